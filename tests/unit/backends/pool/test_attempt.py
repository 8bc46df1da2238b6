"""One request to one worker: a unary response means the same however it arrives."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.deadline_timer import DeadlineTimer
from backends.http.interfaces import BodyConsumer, UpstreamResponse, WorkerConfig
from backends.interfaces import Deadline, StreamItem, Timeouts, ignore_memory
from backends.pool.attempt import Attempt, AttemptServices
from backends.pool.attempt_request import AttemptRequest
from backends.pool.circuit_breaker import WorkerHealth
from backends.pool.metrics import PoolMetrics
from backends.pool.worker_state import WorkerReport, WorkerState
from backends.pool.workers import WorkerSlot
from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.events import Event, StreamEnd, TextDelta
from protocols.core.interfaces import Headers, UpstreamRequest
from protocols.core.request import GenerationRequest
from tests.support.fakes import FakeClock

REQUEST = GenerationRequest(kind="chat", model="m")
WIRE = UpstreamRequest("/v1", b"{}")
EVENTS = st.lists(st.sampled_from([TextDelta("a"), TextDelta("b"), StreamEnd()]), max_size=3)
PIECES = st.tuples(st.none() | st.just(b"raw"), EVENTS)


class FakeResponse:
    """A response whose body arrives with its head or after it."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, body: bytes, *, at_once: bool) -> None:
        self._body = body
        self.complete = at_once

    async def wait_headers(self) -> bool:
        return True

    def read_available(self) -> list[bytes]:
        if not self.complete:
            return []
        body, self._body = self._body, b""
        return [body] if body else []

    async def read(self) -> list[bytes]:
        self.complete = True
        return self.read_available()

    async def forward_to(self, take: BodyConsumer) -> bool:
        raise AssertionError(take)

    def abort(self) -> None:
        self.complete = False

    def release(self) -> None:
        """Do nothing."""


class FakeHttpClient:
    """An HTTP client whose responses have this body."""

    def __init__(self, reading: UpstreamResponse) -> None:
        self._reading = reading

    def try_send(self, url: str, request: UpstreamRequest, own: Headers = ()) -> UpstreamResponse:
        assert (url, request, own) == ("http://w:1", WIRE, ())
        return self._reading

    async def send_on_new_connection(self, *_: object) -> NoReturn:
        raise AssertionError("there is an idle connection")

    async def send(self, *_: object) -> NoReturn:
        raise AssertionError("this method is not used")

    async def start(self) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""


class FakePassthroughDecoder:
    """A passthrough decoder with a scripted meaning."""

    def __init__(self, fed: StreamItem, closed: StreamItem | GatewayError) -> None:
        self._fed = fed
        self._closed = closed

    def feed(self, pieces: Sequence[bytes]) -> StreamItem:
        assert all(pieces)
        assert pieces
        return self._fed

    def close(self) -> StreamItem:
        if isinstance(self._closed, GatewayError):
            raise self._closed
        return self._closed


class AttemptOutcome(NamedTuple):
    """The result of an attempt and its effect on the worker."""

    result: Sequence[StreamItem] | GatewayError
    over: bool
    accepted: bool
    failure: GatewayError | None
    report: WorkerReport
    failures: Mapping[str, int]


async def run_attempt(
    body: bytes,
    fed: StreamItem,
    closed: StreamItem | GatewayError,
    *,
    at_once: bool,
    max_size: int = 1 << 20,
) -> AttemptOutcome:
    clock = FakeClock()
    timer = DeadlineTimer(clock, asyncio.get_running_loop)
    upstream = FakeHttpClient(FakeResponse(body, at_once=at_once))
    means = AttemptServices(
        upstream, Timeouts(), clock, timer, PoolMetrics(), max_response_size=max_size
    )
    member = WorkerState(0, WorkerConfig("http://w:1"), WorkerHealth(), clock)
    work = AttemptRequest(
        REQUEST,
        WIRE,
        (),
        lambda: FakePassthroughDecoder(fed, closed),
        _fail_if_called,
        Deadline(clock, 60),
        ignore_memory,
    )
    attempt = Attempt.create(WorkerSlot(member, clock()), work, means)
    result: Sequence[StreamItem] | GatewayError
    try:
        result = await attempt.begin()
    except GatewayError as error:
        result = error
    if attempt.finished and not attempt.complete and attempt.failure is None:
        await attempt.drain()
    attempt.close()
    timer.close()
    assert (member.waiting_attempts, timer._deadlines) == (set(), {})
    counts_before = member.report(), means.metrics.failures
    return AttemptOutcome(
        result, attempt.finished, attempt.accepted, attempt.failure, *counts_before
    )


def _fail_if_called(*_: object) -> NoReturn:
    raise AssertionError("no error was expected")


@given(
    body=st.binary(max_size=3),
    fed=PIECES,
    closed=PIECES | st.just(WorkerFailed("it means nothing")),
)
def test_unary_response_is_independent_of_body_arrival_time(
    body: bytes, fed: StreamItem, closed: StreamItem | GatewayError
) -> None:
    one, other = (
        asyncio.run(run_attempt(body, fed, closed, at_once=at_once)) for at_once in (True, False)
    )
    assert one == other


@pytest.mark.parametrize("at_once", [True, False])
async def test_oversized_unary_response_is_rejected(*, at_once: bool) -> None:
    batches: tuple[Sequence[Event], ...] = ((TextDelta("a"),), (StreamEnd(),))
    pieces: list[StreamItem] = [(None, events) for events in batches]

    outcome = await run_attempt(b"four", *pieces, at_once=at_once, max_size=3)

    assert isinstance(outcome.result, WorkerFailed)
    assert "larger than" in str(outcome.result)
    assert not outcome.over


@pytest.mark.parametrize(("size", "in_thread"), [((256 << 10) - 1, False), (256 << 10, True)])
async def test_a_large_response_is_decoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, size: int, *, in_thread: bool
) -> None:
    threads: list[int] = []

    def close(decoder: FakePassthroughDecoder) -> StreamItem:
        del decoder
        threads.append(threading.get_ident())
        return None, [TextDelta("a"), StreamEnd()]

    monkeypatch.setattr(FakePassthroughDecoder, "close", close)
    end: StreamItem = None, []

    result = await run_attempt(b"x" * size, end, end, at_once=False)

    assert (result.over, result.accepted, result.failure) == (True, True, None)
    assert [thread != threading.get_ident() for thread in threads] == [in_thread]
