"""A backend's answer, with all that the gateway does in its stead."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, cast

from msgspec.structs import replace

from gateway.core.context import Context
from gateway.core.ports import Backend, Piece, Pieces, Pouring, Take
from gateway.core.types import Done, Event, GenerateRequest, Request, Stopping
from gateway.emulation import fanout, stops
from gateway.emulation.affixes import Around, around
from gateway.emulation.counting import Count, counted
from gateway.emulation.fanout import Merge, Part, Spread
from gateway.emulation.planning import Plan
from gateway.emulation.stops import Stops

Ask = Callable[[Request, Context], Pieces]
_Gather = Callable[[Any, Request, Context], Coroutine[Any, Any, Sequence[Piece]]]
_News = tuple[Part, Sequence[Event]] | Exception | None
"""What a part says; what ended it; or None when there are no parts left."""

AT_ONCE: Final = 8
"""How many parts of a request are asked for at a time."""


def answer(
    backend: Backend, request: Request, context: Context, plan: Plan, take: Take | None = None
) -> Pieces:
    """The events of ``backend.answer``, with what ``plan`` says; there is always usage among them.

    ``request`` is as the client sent it. No batch has bytes of its own. Raises what the backend
    raises. Closing the generator, or cancelling its task, stops all the work at once. ``take``: see
    ``gateway.core.ports.Pouring``.
    """
    inner, outside = around(request)
    stopping = None
    if plan.emulated_fields:
        stopping = _stopping(inner, plan)
        if "stopping.include_stop" in plan.emulated_fields:
            inner = stops.without_stops(inner)
        if not plan.emulated_fields.isdisjoint(fanout.PATHS):
            spread = Spread(inner, plan.emulated_fields)
            if len(spread) > 1:
                ask = partial(_part, backend, stopping)
                return _parts(ask, spread, _merge(spread, inner), context, outside)
            inner = next(iter(spread)).request
    return _one(backend, inner, context, _Heard(inner, stopping, outside, take))


async def gathered(
    backend: Backend, request: Request, context: Context, plan: Plan
) -> Sequence[Event]:
    """All that ``answer`` gives. Cancelling its task stops all the work at once."""
    gather = _gathering(type(backend))
    if not plan.emulated_fields and gather is not None:
        inner, outside = around(request)
        _, events = counted(inner, await gather(backend, inner, context))
        return events if outside is None else outside.apply(events)
    said: list[Event] = []
    async with aclosing(answer(backend, request, context, plan)) as pieces:
        async for _, events in pieces:
            said += events
    return said


def parts(request: Request, plan: Plan) -> int:
    """How many requests a backend gets for the one, if none fails."""
    inner, _ = around(request)
    return (
        1
        if plan.emulated_fields.isdisjoint(fanout.PATHS)
        else len(Spread(inner, plan.emulated_fields))
    )


def _stopping(request: Request, plan: Plan) -> Stopping | None:
    """What ends the choices here, if anything does."""
    if not isinstance(request, GenerateRequest) or plan.emulated_fields.isdisjoint(stops.PATHS):
        return None
    return request.stopping if request.stopping.stop else None


class _Heard:
    """One answer of a backend, as far as it has come.

    ``stopping`` ends its choices, and ``outside`` is put around them. ``taker`` takes at once what
    there is to say.
    """

    def __init__(
        self,
        request: Request,
        stopping: Stopping | None,
        outside: Around | None = None,
        taker: Take | None = None,
    ) -> None:
        self.sink = taker
        self.is_complete = False
        """All that is wanted of it has come."""
        self._usage_counter = Count(request)
        self._stop_strings: Stops | None = None
        if stopping is not None and isinstance(request, GenerateRequest):
            self._stop_strings = Stops(stopping, request.choice_count)
        self._echo_and_suffix = outside
        self._last_events: Sequence[Event] = ()

    def apply(self, batch: Sequence[Event]) -> Sequence[Event]:
        """What is wanted of it, before it is over."""
        events = self._usage_counter.apply(batch)
        if self._stop_strings is not None:
            events = self._stop_strings.apply(events)
            if self._stop_strings.is_complete:
                self.is_complete, self._last_events = True, events
                return ()
        return events if self._echo_and_suffix is None else self._echo_and_suffix.apply(events)

    def push(self, data: bytes | None, batch: Sequence[Event]) -> bool:
        """Give it to ``taker``; see ``gateway.core.ports.Take``."""
        events = self.apply(batch)
        if self.is_complete or self.sink is None:
            return False
        return self.sink(data, events) if events else True

    def finish(self) -> Sequence[Event]:
        """The last events, once it is over."""
        events = [*self._last_events, *self._usage_counter.build_missing_usage(), Done()]
        return events if self._echo_and_suffix is None else self._echo_and_suffix.apply(events)


async def _one(backend: Backend, request: Request, context: Context, heard: _Heard) -> Pieces:
    """One answer of the backend. It is left as soon as all that is wanted of it has come."""
    if heard.sink is not None and _pours(type(backend)):
        batches = cast("Pouring", backend).stream_to(request, context, heard.push)
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
def _pours(kind: type) -> bool:
    """Whether such backends are Pouring. Asked once of each: a port is long to compare."""
    return issubclass(kind, Pouring)


@functools.cache
def _gathering(kind: type) -> _Gather | None:
    """What gathers an answer of such backends, where they are Pouring."""
    return kind.collect if issubclass(kind, Pouring) else None


# --- several at a time ----------------------------------------------------------------------------


def _part(
    backend: Backend, stopping: Stopping | None, request: Request, context: Context
) -> Pieces:
    return _one(backend, request, context, _Heard(request, stopping))


def _merge(spread: Spread, request: Request) -> Merge:
    running = isinstance(request, GenerateRequest) and request.want.usage == "each"
    return Merge(spread, running=running)


async def _parts(
    ask: Ask, spread: Spread, merge: Merge, context: Context, outside: Around | None
) -> Pieces:
    """The answers of all parts as one. The first that fails ends the others."""
    news: asyncio.Queue[_News] = asyncio.Queue(AT_ONCE)
    left = iter(spread)
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(_run(ask, left, context, news)) for _ in range(min(AT_ONCE, len(spread)))
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


async def _run(
    ask: Ask, left: Iterator[Part], context: Context, news: asyncio.Queue[_News]
) -> None:
    """Ask for one part after the other, as long as there are any."""
    ended: Exception | None = None
    try:
        for part in left:
            own = replace(context, id=f"{context.id}-{part.number}")
            async with aclosing(ask(part.request, own)) as batches:
                async for _, batch in batches:
                    await news.put((part, batch))
    except Exception as error:  # noqa: BLE001 - raised where the answer is read
        ended = error
    await news.put(ended)
