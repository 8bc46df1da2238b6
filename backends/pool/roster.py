"""Who may be asked: the workers of a pool, their free places, and who waits for one."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from msgspec import Struct

from backends.pool.policy import Policy
from backends.upstream import Queue, Worker
from gateway.core.context import Clock, Deadline
from gateway.core.errors import DeadlineExceeded, Overloaded

log = logging.getLogger("interlingua")

_FIRST_ABSENCE: Final = 0.5
_LONGEST_ABSENCE: Final = 30.0


class Member(Struct, eq=False):
    """A worker, and what is known of it now. ``absences``: how often in a row it was not there."""

    key: int
    worker: Worker
    in_flight: int = 0
    absences: int = 0
    absent_until: float = 0.0

    @property
    def weight(self) -> int:
        """As configured."""
        return self.worker.weight

    @property
    def free(self) -> bool:
        """Whether it has a place left."""
        most = self.worker.max_concurrency
        return most is None or self.in_flight < most

    def wanted(self, now: float) -> bool:
        """Whether it may be asked: it was there, or its absence is over and nobody tries it yet."""
        return not self.absences or (now >= self.absent_until and not self.in_flight)

    def missed(self, now: float, why: object) -> None:
        """It could not be reached: leave it alone, twice as long each time.

        Requests that were under way to it together count as one.
        """
        if self.absences and now < self.absent_until:
            return
        self.absences += 1
        seconds = min(_FIRST_ABSENCE * 2.0 ** min(self.absences - 1, 10), _LONGEST_ABSENCE)
        self.absent_until = now + seconds
        log.warning("worker %s is left alone for %g s: %s", self.worker.url, seconds, why)

    def met(self) -> None:
        """It answered, whatever it said."""
        if self.absences:
            log.warning("worker %s is back", self.worker.url)
            self.absences = 0


class _Waiter(Struct, eq=False):
    place: asyncio.Future[Member]
    tried: Collection[int]


class Roster:
    """Gives out places at workers, at once or in the order of asking."""

    def __init__(
        self, workers: Sequence[Worker], policy: Policy, queue: Queue, clock: Clock
    ) -> None:
        if not workers:
            raise ValueError("a pool needs at least one worker")
        self._members = [Member(key, worker) for key, worker in enumerate(workers)]
        self._policy = policy
        self._queue = queue
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()

    @property
    def ready(self) -> bool:
        """Whether a worker is there, as far as is known."""
        now = self._clock()
        return any(not one.absences or now >= one.absent_until for one in self._members)

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiters)

    def left(self, tried: Collection[int]) -> bool:
        """Whether there is a worker that was not tried."""
        return any(one.key not in tried for one in self._members)

    async def take(self, deadline: Deadline, tried: Collection[int] = ()) -> Member:
        """A place at a worker that was not ``tried``, to be given back.

        Raises Overloaded when too many wait already, and DeadlineExceeded (``queue``) when none
        came free in time.
        """
        member = self._pick(tried)
        if member is not None:
            return member
        if len(self._waiters) >= self._queue.max:
            raise Overloaded("every worker is busy, and too many requests wait already")
        seconds = deadline.remaining(self._queue.wait)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tried)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(seconds):
                return await waiter.place
        except BaseException as e:
            self._leave(waiter)
            if isinstance(e, TimeoutError):
                raise DeadlineExceeded("no worker came free in time", which="queue") from None
            raise

    def give_back(self, member: Member) -> None:
        """A place is free again: it goes to whoever has waited longest and may have it."""
        member.in_flight -= 1
        for waiter in self._waiters:
            if (found := self._pick(waiter.tried)) is not None:
                self._waiters.remove(waiter)
                waiter.place.set_result(found)
                return

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.place.done() and not waiter.place.cancelled():
            self.give_back(waiter.place.result())

    def _pick(self, tried: Collection[int]) -> Member | None:
        """A place, taken.

        When no worker is thought to be there, any may be: one blip of the network must not leave a
        pool without workers.
        """
        now = self._clock()
        left = [one for one in self._members if one.key not in tried]
        found = [one for one in left if one.wanted(now)] or left
        free = [one for one in found if one.free]
        if not free:
            return None
        member = self._policy.pick(free)
        member.in_flight += 1
        return member
