"""Every client protocol with a pool of OpenAI workers, which are gateways themselves."""

import asyncio

import msgspec
import pytest

from gateway.observability.record import RequestRecord
from tests.conftest import RunningGateway, Serve
from tests.integration.test_end_to_end import (
    CLIENT_PROTOCOLS,
    JSON,
    ClientProtocol,
    disconnect_early,
    each_protocol,
)
from tests.support.waiting import wait_until

FRONT = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, {{name: mindie, prefix: /mindie}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: openai, profile: {profile}, workers: [{workers}]}}
models:
  "*": {{backend: pool}}
  strict: {{backend: pool, model: mock, on_loss: reject}}
  quiet: {{backend: pool, model: mock, on_loss: ignore}}
"""


async def serve_gateway(serve: Serve, *workers: str, profile: str = "openai") -> RunningGateway:
    """Start a gateway in front of these workers."""
    urls = ", ".join(f'"{url}"' for url in workers)
    return await serve(FRONT.format(workers=urls, profile=profile))


def list_model_requests(worker: RunningGateway) -> list[RequestRecord]:
    """Return the requests of a worker without the probes."""
    return [record for record in worker.records if record.model]


@each_protocol
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_openai_worker_serves_clients_of_every_protocol(
    serve: Serve, mock: RunningGateway, protocol: ClientProtocol, *, stream: bool
) -> None:
    gateway = await serve_gateway(serve, mock.url)
    path, body = protocol.call("mock", stream=stream)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200
    if stream:
        assert all(piece in response.text for piece in ('Hello"', ' world"', '!"'))
        assert protocol.ends in response.content
    else:
        assert "Hello world!" in response.text
    assert gateway.records[0].usage is not None
    assert gateway.records[0].usage.completion_tokens == 3


@each_protocol
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_client_disconnect_cancels_the_upstream_request(
    serve: Serve, mock: RunningGateway, protocol: ClientProtocol, *, stream: bool
) -> None:
    gateway = await serve_gateway(serve, mock.url)
    gateway.app.backends["mock-slow"] = mock.app.backends["mock-slow"]

    await disconnect_early(gateway, protocol, stream=stream)

    await wait_until(
        lambda: [record.outcome for record in list_model_requests(mock)] == ["cancelled"]
    )


@each_protocol
async def test_truncated_worker_stream_ends_with_an_error(
    serve: Serve, mock: RunningGateway, protocol: ClientProtocol
) -> None:
    gateway = await serve_gateway(serve, mock.url)
    path, body = protocol.call("mock-cut", stream=True)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert protocol.error_text in response.content.rpartition(b"world")[2]
    assert protocol.ends not in response.content.rpartition(b"world")[2]
    assert b'finish_reason":"' not in response.content


@pytest.mark.parametrize(
    ("model", "status"), [("mock-500", 502), ("mock-429", 429), ("mock-down", 503), ("nope", 502)]
)
async def test_worker_errors_map_to_client_status_codes(
    serve: Serve, mock: RunningGateway, model: str, status: int
) -> None:
    gateway = await serve_gateway(serve, mock.url)
    path, body = CLIENT_PROTOCOLS[0].call(model, stream=False)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == status
    if status in {429, 503}:
        assert int(response.headers["retry-after"]) >= 1


async def test_gateway_starts_without_a_reachable_worker_and_returns_503(serve: Serve) -> None:
    gateway = await serve_gateway(serve, "http://127.0.0.1:1")
    path, body = CLIENT_PROTOCOLS[0].call("mock", stream=False)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 503
    assert response.json()["error"]["type"] != "invalid_request_error"
    assert int(response.headers["retry-after"]) >= 1


REQUEST = {
    "model": "mock",
    "messages": [{"role": "user", "content": "say hi"}],
    "top_k": 5,
    "temperature": 0.5,
    "repetition_penalty": 1.5,
}


async def test_loss_header_names_unsupported_parameters(serve: Serve, mock: RunningGateway) -> None:
    gateway = await serve_gateway(serve, mock.url)

    response = await gateway.http.post("/v1/chat/completions", json=REQUEST)

    assert response.status_code == 200

    lost = dict(part.split("=") for part in response.headers["x-interlingua-loss"].split(","))
    assert lost == {"top_k": "dropped", "repetition_penalty": "dropped"}
    assert {loss.field for loss in gateway.records[0].unsupported_parameters} == set(lost)


async def test_worker_that_supports_all_parameters_causes_no_loss_header(
    serve: Serve, mock: RunningGateway
) -> None:
    gateway = await serve_gateway(serve, mock.url, profile="vllm")

    response = await gateway.http.post("/v1/chat/completions", json=REQUEST)

    assert "x-interlingua-loss" not in response.headers


async def test_strict_request_or_model_rejects_unsupported_parameters(
    serve: Serve, mock: RunningGateway
) -> None:
    gateway = await serve_gateway(serve, mock.url)

    response = await gateway.http.post(
        "/v1/chat/completions", json=REQUEST, headers={"x-interlingua-strict": "1"}
    )
    model = await gateway.http.post("/v1/chat/completions", json=REQUEST | {"model": "strict"})

    databricks = await gateway.http.post(
        "/serving-endpoints/strict/invocations",
        json={"messages": REQUEST["messages"], "top_k": 5},
    )

    for answer in (response, model):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "top_k"
    assert databricks.status_code == 400
    assert databricks.json().keys() == {"error_code", "message"}
    assert not [record for record in mock.records if record.model]


async def test_model_setting_suppresses_the_loss_header(serve: Serve, mock: RunningGateway) -> None:
    gateway = await serve_gateway(serve, mock.url)

    response = await gateway.http.post("/v1/chat/completions", json=REQUEST | {"model": "quiet"})

    assert response.status_code == 200
    assert "x-interlingua-loss" not in response.headers


async def test_response_has_the_client_model_name_not_the_worker_model_name(
    serve: Serve, mock: RunningGateway
) -> None:
    gateway = await serve_gateway(serve, mock.url)

    response = await gateway.http.post("/v1/chat/completions", json=REQUEST | {"model": "quiet"})

    assert response.json()["model"] == "quiet"
    assert list_model_requests(mock)[0].model == "mock"


async def test_embeddings_of_a_pool_worker_in_every_protocol(
    serve: Serve, mock: RunningGateway
) -> None:
    gateway = await serve_gateway(serve, mock.url)

    answers = [
        await gateway.http.post("/v1/embeddings", json={"model": "mock", "input": ["a b", "c"]}),
        await gateway.http.post(
            "/serving-endpoints/mock/invocations", json={"input": ["a b", "c"]}
        ),
        await gateway.http.post("/v3/embeddings", json={"model": "mock", "input": ["a b", "c"]}),
    ]

    for response in answers:
        vectors = [one["embedding"] for one in response.json()["data"]]
        assert vectors == [[3.0, 2.0, 0.5, -0.25], [1.0, 1.0, 0.5, -0.25]]


async def test_concurrent_streams_are_not_mixed_up(serve: Serve, mock: RunningGateway) -> None:
    gateway = await serve_gateway(serve, mock.url, mock.url.replace("127.0.0.1", "localhost"))

    async def ask(number: int) -> str:
        body = {"model": "mock-20", "prompt": "x", "max_tokens": number % 20 + 1, "stream": True}
        response = await gateway.http.post("/v1/completions", json=body)
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        chunks = [msgspec.json.decode(event) for event in events]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    texts = await asyncio.gather(*(ask(number) for number in range(60)))

    assert texts == ["abcdefghijklmnopqrst"[: number % 20 + 1] for number in range(60)]
