"""Who may be asked: the workers of a pool, their free places, and who waits for one."""

import asyncio
import copy
import logging
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from msgspec import Struct, field

from backends.http.interfaces import QueueSettings, WorkerConfig
from backends.interfaces import Deadline
from backends.pool.circuit_breaker import (
    HealthSettings,
    HealthState,
    PeakEwma,
    WorkerHealth,
    select_available,
)
from backends.pool.load_balancing import LoadBalancingPolicy, PolicyScores, RoutingKey
from backends.pool.metrics import PoolMetrics
from protocols.core.errors import (
    ClientError,
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    WorkerError,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import Clock

# A worker of a pool, and what is known of it now.

log = logging.getLogger("interlingua")

_FIRST_SERVER_ERROR: Final = 500
_CLIENT_ERROR_STATUSES: Final = range(400, _FIRST_SERVER_ERROR)


class WorkerReport(Struct, frozen=True):
    """How a worker is, for people and for other programs.

    ``state`` is ``up``, ``trial`` (one request at a time) or ``out``, and then for ``back_in``
    seconds more, where that is known. ``latency`` is in seconds to the first token. ``error`` is
    the kind of its last failure: ``connect``, ``first_token``, ``idle``, ``cut``, ``garbage``, or a
    status. ``weight`` is what counts now.
    """

    url: str
    state: str
    in_flight: int
    limit: int | None
    latency: float | None
    back_in: float | None
    error: str
    weight: float


class AttemptWaiter(Protocol):
    """Whoever waits for a worker."""

    def cancel_wait(self) -> None:
        """Wait no longer."""


class WorkerState(Struct, eq=False):
    """A worker, and what is known of it now. ``gone``: no longer of the pool."""

    key: int
    config: WorkerConfig
    health: WorkerHealth
    clock: Clock
    latency_average: PeakEwma = field(default_factory=PeakEwma)
    in_flight: int = 0
    removed: bool = False
    model_limits_from: set[str] = field(default_factory=set[str])
    """The models that it was asked about since it was last out."""
    model_limits: dict[str, int] = field(default_factory=dict[str, int])
    """How many requests it said that it takes, by model."""
    last_error: str = ""
    """The kind of its last failure."""
    logged_state: HealthState = "up"
    """Its state when something last happened to it."""
    waiting_attempts: set[AttemptWaiter] = field(default_factory=set[AttemptWaiter])
    """The requests that have heard nothing from it yet."""

    @property
    def name(self) -> str:
        """What it is to policies that place by name: the same whenever it comes back."""
        return self.config.url

    @property
    def weight(self) -> float:
        """As configured, and less while it warms up."""
        return self.config.weight * self.health.get_weight_factor(self.clock())

    @property
    def latency(self) -> float | None:
        """Seconds to the first token, of late."""
        return self.latency_average.get_value(self.clock())

    @property
    def limit(self) -> int | None:
        """The most requests that it is given now."""
        most = self.config.max_concurrency
        if self.model_limits:
            told = max(self.model_limits.values())
            most = told if most is None else min(most, told)
        return self.health.get_limit(most, self.in_flight)

    def has_room(self) -> bool:
        """Whether it has a place left: no property, which would cost twice as much."""
        most = (
            self.limit
            if self.model_limits or not self.health.healthy
            else self.config.max_concurrency
        )
        return most is None or self.in_flight < most

    # --- what happened ----------------------------------------------------------------------------

    def record_connected(self) -> None:
        """It began to answer, whatever that will be."""
        self.health.record_connected(self.clock())
        self._log_state_change()

    def record_success(self) -> None:
        """It answered a request to the end."""
        self.health.record_success(self.clock())
        if not self.health.healthy or self.logged_state != "up":
            self._log_state_change()

    def record_failure(self, error: GatewayError, *, pushed_back: bool = False) -> None:
        """It answered a request with ``error``; ``pushed_back``: and said that it has too much.

        What a client did wrong is an answer, and no failure; that its time ran out is neither.
        """
        now = self.clock()
        pushed_back = pushed_back or isinstance(error, RateLimitExceeded)
        match error:
            case WorkerUnreachable():
                self.health.record_connect_failure(now)
            case RateLimitExceeded() | Overloaded() if pushed_back:
                self.health.get_limit(None, self.in_flight)  # it shrinks from what it has
                self.health.record_rate_limit(now, error.retry_after)
            case WorkerFailed(status=int() as status) if status in _CLIENT_ERROR_STATUSES:
                pass  # it is well, and was not asked rightly
            case Overloaded() | WorkerError() | DeadlineExceeded(phase="first_token" | "idle"):
                self.health.record_failure(now)
            case ClientError():
                self.health.record_success(now)
            case _:
                return
        if not isinstance(error, ClientError) or isinstance(error, RateLimitExceeded):
            self.last_error = get_error_kind(error)
        self._log_state_change(error.__cause__ or error)

    def record_health_check(self, *, ok: bool) -> None:
        """It answered a probe as it should, or did not."""
        self.health.record_health_check(self.clock(), ok)
        if not ok:
            self.model_limits_from.clear()
        self._log_state_change("its probes fail")

    def cancel_waiting(self) -> None:
        """Let those who have heard nothing from it yet wait no longer."""
        for one in tuple(self.waiting_attempts):
            one.cancel_wait()

    def report(self) -> WorkerReport:
        """How it is now."""
        now = self.clock()
        until = self.health.get_unavailable_until(now)
        return WorkerReport(
            self.config.url,
            self.health.get_state(now),
            self.in_flight,
            self.limit,
            self.latency,
            None if until is None else until - now,
            self.last_error,
            self.weight,
        )

    def _log_state_change(self, why: object = None) -> None:
        """Tell of a change: whether it is in or out."""
        now = self.clock()
        state = self.health.get_state(now)
        if state == "out" != self.logged_state:
            self.model_limits_from.clear()
            until = self.health.get_unavailable_until(now)
            long = "a while" if until is None else f"{until - now:.3g} s"
            log.warning("worker %s is left alone for %s: %s", self.config.url, long, why)
        elif state == "up" != self.logged_state:
            log.warning("worker %s is back", self.config.url)
        self.logged_state = state


def get_error_kind(error: GatewayError) -> str:
    """What a worker failed with, in a word: see ``WorkerReport.error``."""
    match error:
        case WorkerUnreachable():
            return "connect"
        case DeadlineExceeded(phase=which):
            return which
        case StreamBroken():
            return "cut"
        case RateLimitExceeded():
            return "429"
        case WorkerFailed(status=int() as status):
            return str(status)
        case Overloaded():
            return "503"
        case _:
            return "garbage"


DEFAULT_PRIORITY: Final = 128
"""Of a request that says nothing of it."""
BACKGROUND_PRIORITY: Final = 256
"""Of a request for whose answer nobody waits: below all that clients may say."""
_QUEUE_CHECK_INTERVAL: Final = 0.25
"""Seconds after which those who wait look whether time has brought a worker back."""
_MIN_RETRY_AFTER: Final = 1.0
_MAX_RETRY_AFTER: Final = 3600.0
_MAX_UNCOUNTED: Final = 256
"""Places that are counted together, where nobody asks before."""
_AVERAGE_WEIGHT: Final = 0.1
"""The part that the latest request has in how long one is thought to take."""


class PoolLimits(Struct, frozen=True):
    """Of the whole pool: requests at a time, and waiting; below which part of it health counts."""

    max_concurrency: int | None = None
    queue: QueueSettings = QueueSettings()
    health: HealthSettings = HealthSettings()


class SelectionCriteria(Struct, frozen=True):
    """What a request wants of a worker. One whose key is in ``tried`` will not do.

    ``priority``: lower first. ``give_way`` ends one that is to leave its place to those who wait.
    """

    tried_keys: Collection[int] = frozenset()
    routing_key: RoutingKey = RoutingKey()
    priority: int = DEFAULT_PRIORITY
    preempt: Callable[[], None] | None = None


ANY_WORKER: Final = SelectionCriteria()
"""Whatever worker, in the usual turn."""


class WorkerSlot(Struct, eq=False):
    """A place at a worker, taken at this moment."""

    worker: WorkerState
    acquired_at: float


class _QueuedRequest(Struct, eq=False):
    criteria: SelectionCriteria
    number: int
    slot: asyncio.Future[WorkerSlot]
    request_id: str
    """The exchange's id."""


def _get_queue_order(waiter: _QueuedRequest) -> tuple[int, int]:
    return waiter.criteria.priority, waiter.number


class WorkerPool:
    """Gives out places at workers: at once, or by priority and then in the order of asking.

    The set of workers may change at any time, and may be empty.
    """

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        policy: LoadBalancingPolicy,
        limits: PoolLimits,
        clock: Clock,
        tally: PoolMetrics | None = None,
    ) -> None:
        self._metrics = tally or PoolMetrics()
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._keys = 0
        self._workers_by_url: dict[str, WorkerState] = {}
        """By URL; also those that are gone and still have requests."""
        self._workers: list[WorkerState] = []
        self._in_flight = 0
        self._preemptible: dict[WorkerSlot, Callable[[], None]] = {}
        """Places that are to be left to those who wait, and what makes their holders leave."""
        self._queue: list[_QueuedRequest] = []
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._slot_times: list[float] = []
        """For how many seconds places were held, as far as it is not counted yet."""
        self._average_slot_time: float | None = None
        """The same, smoothed: of those that are counted."""
        self.replace_workers(workers)

    @property
    def workers(self) -> Sequence[WorkerState]:
        """The workers of now."""
        return self._workers

    @property
    def ready(self) -> bool:
        """Whether a worker is there, as far as is known."""
        now = self._clock()
        return any(one.health.is_available(now) for one in self._workers)

    @property
    def queue_length(self) -> int:
        """How many wait for a place."""
        return len(self._queue)

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """The ids of the exchanges that wait for one."""
        return [one.request_id for one in self._queue]

    @property
    def in_panic(self) -> bool:
        """Whether health is ignored, since too few workers are well."""
        now = self._clock()
        return any(not one.health.is_available(now) for one in self.select_available(ANY_WORKER))

    def replace_workers(self, workers: Sequence[WorkerConfig]) -> None:
        """These are the workers from now on.

        One of the same URL is the same worker: what is known of it stays. One that is not among
        them takes no more requests, and finishes what it has. Of two with the same URL the last
        counts.
        """
        members = {}
        for worker in workers:
            member = self._workers_by_url.get(worker.url)
            if member is None:
                member = WorkerState(
                    self._keys, worker, WorkerHealth(self._limits.health), self._clock
                )
                self._keys += 1
            member.config = worker
            member.removed = False
            members[worker.url] = member
        for url, member in self._workers_by_url.items():
            if url not in members:
                member.removed = True
        self._workers = list(members.values())
        self._workers_by_url = {
            url: one
            for url, one in (self._workers_by_url | members).items()
            if not one.removed or one.in_flight
        }
        self._serve_queue()

    def report_workers(self) -> list[WorkerReport]:
        """How each worker is."""
        return [one.report() for one in self._workers]

    def select_available(self, wish: SelectionCriteria) -> Sequence[WorkerState]:
        """The workers that may be asked, whether or not they have a place."""
        found = select_available(self._workers, self._clock(), self._limits.health.panic_threshold)
        return [one for one in found if one.key not in wish.tried_keys]

    def preview_pick(
        self, wish: SelectionCriteria
    ) -> tuple[Sequence[WorkerState], PolicyScores, WorkerState | None]:
        """Who has a place, how they compare, and who would be taken now; it changes nothing."""
        free = self._select_with_room(wish, self._clock())
        likely = copy.deepcopy(self._policy).pick_worker(free, wish.routing_key) if free else None
        return free, self._policy.score_workers(free, wish.routing_key), likely

    def try_acquire(self, wish: SelectionCriteria, now: float) -> WorkerSlot | None:
        """A place at a worker that will do, to be given back; None where there is none now."""
        if self._queue:
            self._serve_queue()
        return self._acquire_now(wish, now)

    async def acquire(
        self, wish: SelectionCriteria, deadline: Deadline, name: str = ""
    ) -> WorkerSlot:
        """The same, and if need be after some time, for the exchange of this name.

        Raises Overloaded when there is no worker, or too many wait already who come before this
        one, and DeadlineExceeded (``queue``) when none came free in time.
        """
        place = self.try_acquire(wish, self._clock())
        if place is not None:
            return place
        if not self._workers:
            self._metrics.shed["no_worker"] += 1
            raise Overloaded("no worker is available")
        waiter = self._enqueue(wish, name)
        since = self._clock()
        try:
            async with asyncio.timeout(deadline.remaining(self._limits.queue.wait)):
                place = await waiter.slot
        except BaseException as e:
            self._remove_waiter(waiter)
            if isinstance(e, TimeoutError):
                self._metrics.shed["queue_wait"] += 1
                late = DeadlineExceeded("no worker came free in time", which="queue")
                late.retry_after = self._estimate_queue_time()
                raise late from None
            raise
        finally:
            self._metrics.queue_times.add(self._clock() - since)
        return place

    def release(self, place: WorkerSlot) -> None:
        """The place is free again."""
        self._slot_times.append(self._clock() - place.acquired_at)
        if len(self._slot_times) >= _MAX_UNCOUNTED:
            self.count_slot_times()
        self._free_slot(place)

    def count_slot_times(self) -> None:
        """Count how long places were held, as far as they are free again."""
        held, self._slot_times = self._slot_times, []
        self._metrics.request_durations.extend(held)
        for seconds in held:
            takes = seconds if self._average_slot_time is None else self._average_slot_time
            self._average_slot_time = takes + _AVERAGE_WEIGHT * (seconds - takes)

    def close_queue(self) -> None:
        """Nobody is served any more."""
        for waiter in self._queue:
            if not waiter.slot.done():
                waiter.slot.set_exception(Overloaded("the gateway is stopping"))
        self._queue.clear()
        self._start_timer()

    # --- places -----------------------------------------------------------------------------------

    def _acquire_now(self, wish: SelectionCriteria, now: float) -> WorkerSlot | None:
        """A place, taken."""
        free = self._select_with_room(wish, now)
        if not free:
            return None
        member = free[0] if len(free) == 1 else self._policy.pick_worker(free, wish.routing_key)
        member.in_flight += 1
        self._in_flight += 1
        place = WorkerSlot(member, now)
        if wish.preempt is not None:
            self._preemptible[place] = wish.preempt
        return place

    def _select_with_room(self, wish: SelectionCriteria, now: float) -> Sequence[WorkerState]:
        """Those that may be asked and have a place."""
        limits, tried = self._limits, wish.tried_keys
        if limits.max_concurrency is not None and self._in_flight >= limits.max_concurrency:
            return []
        free: list[WorkerState] = []
        for one in select_available(self._workers, now, limits.health.panic_threshold):
            if one.key not in tried and one.has_room():
                free.append(one)  # a comprehension would be another call
        return free

    def _free_slot(self, place: WorkerSlot) -> None:
        member = place.worker
        if self._preemptible:
            self._preemptible.pop(place, None)
        member.in_flight -= 1
        self._in_flight -= 1
        if member.removed and not member.in_flight:
            self._workers_by_url.pop(member.config.url, None)
        if self._queue:
            self._serve_queue()

    # --- those who wait ---------------------------------------------------------------------------

    def _enqueue(self, wish: SelectionCriteria, name: str) -> _QueuedRequest:
        waiter = _QueuedRequest(
            wish, self._numbers, asyncio.get_running_loop().create_future(), name
        )
        self._numbers += 1
        room = wish.preempt is None and self._preempt_slot(wish)
        if len(self._queue) >= self._limits.queue.max and not room:
            last = self._queue[-1] if self._queue else waiter
            if _get_queue_order(last) <= _get_queue_order(waiter):
                raise self._make_overloaded_error()
            self._queue.remove(last)
            last.slot.set_exception(self._make_overloaded_error())
        insort(self._queue, waiter, key=_get_queue_order)
        self._start_timer()
        return waiter

    def _preempt_slot(self, wish: SelectionCriteria) -> bool:
        """Have one place left, if somebody has one who is to leave it."""
        choices = self.select_available(wish) if self._preemptible else ()
        for place, give_way in self._preemptible.items():
            if place.worker in choices:
                del self._preemptible[place]
                give_way()
                return True
        return False

    def _serve_queue(self) -> None:
        """Give out what is free, to whoever comes first and may have it.

        Where nothing will do for one who would take any, nothing will for those who come after.
        """
        now = self._clock()
        for waiter in self._queue:
            if waiter.slot.done():  # its task was cancelled, and has not run since
                continue
            place = self._acquire_now(waiter.criteria, now)
            if place is not None:
                waiter.slot.set_result(place)
            elif not waiter.criteria.tried_keys:
                break
        if self._queue:
            self._queue = [one for one in self._queue if not one.slot.done()]

    def _remove_waiter(self, waiter: _QueuedRequest) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif waiter.slot.done() and not waiter.slot.cancelled() and not waiter.slot.exception():
            self._free_slot(waiter.slot.result())

    def _start_timer(self) -> None:
        """Have a timer as long as somebody waits: health changes by itself."""
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(
                _QUEUE_CHECK_INTERVAL, self._on_timer
            )
        elif self._timer is not None and not self._queue:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._serve_queue()
        self._start_timer()

    def _make_overloaded_error(self) -> GatewayError:
        self._metrics.shed["queue_full"] += 1
        text = "every worker is busy, and too many requests wait already"
        return Overloaded(text, retry_after=self._estimate_queue_time())

    def _estimate_queue_time(self) -> float:
        """In how many seconds all who wait now will be served, going by the last requests."""
        self.count_slot_times()
        if self._average_slot_time is None:
            return max(self._limits.queue.wait, _MIN_RETRY_AFTER)
        seconds = self._average_slot_time * (len(self._queue) + 1) / max(self._in_flight, 1)
        return min(max(seconds, _MIN_RETRY_AFTER), _MAX_RETRY_AFTER)
