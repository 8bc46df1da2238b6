"""Routes a request and takes its part of its key's limits: what comes before any target.

The order is fixed: a key that may not use the model learns no more than for an unknown model, and
a request takes nothing of a limit before its target is known.
"""

from gateway.observability.record import RequestRecord
from gateway.pipeline.state import RequestState, RouteStages
from gateway.ratelimit.limiter import RateLimiter
from gateway.routing.router import Route, Router


class Admission:
    """Admits the requests of one listener."""

    def __init__(
        self, router: Router, limiter: RateLimiter | None, route_stages: RouteStages
    ) -> None:
        """``limiter`` is None without rate limits."""
        self._router = router
        self._route_stages = route_stages
        self._limiter = limiter

    def admit(self, request: RequestState) -> None:
        """Set the request's route and reservation.

        Raises Forbidden where the key may not use the model, which is checked first, so that such
        a request takes no longer than one for an unknown model; and RateLimitExceeded,
        QuotaExceeded or Overloaded.
        """
        info, principal = request.routing_info, request.principal
        if principal is not None and principal.models is not None:
            self._router.check_access(info.model, principal.models)
        route = request.route = self._router.route(
            info.model, info.version, request.get_attributes, request.route_observer
        )
        set_target_labels(request.record, route, info.stream)
        if not self._route_stages.is_empty:
            for stage in self._route_stages.select(route):
                request.add_stage(stage)
        if request.stages:
            request.notify(lambda stage: stage.on_routed(request))
        if self._limiter is not None:
            self._reserve(request, self._limiter)
        request.record.split = route.split  # of a request that a limit refuses, none has sent it
        if request.stages:
            request.notify(lambda stage: stage.on_admitted(request))

    def _reserve(self, request: RequestState, limiter: RateLimiter) -> None:
        """Take the request's part of its key's limits. Only generation takes tokens."""
        takes_tokens = request.match.endpoint.task == "generate"
        reservation = request.reservation = limiter.reserve(
            request.record.key,
            request.route.requested_model,
            request.route.model.info,
            request.client_request.body if takes_tokens else None,
            request.adapter,
        )
        if reservation is not None:
            request.headers = reservation.headers
            reservation.check()


def set_target_labels(record: RequestRecord, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
    """Note the target that is about to get the request."""
    target, reason = route.target, route.reason
    record.model = route.model.info.name
    record.version = target.version
    record.backend = target.backend_name
    record.rule = reason.rule
    record.sticky = "pinned" if route.pinned else reason.sticky
    record.stream = stream
