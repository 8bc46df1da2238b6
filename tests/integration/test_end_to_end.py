"""What cannot be added later, over a real socket and in every protocol."""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from tests.conftest import RunningGateway, Serve

HELLO = "say hi"


class ClientProtocol(Struct, frozen=True):
    """A client's way to ask a model for text, streamed or not."""

    name: str
    path: str
    body: dict[str, Any]
    stream_path: str = ""
    stream_body: dict[str, Any] = {}
    error_text: bytes = b'"error"'
    """In a stream that broke."""
    ends: bytes = b"[DONE]"
    """In a stream that did not."""

    def call(self, model: str, *, stream: bool) -> tuple[str, bytes]:
        """The path and the body of a request."""
        path = (stream and self.stream_path) or self.path
        fields = self.body | (self.stream_body if stream else {})
        if "model" in fields:
            fields = fields | {"model": model}
        return path.replace("MODEL", model), msgspec.json.encode(fields)


CHAT = {"model": "", "messages": [{"role": "user", "content": HELLO}]}
GENERATE = "/v2/models/MODEL/generate"
WAYS = [
    ClientProtocol("openai chat", "/v1/chat/completions", CHAT, stream_body={"stream": True}),
    ClientProtocol(
        "openai completions",
        "/v1/completions",
        {"model": "", "prompt": HELLO},
        stream_body={"stream": True},
    ),
    ClientProtocol(
        "databricks",
        "/serving-endpoints/MODEL/invocations",
        {"messages": CHAT["messages"]},
        stream_body={"stream": True},
    ),
    ClientProtocol(
        "triton",
        GENERATE,
        {"text_input": HELLO},
        GENERATE + "_stream",
        {"stream": True},
        ends=b"text_output",
    ),
    ClientProtocol(
        "mindie",
        "/mindie" + GENERATE,
        {"text_input": HELLO, "parameters": {"details": True}},
        "/mindie" + GENERATE + "_stream",
        error_text=b"\n\n",
        ends=b"eos_token",
    ),
    ClientProtocol(
        "mindie chat",
        "/mindie/v1/chat/completions",
        CHAT,
        stream_body={"stream": True},
        error_text=b"",
    ),
    ClientProtocol("ovms", "/v3/chat/completions", CHAT, stream_body={"stream": True}),
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
JSON = {"Content-Type": "application/json"}


async def disconnect_early(gateway: RunningGateway, way: ClientProtocol, *, stream: bool) -> None:
    """Ask a slow model, wait until it is at work, and close the connection."""
    path, body = way.call("mock-slow", stream=stream)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    backend = gateway.app.backends["mock-slow"]
    await wait_until(lambda: backend.running == 1)  # type: ignore[attr-defined]
    if stream:
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await wait_until(lambda: backend.running == 0)  # type: ignore[attr-defined]


async def wait_until(true: Any, seconds: float = 1.5) -> None:
    """Wait until something is true; well before the slow model would have ended by itself."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@every_way
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_client_disconnect_cancels_the_generation(
    mock: RunningGateway, way: ClientProtocol, *, stream: bool
) -> None:
    await disconnect_early(mock, way, stream=stream)

    await wait_until(lambda: len(mock.records) == 1)
    assert mock.records[0].outcome == "cancelled"


@every_way
@pytest.mark.parametrize("model", ["mock-cut", "mock-midfail"])
async def test_truncated_stream_ends_with_an_error_and_no_finish_reason(
    mock: RunningGateway, way: ClientProtocol, model: str
) -> None:
    path, body = way.call(model, stream=True)

    answer = await mock.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    assert b"Hello" in answer.content
    assert way.error_text in answer.content.rpartition(b"world")[2]
    assert way.ends not in answer.content.rpartition(b"world")[2]
    assert b'finish_reason":"' not in answer.content
    assert mock.records[0].outcome == "truncated"


@every_way
async def test_truncated_worker_response_makes_a_unary_request_fail(
    mock: RunningGateway, way: ClientProtocol
) -> None:
    path, body = way.call("mock-cut", stream=False)

    answer = await mock.http.post(path, content=body, headers=JSON)

    assert answer.status_code >= 400
    assert b"Hello" not in answer.content


@every_way
async def test_complete_stream_has_the_end_marker_of_its_protocol(
    mock: RunningGateway, way: ClientProtocol
) -> None:
    path, body = way.call("mock", stream=True)

    answer = await mock.http.post(path, content=body, headers=JSON)

    assert answer.status_code == 200
    assert way.ends in answer.content


@every_way
async def test_timeout_header_bounds_the_request_duration(
    mock: RunningGateway, way: ClientProtocol
) -> None:
    path, body = way.call("mock-slow", stream=False)

    answer = await mock.http.post(
        path, content=body, headers=JSON | {"x-interlingua-timeout": "0.3"}
    )

    assert answer.status_code >= 400
    assert mock.records[0].error == "DeadlineExceeded"
    assert mock.app.backends["mock-slow"].running == 0  # type: ignore[attr-defined]


BAD_BODIES = {
    "nothing": b"",
    "no json": b"hello",
    "half": b'{"model":',
    "an array": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "not UTF-8": b'{"model":"mock","text_input":"\xff\xfe","messages":"\xff","prompt":"\xff"}',
    "a lone surrogate": b'{"model":"mock","text_input":"\\ud83d","messages":"\\ud83d"}',
    "100,000 brackets": b"[" * 100_000,
    "100,000 brackets inside": b'{"model":"mock","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 objects": b'{"a":' * 100_000,
    "NaN": b'{"model":"mock","temperature":NaN,"text_input":"a","messages":[]}',
    "more after the end": b'{"model":"mock"} x',
    "a huge number": b'{"model":"mock","max_tokens":' + b"9" * 5000 + b"}",
}


@every_way
@pytest.mark.parametrize("bad", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_malformed_body_is_rejected_and_the_next_request_succeeds(
    mock: RunningGateway, way: ClientProtocol, bad: bytes
) -> None:
    path, good = way.call("mock", stream=False)

    refused = await mock.http.post(path, content=bad, headers=JSON)
    # Triton answers 500 to what its JSON layer refuses; every other protocol has a 4xx for it.
    assert refused.status_code in ({400, 500} if way.name == "triton" else range(400, 500))
    assert msgspec.json.decode(refused.content)
    assert mock.records[0].outcome == "client_error"
    assert mock.records[0].duration < 10  # a ceiling for a hang, not a measurement

    answer = await mock.http.post(path, content=good, headers=JSON)
    assert answer.status_code == 200
    assert b"Hello world!" in answer.content


async def test_body_over_the_size_limit_returns_413(serve: Serve) -> None:
    gateway = await serve(
        """
        listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
        limits: {body: 1KiB}
        backends: {e: {kind: echo}}
        models: {m: {backend: e, model: m}}
        """
    )

    answer = await gateway.http.post("/v1/chat/completions", content=b" " * 2000)

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_response_has_the_request_id_header(mock: RunningGateway) -> None:
    path, body = WAYS[0].call("mock", stream=False)

    own = await mock.http.post(path, content=body, headers=JSON | {"x-request-id": "abc-1"})
    response = await mock.http.post(path, content=body, headers=JSON | {"x-request-id": "a b"})

    assert own.headers["x-request-id"] == "abc-1"
    assert response.headers["x-request-id"] not in {"", "a b"}


async def test_request_record_has_protocol_model_version_and_outcome(mock: RunningGateway) -> None:
    path, body = WAYS[0].call("ep-ab", stream=False)

    await mock.http.post(path, content=body, headers=JSON)

    [record] = mock.records
    assert (record.protocol, record.model, record.backend) == ("openai", "ep-ab", "mock")
    assert record.version in {"m-a", "m-b"}
    assert (record.outcome, record.status) == ("ok", 200)
    assert record.usage is not None
    assert record.usage.total_tokens == 5
