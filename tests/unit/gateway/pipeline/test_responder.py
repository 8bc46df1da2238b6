"""The responder passes events on and records the request."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from backends.deadline_timer import DeadlineTimer
from backends.interfaces import (
    Deadline,
    EventSink,
    RequestContext,
    StreamItem,
    StreamItems,
    ignore_memory,
)
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import CancellableRequest, ResponseWriter
from gateway.pipeline.responder import Responder
from gateway.pipeline.state import RequestState
from protocols.core.errors import DeadlineExceeded, StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ReasoningDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import (
    ClientRequest,
    Endpoint,
    Headers,
    HttpResponse,
    ResponseEncoder,
)


class FakeClock:
    """A clock that advances by a second with each batch."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeStrategy:
    """A response with bytes for every batch; with ``pours`` later batches are pushed."""

    def __init__(
        self, clock: FakeClock, *batches: tuple[bytes, Sequence[Event]], pours: bool = False
    ) -> None:
        self._pours = pours
        self._clock = clock
        self._batches = batches

    unsupported_parameters = ()

    def get_encoder(self) -> ResponseEncoder:
        raise AssertionError

    def report_lost_event(self, event: Event, *, is_encoded: bool = False) -> None:
        pass

    def get_heartbeat_encoder(self) -> None:
        return None

    def get_stream_headers(self) -> Headers:
        return ()

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        return events

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        raise AssertionError

    async def stream(self, take: EventSink | None = None) -> StreamItems:
        for number, batch in enumerate(self._batches):
            self._clock.now += 1
            if number and self._pours:
                assert take is not None
                assert take(*batch)
            else:
                yield batch
        yield None, ()

    async def send_unary(self) -> Sequence[StreamItem]:
        return self._batches

    def release_body(self) -> None:
        """Hold no body to let go of."""


class HangingStrategy(FakeStrategy):
    """A response whose worker stays connected after the end."""

    def __init__(self, clock: FakeClock, *batches: tuple[bytes, Sequence[Event]]) -> None:
        super().__init__(clock, *batches)
        self.ends = asyncio.Event()

    async def stream(self, take: EventSink | None = None) -> StreamItems:
        for batch in self._batches:
            yield batch
        await self.ends.wait()
        raise StreamBroken("the worker's answer stopped before its end")


class FakeWriter:
    """Records what is written."""

    started = False
    finished = 0
    needs_drain = False

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        raise AssertionError

    def start(self, status: int, headers: Headers) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        """Ignore the data."""

    def finish(self) -> None:
        self.finished += 1

    def flush(self) -> None:
        raise AssertionError("nothing bridges a silence here")

    async def drain(self) -> None:
        raise AssertionError


def make_responder(
    strategy: FakeStrategy,
    clock: FakeClock,
    seconds: float = 60.0,
    writer: ResponseWriter | None = None,
    record: RequestRecord | None = None,
) -> Responder:
    context = RequestContext("r", Deadline(clock, seconds), clock, ignore_memory, received_at=100.0)
    timer = DeadlineTimer(clock, asyncio.get_running_loop)
    record = RequestRecord("r") if record is None else record
    http: Any = None  # not used
    request = RequestState(http, writer or FakeWriter(), record)
    request.context = context
    endpoint = Endpoint("POST", "/v1/chat/completions", "generate", "chat")
    request.client_request = ClientRequest(endpoint, {}, {}, "", b"", endpoint.path)
    make: Any = Responder
    responder: Responder = make(request, strategy, timer, asyncio.Semaphore())
    return responder


END: tuple[bytes, Sequence[Event]] = (
    b"end",
    [ChoiceEnd("stop"), ChoiceEnd("length", 1), Usage(1, 2), StreamEnd()],
)


@pytest.mark.parametrize(
    ("batches", "first_byte", "first_token"),
    [
        ([(b"t", [TextDelta("a")]), END], 1.0, 1.0),
        (
            [(b"h", [StreamStart()]), (b"t", [TextDelta("a")]), (b"t", [TextDelta("b")]), END],
            1.0,
            2.0,
        ),
        ([(b"h", [PromptEcho(0, "p")]), (b"t", [ReasoningDelta("a")]), END], 1.0, 2.0),
        (
            [(b"", [TextDelta("held back")]), (b"c", [ToolCallStart(0, 0, "id", "f")]), END],
            2.0,
            2.0,
        ),
        ([(b"h", [StreamStart()]), END], 1.0, None),
    ],
)
@pytest.mark.parametrize("pours", [False, True], ids=["read", "poured"])
async def test_first_token_time_excludes_the_stream_start(
    batches: list[tuple[bytes, Sequence[Event]]],
    first_byte: float,
    first_token: float | None,
    *,
    pours: bool,
) -> None:
    clock, record = FakeClock(), RequestRecord("r")

    response = FakeStrategy(clock, *batches, pours=pours)
    await make_responder(response, clock, record=record).run(set(), stream=True)

    assert (record.first_byte, record.first_token) == (first_byte, first_token)
    assert record.finish_reasons == ("stop", "length")
    assert record.usage == Usage(1, 2)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_exceeded_deadline_sends_no_upstream_request(*, stream: bool) -> None:
    clock, live = FakeClock(), set[CancellableRequest]()
    exchange = make_responder(FakeStrategy(clock), clock, seconds=0.0)

    with pytest.raises(DeadlineExceeded):
        await exchange.run(live, stream=stream)

    assert not live


@pytest.mark.parametrize("how", ["broken", "stopped", "gone"])
async def test_stream_ends_with_stream_end_even_if_the_worker_stays_connected(how: str) -> None:
    clock, record, sink = FakeClock(), RequestRecord("r"), FakeWriter()
    events: list[Event] = [TextDelta("a")]
    response = HangingStrategy(clock, (b"t", events), (b"end", [ChoiceEnd("stop"), StreamEnd()]))
    exchange = make_responder(response, clock, writer=sink, record=record)
    task = asyncio.create_task(exchange.run(set(), stream=True))
    await asyncio.sleep(0)

    assert (sink.finished, task.done()) == (1, False)

    if how == "broken":
        response.ends.set()
    elif how == "stopped":
        exchange.stop()
    else:
        task.cancel()
    await task

    assert sink.finished == 1
    assert (record.outcome, record.error, record.finish_reasons) == ("ok", "", ("stop",))


class FakeUnaryStrategy(FakeStrategy):
    """A unary response and the events that it is built from."""

    built: tuple[Sequence[Event], bytes | None] = (), None

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        self.built = events, body
        return HttpResponse(200)


class FakeUnaryWriter(FakeWriter):
    """Records a unary response."""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        assert status == 200


@pytest.mark.parametrize("data", [b"body", None])
async def test_unary_response_is_built_from_all_batches(data: bytes | None) -> None:
    clock, record = FakeClock(), RequestRecord("r")
    response = FakeUnaryStrategy(clock, (b"", [TextDelta("a")]), (data or b"", END[1]))

    await make_responder(response, clock, writer=FakeUnaryWriter(), record=record).run(
        set(), stream=False
    )

    assert response.built == ([TextDelta("a"), *END[1]], data)
    assert (record.status, record.usage) == (200, Usage(1, 2))
    assert record.finish_reasons == ("stop", "length")


async def test_unary_response_without_stream_end_raises_stream_broken() -> None:
    clock = FakeClock()
    with pytest.raises(StreamBroken):
        await make_responder(FakeUnaryStrategy(clock, (b"b", [TextDelta("a")])), clock).run(
            set(), stream=False
        )
