"""A worker of a pool, and what is known of it now."""

import logging
from typing import Final, Protocol

from msgspec import Struct, field

from backends.pool.health import HealthState, WorkerHealth
from backends.pool.smooth import PeakEwma
from backends.upstream import WorkerConfig
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
