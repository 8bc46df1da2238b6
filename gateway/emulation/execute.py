"""Runs an emulation plan around a backend's events."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, cast

from msgspec.structs import replace

from backends.interfaces import (
    Backend,
    EventSink,
    RequestContext,
    StreamItem,
    StreamItems,
    SupportsPush,
)
from gateway.emulation import fan_out, stop_strings
from gateway.emulation.fan_out import FanIn, FanOut, RequestPart
from gateway.emulation.planner import EmulationPlan
from gateway.emulation.prompt_echo import EchoAndSuffix, strip_echo_and_suffix
from gateway.emulation.stop_strings import StopStringEmulator
from gateway.emulation.usage import UsageCounter, add_usage
from protocols.core.events import Event, StreamEnd
from protocols.core.request import GenerationRequest, Request, StopConditions

RequestSender = Callable[[Request, RequestContext], StreamItems]
_Collector = Callable[[Any, Request, RequestContext], Coroutine[Any, Any, Sequence[StreamItem]]]
_PartMessage = tuple[RequestPart, Sequence[Event]] | Exception | None
"""Events of a part; the error that ended one; or None when no parts are left."""

MAX_CONCURRENT_PARTS: Final = 8
"""How many parts of a request run at a time."""


def stream_emulated(
    backend: Backend,
    request: Request,
    context: RequestContext,
    plan: EmulationPlan,
    take: EventSink | None = None,
) -> StreamItems:
    """The events of the backend with the emulation of ``plan``; they always have usage.

    ``request`` is as the client sent it. No batch has bytes of its own. Raises the backend's
    errors. Closing the generator, or cancelling its task, stops all work at once. For ``take`` see
    ``backends.interfaces.SupportsPush``.
    """
    inner, outside = strip_echo_and_suffix(request)
    stopping = None
    if plan.emulated_fields:
        stopping = _select_stop_conditions(inner, plan)
        if "stopping.include_stop" in plan.emulated_fields:
            inner = stop_strings.remove_stop_strings(inner)
        if not plan.emulated_fields.isdisjoint(fan_out.FAN_OUT_FIELDS):
            spread = FanOut(inner, plan.emulated_fields)
            if len(spread) > 1:
                ask = partial(_stream_part, backend, stopping)
                return _stream_parts(ask, spread, _build_fan_in(spread, inner), context, outside)
            inner = next(iter(spread)).request
    return _stream_one(backend, inner, context, _EmulatedStream(inner, stopping, outside, take))


async def collect_emulated(
    backend: Backend, request: Request, context: RequestContext, plan: EmulationPlan
) -> Sequence[Event]:
    """All events of ``stream_emulated``. Cancelling its task stops all work at once."""
    gather = _find_collector(type(backend))
    if not plan.emulated_fields and gather is not None:
        inner, outside = strip_echo_and_suffix(request)
        _, events = add_usage(inner, await gather(backend, inner, context))
        return events if outside is None else outside.apply(events)
    said: list[Event] = []
    async with aclosing(stream_emulated(backend, request, context, plan)) as pieces:
        async for _, events in pieces:
            said += events
    return said


def count_parts(request: Request, plan: EmulationPlan) -> int:
    """How many requests the backend gets for this one, if none fails."""
    inner, _ = strip_echo_and_suffix(request)
    return (
        1
        if plan.emulated_fields.isdisjoint(fan_out.FAN_OUT_FIELDS)
        else len(FanOut(inner, plan.emulated_fields))
    )


def _select_stop_conditions(request: Request, plan: EmulationPlan) -> StopConditions | None:
    """The stop conditions that the gateway emulates, if any."""
    if not isinstance(request, GenerationRequest) or plan.emulated_fields.isdisjoint(
        stop_strings.STOP_STRING_FIELDS
    ):
        return None
    return request.stopping if request.stopping.stop else None


class _EmulatedStream:
    """Applies the emulation to one stream of a backend.

    ``stopping`` ends its choices, ``outside`` adds the echo and the suffix. ``taker`` is the sink
    of a backend that pushes events.
    """

    def __init__(
        self,
        request: Request,
        stopping: StopConditions | None,
        outside: EchoAndSuffix | None = None,
        taker: EventSink | None = None,
    ) -> None:
        self.sink = taker
        self.is_complete = False
        """Whether all choices have ended, so that the rest of the stream is not needed."""
        self._usage_counter = UsageCounter(request)
        self._stop_strings: StopStringEmulator | None = None
        if stopping is not None and isinstance(request, GenerationRequest):
            self._stop_strings = StopStringEmulator(stopping, request.choice_count)
        self._echo_and_suffix = outside
        self._last_events: Sequence[Event] = ()

    def apply(self, batch: Sequence[Event]) -> Sequence[Event]:
        """The events to send for a batch."""
        events = self._usage_counter.apply(batch)
        if self._stop_strings is not None:
            events = self._stop_strings.apply(events)
            if self._stop_strings.is_complete:
                self.is_complete, self._last_events = True, events
                return ()
        return events if self._echo_and_suffix is None else self._echo_and_suffix.apply(events)

    def push(self, data: bytes | None, batch: Sequence[Event]) -> bool:
        """Pass a batch to the sink; see ``backends.interfaces.EventSink``."""
        events = self.apply(batch)
        if self.is_complete or self.sink is None:
            return False
        return self.sink(data, events) if events else True

    def finish(self) -> Sequence[Event]:
        """The last events, at the end of the stream."""
        events = [*self._last_events, *self._usage_counter.build_missing_usage(), StreamEnd()]
        return events if self._echo_and_suffix is None else self._echo_and_suffix.apply(events)


async def _stream_one(
    backend: Backend, request: Request, context: RequestContext, heard: _EmulatedStream
) -> StreamItems:
    """One stream of the backend. It is closed as soon as the rest is not needed."""
    if heard.sink is not None and _supports_push(type(backend)):
        batches = cast("SupportsPush", backend).stream_to(request, context, heard.push)
    else:
        batches = backend.stream(request, context)
    try:
        async for batch in batches:
            events = () if heard.is_complete else heard.apply(batch)
            if heard.is_complete:
                break
            if events or not batch:
                yield None, events
        else:
            return
    finally:
        await batches.aclose()
    yield None, heard.finish()


@functools.cache
def _supports_push(kind: type) -> bool:
    """Whether a backend is ``SupportsPush``. Cached, since ``issubclass`` is slow here."""
    return issubclass(kind, SupportsPush)


@functools.cache
def _find_collector(kind: type) -> _Collector | None:
    """The ``collect`` method of a backend that is ``SupportsPush``."""
    return kind.collect if issubclass(kind, SupportsPush) else None


# --- several requests for one --------------------------------------------------------------------


def _stream_part(
    backend: Backend, stopping: StopConditions | None, request: Request, context: RequestContext
) -> StreamItems:
    return _stream_one(backend, request, context, _EmulatedStream(request, stopping))


def _build_fan_in(spread: FanOut, request: Request) -> FanIn:
    running = isinstance(request, GenerationRequest) and request.response_options.usage == "each"
    return FanIn(spread, running=running)


async def _stream_parts(
    ask: RequestSender,
    spread: FanOut,
    merge: FanIn,
    context: RequestContext,
    outside: EchoAndSuffix | None,
) -> StreamItems:
    """The streams of all parts as one. The first part that fails cancels the others."""
    news: asyncio.Queue[_PartMessage] = asyncio.Queue(MAX_CONCURRENT_PARTS)
    left = iter(spread)
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(_run_parts(ask, left, context, news))
        for _ in range(min(MAX_CONCURRENT_PARTS, len(spread)))
    ]
    try:
        busy = len(tasks)
        while busy:
            one = await news.get()
            if one is None:
                busy -= 1
            elif isinstance(one, Exception):
                raise one
            elif events := merge.apply(*one):
                yield None, events if outside is None else outside.apply(events)
        yield None, merge.finish()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_parts(
    ask: RequestSender,
    left: Iterator[RequestPart],
    context: RequestContext,
    news: asyncio.Queue[_PartMessage],
) -> None:
    """Run one part after the other until none is left."""
    ended: Exception | None = None
    try:
        for part in left:
            own = replace(context, id=f"{context.id}-{part.number}")
            async with aclosing(ask(part.request, own)) as batches:
                async for _, batch in batches:
                    await news.put((part, batch))
    except Exception as error:  # noqa: BLE001 - raised where the events are read
        ended = error
    await news.put(ended)
