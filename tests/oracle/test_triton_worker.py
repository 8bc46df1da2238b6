"""A real Triton server as the gateway's worker, with clients of each protocol."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from protocols.core.events import Usage
from tests.conftest import RunningGateway, Serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.oracle

FRONT = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, {{name: mindie, prefix: /mindie}}]
limits: {{drain_timeout: 1s}}
backends:
  vllm: {{protocol: triton, profile: vllm, workers: ["{url}"]}}
  trtllm: {{protocol: triton, profile: trtllm, workers: ["{url}"]}}
  plain: {{protocol: triton, profile: plain, workers: ["{url}"]}}
models:
  vllm_like: {{backend: vllm}}
  first_version: {{backend: vllm, model: vllm_like/versions/1}}
  no_version: {{backend: vllm, model: vllm_like/versions/9}}
  no_model: {{backend: vllm}}
  vllm_fails_first: {{backend: vllm}}
  vllm_fails_third: {{backend: vllm}}
  trt_like: {{backend: trtllm}}
  patient: {{backend: plain}}
"""
JSON = {"Content-Type": "application/json"}
OUTPUT_TEXT = " w0 w1 w2 w3"


class ClientForm(Struct, frozen=True):
    """A client's request for four words, and where its response has text and finish reason."""

    name: str
    path: str
    body: dict[str, Any]
    text: Callable[[Any], str]
    reason: Callable[[Any], Any]
    unanswered: int
    """The status if the worker can't answer."""
    stream_path: str = ""
    flagged: bool = True
    """Whether the body requests a stream."""

    def call(self, model: str, *, stream: bool, **extra_fields: Any) -> tuple[str, bytes]:
        """Return the path and the body of a request."""
        path = (stream and self.stream_path) or self.path
        fields = self.body | ({"stream": True} if stream and self.flagged else {}) | extra_fields
        if "model" in fields:
            fields |= {"model": model}
        return path.replace("MODEL", model), msgspec.json.encode(fields)


def get_chat_text(body: Any) -> str:
    choice = body["choices"][0]
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def get_chat_finish_reason(body: Any) -> Any:
    return body["choices"][0].get("finish_reason")


def get_completion_text(body: Any) -> str:
    return str(body["choices"][0]["text"])


def get_generated_text(body: Any) -> str:
    return str(body["text_output"]).removeprefix("hi")


TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
GENERATE = "/v2/models/MODEL/generate"
CLIENT_PROTOCOLS = [
    ClientForm(
        "openai chat",
        "/v1/chat/completions",
        {"model": "", **TALK},
        get_chat_text,
        get_chat_finish_reason,
        502,
    ),
    ClientForm(
        "openai completions",
        "/v1/completions",
        {"model": "", "prompt": "hi", "max_tokens": 4},
        get_completion_text,
        get_chat_finish_reason,
        502,
    ),
    ClientForm(
        "databricks",
        "/serving-endpoints/MODEL/invocations",
        TALK,
        get_chat_text,
        get_chat_finish_reason,
        500,
    ),
    ClientForm(
        "ovms",
        "/v3/chat/completions",
        {"model": "", **TALK},
        get_chat_text,
        get_chat_finish_reason,
        400,
    ),
    ClientForm(
        "mindie",
        "/mindie" + GENERATE,
        {"text_input": "hi", "parameters": {"details": True, "max_new_tokens": 4}},
        get_generated_text,
        lambda body: body["details"].get("finish_reason"),
        500,
        "/mindie" + GENERATE + "_stream",
        flagged=False,
    ),
    ClientForm(
        "triton",
        GENERATE,
        {"text_input": "hi", "max_tokens": 4, "return_finish_reason": True},
        get_generated_text,
        lambda body: None if body["finish_reason"] == "None" else body["finish_reason"],
        400,
        GENERATE + "_stream",
    ),
]
each_protocol = pytest.mark.parametrize(
    "protocol", CLIENT_PROTOCOLS, ids=lambda protocol: protocol.name
)
stream_or_unary = pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])


@pytest.fixture
async def gateway(serve: Serve, triton: str) -> RunningGateway:
    """A gateway in front of the real server."""
    return await serve(FRONT.format(url=triton))


def parse_events(body: bytes) -> list[Any]:
    """Return the events of a stream without the end mark."""
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


def get_texts(protocol: ClientForm, body: bytes) -> list[str]:
    """Return the texts in a stream up to an error."""
    events = [one for one in parse_events(body) if "error" not in one and one.get("choices", True)]
    return [text for one in events if (text := protocol.text(one))]


@each_protocol
@pytest.mark.parametrize("model", ["vllm_like", "first_version"])
async def test_unary_response_through_a_triton_worker(
    gateway: RunningGateway, protocol: ClientForm, model: str
) -> None:
    path, body = protocol.call(model, stream=False)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200
    assert protocol.text(response.json()) == OUTPUT_TEXT
    assert protocol.reason(response.json()) == "length"


@each_protocol
async def test_streamed_response_through_a_triton_worker(
    gateway: RunningGateway, protocol: ClientForm
) -> None:
    path, body = protocol.call("vllm_like", stream=True)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200
    assert get_texts(protocol, response.content) == [" w0", " w1", " w2", " w3"]

    events = [one for one in parse_events(response.content) if one.get("choices", True)]
    assert [reason for one in events if (reason := protocol.reason(one))] == ["length"]
    assert gateway.records[0].outcome == "ok"


@each_protocol
@stream_or_unary
async def test_non_streaming_model_is_reported_as_approximated_stream(
    gateway: RunningGateway, protocol: ClientForm, *, stream: bool
) -> None:
    path, body = protocol.call("trt_like", stream=stream)
    await gateway.http.post(
        path, content=body, headers=JSON
    )  # for which the model's configuration is requested

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200

    texts = get_texts(protocol, response.content) if stream else [protocol.text(response.json())]
    assert texts == [OUTPUT_TEXT]
    assert ("stream=approximated" in response.headers.get("x-interlingua-loss", "")) is stream


@each_protocol
@stream_or_unary
async def test_usage_is_read_from_the_worker_or_estimated(
    gateway: RunningGateway, protocol: ClientForm, *, stream: bool
) -> None:
    """One model reports both counts; the other does not count prompt tokens."""
    for model, usage in (("trt_like", Usage(1, 4)), ("vllm_like", Usage(1, 4, source="estimated"))):
        path, body = protocol.call(model, stream=stream)
        await gateway.http.post(path, content=body, headers=JSON)
        assert gateway.records[-1].usage == usage


@each_protocol
@stream_or_unary
@pytest.mark.parametrize("model", ["no_model", "no_version", "vllm_fails_first"])
async def test_worker_error_is_returned_in_the_protocol_of_the_client(
    gateway: RunningGateway, protocol: ClientForm, model: str, *, stream: bool
) -> None:
    path, body = protocol.call(model, stream=stream)

    response = await gateway.http.post(path, content=body, headers=JSON)

    has_worker_reason = protocol.name == "triton" and model != "vllm_fails_first"
    assert response.status_code == (404 if has_worker_reason else protocol.unanswered)
    assert b'"error' in response.content
    assert OUTPUT_TEXT not in response.text


@each_protocol
@stream_or_unary
async def test_unknown_model_returns_404(
    gateway: RunningGateway, protocol: ClientForm, *, stream: bool
) -> None:
    path, body = protocol.call("nobody", stream=stream)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 404


@each_protocol
async def test_model_failure_mid_stream_truncates_the_response(
    gateway: RunningGateway, protocol: ClientForm
) -> None:
    path, body = protocol.call("vllm_fails_third", stream=True)

    response = await gateway.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200
    assert get_texts(protocol, response.content) == [" w0", " w1"]
    assert b"[DONE]" not in response.content
    assert b'"length"' not in response.content
    assert gateway.records[0].outcome == "truncated"


async def test_client_disconnect_cancels_the_triton_request(gateway: RunningGateway) -> None:
    body = {"model": "patient", "messages": TALK["messages"], "stream": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if "w1" in line:
                break
    await wait_until(lambda: [record.outcome for record in gateway.records] == ["cancelled"])

    how = {"text_input": "how did it end?"}
    response = await gateway.http.post("/v2/models/patient/generate", json=how)

    assert response.json()["text_output"] == "how did it end?cancelled"


async def test_stop_strings_and_choices_are_emulated(gateway: RunningGateway) -> None:
    protocol = CLIENT_PROTOCOLS[0]
    path, body = protocol.call("trt_like", stream=False, stop=[" w2"])
    stopped = await gateway.http.post(path, content=body, headers=JSON)
    path, body = protocol.call("vllm_like", stream=True, n=2)

    twice = await gateway.http.post(path, content=body, headers=JSON)

    assert protocol.text(stopped.json()) == " w0 w1"
    assert protocol.reason(stopped.json()) == "stop"
    assert "stop=emulated" in stopped.headers["x-interlingua-loss"]
    assert sorted(get_texts(protocol, twice.content)) == [
        " w0",
        " w0",
        " w1",
        " w1",
        " w2",
        " w2",
        " w3",
        " w3",
    ]
    assert {one["choices"][0]["index"] for one in parse_events(twice.content)} == {0, 1}
