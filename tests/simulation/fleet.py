"""Simulates a pool with a virtual clock: workers with faults, and the pool's pure parts.

The pool's own code makes all its decisions: policy, health, smoothed time to first token, retry
budget. Only the workers, the queue and the clock are simulated.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final, Literal

from msgspec import Struct, field

from backends.pool.circuit_breaker import PeakEwma, WorkerHealth, select_available
from backends.pool.load_balancing import PolicyName, RoutingKey, make_policy
from backends.pool.retry import RetryBudget
from backends.pool.settings import CircuitBreakerSettings, HealthCheckSettings

Kind = Literal["dead", "hang", "error", "slow"]
Outcome = Literal["done", "cut", "failed", "queue"]
"""``cut``: an error in the stream; ``failed``: none started; ``queue``: waited too long."""

FIRST_TOKEN: Final = 5.0
"""The timeout of the first token; all times are in seconds."""
QUEUE: Final = 10.0
TRIES: Final = 3


class FaultPeriod(Struct, frozen=True):
    """A fault of a worker for some time.

    ``dead`` refuses connections and closes open ones; ``hang`` sends nothing; ``error`` fails the
    share ``much`` of its requests at once; ``slow`` takes ``much`` times as long.
    """

    kind: Kind
    start: float
    end: float
    much: float = 1.0


class SimulatedWorker(Struct, frozen=True):
    """A worker: its seconds to the first token, and from there to the end.

    It is configured for ``places`` concurrent requests, and rejects (429) those beyond
    ``max_concurrency``.
    """

    first: float = 0.1
    rest: float = 0.3
    weight: float = 1.0
    places: int | None = None
    max_concurrency: int | None = None
    spells: tuple[FaultPeriod, ...] = ()

    def spell(self, now: float) -> FaultPeriod | None:
        return next((one for one in self.spells if one.start <= now < one.end), None)

    def death(self, start: float, end: float) -> float | None:
        """Return the first time in an interval at which it dies."""
        moments = [one.start for one in self.spells if one.kind == "dead"]
        return min((one for one in moments if start < one < end), default=None)


class SimulatedRequest(Struct, eq=False):
    """A request in progress."""

    ask: RoutingKey = RoutingKey()
    tried: set[int] = field(default_factory=set[int])
    began: bool = False
    outcome: Outcome | None = None


class PoolMember:
    """A worker as the pool sees it."""

    def __init__(self, key: int, site: SimulatedWorker, fleet: "PoolSimulation") -> None:
        self.key = key
        self.name = f"http://w{key}:8000"
        self.site = site
        self.health = WorkerHealth(breaker=fleet.breaker)
        self.smoothed = PeakEwma()
        self.in_flight = 0
        self._fleet = fleet

    @property
    def weight(self) -> float:
        return self.site.weight * self.health.get_weight_factor(self._fleet.now)

    @property
    def latency(self) -> float | None:
        return self.smoothed.get_value(self._fleet.now)

    @property
    def free(self) -> bool:
        places, limit = self.site.places, self.health.get_limit()
        return (places is None or self.in_flight < places) and (
            limit is None or self.in_flight < limit
        )

    def refuse(self, now: float) -> None:
        """It answered 429 to one of its requests, of which it no longer counts this one."""
        self.health.record_rate_limit(now, in_flight=self.in_flight + 1)


class Attempt(Struct, frozen=True):
    """One attempt: the time, the worker, and the load of all workers."""

    at: float
    key: int
    call: SimulatedRequest
    again: bool
    in_flight: tuple[int, ...]


class PoolSimulation:
    """Runs requests against workers. ``seed`` determines all random numbers."""

    def __init__(
        self,
        sites: Sequence[SimulatedWorker],
        policy: PolicyName,
        seed: int,
        *,
        breaker: CircuitBreakerSettings = CircuitBreakerSettings(),  # noqa: B008 - frozen
        probing: float | None = None,
    ) -> None:
        self.now = 0.0
        self.breaker = breaker
        self.luck = random.Random(seed)
        self.members = [PoolMember(key, site, self) for key, site in enumerate(sites)]
        self.picks: list[Attempt] = []
        self.calls: list[SimulatedRequest] = []
        self.attempts_by_worker = Counter[int]()
        self._policy = make_policy(policy, self.luck.random)
        self._budget = RetryBudget()
        self._probing = probing
        self._waiting: deque[SimulatedRequest] = deque()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()

    def run(
        self, rate: float, until: float, ask: Callable[[random.Random], RoutingKey]
    ) -> "PoolSimulation":
        """Send requests at random times, ``rate`` per second, and run until the last has ended."""
        moment = self.now
        while (moment := moment + self.luck.expovariate(rate)) < until:
            self._at(moment, self._arrive, SimulatedRequest(ask(self.luck)))
        if self._probing is not None:
            for member in self.members:
                for n in range(int((until - self.now) / self._probing)):
                    self._at(
                        self.now + (n + self.luck.random()) * self._probing, self._probe, member
                    )
        while self._events:
            self.now, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)
        self.now = max(self.now, until)
        return self

    def outcomes(self, since: float = 0.0) -> Counter[Outcome | None]:
        """Return the outcomes of the requests sent since ``start``."""
        return Counter(one.call.outcome for one in self.picks if not one.again and one.at >= since)

    def shares(self, start: float = 0.0, end: float = 1e9) -> Counter[int]:
        """Return the number of requests by worker."""
        return Counter(one.key for one in self.picks if start <= one.at < end)

    def _at(self, moment: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._number), do, arguments))

    def _arrive(self, call: SimulatedRequest) -> None:
        self.calls.append(call)
        self._budget.record_request(self.now)
        self._place(call)

    def _place(self, call: SimulatedRequest) -> None:
        if not self._send(call):
            self._waiting.append(call)
            self._at(self.now + QUEUE, self._give_up, call)

    def _give_up(self, call: SimulatedRequest) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            call.outcome = "queue"

    def _send(self, call: SimulatedRequest) -> bool:
        """Send a request; return whether a worker had a slot."""
        available = select_available(self.members, self.now, HealthCheckSettings().panic_threshold)
        assert available, "a worker can always be selected"
        left = [one for one in available if one.key not in call.tried]
        left = left or [one for one in self.members if one.key not in call.tried]
        free = [one for one in left if one.free]
        if not free:
            return False
        member = self._policy.pick_worker(free, call.ask)
        assert any(member is one for one in free)
        busy = tuple(one.in_flight for one in free)
        self.picks.append(Attempt(self.now, member.key, call, bool(call.tried), busy))
        member.in_flight += 1
        call.tried.add(member.key)
        self._befall(call, member)
        return True

    def _befall(self, call: SimulatedRequest, member: PoolMember) -> None:
        """Determine the result of an attempt when it is sent."""
        site, now = member.site, self.now
        spell = site.spell(now)
        kind, much = (spell.kind, spell.much) if spell else (None, 1.0)
        if kind == "dead":
            self._at(now + 0.001, self._end, call, member, member.health.record_connect_failure)
        elif site.max_concurrency is not None and member.in_flight > site.max_concurrency:
            self.attempts_by_worker[member.key] += 1
            self._at(now + 0.005, self._end, call, member, member.refuse)
        elif kind == "error" and self.luck.random() < much:
            self._at(now + 0.02, self._end, call, member, member.health.record_failure)
        elif kind == "hang":
            self._at(now + FIRST_TOKEN, self._end, call, member, member.health.record_failure)
        else:
            longer = self.luck.lognormvariate(0.0, 0.3) * (much if kind == "slow" else 1.0)
            first = now + site.first * longer
            end = first + site.rest * longer
            death = site.death(now, end)
            if death is None or death > first:
                self._at(first, self._begin, call, member, now)
            how = member.health.record_success if death is None else member.health.record_failure
            self._at(death or end, self._end, call, member, how)

    def _begin(self, call: SimulatedRequest, member: PoolMember, sent: float) -> None:
        call.began = True
        member.smoothed.add(self.now, self.now - sent)

    def _end(
        self, call: SimulatedRequest, member: PoolMember, how: Callable[[float], None]
    ) -> None:
        member.in_flight -= 1
        how(self.now)
        if how == member.health.record_success:
            call.outcome = "done"
        elif call.began:
            call.outcome = "cut"
        elif self._may_try(call):
            self._budget.record_retry(self.now)
            self._place(call)
        else:
            call.outcome = "failed"
        for waiting in list(self._waiting):
            if not any(one.free for one in self.members):
                break
            if self._send(waiting):
                self._waiting.remove(waiting)

    def _may_try(self, call: SimulatedRequest) -> bool:
        left = len(call.tried) < min(TRIES, len(self.members))
        return left and self._budget.allows_retry(self.now)

    def _probe(self, member: PoolMember) -> None:
        spell = member.site.spell(self.now)
        member.health.record_health_check(
            self.now, ok=spell is None or spell.kind in {"error", "slow"}
        )
