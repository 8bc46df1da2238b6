"""A real Triton server as the gateway's worker, asked in the dialects of clients."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from protocols.core.events import Usage
from tests.conftest import Running, Serve
from tests.integration.test_end_to_end import until

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
SAID = " w0 w1 w2 w3"


class Way(Struct, frozen=True):
    """How a client asks for four words, and where it finds text and reason in what it is told."""

    name: str
    path: str
    body: dict[str, Any]
    text: Callable[[Any], str]
    reason: Callable[[Any], Any]
    unanswered: int
    """The status where the worker can't answer."""
    stream_path: str = ""
    flagged: bool = True
    """Whether a stream is asked for in the body."""

    def call(self, model: str, *, stream: bool, **more: Any) -> tuple[str, bytes]:
        """The path and the body of a request."""
        path = (stream and self.stream_path) or self.path
        fields = self.body | ({"stream": True} if stream and self.flagged else {}) | more
        if "model" in fields:
            fields |= {"model": model}
        return path.replace("MODEL", model), msgspec.json.encode(fields)


def chat_text(told: Any) -> str:
    choice = told["choices"][0]
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def chat_reason(told: Any) -> Any:
    return told["choices"][0].get("finish_reason")


def completion_text(told: Any) -> str:
    return str(told["choices"][0]["text"])


def generated_text(told: Any) -> str:
    return str(told["text_output"]).removeprefix("hi")


TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
GENERATE = "/v2/models/MODEL/generate"
WAYS = [
    Way("openai chat", "/v1/chat/completions", {"model": "", **TALK}, chat_text, chat_reason, 502),
    Way(
        "openai completions",
        "/v1/completions",
        {"model": "", "prompt": "hi", "max_tokens": 4},
        completion_text,
        chat_reason,
        502,
    ),
    Way(
        "databricks",
        "/serving-endpoints/MODEL/invocations",
        TALK,
        chat_text,
        chat_reason,
        500,
    ),
    Way("ovms", "/v3/chat/completions", {"model": "", **TALK}, chat_text, chat_reason, 400),
    Way(
        "mindie",
        "/mindie" + GENERATE,
        {"text_input": "hi", "parameters": {"details": True, "max_new_tokens": 4}},
        generated_text,
        lambda told: told["details"].get("finish_reason"),
        500,
        "/mindie" + GENERATE + "_stream",
        flagged=False,
    ),
    Way(
        "triton",
        GENERATE,
        {"text_input": "hi", "max_tokens": 4, "return_finish_reason": True},
        generated_text,
        lambda told: None if told["finish_reason"] == "None" else told["finish_reason"],
        400,
        GENERATE + "_stream",
    ),
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture
async def front(serve: Serve, triton: str) -> Running:
    """A gateway before the real server."""
    return await serve(FRONT.format(url=triton))


def events(body: bytes) -> list[Any]:
    """What a stream tells, but for its last word."""
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


def pieces(way: Way, body: bytes) -> list[str]:
    """The texts in a stream, up to an error."""
    told = [one for one in events(body) if "error" not in one and one.get("choices", True)]
    return [text for one in told if (text := way.text(one))]


@every_way
@pytest.mark.parametrize("model", ["vllm_like", "first_version"])
async def test_a_whole_answer(front: Running, way: Way, model: str) -> None:
    path, body = way.call(model, stream=False)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    assert way.text(answer.json()) == SAID
    assert way.reason(answer.json()) == "length"


@every_way
async def test_a_stream(front: Running, way: Way) -> None:
    path, body = way.call("vllm_like", stream=True)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    assert pieces(way, answer.content) == [" w0", " w1", " w2", " w3"]
    told = [one for one in events(answer.content) if one.get("choices", True)]
    assert [reason for one in told if (reason := way.reason(one))] == ["length"]
    assert front.records[0].outcome == "ok"


@every_way
@both
async def test_a_model_that_answers_in_one_piece(front: Running, way: Way, *, stream: bool) -> None:
    path, body = way.call("trt_like", stream=stream)
    await front.http.post(path, content=body, headers=JSON)  # for its sake the model is asked about

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    texts = pieces(way, answer.content) if stream else [way.text(answer.json())]
    assert texts == [SAID]
    assert ("stream=approximated" in answer.headers.get("x-interlingua-loss", "")) is stream


@every_way
@both
async def test_whose_figures_they_are(front: Running, way: Way, *, stream: bool) -> None:
    """The one model counts both; the other does not count prompts."""
    for model, usage in (("trt_like", Usage(1, 4)), ("vllm_like", Usage(1, 4, source="estimated"))):
        path, body = way.call(model, stream=stream)
        await front.http.post(path, content=body, headers=JSON)
        assert front.records[-1].usage == usage


@every_way
@both
@pytest.mark.parametrize("model", ["no_model", "no_version", "vllm_fails_first"])
async def test_what_the_worker_does_not_answer(
    front: Running, way: Way, model: str, *, stream: bool
) -> None:
    path, body = way.call(model, stream=stream)

    answer = await front.http.post(path, content=body, headers=JSON)

    told_as_it_was = way.name == "triton" and model != "vllm_fails_first"
    assert answer.status_code == (404 if told_as_it_was else way.unanswered)
    assert b'"error' in answer.content
    assert SAID not in answer.text


@every_way
@both
async def test_a_model_that_the_gateway_does_not_have(
    front: Running, way: Way, *, stream: bool
) -> None:
    path, body = way.call("nobody", stream=stream)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 404


@every_way
async def test_a_model_that_fails_half_way(front: Running, way: Way) -> None:
    path, body = way.call("vllm_fails_third", stream=True)

    answer = await front.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    assert pieces(way, answer.content) == [" w0", " w1"]
    assert b"[DONE]" not in answer.content
    assert b'"length"' not in answer.content
    assert front.records[0].outcome == "truncated"


async def test_a_client_that_leaves_stops_the_model(front: Running) -> None:
    asked = {"model": "patient", "messages": TALK["messages"], "stream": True}
    async with front.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        async for line in answer.aiter_lines():
            if "w1" in line:
                break
    await until(lambda: [record.outcome for record in front.records] == ["cancelled"])

    how = {"text_input": "how did it end?"}
    told = await front.http.post("/v2/models/patient/generate", json=how)

    assert told.json()["text_output"] == "how did it end?cancelled"


async def test_what_the_gateway_does_in_the_model_s_stead(front: Running) -> None:
    way = WAYS[0]
    path, body = way.call("trt_like", stream=False, stop=[" w2"])
    stopped = await front.http.post(path, content=body, headers=JSON)
    path, body = way.call("vllm_like", stream=True, n=2)
    twice = await front.http.post(path, content=body, headers=JSON)

    assert way.text(stopped.json()) == " w0 w1"
    assert way.reason(stopped.json()) == "stop"
    assert "stop=emulated" in stopped.headers["x-interlingua-loss"]
    assert sorted(pieces(way, twice.content)) == [
        " w0",
        " w0",
        " w1",
        " w1",
        " w2",
        " w2",
        " w3",
        " w3",
    ]
    assert {one["choices"][0]["index"] for one in events(twice.content)} == {0, 1}
