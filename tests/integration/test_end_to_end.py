"""Streaming, errors and disconnects must work in every protocol, over a real socket."""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from tests.conftest import MOCK, RunningGateway, Serve
from tests.support.waiting import wait_until

HELLO = "say hi"


class ClientProtocol(Struct, frozen=True):
    """How a client of a protocol requests a text, streamed or not."""

    name: str
    path: str
    body: dict[str, Any]
    stream_path: str = ""
    stream_body: dict[str, Any] = {}
    error_text: bytes = b'"error"'
    """The text of an error inside a stream."""
    ends: bytes = b"[DONE]"
    """The text at the end of a complete stream."""

    def call(self, model: str, *, stream: bool) -> tuple[str, bytes]:
        """Return the path and the body of a request."""
        path = (stream and self.stream_path) or self.path
        fields = self.body | (self.stream_body if stream else {})
        if "model" in fields:
            fields = fields | {"model": model}
        return path.replace("MODEL", model), msgspec.json.encode(fields)


CHAT = {"model": "", "messages": [{"role": "user", "content": HELLO}]}
GENERATE = "/v2/models/MODEL/generate"
CLIENT_PROTOCOLS = [
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
each_protocol = pytest.mark.parametrize(
    "protocol", CLIENT_PROTOCOLS, ids=lambda protocol: protocol.name
)
JSON = {"Content-Type": "application/json"}


async def disconnect_early(
    gateway: RunningGateway, protocol: ClientProtocol, *, stream: bool
) -> None:
    """Send a request to a slow model and disconnect while it generates."""
    path, body = protocol.call("mock-slow", stream=stream)
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


@each_protocol
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_client_disconnect_cancels_the_generation(
    serve: Serve, protocol: ClientProtocol, *, stream: bool
) -> None:
    """Given a model that generates for minutes, when the client leaves, then generation ends."""
    script = f"[{', '.join(600 * 'a')}]"
    gateway = await serve(MOCK.replace("[a, b, c, d, e, f, g, h, i, j]", script))

    await disconnect_early(gateway, protocol, stream=stream)

    await wait_until(lambda: len(gateway.records) == 1)
    assert gateway.records[0].outcome == "cancelled"


@each_protocol
@pytest.mark.parametrize("model", ["mock-cut", "mock-midfail"])
async def test_truncated_stream_ends_with_an_error_and_no_finish_reason(
    mock: RunningGateway, protocol: ClientProtocol, model: str
) -> None:
    path, body = protocol.call(model, stream=True)

    response = await mock.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200
    assert b"Hello" in response.content
    assert protocol.error_text in response.content.rpartition(b"world")[2]
    assert protocol.ends not in response.content.rpartition(b"world")[2]
    assert b'finish_reason":"' not in response.content
    assert mock.records[0].outcome == "truncated"


@each_protocol
async def test_truncated_worker_response_makes_a_unary_request_fail(
    mock: RunningGateway, protocol: ClientProtocol
) -> None:
    path, body = protocol.call("mock-cut", stream=False)

    response = await mock.http.post(path, content=body, headers=JSON)

    assert response.status_code >= 400
    assert b"Hello" not in response.content


@each_protocol
async def test_complete_stream_has_the_end_marker_of_its_protocol(
    mock: RunningGateway, protocol: ClientProtocol
) -> None:
    path, body = protocol.call("mock", stream=True)

    response = await mock.http.post(path, content=body, headers=JSON)

    assert response.status_code == 200
    assert protocol.ends in response.content


@each_protocol
async def test_timeout_header_bounds_the_request_duration(
    mock: RunningGateway, protocol: ClientProtocol
) -> None:
    path, body = protocol.call("mock-slow", stream=False)

    response = await mock.http.post(
        path, content=body, headers=JSON | {"x-interlingua-timeout": "0.3"}
    )

    assert response.status_code >= 400
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


@each_protocol
@pytest.mark.parametrize("bad", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_malformed_body_is_rejected_and_the_next_request_succeeds(
    mock: RunningGateway, protocol: ClientProtocol, bad: bytes
) -> None:
    path, good = protocol.call("mock", stream=False)

    refused = await mock.http.post(path, content=bad, headers=JSON)
    # Triton answers invalid JSON with 500; every other protocol uses a 4xx status.
    assert refused.status_code in ({400, 500} if protocol.name == "triton" else range(400, 500))
    assert msgspec.json.decode(refused.content)
    assert mock.records[0].outcome == "client_error"
    assert mock.records[0].duration < 10  # an upper bound that detects a hang

    response = await mock.http.post(path, content=good, headers=JSON)
    assert response.status_code == 200
    assert b"Hello world!" in response.content


async def test_body_over_the_size_limit_returns_413(serve: Serve) -> None:
    gateway = await serve(
        """
        listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
        limits: {body: 1KiB}
        backends: {e: {kind: echo}}
        models: {m: {backend: e, model: m}}
        """
    )

    response = await gateway.http.post("/v1/chat/completions", content=b" " * 2000)

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


async def test_response_has_the_request_id_header(mock: RunningGateway) -> None:
    path, body = CLIENT_PROTOCOLS[0].call("mock", stream=False)

    own = await mock.http.post(path, content=body, headers=JSON | {"x-request-id": "abc-1"})
    response = await mock.http.post(path, content=body, headers=JSON | {"x-request-id": "a b"})

    assert own.headers["x-request-id"] == "abc-1"
    assert response.headers["x-request-id"] not in {"", "a b"}


async def test_request_record_has_protocol_model_version_and_outcome(mock: RunningGateway) -> None:
    path, body = CLIENT_PROTOCOLS[0].call("ep-ab", stream=False)

    await mock.http.post(path, content=body, headers=JSON)

    [record] = mock.records
    assert (record.protocol, record.model, record.backend) == ("openai", "ep-ab", "mock")
    assert record.version in {"m-a", "m-b"}
    assert (record.outcome, record.status) == ("ok", 200)
    assert record.usage is not None
    assert record.usage.total_tokens == 5
