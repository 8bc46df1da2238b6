"""The workers of a pool, their slots, and the queue of requests that wait for a slot.

A request gets a slot at once if a worker that it may use has one, by the load balancing policy;
otherwise it waits, in the order of priority and arrival. A freed slot is assigned to the first in
the queue that may use it, before any newcomer. A timer looks again while requests wait, since
workers come back by time alone.

What must never happen:

- A slot that is lost or counted twice: a request that was cancelled just as it got its slot gives
  it back, and a worker that left the pool keeps its count until its last request has ended.
- A request that waits although a worker is free, or is overtaken by a later one of its priority.
- All workers out at once by a fault of the requests: if too few are healthy, health is ignored.
"""

import asyncio
import copy
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from typing import Final

from msgspec import Struct

from backends.http.interfaces import WorkerConfig
from backends.interfaces import Deadline
from backends.pool.circuit_breaker import WorkerHealth, select_available
from backends.pool.load_balancing import LoadBalancingPolicy, PolicyScores, RoutingKey
from backends.pool.metrics import PoolMetrics
from backends.pool.settings import CircuitBreakerSettings, HealthCheckSettings, QueueSettings
from backends.pool.worker_state import WorkerReport, WorkerState
from protocols.core.errors import DeadlineExceeded, GatewayError, Overloaded
from protocols.core.interfaces import Clock

DEFAULT_PRIORITY: Final = 128
"""The priority of a request without one."""
BACKGROUND_PRIORITY: Final = 256
"""The priority of shadow traffic: below all that clients may set."""
_QUEUE_CHECK_INTERVAL: Final = 0.25
"""Seconds between checks whether a worker is back while requests wait."""
_MIN_RETRY_AFTER: Final = 1.0
_MAX_RETRY_AFTER: Final = 3600.0
_MAX_UNCOUNTED: Final = 256
"""Slot times that are buffered before they are added to the metrics."""
_AVERAGE_WEIGHT: Final = 0.1
"""The weight of the latest request in the average slot time."""


class PoolLimits(Struct, frozen=True):
    """Limits of the whole pool: concurrency, queue, health checks and circuit breaker."""

    max_concurrency: int | None = None
    queue: QueueSettings = QueueSettings()
    health: HealthCheckSettings = HealthCheckSettings()
    breaker: CircuitBreakerSettings = CircuitBreakerSettings()


class SelectionCriteria(Struct, frozen=True):
    """What a request for ``model`` requires of a worker. ``tried_keys`` are excluded.

    ``priority``: lower first. ``preempt`` ends a request that must free its slot for others.
    """

    tried_keys: Collection[int] = frozenset()
    routing_key: RoutingKey = RoutingKey()
    priority: int = DEFAULT_PRIORITY
    preempt: Callable[[], None] | None = None
    model: str = ""


ANY_WORKER: Final = SelectionCriteria()
"""Any worker, default priority."""


class WorkerSlot(Struct, eq=False):
    """A slot at a worker and when it was acquired, by the clock."""

    worker: WorkerState
    acquired_at: float
    model: str = ""


class _QueuedRequest(Struct, eq=False):
    criteria: SelectionCriteria
    number: int
    slot: asyncio.Future[WorkerSlot]
    request_id: str


def _get_queue_order(waiter: _QueuedRequest) -> tuple[int, int]:
    return waiter.criteria.priority, waiter.number


class WorkerPool:
    """Assigns slots at workers: at once, or queued by priority and order of arrival.

    The set of workers may change at any time and may be empty.
    """

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        policy: LoadBalancingPolicy,
        limits: PoolLimits,
        clock: Clock,
        metrics: PoolMetrics | None = None,
    ) -> None:
        self._metrics = metrics or PoolMetrics()
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._keys = 0
        self._workers_by_url: dict[str, WorkerState] = {}
        """By URL, with removed workers that still have requests."""
        self._workers: list[WorkerState] = []
        self._in_flight = 0
        self._preemptible: dict[WorkerSlot, Callable[[], None]] = {}
        """Slots of preemptible requests, with the function that ends the request."""
        self._queue: list[_QueuedRequest] = []
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._slot_times: list[float] = []
        """Seconds for which slots were held, not yet added to the metrics."""
        self._average_slot_time: float | None = None
        """The smoothed average of the slot times in seconds."""
        self.replace_workers(workers)

    def __repr__(self) -> str:
        return (
            f"<WorkerPool {len(self._workers)} workers, {self._in_flight} requests in flight,"
            f" {len(self._queue)} queued>"
        )

    @property
    def workers(self) -> Sequence[WorkerState]:
        """The current workers."""
        return self._workers

    @property
    def ready(self) -> bool:
        """Whether any worker is available."""
        now = self._clock()
        return any(worker.health.is_available(now) for worker in self._workers)

    @property
    def queue_length(self) -> int:
        """How many requests wait for a slot."""
        return len(self._queue)

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """The ids of the requests that wait for a slot."""
        return [waiter.request_id for waiter in self._queue]

    @property
    def in_panic(self) -> bool:
        """Whether health is ignored because too few workers are healthy."""
        now = self._clock()
        return any(
            not worker.health.is_available(now) for worker in self.select_available(ANY_WORKER)
        )

    def replace_workers(self, workers: Sequence[WorkerConfig]) -> None:
        """Replace the set of workers.

        A worker with the same URL keeps its state. A worker that is no longer listed gets no new
        requests and finishes those it has. Of two with the same URL the last counts.
        """
        states = {}
        for worker in workers:
            state = self._workers_by_url.get(worker.url)
            if state is None:
                state = WorkerState(
                    self._keys,
                    worker,
                    WorkerHealth(self._limits.health, self._limits.breaker),
                    self._clock,
                )
                self._keys += 1
            state.config = worker
            state.removed = False
            states[worker.url] = state
        for url, state in self._workers_by_url.items():
            if url not in states:
                state.removed = True
        self._workers = list(states.values())
        self._workers_by_url = {
            url: one
            for url, one in (self._workers_by_url | states).items()
            if not one.removed or one.in_flight
        }
        self._serve_queue()

    def report_workers(self) -> list[WorkerReport]:
        """The state of each worker."""
        return [worker.report() for worker in self._workers]

    def select_available(self, criteria: SelectionCriteria) -> Sequence[WorkerState]:
        """The available workers, whether or not a slot is free."""
        available = select_available(
            self._workers, self._clock(), self._limits.health.panic_threshold, criteria.model
        )
        return [worker for worker in available if worker.key not in criteria.tried_keys]

    def preview_pick(
        self, criteria: SelectionCriteria
    ) -> tuple[Sequence[WorkerState], PolicyScores, WorkerState | None]:
        """The workers with a free slot, their scores, and the likely choice. No side effects."""
        free = self._select_with_room(criteria, self._clock())
        key = criteria.routing_key
        choice = copy.deepcopy(self._policy).pick_worker(free, key) if free else None
        return free, self._policy.score_workers(free, key), choice

    def try_acquire(self, criteria: SelectionCriteria, now: float) -> WorkerSlot | None:
        """A slot at a matching worker, to be released; None if there is none now."""
        if self._queue:
            self._serve_queue()
        return self._acquire_now(criteria, now)

    async def acquire(
        self, criteria: SelectionCriteria, deadline: Deadline, name: str = ""
    ) -> WorkerSlot:
        """A slot at a matching worker, waiting in the queue if necessary.

        ``name`` is the request id. Raises Overloaded if there is no worker or the queue is full,
        and DeadlineExceeded (``queue``) if no slot became free in time.
        """
        slot = self.try_acquire(criteria, self._clock())
        if slot is not None:
            return slot
        if not self._workers:
            self._metrics.shed["no_worker"] += 1
            raise Overloaded("no worker is available")
        waiter = self._enqueue(criteria, name)
        enqueued_at = self._clock()
        try:
            async with asyncio.timeout(deadline.remaining(self._limits.queue.wait)):
                slot = await waiter.slot
        except BaseException as e:
            self._remove_waiter(waiter)
            if isinstance(e, TimeoutError):
                self._metrics.shed["queue_wait"] += 1
                error = DeadlineExceeded("no worker became free in time", which="queue")
                error.retry_after = self._estimate_queue_time()
                raise error from None
            raise
        finally:
            self._metrics.queue_times.add(self._clock() - enqueued_at)
        return slot

    def release(self, slot: WorkerSlot) -> None:
        """Release the slot."""
        self._slot_times.append(self._clock() - slot.acquired_at)
        if len(self._slot_times) >= _MAX_UNCOUNTED:
            self.count_slot_times()
        self._free_slot(slot)

    def count_slot_times(self) -> None:
        """Add the times of released slots to the metrics."""
        slot_times, self._slot_times = self._slot_times, []
        self._metrics.request_durations.extend(slot_times)
        for seconds in slot_times:
            average = seconds if self._average_slot_time is None else self._average_slot_time
            self._average_slot_time = average + _AVERAGE_WEIGHT * (seconds - average)

    def close_queue(self) -> None:
        """Reject all waiting requests."""
        for waiter in self._queue:
            if not waiter.slot.done():
                waiter.slot.set_exception(Overloaded("the gateway is shutting down"))
        self._queue.clear()
        self._start_timer()

    # --- slots ------------------------------------------------------------------------------------

    def _acquire_now(self, criteria: SelectionCriteria, now: float) -> WorkerSlot | None:
        """A slot, if one is free now."""
        free = self._select_with_room(criteria, now)
        if not free:
            return None
        worker = free[0] if len(free) == 1 else self._policy.pick_worker(free, criteria.routing_key)
        model, running = criteria.model, worker.in_flight_by_model
        worker.in_flight += 1
        running[model] = running.get(model, 0) + 1
        self._in_flight += 1
        slot = WorkerSlot(worker, now, model)
        if criteria.preempt is not None:
            self._preemptible[slot] = criteria.preempt
        return slot

    def _select_with_room(self, criteria: SelectionCriteria, now: float) -> Sequence[WorkerState]:
        """The available workers with a free slot."""
        limits, tried = self._limits, criteria.tried_keys
        if limits.max_concurrency is not None and self._in_flight >= limits.max_concurrency:
            return []
        free: list[WorkerState] = []  # a comprehension would be another call
        for worker in self._workers:
            if not worker.health.healthy:
                break
            limit = worker.total_limit if worker.model_limits else worker.config.max_concurrency
            if (limit is None or worker.in_flight < limit) and worker.key not in tried:
                free.append(worker)
        else:
            return free
        model = criteria.model
        available = select_available(self._workers, now, limits.health.panic_threshold, model)
        return [one for one in available if one.key not in tried and one.has_room(model)]

    def _free_slot(self, slot: WorkerSlot) -> None:
        worker = slot.worker
        if self._preemptible:
            self._preemptible.pop(slot, None)
        model, running = slot.model, worker.in_flight_by_model
        worker.in_flight -= 1
        if running[model] > 1:
            running[model] -= 1
        else:
            del running[model]
        self._in_flight -= 1
        if worker.removed and not worker.in_flight:
            self._workers_by_url.pop(worker.config.url, None)
        if self._queue:
            self._serve_queue()

    # --- queue ------------------------------------------------------------------------------------

    def _enqueue(self, criteria: SelectionCriteria, name: str) -> _QueuedRequest:
        waiter = _QueuedRequest(
            criteria, self._numbers, asyncio.get_running_loop().create_future(), name
        )
        self._numbers += 1
        preempted = criteria.preempt is None and self._preempt_slot(criteria)
        if len(self._queue) >= self._limits.queue.max and not preempted:
            last = self._queue[-1] if self._queue else waiter
            if _get_queue_order(last) <= _get_queue_order(waiter):
                raise self._make_overloaded_error()
            self._queue.remove(last)
            last.slot.set_exception(self._make_overloaded_error())
        insort(self._queue, waiter, key=_get_queue_order)
        self._start_timer()
        return waiter

    def _preempt_slot(self, criteria: SelectionCriteria) -> bool:
        """End one preemptible request, if any holds a usable slot; returns whether one did."""
        available = self.select_available(criteria) if self._preemptible else ()
        for slot, preempt in self._preemptible.items():
            if slot.worker in available:
                del self._preemptible[slot]
                preempt()
                return True
        return False

    def _serve_queue(self) -> None:
        """Assign free slots to waiting requests, in order.

        If there is no slot for a request that accepts any worker, there is none for later ones of
        the same model; nor for those of other models, unless workers limit models.
        """
        now = self._clock()
        full_models: set[str] = set()
        for waiter in self._queue:
            criteria = waiter.criteria
            if waiter.slot.done():  # its task was cancelled and has not run since
                continue
            if full_models and criteria.model in full_models:
                continue
            slot = self._acquire_now(criteria, now)
            if slot is not None:
                waiter.slot.set_result(slot)
            elif not criteria.tried_keys:
                if not any(worker.health.limits_models for worker in self._workers):
                    break
                full_models.add(criteria.model)
        if self._queue:
            self._queue = [one for one in self._queue if not one.slot.done()]

    def _remove_waiter(self, waiter: _QueuedRequest) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif waiter.slot.done() and not waiter.slot.cancelled() and not waiter.slot.exception():
            self._free_slot(waiter.slot.result())

    def _start_timer(self) -> None:
        """Run a timer while requests wait, since health changes with time."""
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
        message = "all workers are busy and the queue is full"
        return Overloaded(message, retry_after=self._estimate_queue_time())

    def _estimate_queue_time(self) -> float:
        """The estimated time in seconds until the queue is served."""
        self.count_slot_times()
        if self._average_slot_time is None:
            return max(self._limits.queue.wait, _MIN_RETRY_AFTER)
        seconds = self._average_slot_time * (len(self._queue) + 1) / max(self._in_flight, 1)
        return min(max(seconds, _MIN_RETRY_AFTER), _MAX_RETRY_AFTER)
