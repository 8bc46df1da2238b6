"""A gateway before raw workers that speak OpenAI, and clients of every protocol before it.

async with raw(STREAM, HANG) as worker:
    front = await before(serve, worker)
    answer = await ask(front, client, stream=True)
    await one_record(front)
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from msgspec import Struct

from backends.pool.pool import PoolBackend
from backends.pool.workers import WorkerReport
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway
from tests.conftest import RunningGateway, Serve
from tests.integration.test_end_to_end import JSON, WAYS, ClientProtocol
from tests.support.fakes import CHUNKED, END, Reply, ScriptedWorker, chunk, make_reply

# ── what workers write ──────────────────────────────────────────────────────────────────────────


def build_event(text: str = "", finish: str | None = None) -> bytes:
    """One event, of a conversation and of a completion alike."""
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish}
    body = {"id": "c", "object": "chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def build_response_body(text: str) -> bytes:
    """A whole answer, of a conversation and of a completion alike."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "text": text, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    body = {"id": "c", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return msgspec.json.encode(body)


HELLO = build_event("Hello") + build_event(" world")
"""Two tokens: one alone is held back where an event must tell whether it is the last."""
STOP = build_event(finish="stop")
DONE = b"data: [DONE]\n\n"
SAYS = CHUNKED + chunk(HELLO)
"""A stream that has begun."""
STREAM = SAYS + chunk(STOP) + chunk(DONE) + END
WHOLE = make_reply(build_response_body("Hello"))
WELL = make_reply(b"{}")


def build_error_reply(
    status: str, body: bytes = b'{"error":{"message":"no"}}', **headers: str
) -> Reply:
    """An answer of another status than 200."""
    return [make_reply(body, status, **headers)]


def build_good_reply(*, stream: bool) -> Reply:
    """A complete answer."""
    return [STREAM if stream else WHOLE]


def create_raw_worker(*replies: Reply, probed: bytes = WELL) -> ScriptedWorker:
    """A scripted worker whose probes are good, and no part of its script."""
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
    """A gateway in every protocol before workers of these URLs. ``pool`` as in the file."""
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
    """A gateway before these workers, asked in turn; see ``configuration``."""
    urls = [one if isinstance(one, str) else one.url for one in workers]
    return await serve(build_pool_config(urls, limits, timeouts, **pool))


def get_pool(app: Gateway) -> PoolBackend:
    """The only backend of such a gateway."""
    return cast("PoolBackend", app.backends["pool"])


def get_worker_reports(front: RunningGateway) -> Sequence[WorkerReport]:
    """How the gateway thinks of its workers, in their order."""
    return get_pool(front.app).report_workers()


def get_queue_length(front: RunningGateway) -> int:
    """How many requests wait for a place at a worker."""
    return get_pool(front.app)._workers.queue_length


async def wait_until(true: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until something is so. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def get_single_record(front: RunningGateway) -> RequestRecord:
    """What was recorded of the only request; and no worker has it any more."""
    await wait_until(lambda: front.records)
    [record] = front.records
    assert [one.in_flight for one in get_worker_reports(front)] == [0] * len(
        get_worker_reports(front)
    )
    return record


# ── clients ─────────────────────────────────────────────────────────────────────────────────────


class Client(Struct, frozen=True):
    """One protocol: how a request is written, and how a stream's end and an error in it show."""

    way: ClientProtocol
    ends: bytes
    """Nothing for Triton, whose streams end with their body."""
    error_text: bytes
    bad: tuple[int, ...]
    """The statuses that it has for a worker that failed."""

    @property
    def name(self) -> str:
        return self.way.name


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
        way,
        _ENDS.get(way.name, b"[DONE]"),
        _ERROR_TEXTS.get(way.name, b'"error"'),
        _BAD.get(way.name, (502, 504)),
    )
    for way in WAYS
]
CHAT = CLIENTS[0]
every_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
RELAYED, TRANSLATED = CHAT, CLIENTS[3]


def parametrize_cases(cases: Mapping[str, Any], *common: str) -> pytest.MarkDecorator:
    """Clients by ``case``: all cases for one that is relayed and one that is translated.

    For the others those in ``common``.
    """
    pairs = [
        pytest.param(client, case, id=f"{client.name}-{name}")
        for client in CLIENTS
        for name, case in cases.items()
        if client in (RELAYED, TRANSLATED) or name in common
    ]
    return pytest.mark.parametrize(("client", "case"), pairs)


async def send_request(front: RunningGateway, client: Client, *, stream: bool) -> httpx.Response:
    """One request in this protocol, and its answer."""
    path, body = client.way.call("m", stream=stream)
    return await front.http.post(path, content=body, headers=JSON)


def is_complete(got: httpx.Response, client: Client) -> bool:
    """Whether a stream had its protocol's end, and no error."""
    return (
        got.status_code == 200
        and client.ends in got.content
        and client.error_text not in got.content
    )


def assert_error_in_stream(got: httpx.Response, client: Client) -> None:
    """What was said of "Hello" was passed on, then an error was told, and no end made up."""
    assert got.status_code == 200, (got.status_code, got.content)
    rest = got.content.rpartition(b"Hello")[2]
    assert rest != got.content, "Hello was not passed on"
    assert client.error_text in rest
    assert not client.ends or client.ends not in got.content


def assert_error_response(got: httpx.Response, *statuses: int) -> None:
    """An error of one of these statuses, in JSON or as an event, and nothing of the answer."""
    assert got.status_code in statuses, (got.status_code, got.content)
    body = msgspec.json.decode(got.content.removeprefix(b"data: "))
    assert body.get("error") or body.get("message"), body
    assert b"Hello" not in got.content
    assert b"127.0.0.1" not in got.content


class RawClient:
    """A client on a raw socket, which may leave or stop reading when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def ask(
        cls, front: RunningGateway, path: str, body: bytes, *, length: int | None = None
    ) -> "RawClient":
        """Send a request, or its beginning where it has a ``length`` beyond that of ``body``."""
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        size = len(body) if length is None else length
        writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        """More of the request."""
        self._writer.write(data)
        await self._writer.drain()

    async def hear(self, what: bytes) -> bytes:
        """Read until ``what`` has come."""
        received = b""
        async with asyncio.timeout(5):
            while what not in received:
                if not (data := await self.reader.read(1 << 16)):
                    raise EOFError(received)
                received += data
        return received

    def leave(self) -> None:
        """Close the connection."""
        self._writer.close()
