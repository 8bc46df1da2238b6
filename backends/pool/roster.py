"""Who may be asked: the workers of a pool, their free places, and who waits for one."""

import asyncio
import copy
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from typing import Final

from msgspec import Struct

from backends.pool.health import Health, HealthSettings, eligible
from backends.pool.member import Member, WorkerReport
from backends.pool.policy import Ask, Policy, Scores
from backends.pool.tally import Tally
from backends.upstream import Queue, Worker
from gateway.core.context import Clock, Deadline
from gateway.core.errors import DeadlineExceeded, GatewayError, Overloaded

USUAL_PRIORITY: Final = 128
"""Of a request that says nothing of it."""
LAST_PRIORITY: Final = 256
"""Of a request for whose answer nobody waits: below all that clients may say."""
_LOOK_AGAIN: Final = 0.25
"""Seconds after which those who wait look whether time has brought a worker back."""
_LEAST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 3600.0
_MANY: Final = 256
"""Places that are counted together, where nobody asks before."""
_NEW: Final = 0.1
"""The part that the latest request has in how long one is thought to take."""


class Limits(Struct, frozen=True):
    """Of the whole pool: requests at a time, and waiting; below which part of it health counts."""

    most: int | None = None
    queue: Queue = Queue()
    health: HealthSettings = HealthSettings()


class Wish(Struct, frozen=True):
    """What a request wants of a worker. One whose key is in ``tried`` will not do.

    ``priority``: lower first. ``give_way`` ends one that is to leave its place to those who wait.
    """

    tried: Collection[int] = frozenset()
    ask: Ask = Ask()
    priority: int = USUAL_PRIORITY
    give_way: Callable[[], None] | None = None


ANY: Final = Wish()
"""Whatever worker, in the usual turn."""


class Place(Struct, eq=False):
    """A place at a worker, taken at this moment."""

    member: Member
    since: float


class _Waiter(Struct, eq=False):
    wish: Wish
    number: int
    place: asyncio.Future[Place]
    name: str
    """The exchange's id."""


def _order(waiter: _Waiter) -> tuple[int, int]:
    return waiter.wish.priority, waiter.number


class Roster:
    """Gives out places at workers: at once, or by priority and then in the order of asking.

    The set of workers may change at any time, and may be empty.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: Policy,
        limits: Limits,
        clock: Clock,
        tally: Tally | None = None,
    ) -> None:
        self._tally = tally or Tally()
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._keys = 0
        self._known: dict[str, Member] = {}
        """By URL; also those that are gone and still have requests."""
        self._members: list[Member] = []
        self._in_flight = 0
        self._guests: dict[Place, Callable[[], None]] = {}
        """Places that are to be left to those who wait, and what makes their holders leave."""
        self._waiters: list[_Waiter] = []
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._held: list[float] = []
        """For how many seconds places were held, as far as it is not counted yet."""
        self._takes: float | None = None
        """The same, smoothed: of those that are counted."""
        self.replace(workers)

    @property
    def members(self) -> Sequence[Member]:
        """The workers of now."""
        return self._members

    @property
    def ready(self) -> bool:
        """Whether a worker is there, as far as is known."""
        now = self._clock()
        return any(one.health.ready(now) for one in self._members)

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiters)

    @property
    def queued(self) -> Sequence[str]:
        """The ids of the exchanges that wait for one."""
        return [one.name for one in self._waiters]

    @property
    def panics(self) -> bool:
        """Whether health is ignored, since too few workers are well."""
        now = self._clock()
        return any(not one.health.ready(now) for one in self.choices(ANY))

    def replace(self, workers: Sequence[Worker]) -> None:
        """These are the workers from now on.

        One of the same URL is the same worker: what is known of it stays. One that is not among
        them takes no more requests, and finishes what it has. Of two with the same URL the last
        counts.
        """
        members = {}
        for worker in workers:
            member = self._known.get(worker.url)
            if member is None:
                member = Member(self._keys, worker, Health(self._limits.health), self._clock)
                self._keys += 1
            member.worker = worker
            member.gone = False
            members[worker.url] = member
        for url, member in self._known.items():
            if url not in members:
                member.gone = True
        self._members = list(members.values())
        self._known = {
            url: one
            for url, one in (self._known | members).items()
            if not one.gone or one.in_flight
        }
        self._serve()

    def report(self) -> list[WorkerReport]:
        """How each worker is."""
        return [one.report() for one in self._members]

    def choices(self, wish: Wish) -> Sequence[Member]:
        """The workers that may be asked, whether or not they have a place."""
        found = eligible(self._members, self._clock(), self._limits.health.panic)
        return [one for one in found if one.key not in wish.tried]

    def foresee(self, wish: Wish) -> tuple[Sequence[Member], Scores, Member | None]:
        """Who has a place, how they compare, and who would be taken now; it changes nothing."""
        free = self._free(wish, self._clock())
        likely = copy.deepcopy(self._policy).pick(free, wish.ask) if free else None
        return free, self._policy.scores(free, wish.ask), likely

    def at_once(self, wish: Wish, now: float) -> Place | None:
        """A place at a worker that will do, to be given back; None where there is none now."""
        if self._waiters:
            self._serve()
        return self._pick(wish, now)

    async def take(self, wish: Wish, deadline: Deadline, name: str = "") -> Place:
        """The same, and if need be after some time, for the exchange of this name.

        Raises Overloaded when there is no worker, or too many wait already who come before this
        one, and DeadlineExceeded (``queue``) when none came free in time.
        """
        place = self.at_once(wish, self._clock())
        if place is not None:
            return place
        if not self._members:
            self._tally.shed["no_worker"] += 1
            raise Overloaded("no worker is available")
        waiter = self._enqueue(wish, name)
        since = self._clock()
        try:
            async with asyncio.timeout(deadline.remaining(self._limits.queue.wait)):
                place = await waiter.place
        except BaseException as e:
            self._leave(waiter)
            if isinstance(e, TimeoutError):
                self._tally.shed["queue_wait"] += 1
                late = DeadlineExceeded("no worker came free in time", which="queue")
                late.retry_after = self._estimate()
                raise late from None
            raise
        finally:
            self._tally.waited.add(self._clock() - since)
        return place

    def give_back(self, place: Place) -> None:
        """The place is free again."""
        self._held.append(self._clock() - place.since)
        if len(self._held) >= _MANY:
            self.count()
        self._release(place)

    def count(self) -> None:
        """Count how long places were held, as far as they are free again."""
        held, self._held = self._held, []
        self._tally.took.extend(held)
        for seconds in held:
            takes = seconds if self._takes is None else self._takes
            self._takes = takes + _NEW * (seconds - takes)

    def close(self) -> None:
        """Nobody is served any more."""
        for waiter in self._waiters:
            if not waiter.place.done():
                waiter.place.set_exception(Overloaded("the gateway is stopping"))
        self._waiters.clear()
        self._look_later()

    # --- places -----------------------------------------------------------------------------------

    def _pick(self, wish: Wish, now: float) -> Place | None:
        """A place, taken."""
        free = self._free(wish, now)
        if not free:
            return None
        member = free[0] if len(free) == 1 else self._policy.pick(free, wish.ask)
        member.in_flight += 1
        self._in_flight += 1
        place = Place(member, now)
        if wish.give_way is not None:
            self._guests[place] = wish.give_way
        return place

    def _free(self, wish: Wish, now: float) -> Sequence[Member]:
        """Those that may be asked and have a place."""
        limits, tried = self._limits, wish.tried
        if limits.most is not None and self._in_flight >= limits.most:
            return []
        free: list[Member] = []
        for one in eligible(self._members, now, limits.health.panic):
            if one.key not in tried and one.has_room():
                free.append(one)  # a comprehension would be another call
        return free

    def _release(self, place: Place) -> None:
        member = place.member
        if self._guests:
            self._guests.pop(place, None)
        member.in_flight -= 1
        self._in_flight -= 1
        if member.gone and not member.in_flight:
            self._known.pop(member.worker.url, None)
        if self._waiters:
            self._serve()

    # --- those who wait ---------------------------------------------------------------------------

    def _enqueue(self, wish: Wish, name: str) -> _Waiter:
        waiter = _Waiter(wish, self._numbers, asyncio.get_running_loop().create_future(), name)
        self._numbers += 1
        room = wish.give_way is None and self._make_room(wish)
        if len(self._waiters) >= self._limits.queue.max and not room:
            last = self._waiters[-1] if self._waiters else waiter
            if _order(last) <= _order(waiter):
                raise self._full()
            self._waiters.remove(last)
            last.place.set_exception(self._full())
        insort(self._waiters, waiter, key=_order)
        self._look_later()
        return waiter

    def _make_room(self, wish: Wish) -> bool:
        """Have one place left, if somebody has one who is to leave it."""
        choices = self.choices(wish) if self._guests else ()
        for place, give_way in self._guests.items():
            if place.member in choices:
                del self._guests[place]
                give_way()
                return True
        return False

    def _serve(self) -> None:
        """Give out what is free, to whoever comes first and may have it.

        Where nothing will do for one who would take any, nothing will for those who come after.
        """
        now = self._clock()
        for waiter in self._waiters:
            if waiter.place.done():  # its task was cancelled, and has not run since
                continue
            place = self._pick(waiter.wish, now)
            if place is not None:
                waiter.place.set_result(place)
            elif not waiter.wish.tried:
                break
        if self._waiters:
            self._waiters = [one for one in self._waiters if not one.place.done()]

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.place.done() and not waiter.place.cancelled() and not waiter.place.exception():
            self._release(waiter.place.result())

    def _look_later(self) -> None:
        """Have a timer as long as somebody waits: health changes by itself."""
        if self._timer is None and self._waiters:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN, self._look)
        elif self._timer is not None and not self._waiters:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        self._serve()
        self._look_later()

    def _full(self) -> GatewayError:
        self._tally.shed["queue_full"] += 1
        text = "every worker is busy, and too many requests wait already"
        return Overloaded(text, retry_after=self._estimate())

    def _estimate(self) -> float:
        """In how many seconds all who wait now will be served, going by the last requests."""
        self.count()
        if self._takes is None:
            return max(self._limits.queue.wait, _LEAST_WAIT)
        seconds = self._takes * (len(self._waiters) + 1) / max(self._in_flight, 1)
        return min(max(seconds, _LEAST_WAIT), _LONGEST_WAIT)
