"""A backend's answer, with all that the gateway does in its stead."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, cast

from msgspec.structs import replace

from gateway.core.context import Context
from gateway.core.ports import Backend, Pouring, Take
from gateway.core.types import Done, Event, GenerateRequest, Request, Stopping
from gateway.emulation import fanout, stops
from gateway.emulation.affixes import Around, around
from gateway.emulation.counting import Count
from gateway.emulation.fanout import Merge, Part, Spread
from gateway.emulation.planning import Plan
from gateway.emulation.stops import Stops

Batches = AsyncGenerator[Sequence[Event], None]
Ask = Callable[[Request, Context, Take | None], Batches]
_News = tuple[Part, Sequence[Event]] | Exception | None
"""What a part says; what ended it; or None when there are no parts left."""

AT_ONCE: Final = 8
"""How many parts of a request are asked for at a time."""


def answer(
    backend: Backend, request: Request, context: Context, plan: Plan, take: Take | None = None
) -> Batches:
    """The events of ``backend.answer``, with what ``plan`` says; there is always usage among them.

    ``request`` is as the client sent it. Raises what the backend raises. Closing the generator, or
    cancelling its task, stops all the work at once. ``take``: see ``gateway.core.ports.Pouring``.
    """
    inner, outside = around(request)
    stopping = None
    if isinstance(inner, GenerateRequest) and inner.stopping.stop:
        stopping = None if plan.does.isdisjoint(stops.PATHS) else inner.stopping
    if "stopping.include_stop" in plan.does:
        inner = stops.without_stops(inner)
    ask = partial(_one, backend, stopping)
    taken = take if take is None or outside is None else partial(_outside, take, outside)
    if plan.does.isdisjoint(fanout.PATHS):
        batches = ask(inner, context, taken)
    else:
        batches = _spread(ask, inner, context, plan, taken)
    return batches if outside is None else _within(batches, outside)


def parts(request: Request, plan: Plan) -> int:
    """How many requests a backend gets for the one, if none fails."""
    inner, _ = around(request)
    return 1 if plan.does.isdisjoint(fanout.PATHS) else len(Spread(inner, plan.does))


async def _within(batches: Batches, outside: Around) -> Batches:
    async with aclosing(batches):
        async for batch in batches:
            yield outside.apply(batch)


def _outside(take: Take, outside: Around, data: bytes | None, batch: Sequence[Event]) -> bool:
    return take(data, outside.apply(batch))


class _Heard:
    """One answer of a backend, as far as it has come."""

    def __init__(self, request: Request, stopping: Stopping | None) -> None:
        self.over = False
        """All that is wanted of it has come."""
        self._count = Count(request)
        self._cut: Stops | None = None
        if stopping is not None and isinstance(request, GenerateRequest):
            self._cut = Stops(stopping, request.choices)
        self._last: Sequence[Event] = ()

    def apply(self, batch: Sequence[Event]) -> Sequence[Event]:
        """What is wanted of it, before it is over."""
        events = self._count.apply(batch)
        if self._cut is not None:
            events = self._last = self._cut.apply(events)
            self.over = self._cut.over
        return events

    def end(self) -> Sequence[Event]:
        """The last events, once it is over."""
        return [*self._last, *self._count.missing(), Done()]


async def _one(
    backend: Backend,
    stopping: Stopping | None,
    request: Request,
    context: Context,
    take: Take | None,
) -> Batches:
    """One answer of the backend. It is left as soon as all that is wanted of it has come."""
    heard = _Heard(request, stopping)

    def taken(data: bytes | None, batch: Sequence[Event]) -> bool:
        events = heard.apply(batch)
        if heard.over or take is None:
            return False
        return take(data, events) if events else True

    if take is not None and _pours(type(backend)):
        answering = cast("Pouring", backend).pour(request, context, taken)
    else:
        answering = backend.answer(request, context)
    async with aclosing(answering) as batches:
        async for batch in batches:
            events = () if heard.over else heard.apply(batch)
            if heard.over:
                break
            if events or not batch:
                yield events
        else:
            return
    yield heard.end()


@functools.cache
def _pours(kind: type) -> bool:
    """Whether such backends are Pouring. Asked once of each: a port is long to compare."""
    return issubclass(kind, Pouring)


# --- several at a time ----------------------------------------------------------------------------


def _spread(ask: Ask, request: Request, context: Context, plan: Plan, take: Take | None) -> Batches:
    spread = Spread(request, plan.does)
    if len(spread) == 1:
        return ask(next(iter(spread)).request, context, take)
    running = isinstance(request, GenerateRequest) and request.want.usage == "each"
    return _parts(ask, spread, Merge(spread, running=running), context)


async def _parts(ask: Ask, spread: Spread, merge: Merge, context: Context) -> Batches:
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
                yield events
        yield merge.end()
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
            async with aclosing(ask(part.request, own, None)) as batches:
                async for batch in batches:
                    await news.put((part, batch))
    except Exception as error:  # noqa: BLE001 - raised where the answer is read
        ended = error
    await news.put(ended)
