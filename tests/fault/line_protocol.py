"""A minimal protocol of lines for tests of the pool, and a pool with it.

A worker writes lines: JSON objects ``{"text": "..."}``, and finally ``end``. A line that starts
with ``start`` has no text.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from random import Random
from time import monotonic
from typing import Any, Protocol

import msgspec
import pytest

from backends.http.interfaces import HttpClient, WorkerConfig
from backends.interfaces import Deadline, PreparedRequest, RequestContext, Timeouts, ignore_memory
from backends.pool.pool import PoolBackend
from backends.pool.settings import (
    HealthCheckSettings,
    PoolContext,
    PoolSettings,
    WorkerAuthSettings,
    WorkerSourceSettings,
)
from protocols.core.errors import (
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    WorkerFailed,
)
from protocols.core.events import ChoiceEnd, Event, StreamEnd, StreamStart, TextDelta
from protocols.core.interfaces import Clock, ResponseDecoder, UpstreamAdapter, UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import GenerationRequest, Request
from protocols.core.units import Secret
from tests.support.fakes import chunked

LIMIT = 1 << 20
STREAMED = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
UNARY = GenerationRequest(model="m", kind="completion", prompts=("hi",))


def encode_line(text: str) -> bytes:
    """Encode a line with a text."""
    return msgspec.json.encode({"text": text}) + b"\n"


def reply_text(*pieces: str) -> bytes:
    """Return a complete response that streams a text in these pieces."""
    return chunked(*map(encode_line, pieces), b"end\n")


class LineDecoder:
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._ended = False

    def feed(self, data: bytes) -> Sequence[Event]:
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) > LIMIT:
            raise WorkerFailed(f"a line of more than {LIMIT} bytes")
        return [event for line in lines for event in self._read(line)]

    def close(self) -> Sequence[Event]:
        if not self._ended:
            raise StreamBroken("the lines stopped before their end")
        return [StreamEnd()]

    def _read(self, line: bytes) -> Sequence[Event]:
        if line == b"end":
            self._ended = True
            return [ChoiceEnd("eos")]
        if line.startswith(b"start"):
            return [StreamStart()]
        try:
            return [TextDelta(msgspec.json.decode(line)["text"])]
        except msgspec.DecodeError:
            raise WorkerFailed("a line is not JSON") from None


class LineProtocol:
    """An UpstreamAdapter for lines."""

    name = "lines"
    health_request = UpstreamRequest("/health", b"", method="GET")

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        return (UnsupportedParameter("seed", "dropped"),)

    def encode_request(self, request: Request) -> UpstreamRequest:
        headers = (("Content-Type", "application/json"), ("X-Secret", "never sent"))
        return UpstreamRequest("/say?to=me", msgspec.json.encode({"model": request.model}), headers)

    def create_decoder(self, request: Request) -> ResponseDecoder:
        return LineDecoder()

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        if status == 429:
            return RateLimitExceeded(
                "the worker is busy", retry_after=float(headers["retry-after"])
            )
        if status == 503:
            return Overloaded("the worker is overloaded")
        return WorkerFailed(f"the worker failed: {len(body)} bytes", status=status)


SOON = Timeouts(connect=1.0, first_token=5.0, idle=5.0, total=20.0)


def pool_settings(*workers: WorkerConfig | str, **settings: Any) -> PoolSettings:
    """Build the settings of a pool with these workers."""
    configs = [WorkerConfig(one) if isinstance(one, str) else one for one in workers]
    sources = tuple(
        WorkerSourceSettings(
            url=one.url,
            weight=one.weight,
            max_concurrency=one.max_concurrency,
            auth=None
            if one.credentials is None
            else WorkerAuthSettings(Secret(one.credentials.secrets[0])),
        )
        for one in configs
    )
    return PoolSettings(protocol="lines", workers=sources, **settings)


@asynccontextmanager
async def run_pool(
    *workers: WorkerConfig | str,
    timeouts: Timeouts = SOON,
    upstream: HttpClient | None = None,
    adapter: UpstreamAdapter | None = None,
    clock: Clock = monotonic,
    models: Sequence[str] = (),
    health: HealthCheckSettings | None = None,
    **settings: Any,
) -> AsyncIterator[PoolBackend]:
    """Run a pool for the line protocol; without ``health`` it has no health checks."""
    backend = PoolBackend(
        pool_settings(
            *workers, timeouts=timeouts, health=health or HealthCheckSettings(), **settings
        ),
        adapter=adapter or LineProtocol(),
        clock=clock,
        draw=Random(7).random,
        context=PoolContext(models=models),
        http_client=upstream,
        has_health_checks=health is not None,
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.aclose()


def build_context(total: float = 20.0, **fields: Any) -> RequestContext:
    """Build the context of a request with a deadline in ``total`` seconds."""
    return RequestContext("req-1", Deadline(monotonic, total), monotonic, ignore_memory, **fields)


class CollectEvents(Protocol):
    """``collect_events`` or ``collect_pushed_events``."""

    async def __call__(
        self, backend: PoolBackend, request: Request = STREAMED, into: list[Event] | None = None
    ) -> list[Event]: ...


async def collect_events(
    backend: PoolBackend, request: Request = STREAMED, into: list[Event] | None = None
) -> list[Event]:
    """Return all events of a response; ``into`` keeps those before an error."""
    events: list[Event] = [] if into is None else into
    async with aclosing(backend.send(PreparedRequest(request), build_context())) as batches:
        async for _, batch in batches:
            events += batch
    return events


async def collect_pushed_events(
    backend: PoolBackend, request: Request = STREAMED, into: list[Event] | None = None
) -> list[Event]:
    """Like ``collect_events``, as a consumer that accepts pushed events."""
    events: list[Event] = [] if into is None else into

    def take(data: bytes | None, batch: Sequence[Event]) -> bool:
        assert data is None
        events.extend(batch)
        return True

    async with aclosing(backend.send(PreparedRequest(request), build_context(), take)) as batches:
        async for _, batch in batches:
            events += batch
    return events


each_consumer = pytest.mark.parametrize("collect", [collect_events, collect_pushed_events])


def join_text(events: Sequence[Event]) -> str:
    """Return the joined text of the events."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))
