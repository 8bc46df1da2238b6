"""The work of one turn of the event loop.

What thousands of clients cause at once is done in slices, and others are served between them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

Item = TypeVar("Item")


MAX_TURN_ITEMS: Final = 64
"""Connections or requests that are closed or stopped in one turn."""
MAX_TURN_TASKS: Final = 4
"""Streams that go on in one turn after they have sent as much as a connection takes at once."""


class TurnQueue:
    """Calls at most MAX_TURN_ITEMS functions in one turn of the event loop, in their order.

    The first ones of a turn are called at once; the others wait for the next turns.
    """

    __slots__ = ("_free", "_is_scheduled", "_waiting")

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], object]]()
        self._free = MAX_TURN_ITEMS
        """How many more may be called in this turn."""
        self._is_scheduled = False

    def __repr__(self) -> str:
        return f"<TurnQueue {len(self._waiting)} calls wait>"

    def call(self, function: Callable[[], object]) -> None:
        """Call it now, or in a later turn."""
        self._waiting.append(function)
        self._call_some()

    def _start_turn(self) -> None:
        self._is_scheduled, self._free = False, MAX_TURN_ITEMS
        if self._waiting:
            self._call_some()

    def _call_some(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_turn)
        while self._waiting and self._free:
            self._free -= 1
            self._waiting.popleft()()


class TurnGate:
    """Lets at most MAX_TURN_TASKS tasks go on in one turn of the event loop, in their order.

    Each waits for a later turn than that in which it comes.
    """

    __slots__ = ("_is_scheduled", "_waiting")

    def __init__(self) -> None:
        self._waiting = deque[asyncio.Future[None]]()
        self._is_scheduled = False

    def __repr__(self) -> str:
        return f"<TurnGate {len(self._waiting)} tasks wait>"

    async def wait(self) -> None:
        """Wait for this task's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        self._schedule(loop)
        await turn

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._open, loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled, free = False, MAX_TURN_TASKS
        while self._waiting and free:
            turn = self._waiting.popleft()
            if not turn.done():  # its task may have been cancelled
                turn.set_result(None)
                free -= 1
        self._schedule(loop)


async def iterate_in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """These items, at most MAX_TURN_ITEMS in one turn of the event loop."""
    for number, item in enumerate(list(items), 1):
        yield item
        if number % MAX_TURN_ITEMS == 0:
            await asyncio.sleep(0)
