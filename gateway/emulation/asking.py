"""A backend's answer, with all that the gateway does in its stead."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from msgspec.structs import replace

from gateway.core.context import Context
from gateway.core.ports import Backend
from gateway.core.types import Done, Event, GenerateRequest, Request, Stopping
from gateway.emulation import fanout, stops
from gateway.emulation.affixes import Around, around
from gateway.emulation.counting import Count
from gateway.emulation.fanout import Merge, Part, Spread
from gateway.emulation.planning import Plan
from gateway.emulation.stops import Stops

Batches = AsyncGenerator[Sequence[Event], None]
Ask = Callable[[Request, Context], Batches]
_News = tuple[Part, Sequence[Event]] | Exception | None
"""What a part says; what ended it; or None when there are no parts left."""

AT_ONCE: Final = 8
"""How many parts of a request are asked for at a time."""


def answer(backend: Backend, request: Request, context: Context, plan: Plan) -> Batches:
    """The events of ``backend.answer``, with what ``plan`` says; there is always usage among them.

    ``request`` is as the client sent it. Raises what the backend raises. Closing the generator, or
    cancelling its task, stops all the work at once.
    """
    inner, outside = around(request)
    stopping = None
    if isinstance(inner, GenerateRequest) and inner.stopping.stop:
        stopping = None if plan.does.isdisjoint(stops.PATHS) else inner.stopping
    if "stopping.include_stop" in plan.does:
        inner = stops.without_stops(inner)
    ask = partial(_one, backend, stopping)
    if plan.does.isdisjoint(fanout.PATHS):
        batches = ask(inner, context)
    else:
        batches = _spread(ask, inner, context, plan)
    return batches if outside is None else _within(batches, outside)


def parts(request: Request, plan: Plan) -> int:
    """How many requests a backend gets for the one, if none fails."""
    inner, _ = around(request)
    return 1 if plan.does.isdisjoint(fanout.PATHS) else len(Spread(inner, plan.does))


async def _within(batches: Batches, outside: Around) -> Batches:
    async with aclosing(batches):
        async for batch in batches:
            yield outside.apply(batch)


async def _one(
    backend: Backend, stopping: Stopping | None, request: Request, context: Context
) -> Batches:
    """One answer of the backend. It is left as soon as all that is wanted of it has come."""
    count, cut = Count(request), None
    if stopping is not None and isinstance(request, GenerateRequest):
        cut = Stops(stopping, request.choices)
    events: Sequence[Event] = ()
    async with aclosing(backend.answer(request, context)) as batches:
        async for batch in batches:
            events = count.apply(batch)
            if cut is not None:
                events = cut.apply(events)
                if cut.over:
                    break
            if events:
                yield events
        else:
            return
    yield [*events, *count.missing(), Done()]


# --- several at a time ----------------------------------------------------------------------------


def _spread(ask: Ask, request: Request, context: Context, plan: Plan) -> Batches:
    spread = Spread(request, plan.does)
    if len(spread) == 1:
        return ask(next(iter(spread)).request, context)
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
            async with aclosing(ask(part.request, own)) as batches:
                async for batch in batches:
                    await news.put((part, batch))
    except Exception as error:  # noqa: BLE001 - raised where the answer is read
        ended = error
    await news.put(ended)
