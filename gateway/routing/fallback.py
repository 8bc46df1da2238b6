"""Who answers in a target's stead: which errors lead on, and what is told of the way. Pure."""

import math

from gateway.observability.record import RequestRecord
from gateway.routing.requirements import CONTEXT_LENGTH
from gateway.routing.router import Route
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    Overloaded,
    RateLimitExceeded,
    UnsupportedFeature,
    WorkerError,
)


def is_fallback_error(error: GatewayError) -> bool:
    """Whether another target may do better: the fault is not the client's, and time is left.

    A prompt that is too long for one may fit another.
    """
    match error:
        case DeadlineExceeded(phase=which):
            return which != "total"
        case Overloaded() | WorkerError() | RateLimitExceeded() | ContextTooLong():
            return True
        case _:
            return False


class FallbackHistory:
    """The targets that one request was to be answered by, and why they did not."""

    def __init__(self, route: Route, error: GatewayError) -> None:
        """``route`` was asked first, and failed with ``error``, which ``passes_on``."""
        self.route = route
        """The last that was asked and failed."""
        self.error = error
        """What it said, which the client hears if nobody is left."""
        self._first_target = route.target_name
        self._reasons = {route.target_name: type(error).__name__}
        self._min_context = -1.0
        """What was told to be too little room for the prompt, in tokens."""
        if isinstance(error, ContextTooLong):
            known = _read_context_limit(route, error)
            self._min_context = math.inf if known is None else known

    def fits_context(self, route: Route) -> bool:
        """Whether the prompt may fit a target's context, after what was heard of its length."""
        return self._min_context < 0 or (route.model.info.context_length or 0) > self._min_context

    def record_skipped(self, route: Route, why: str) -> None:
        """A target can't do what the request asks, so it was not asked."""
        self._reasons[route.target_name] = why

    def record_failure(self, route: Route, error: GatewayError) -> bool:
        """A target in the first one's stead failed: whether the next may be asked.

        Where it could not do what was asked, what the one before it said is still what counts.
        """
        self._reasons[route.target_name] = type(error).__name__
        if isinstance(error, ContextTooLong):
            self._min_context = max(self._min_context, _read_context_limit(route, error) or 0)
        elif is_fallback_error(error):
            self.route, self.error = route, error
        return is_fallback_error(error) or isinstance(error, InvalidParameter | UnsupportedFeature)

    def write_record(self, record: RequestRecord, route: Route) -> None:
        """Note how ``route`` came to be the one that answers, or fails last."""
        record.fallback_from = "" if route.target_name == self._first_target else self._first_target
        record.failed_attempts = tuple(
            f"{named} {why}" for named, why in self._reasons.items() if named != route.target_name
        )


def describe_missing(*abilities: str) -> str:
    """Why a target is passed over."""
    return f"lacks {', '.join(abilities)}"


CONTEXT_TOO_SHORT = describe_missing(CONTEXT_LENGTH)


def _read_context_limit(route: Route, error: ContextTooLong) -> int | None:
    """How many tokens a target takes, where that is known."""
    return route.model.info.context_length if error.limit is None else error.limit
