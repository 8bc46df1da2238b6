"""Fallbacks: which errors lead to another target, and one request's failures so far. Pure."""

import math

from gateway.routing.requirements import CONTEXT_LENGTH
from gateway.routing.router import Route
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    MemoryExhausted,
    Overloaded,
    RateLimitExceeded,
    RetriesExhausted,
    UnsupportedFeature,
    WorkerError,
)


def is_fallback_error(error: GatewayError) -> bool:
    """Whether another target may succeed: the client is not at fault, and time is left.

    A prompt that is too long for one target may fit another.
    """
    match error:
        case MemoryExhausted():
            return False
        case DeadlineExceeded(phase=which):
            return which != "total"
        case Overloaded() | WorkerError() | RateLimitExceeded() | ContextTooLong():
            return True
        case _:
            return False


class FallbackHistory:
    """The targets of one request that failed or were skipped, and why."""

    def __init__(self, route: Route, error: GatewayError) -> None:
        """``route`` was asked first and failed with ``error``, a fallback error."""
        self.route = route
        """The last target that was asked and failed."""
        self.error = error
        """Its error, which the client gets if no fallback is left."""
        self._first_target = route.target_name
        self._reasons = {route.target_name: type(error).__name__}
        self._min_context = -1.0
        """The largest context that was too short for the prompt, in tokens; below 0 if none was."""
        if isinstance(error, ContextTooLong):
            limit = _read_context_limit(route, error)
            self._min_context = math.inf if limit is None else limit

    def fits_context(self, route: Route) -> bool:
        """Whether the prompt may fit a target's context, as far as its length is known."""
        return self._min_context < 0 or (route.model.info.context_length or 0) > self._min_context

    def record_skipped(self, route: Route, reason: str) -> None:
        """A target lacks a requirement, so it was not asked."""
        self._reasons[route.target_name] = reason

    def record_failure(self, route: Route, error: GatewayError) -> bool:
        """A fallback failed. Returns whether the next one may be asked.

        If it could not serve such a request at all, the error before it stays the one to report.
        """
        self._reasons[route.target_name] = type(error).__name__
        if isinstance(error, RetriesExhausted):
            self.record_skipped(route, error.message)
        elif isinstance(error, ContextTooLong):
            self._min_context = max(self._min_context, _read_context_limit(route, error) or 0)
        elif is_fallback_error(error):
            self.route, self.error = route, error
        return is_fallback_error(error) or isinstance(error, InvalidParameter | UnsupportedFeature)

    def get_first_target(self, route: Route) -> str:
        """The target from which the request fell back to ``route``; "" if that is the first."""
        return "" if route.target_name == self._first_target else self._first_target

    def list_failures(self, route: Route) -> tuple[str, ...]:
        """``model@version Error`` of each target that failed or was skipped before ``route``."""
        return tuple(
            f"{name} {reason}"
            for name, reason in self._reasons.items()
            if name != route.target_name
        )


def describe_missing(*abilities: str) -> str:
    """Why a fallback is skipped."""
    return f"lacks {', '.join(abilities)}"


CONTEXT_TOO_SHORT = describe_missing(CONTEXT_LENGTH)
NO_ACCESS = "no access"
"""Why a model is skipped that the principal may not use."""


def _read_context_limit(route: Route, error: ContextTooLong) -> int | None:
    """The target's context length in tokens, if it is known."""
    return route.model.info.context_length if error.limit is None else error.limit
