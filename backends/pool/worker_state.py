"""One worker of a pool and its state: health, slots, latency, and what its requests did."""

import logging
from typing import Final, Protocol

from msgspec import Struct, field

from backends.http.interfaces import WorkerConfig
from backends.pool.circuit_breaker import HealthState, OutReason, PeakEwma, WorkerHealth
from protocols.core.errors import (
    ClientError,
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnknownFinishReason,
    WorkerError,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import Clock

log = logging.getLogger("interlingua")
_FIRST_SERVER_ERROR: Final = 500
_CLIENT_ERROR_STATUSES: Final = range(400, _FIRST_SERVER_ERROR)


class WorkerReport(Struct, frozen=True):
    """The state of a worker, for the admin API and metrics.

    ``state`` is ``up``, ``trial`` (one request at a time) or ``out``, for ``back_in`` more seconds
    if that is known. ``latency`` is the mean time to the first token of the last streams, in
    seconds. ``error`` is the kind of the last failure: ``connect``, ``first_token``, ``idle``,
    ``disconnect``, ``invalid_response``, or a status. ``weight`` is the effective weight.
    ``out_reason``: why it is out.
    """

    url: str
    state: str
    in_flight: int
    limit: int | None
    latency: float | None
    back_in: float | None
    error: str
    weight: float
    out_reason: OutReason = ""
    model_limits: dict[str, int] = field(default_factory=dict[str, int])
    """The concurrency limits of models that it refused not long ago: see ``record_failure``."""


class AttemptWaiter(Protocol):
    """An attempt that waits for a worker's first events."""

    def cancel_wait(self) -> None:
        """Stop waiting."""


class WorkerState(Struct, eq=False):
    """A worker and its state. ``removed``: it no longer belongs to the pool."""

    key: int
    config: WorkerConfig
    health: WorkerHealth
    clock: Clock
    latency_average: PeakEwma = field(default_factory=PeakEwma)
    in_flight: int = 0
    in_flight_by_model: dict[str, int] = field(default_factory=dict[str, int])
    removed: bool = False
    model_limits_from: set[str] = field(default_factory=set[str])
    """The models whose metadata was read since it was last out."""
    model_limits: dict[str, int] = field(default_factory=dict[str, int])
    """The concurrency that the worker announces, by model."""
    last_error: str = ""
    """The kind of the last failure."""
    logged_state: HealthState = "up"
    """The state at the last change, as logged."""
    ignored_usage_models: set[str] = field(default_factory=set[str])
    """The models of which an implausible usage was logged."""
    waiting_attempts: set[AttemptWaiter] = field(default_factory=set[AttemptWaiter])
    """The attempts without a response yet."""

    def __repr__(self) -> str:
        removed = ", removed" if self.removed else ""
        return (
            f"<WorkerState {self.name}, {self.logged_state}, {self.in_flight} in flight{removed}>"
        )

    @property
    def name(self) -> str:
        """The URL, a stable name for hashing policies."""
        return self.config.url

    @property
    def weight(self) -> float:
        """The configured weight, reduced during slow start."""
        return self.config.weight * self.health.get_weight_factor(self.clock())

    @property
    def latency(self) -> float | None:
        """The time to the first token in seconds that load balancing expects."""
        return self.latency_average.get_value(self.clock())

    @property
    def limit(self) -> int | None:
        """The current concurrency limit, with those of models if no other model is in flight."""
        limits = self.health.get_limits()
        if not limits or not limits.keys() >= self.in_flight_by_model.keys():
            return self.total_limit
        limit, of_models = self.total_limit, sum(limits.values())
        return of_models if limit is None else min(limit, of_models)

    @property
    def total_limit(self) -> int | None:
        """The concurrency limit of all models together: as configured and announced."""
        limit = self.config.max_concurrency
        if self.model_limits:
            announced = max(self.model_limits.values())
            limit = announced if limit is None else min(limit, announced)
        return limit

    def has_room(self, model: str = "") -> bool:
        """Whether a slot for this model is free."""
        limit = self.total_limit
        if limit is not None and self.in_flight >= limit:
            return False
        limit = self.health.get_limit(model)
        return limit is None or self.in_flight_by_model.get(model, 0) < limit

    # --- outcomes ---------------------------------------------------------------------------------

    def record_connected(self) -> None:
        """The worker began to respond."""
        self.health.record_connected(self.clock())
        self._log_state_change()

    def record_success(self, model: str = "") -> None:
        """The worker completed a response of ``model``."""
        self.health.record_success(self.clock(), model)
        if self.logged_state != "up" or not self.health.healthy:
            self._log_state_change()

    def record_failure(
        self, error: GatewayError, *, overloaded: bool = False, model: str = ""
    ) -> None:
        """An attempt failed with ``error``; ``overloaded``: the worker reported overload.

        Overload is that of ``model`` only.

        A client error counts as a success; an expired deadline of the request as neither.
        """
        now = self.clock()
        overloaded = overloaded or isinstance(error, RateLimitExceeded)
        match error:
            case WorkerUnreachable():
                self.health.record_connect_failure(now)
            case RateLimitExceeded() | Overloaded() if overloaded:
                in_flight = self.in_flight_by_model.get(model, 0)
                self.health.record_rate_limit(
                    now, error.retry_after, model=model, in_flight=in_flight
                )
            case WorkerFailed(status=int() as status) if status in _CLIENT_ERROR_STATUSES:
                pass  # the worker is healthy, the request was wrong
            case UnknownFinishReason():
                self.health.record_success(
                    now, model
                )  # a whole answer, whose last word nobody has listed
            case Overloaded() | WorkerError() | DeadlineExceeded(phase="first_token" | "idle"):
                self.health.record_failure(now)
            case ClientError():
                self.health.record_success(now, model)
            case _:
                return
        if not isinstance(error, ClientError) or isinstance(error, RateLimitExceeded):
            self.last_error = get_error_kind(error)
        self._log_state_change(error.__cause__ or error)

    def record_health_check(self, *, ok: bool) -> None:
        """A health check succeeded or failed."""
        self.health.record_health_check(self.clock(), ok)
        if not ok:
            self.model_limits_from.clear()
        self._log_state_change("its health checks fail")

    def cancel_waiting(self) -> None:
        """Cancel the attempts without a response yet."""
        for attempt in tuple(self.waiting_attempts):
            attempt.cancel_wait()

    def log_ignored_usage(self, model: str) -> None:
        """Log once for each model that the worker's token counts are implausible."""
        if model not in self.ignored_usage_models:
            self.ignored_usage_models.add(model)
            log.warning(
                "worker %s reports implausible usage for the model %r: the gateway counts instead",
                self.config.url,
                model,
            )

    def report(self) -> WorkerReport:
        """The state as a report."""
        now = self.clock()
        until = self.health.get_unavailable_until(now)
        return WorkerReport(
            url=self.config.url,
            state=self.health.get_state(now),
            in_flight=self.in_flight,
            limit=self.limit,
            latency=self.latency_average.recent_mean,
            back_in=None if until is None else until - now,
            error=self.last_error,
            weight=self.weight,
            out_reason=self.health.get_out_reason(now),
            model_limits=self.health.get_limits(),
        )

    def _log_state_change(self, reason: object = None) -> None:
        """Log whether the worker was ejected or is back."""
        now = self.clock()
        state = self.health.get_state(now)
        if state == "out" != self.logged_state:
            self.model_limits_from.clear()
            until = self.health.get_unavailable_until(now)
            duration = "now" if until is None else f"for {until - now:.3g} s"
            text = str(reason) or type(reason).__name__  # some exceptions have no text
            log.warning("worker %s ejected %s: %s", self.config.url, duration, text)
        elif state == "up" != self.logged_state:
            log.warning("worker %s is back in rotation", self.config.url)
        self.logged_state = state


def get_error_kind(error: GatewayError) -> str:
    """The kind of a failure: see ``WorkerReport.error``."""
    match error:
        case WorkerUnreachable():
            return "connect"
        case DeadlineExceeded(phase=phase):
            return phase
        case StreamBroken():
            return "disconnect"
        case RateLimitExceeded():
            return "429"
        case WorkerFailed(status=int() as status):
            return str(status)
        case Overloaded():
            return "503"
        case _:
            return "invalid_response"
