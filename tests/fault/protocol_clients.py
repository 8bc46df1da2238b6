"""A gateway in front of scripted OpenAI workers, and clients of every protocol.

async with create_raw_worker(STREAM, [HANG]) as worker:
    gateway = await serve_gateway(serve, worker)
    response = await send_request(gateway, client, stream=True)
    await get_single_record(gateway)
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from msgspec import Struct

from backends.pool.pool import PoolBackend
from backends.pool.worker_state import WorkerReport
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway
from tests.conftest import RunningGateway, Serve
from tests.integration.test_end_to_end import CLIENT_PROTOCOLS, JSON, ClientProtocol
from tests.support.fakes import CHUNKED, END, Reply, ScriptedWorker, chunk, make_reply
from tests.support.waiting import PATIENCE, wait_until

# ── responses of workers ──────────────────────────────────────────────────────────────────────────


def build_event(text: str = "", finish: str | None = None) -> bytes:
    """Build an event that is valid for chat and for completions."""
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish}
    body = {"id": "c", "object": "chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def build_response_body(text: str) -> bytes:
    """Build a unary body that is valid for chat and for completions."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "text": text, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    body = {"id": "c", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return msgspec.json.encode(body)


HELLO = build_event("Hello") + build_event(" world")
"""Two tokens: a single one is held back where an event must tell whether it is the last."""
STOP = build_event(finish="stop")
DONE = b"data: [DONE]\n\n"
STARTED_STREAM = CHUNKED + chunk(HELLO)
"""A stream that has started."""
STREAM = STARTED_STREAM + chunk(STOP) + chunk(DONE) + END
UNARY_RESPONSE = make_reply(build_response_body("Hello"))
WELL = make_reply(b"{}")


def build_error_reply(
    status: str, body: bytes = b'{"error":{"message":"no"}}', **headers: str
) -> Reply:
    """Build an error response."""
    return [make_reply(body, status, **headers)]


def build_good_reply(*, stream: bool) -> Reply:
    """Build a complete response."""
    return [STREAM if stream else UNARY_RESPONSE]


def create_raw_worker(*replies: Reply, probed: bytes = WELL) -> ScriptedWorker:
    """Create a scripted worker that answers health probes outside its script."""
    return ScriptedWorker(*replies, probed=probed)


# ── the gateway ─────────────────────────────────────────────────────────────────────────────────

TIMEOUTS = {"connect": "2s", "first_token": "10s", "idle": "10s", "total": "30s"}
POOL = {"protocol": "openai", "profile": "vllm", "policy": "round_robin"}
PROTOCOLS = ["openai", "databricks", "triton", "ovms", {"name": "mindie", "prefix": "/mindie"}]


def build_pool_config(
    workers: Sequence[str],
    limits: Mapping[str, str] | None = None,
    timeouts: Mapping[str, str] | None = None,
    **pool: Any,
) -> str:
    """Build a configuration with every protocol and a pool of these workers."""
    times = TIMEOUTS | dict(timeouts or {})
    config: dict[str, Any] = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": PROTOCOLS}],
        "limits": {"drain_timeout": "1s"} | dict(limits or {}),
        "defaults": {"timeouts": times},
        "backends": {"pool": POOL | {"workers": workers, "timeouts": times} | pool},
        "models": {"*": {"backend": "pool"}},
    }
    return msgspec.json.encode(config).decode()


async def serve_gateway(
    serve: Serve,
    *workers: ScriptedWorker | str,
    limits: Mapping[str, str] | None = None,
    timeouts: Mapping[str, str] | None = None,
    **pool: Any,
) -> RunningGateway:
    """Start a gateway in front of these workers, which are used in turn."""
    urls = [one if isinstance(one, str) else one.url for one in workers]
    return await serve(build_pool_config(urls, limits, timeouts, **pool))


def get_pool(app: Gateway) -> PoolBackend:
    """Return the gateway's only backend."""
    return cast("PoolBackend", app.backends["pool"])


def get_worker_reports(gateway: RunningGateway) -> Sequence[WorkerReport]:
    """Return the gateway's reports of its workers, in their order."""
    return get_pool(gateway.app).report_workers()


def get_queue_length(gateway: RunningGateway) -> int:
    """Return the number of requests in the pool's queue."""
    return get_pool(gateway.app)._workers.queue_length


async def get_single_record(gateway: RunningGateway) -> RequestRecord:
    """Wait for the only request's record, and until no worker has the request."""
    await wait_until(lambda: gateway.records)
    [record] = gateway.records
    assert [one.in_flight for one in get_worker_reports(gateway)] == [0] * len(
        get_worker_reports(gateway)
    )
    return record


# ── clients ─────────────────────────────────────────────────────────────────────────────────────


class Client(Struct, frozen=True):
    """A protocol: its requests, and how a stream shows its end and an error."""

    protocol: ClientProtocol
    ends: bytes
    """Empty for Triton, whose streams have no end mark."""
    error_text: bytes
    bad: tuple[int, ...]
    """The protocol's statuses for a failed worker."""

    @property
    def name(self) -> str:
        return self.protocol.name


_ENDS = {"triton": b"", "mindie": b'"finish_reason":"'}
_ERROR_TEXTS = {"mindie": b"Failed to get engine", "mindie chat": b"Failed to get engine"}
_BAD = {
    "databricks": (500, 504),
    "triton": (400, 503),
    "mindie": (500, 503),
    "mindie chat": (500, 503),
    "ovms": (400,),
}
CLIENTS = [
    Client(
        protocol,
        _ENDS.get(protocol.name, b"[DONE]"),
        _ERROR_TEXTS.get(protocol.name, b'"error"'),
        _BAD.get(protocol.name, (502, 504)),
    )
    for protocol in CLIENT_PROTOCOLS
]
CHAT = CLIENTS[0]
every_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
stream_or_unary = pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
RELAYED, TRANSLATED = CHAT, CLIENTS[3]


def parametrize_cases(cases: Mapping[str, Any], *common: str) -> pytest.MarkDecorator:
    """Parametrize clients and cases: all cases for one passthrough and one translating client.

    The other clients get the cases in ``common``.
    """
    pairs = [
        pytest.param(client, case, id=f"{client.name}-{name}")
        for client in CLIENTS
        for name, case in cases.items()
        if client in (RELAYED, TRANSLATED) or name in common
    ]
    return pytest.mark.parametrize(("client", "case"), pairs)


async def send_request(gateway: RunningGateway, client: Client, *, stream: bool) -> httpx.Response:
    """Send a request in this protocol and return the response."""
    path, body = client.protocol.call("m", stream=stream)
    return await gateway.http.post(path, content=body, headers=JSON)


def is_complete(response: httpx.Response, client: Client) -> bool:
    """Return whether a stream has its protocol's end and no error."""
    return (
        response.status_code == 200
        and client.ends in response.content
        and client.error_text not in response.content
    )


def assert_error_in_stream(response: httpx.Response, client: Client) -> None:
    """The stream has the text "Hello" and then an error, without an end mark."""
    assert response.status_code == 200, (response.status_code, response.content)
    rest = response.content.rpartition(b"Hello")[2]
    assert rest != response.content, "Hello was not passed on"
    assert client.error_text in rest
    assert not client.ends or client.ends not in response.content


def assert_error_response(response: httpx.Response, *statuses: int) -> None:
    """The response is an error with one of these statuses and no text."""
    assert response.status_code in statuses, (response.status_code, response.content)
    body = msgspec.json.decode(response.content.removeprefix(b"data: "))
    assert body.get("error") or body.get("message"), body
    assert b"Hello" not in response.content
    assert b"127.0.0.1" not in response.content


class RawClient:
    """A client on a raw socket that can disconnect or stop reading at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def connect(
        cls, gateway: RunningGateway, path: str, body: bytes, *, length: int | None = None
    ) -> "RawClient":
        """Send a request; with a larger ``length`` than the body's, only its beginning."""
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        size = len(body) if length is None else length
        writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)
        return cls(reader, writer)

    async def send_more(self, data: bytes) -> None:
        """Send more of the request."""
        self._writer.write(data)
        await self._writer.drain()

    async def read_until(self, what: bytes) -> bytes:
        """Read until the bytes contain ``what``, and return them."""
        received = b""
        async with asyncio.timeout(PATIENCE):
            while what not in received:
                if not (data := await self.reader.read(1 << 16)):
                    raise EOFError(received)
                received += data
        return received

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
