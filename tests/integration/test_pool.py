"""Every client dialect before a pool of OpenAI-speaking workers, which are gateways themselves."""

import asyncio

import msgspec
import pytest

from gateway.observability.record import RequestRecord
from tests.conftest import Running, Serve
from tests.integration.test_end_to_end import JSON, WAYS, Way, every_way, leave_early, until

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


async def before(serve: Serve, *workers: str, profile: str = "openai") -> Running:
    """A gateway before these workers."""
    urls = ", ".join(f'"{url}"' for url in workers)
    return await serve(FRONT.format(workers=urls, profile=profile))


def asked(worker: Running) -> list[RequestRecord]:
    """What a worker was asked for, beside the probes."""
    return [record for record in worker.records if record.model]


@every_way
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_worker_answers_every_dialect(
    serve: Serve, mock: Running, way: Way, *, stream: bool
) -> None:
    front = await before(serve, mock.url)
    path, body = way.call("mock", stream=stream)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    if stream:
        assert all(piece in answer.text for piece in ('Hello"', ' world"', '!"'))
        assert way.ends in answer.content
    else:
        assert "Hello world!" in answer.text
    assert front.records[0].usage is not None
    assert front.records[0].usage.completion_tokens == 3


@every_way
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_closes_the_connection_to_the_worker(
    serve: Serve, mock: Running, way: Way, *, stream: bool
) -> None:
    front = await before(serve, mock.url)
    front.app.backends["mock-slow"] = mock.app.backends["mock-slow"]

    await leave_early(front, way, stream=stream)

    await until(lambda: [record.outcome for record in asked(mock)] == ["cancelled"])


@every_way
async def test_a_worker_that_is_cut_off_is_told(serve: Serve, mock: Running, way: Way) -> None:
    front = await before(serve, mock.url)
    path, body = way.call("mock-cut", stream=True)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert way.told in answer.content.rpartition(b"world")[2]
    assert way.ends not in answer.content.rpartition(b"world")[2]
    assert b'finish_reason":"' not in answer.content


@pytest.mark.parametrize(
    ("model", "status"), [("mock-500", 502), ("mock-429", 429), ("mock-down", 503), ("nope", 502)]
)
async def test_what_a_worker_refuses_has_its_own_status(
    serve: Serve, mock: Running, model: str, status: int
) -> None:
    front = await before(serve, mock.url)
    path, body = WAYS[0].call(model, stream=False)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == status
    if status in {429, 503}:
        assert int(answer.headers["retry-after"]) >= 1


async def test_without_a_worker_the_gateway_starts_and_says_so(serve: Serve) -> None:
    front = await before(serve, "http://127.0.0.1:1")
    path, body = WAYS[0].call("mock", stream=False)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 503
    assert answer.json()["error"]["type"] != "invalid_request_error"
    assert int(answer.headers["retry-after"]) >= 1


ASKED = {
    "model": "mock",
    "messages": [{"role": "user", "content": "say hi"}],
    "top_k": 5,
    "temperature": 0.5,
    "repetition_penalty": 1.5,
}


async def test_a_loss_is_reported(serve: Serve, mock: Running) -> None:
    front = await before(serve, mock.url)

    answer = await front.http.post("/v1/chat/completions", json=ASKED)

    assert answer.status_code == 200
    lost = dict(part.split("=") for part in answer.headers["x-interlingua-loss"].split(","))
    assert lost == {"top_k": "dropped", "repetition_penalty": "dropped"}
    assert {loss.field for loss in front.records[0].unsupported_parameters} == set(lost)


async def test_a_worker_that_takes_it_loses_nothing(serve: Serve, mock: Running) -> None:
    front = await before(serve, mock.url, profile="vllm")

    answer = await front.http.post("/v1/chat/completions", json=ASKED)

    assert "x-interlingua-loss" not in answer.headers


async def test_a_loss_is_refused_where_the_request_or_the_model_is_strict(
    serve: Serve, mock: Running
) -> None:
    front = await before(serve, mock.url)

    asked = await front.http.post(
        "/v1/chat/completions", json=ASKED, headers={"x-interlingua-strict": "1"}
    )
    model = await front.http.post("/v1/chat/completions", json=ASKED | {"model": "strict"})
    databricks = await front.http.post(
        "/serving-endpoints/strict/invocations",
        json={"messages": ASKED["messages"], "top_k": 5},
    )

    for answer in (asked, model):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "top_k"
    assert databricks.status_code == 400
    assert databricks.json().keys() == {"error_code", "message"}
    assert not [record for record in mock.records if record.model]


async def test_a_loss_is_not_spoken_of_where_the_model_says_so(serve: Serve, mock: Running) -> None:
    front = await before(serve, mock.url)

    answer = await front.http.post("/v1/chat/completions", json=ASKED | {"model": "quiet"})

    assert answer.status_code == 200
    assert "x-interlingua-loss" not in answer.headers


async def test_the_workers_name_for_a_model_is_not_the_clients(serve: Serve, mock: Running) -> None:
    front = await before(serve, mock.url)

    answer = await front.http.post("/v1/chat/completions", json=ASKED | {"model": "quiet"})

    assert answer.json()["model"] == "quiet"
    assert asked(mock)[0].model == "mock"


async def test_embeddings_come_through_the_pool(serve: Serve, mock: Running) -> None:
    front = await before(serve, mock.url)

    answers = [
        await front.http.post("/v1/embeddings", json={"model": "mock", "input": ["a b", "c"]}),
        await front.http.post("/serving-endpoints/mock/invocations", json={"input": ["a b", "c"]}),
        await front.http.post("/v3/embeddings", json={"model": "mock", "input": ["a b", "c"]}),
    ]

    for answer in answers:
        vectors = [one["embedding"] for one in answer.json()["data"]]
        assert vectors == [[3.0, 2.0, 0.5, -0.25], [1.0, 1.0, 0.5, -0.25]]


async def test_many_streams_at_once_keep_their_own_words(serve: Serve, mock: Running) -> None:
    front = await before(serve, mock.url, mock.url.replace("127.0.0.1", "localhost"))

    async def ask(number: int) -> str:
        body = {"model": "mock-20", "prompt": "x", "max_tokens": number % 20 + 1, "stream": True}
        answer = await front.http.post("/v1/completions", json=body)
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [msgspec.json.decode(event) for event in events]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    texts = await asyncio.gather(*(ask(number) for number in range(60)))

    assert texts == ["abcdefghijklmnopqrst"[: number % 20 + 1] for number in range(60)]
