"""Runs an emulation plan around a backend's events."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final, cast

from msgspec.structs import replace

from backends.interfaces import (
    Backend,
    EventSink,
    PreparedRequest,
    RequestContext,
    StreamItem,
    StreamItems,
    collect_items,
)
from gateway.emulation.fan_out import FAN_OUT_FIELDS, FanIn, FanOut, RequestPart
from gateway.emulation.planner import EmulationPlan
from gateway.emulation.prompt_echo import strip_echo_and_suffix
from gateway.emulation.stop_strings import (
    STOP_STRING_FIELDS,
    StopStringEmulator,
    remove_stop_strings,
)
from gateway.emulation.usage import UsageCounter
from protocols.core.custom_tools import CustomCallReader
from protocols.core.events import Event, StreamEnd
from protocols.core.request import AnyRequest, GenerationRequest, Request, StopConditions

EventProcessor = Callable[[Sequence[Event]], Sequence[Event]]
PartSender = Callable[[AnyRequest, RequestContext], StreamItems]
_PartMessage = tuple[RequestPart, Sequence[Event]] | Exception | None
"""Events of a part; the error that ended one; or None when no parts are left."""

_STREAM_FIELDS: Final = STOP_STRING_FIELDS | FAN_OUT_FIELDS
"""The emulated fields for which the backend's stream ends early, or several become one."""
MAX_CONCURRENT_PARTS: Final = 8
"""How many parts of a request run at a time."""


def send_emulated(
    backend: Backend,
    prepared: PreparedRequest,
    context: RequestContext,
    plan: EmulationPlan,
    sink: EventSink | None = None,
) -> tuple[StreamItems, EventProcessor]:
    """Send a request with the emulation of ``plan``; see ``backends.interfaces.Backend.send``.

    Returns the items and the function that each batch of them is to be passed to, in order. The
    events that it returns always have usage.
    """
    if plan.emulated_fields.isdisjoint(_STREAM_FIELDS):
        inner, process = _prepare_plain(prepared)
        return backend.send(inner, context, sink), process
    request, outside = strip_echo_and_suffix(prepared.request)
    items = _stream_emulated(backend, request, context, plan, sink)
    process = keep_events if outside is None else outside.apply
    if type(request) is GenerationRequest and request.tools:
        process = _restore_custom_calls(request, process)
    return items, process


def send_emulated_unary(
    backend: Backend, prepared: PreparedRequest, context: RequestContext, plan: EmulationPlan
) -> tuple[Coroutine[Any, Any, Sequence[StreamItem]], EventProcessor]:
    """All items of a unary response at once; otherwise as ``send_emulated``."""
    if plan.emulated_fields.isdisjoint(_STREAM_FIELDS):
        inner, process = _prepare_plain(prepared)
        return backend.send_unary(inner, context), process
    items, process = send_emulated(backend, prepared, context, plan)
    return collect_items(items), process


def _prepare_plain(prepared: PreparedRequest) -> tuple[PreparedRequest, EventProcessor]:
    """The request to send, and the processor of its events, if its stream needs no emulation."""
    if prepared.passthrough is not None:
        return prepared, UsageCounter(prepared.request).apply
    inner, outside = strip_echo_and_suffix(prepared.request)
    process: EventProcessor = UsageCounter(inner).apply
    if type(inner) is GenerationRequest and inner.tools:
        process = _restore_custom_calls(inner, process)
    if outside is None:
        return PreparedRequest(inner), process
    return PreparedRequest(inner), lambda events: outside.apply(process(events))


def _restore_custom_calls(request: GenerationRequest, process: EventProcessor) -> EventProcessor:
    """The processor, after which calls of functions are those of the client's custom tools."""
    reader = CustomCallReader(request.tools)
    return (lambda events: reader.apply(process(events))) if reader.names else process


def keep_events(events: Sequence[Event]) -> Sequence[Event]:
    """An ``EventProcessor`` that changes nothing."""
    return events


def count_parts(request: AnyRequest, plan: EmulationPlan) -> int:
    """How many requests the backend gets for this one, if none fails."""
    inner, _ = strip_echo_and_suffix(request)
    return (
        1
        if plan.emulated_fields.isdisjoint(FAN_OUT_FIELDS)
        else len(FanOut(cast("Request", inner), plan.emulated_fields))
    )


def _stream_emulated(
    backend: Backend,
    request: AnyRequest,
    context: RequestContext,
    plan: EmulationPlan,
    sink: EventSink | None,
) -> StreamItems:
    """The events of the backend with stop strings and fan-out."""
    stopping = _select_stop_conditions(request, plan)
    if not plan.emulated_fields.isdisjoint(STOP_STRING_FIELDS):
        request = remove_stop_strings(request)
    if not plan.emulated_fields.isdisjoint(FAN_OUT_FIELDS):
        fan_out = FanOut(cast("Request", request), plan.emulated_fields)
        if len(fan_out) > 1:

            def send_part(part: AnyRequest, context: RequestContext) -> StreamItems:
                return _EmulatedStream(part, stopping).run(backend, context)

            return _stream_parts(send_part, fan_out, _build_fan_in(fan_out, request), context)
        request = next(iter(fan_out)).request
    return _EmulatedStream(request, stopping, sink).run(backend, context)


def _select_stop_conditions(request: AnyRequest, plan: EmulationPlan) -> StopConditions | None:
    """The stop conditions that the gateway emulates, if any."""
    if not isinstance(request, GenerationRequest) or plan.emulated_fields.isdisjoint(
        STOP_STRING_FIELDS
    ):
        return None
    return request.stopping if request.stopping.stop else None


class _EmulatedStream:
    """One stream of a backend. It has usage, and ``stopping`` ends its choices."""

    def __init__(
        self, request: AnyRequest, stopping: StopConditions | None, sink: EventSink | None = None
    ) -> None:
        self._is_complete = False
        """Whether all choices have ended, so that the rest of the stream is not needed."""
        self._request = request
        self._sink = sink
        self._usage_counter = UsageCounter(request)
        self._stop_strings: StopStringEmulator | None = None
        if stopping is not None and isinstance(request, GenerationRequest):
            self._stop_strings = StopStringEmulator(stopping, request.choice_count)
        self._last_events: Sequence[Event] = ()

    async def run(self, backend: Backend, context: RequestContext) -> StreamItems:
        """Send the request. The response is closed as soon as the rest of it is not needed."""
        sink = None if self._sink is None else self._push
        items = backend.send(PreparedRequest(self._request), context, sink)
        try:
            async for _, batch in items:
                events = () if self._is_complete else self._apply(batch)
                if self._is_complete:
                    break
                if events or not batch:
                    yield None, events
            else:
                return
        finally:
            await items.aclose()
        yield None, self._finish()

    def _apply(self, batch: Sequence[Event]) -> Sequence[Event]:
        """The events to send for a batch."""
        events = self._usage_counter.apply(batch)
        if self._stop_strings is not None:
            events = self._stop_strings.apply(events)
            if self._stop_strings.is_complete:
                self._is_complete, self._last_events = True, events
                return ()
        return events

    def _push(self, data: bytes | None, batch: Sequence[Event]) -> bool:
        """Pass a batch to the sink; see ``backends.interfaces.EventSink``."""
        events = self._apply(batch)
        if self._is_complete or self._sink is None:
            return False
        return self._sink(data, events) if events else True

    def _finish(self) -> Sequence[Event]:
        """The last events, at the end of the stream."""
        return [*self._last_events, *self._usage_counter.build_missing_usage(), StreamEnd()]


# --- several requests for one --------------------------------------------------------------------


def _build_fan_in(fan_out: FanOut, request: AnyRequest) -> FanIn:
    running = isinstance(request, GenerationRequest) and request.response_options.usage == "each"
    return FanIn(fan_out, running=running)


async def _stream_parts(
    send_part: PartSender,
    fan_out: FanOut,
    fan_in: FanIn,
    context: RequestContext,
) -> StreamItems:
    """The streams of all parts as one. The first part that fails cancels the others."""
    messages: asyncio.Queue[_PartMessage] = asyncio.Queue(MAX_CONCURRENT_PARTS)
    parts = iter(fan_out)
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(_run_parts(send_part, parts, context, messages))
        for _ in range(min(MAX_CONCURRENT_PARTS, len(fan_out)))
    ]
    try:
        running = len(tasks)
        while running:
            message = await messages.get()
            if message is None:
                running -= 1
            elif isinstance(message, Exception):
                raise message
            elif events := fan_in.apply(*message):
                yield None, events
        yield None, fan_in.finish()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_parts(
    send_part: PartSender,
    parts: Iterator[RequestPart],
    context: RequestContext,
    messages: asyncio.Queue[_PartMessage],
) -> None:
    """Run one part after the other until none is left."""
    failure: Exception | None = None
    try:
        for part in parts:
            part_context = replace(context, id=f"{context.id}-{part.number}")
            async with aclosing(send_part(part.request, part_context)) as items:
                async for _, batch in items:
                    await messages.put((part, batch))
    except Exception as error:  # noqa: BLE001 - raised where the events are read
        failure = error
    await messages.put(failure)
