"""The end of a worker's stream means the same to the clients of every protocol."""

import json
from typing import Any, Final

import pytest

from tests.conftest import Serve
from tests.protocols import find_rows, list_mounts
from tests.support.fakes import CHUNKED, END, ScriptedWorker, chunk

CONFIGURATION: Final = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, ollama, anthropic, OTHERS,
      {name: mindie, prefix: /mindie}, {name: tgi, prefix: /tgi}]
backends:
  pool: {protocol: openai, workers: ["%s"], retries: {max: 0}, health: {interval: 1h}}
models: {m: {backend: pool, model: m}}
""".replace("OTHERS", list_mounts())
TURNS: Final = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
CHAT: Final[dict[str, Any]] = {"model": "m", **TURNS}
CLIENTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "openai": ("/v1/chat/completions", CHAT),
    "openai translated": (
        "/v1/chat/completions",
        {**CHAT, "n": 1, "suffix": None, "logprobs": True},
    ),
    "responses": ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
    "databricks": ("/serving-endpoints/chat/completions", CHAT),
    "triton": ("/v2/models/m/generate_stream", {"text_input": "hi", "stream": True}),
    "ovms": ("/v3/chat/completions", CHAT),
    "ollama": ("/api/chat", CHAT),
    "anthropic": ("/v1/messages", {**CHAT, "max_tokens": 9}),
    "mindie": ("/mindie/v1/chat/completions", CHAT),
    "tgi": ("/tgi/generate_stream", {"inputs": "hi"}),
    **{
        name: (path, {"model": "m", **body, "stream": True})
        for name, (path, body) in find_rows("CONVERSATION").items()
    },
}


def build_event(finish_reason: str | None, text: str) -> bytes:
    """Build an event for both of OpenAI's endpoints, without the blank line after it."""
    choice = {
        "index": 0,
        "delta": {"content": text},
        "text": text,
        "finish_reason": finish_reason,
    }
    body = {"id": "c", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(body).encode()


FIRST: Final = build_event(None, "first") + b"\n\n"
LAST: Final = build_event("stop", " last")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
async def test_end_of_the_body_ends_the_last_event(serve: Serve, client: str, end: bytes) -> None:
    """The worker's last event has a finish reason, but no blank line, and no [DONE] follows."""
    reply = [CHUNKED, chunk(FIRST), chunk(LAST + end), END]
    async with ScriptedWorker(reply) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        path, body = CLIENTS[client]
        response = await gateway.http.post(path, json=body)

    assert response.status_code == 200
    assert "first" in response.text
    assert "last" in response.text
    assert gateway.records[0].outcome == "ok"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("word", ["repetition", "content_filter"])
async def test_reason_that_a_client_does_not_get_is_reported(
    serve: Serve, client: str, word: str
) -> None:
    """Clients of the worker's protocol get the word itself."""
    last = build_event(word, " last") + b"\n\n"
    async with ScriptedWorker([CHUNKED, chunk(FIRST), chunk(last), END]) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        path, body = CLIENTS[client]
        response = await gateway.http.post(path, json=body)

    [record] = gateway.records
    lost = [(one.field, one.reason) for one in record.unsupported_parameters]
    is_reported = ("response.choices[0].finish_reason", "approximated") in lost
    says_filtered = any(one in response.text for one in ("content_filter", "refusal", "ERROR"))
    assert record.outcome == "ok"
    if word == "repetition":
        assert is_reported == (client not in ("openai", "openai translated"))
        assert is_reported != ('"finish_reason":"repetition"' in response.text)
    else:
        assert is_reported != (says_filtered or client == "ovms")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("size", [20, len(LAST) - 1])
async def test_half_an_event_is_an_error(serve: Serve, client: str, size: int) -> None:
    """The worker's stream ends inside its last event."""
    async with ScriptedWorker([CHUNKED, chunk(2 * FIRST), chunk(LAST[:size]), END]) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        path, body = CLIENTS[client]
        response = await gateway.http.post(path, json=body)

    assert "first" in response.text
    assert "last" not in response.text
    assert gateway.records[0].outcome == "truncated"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("is_first", [True, False])
async def test_event_of_two_mebibytes_passes(serve: Serve, client: str, *, is_first: bool) -> None:
    """The worker sends 2 MiB in one delta."""
    big = build_event(None, "x" * (2 << 20)) + b"\n\n"
    events = [big, FIRST] if is_first else [FIRST, big]

    async with ScriptedWorker([CHUNKED, *map(chunk, events), chunk(LAST + b"\n\n"), END]) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        path, body = CLIENTS[client]
        response = await gateway.http.post(path, json=body)

    assert response.text.count("x" * (2 << 20)) >= 1
    assert gateway.records[0].outcome == "ok"


def number(event: bytes, index: int) -> bytes:
    """The event with another index of its choice."""
    return event.replace(b'"index": 0', b'"index": %d' % index)


ODD_STREAMS: Final = {
    "a finish reason each": [build_event("stop", one) for one in ("first", " second", " third")],
    "a number each": [
        number(build_event(reason, text), i)
        for i, (text, reason) in enumerate([("first", None), (" second", None), (" third", "stop")])
    ],
}


@pytest.mark.parametrize("name", ODD_STREAMS)
@pytest.mark.parametrize("client", CLIENTS)
async def test_odd_stream_reaches_every_client_whole(serve: Serve, client: str, name: str) -> None:
    path, body = CLIENTS[client]
    events = [*ODD_STREAMS[name], b"data: [DONE]"]
    async with ScriptedWorker([CHUNKED, *(chunk(one + b"\n\n") for one in events), END]) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        response = await gateway.http.post(path, json=body)

    assert response.status_code == 200
    for text in ("first", " second", " third"):
        assert text in response.text
    assert gateway.records[0].outcome == "ok"
    assert gateway.records[0].finish_reasons == ("eos",)
