"""Sends a routed request to its target, or to a fallback if the target fails.

strategy  pass-through or translation, as the target's backend can (``pipeline.strategies``)
response  the events, written to the client (``pipeline.responder``)
fallback  the next target that meets the request's requirements (``routing.fallback``)
shadow    a copy of the request for another target (``pipeline.shadow``)
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from backends.aio import DeadlineTimer
from backends.interfaces import RequestContext
from gateway.auth.api_keys import Principal
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import CancellableRequest, ResponseWriter
from gateway.pipeline.recorder import NULL_RECORDER, ExplainRecorder
from gateway.pipeline.recording import RequestCapture
from gateway.pipeline.responder import Responder, ResponseSaver
from gateway.pipeline.shadow import PrimaryRequest, ResponseSummary, ShadowManager, ShadowPair
from gateway.pipeline.strategies import ResponseStrategy
from gateway.ratelimit.limiter import Reservation
from gateway.routing.fallback import (
    CONTEXT_TOO_SHORT,
    NO_ACCESS,
    FallbackHistory,
    describe_missing,
    is_fallback_error,
)
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.requirements import find_missing_requirements
from gateway.routing.router import Model, Route, Router, ShadowRule
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    ResponseContext,
    RoutingInfo,
)
from protocols.core.request import GenerationRequest


class RoutedRequest(Struct):
    """A request and its principal, whichever target serves it."""

    adapter: ClientAdapter
    client_request: ClientRequest
    routing_info: RoutingInfo
    context: RequestContext
    writer: ResponseWriter
    record: RequestRecord
    principal: Principal | None
    peer: str
    explain_recorder: ExplainRecorder
    summary: ResponseSummary | None = None
    """Summarizes the response for the comparison with its shadow, if it has one."""
    capture: RequestCapture | None = None
    """Captures the response, if the request is recorded."""
    reservation: Reservation | None = None
    """What it took of its key's limits, if it has any."""
    headers: Headers = ()
    """Headers of the response, whichever target serves it: the rate-limit headers."""
    store_response: ResponseSaver | None = None
    """Stores the response, if its endpoint is stateful."""

    @property
    def is_rejected(self) -> bool:
        """Whether its choices exceed a concurrency limit of its key."""
        return self.reservation is not None and self.reservation.rejection is not None

    def get_attributes(self) -> RequestAttributes:
        """The attributes that route conditions and sticky sources read."""
        request, principal = self.client_request, self.principal
        key, tags = (
            ("", frozenset[str]()) if principal is None else (principal.name, principal.tags)
        )
        return RequestAttributes(
            self.adapter.name, request.headers, request.body, key, tags, self.peer
        )


class Dispatcher:
    """Sends each request to one target after the other until one succeeds."""

    def __init__(
        self,
        router: Router,
        max_body_size: int,
        shadow_manager: ShadowManager,
        deadline_timer: DeadlineTimer,
    ) -> None:
        """``max_body_size`` is the limit of a request's body, in bytes, for explanations."""
        self.named_requests: dict[tuple[str, str, str], Responder] = {}
        """By protocol, API key and the client's own id for the request."""
        self.running_requests: set[CancellableRequest] = set()
        """All running requests, with or without such an id."""
        self._router = router
        self._max_body_size = max_body_size
        self._shadow_manager = shadow_manager
        self._deadline_timer = deadline_timer
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, since the first request."""

    def dispatch(self, request: RoutedRequest, route: Route) -> Coroutine[Any, Any, None]:
        """Send the request to its target, or to its fallbacks; start a shadow if one is drawn."""
        rule = route.model.shadow
        if rule is None or (pair := self._start_shadow(request, route, rule)) is None:
            return self._dispatch_with_fallback(request, route)
        return self._dispatch_with_shadow(
            pair, replace(request, summary=pair.primary_summary), route
        )

    async def _dispatch_with_shadow(
        self, pair: ShadowPair, request: RoutedRequest, route: Route
    ) -> None:
        with pair.observe_primary():
            await self._dispatch_with_fallback(request, route)

    def _start_shadow(
        self, request: RoutedRequest, route: Route, rule: ShadowRule
    ) -> ShadowPair | None:
        """Start the request's shadow, if it is drawn for one."""
        if request.explain_recorder.dry_run:
            return None
        shadow_route = self._router.route_shadow(route, rule, request.get_attributes)
        if shadow_route is None:
            return None
        primary = PrimaryRequest(
            request.adapter, request.client_request, route, request.context, request.record
        )
        return self._shadow_manager.start(primary, shadow_route, rule)

    async def _dispatch_with_fallback(self, request: RoutedRequest, route: Route) -> None:
        if request.explain_recorder.dry_run:
            fallbacks = self._router.list_fallbacks(route, request.get_attributes)
            request.explain_recorder.record_fallbacks(
                (fallback, self._prepare_fallback(request, fallback, route.model))
                for fallback in fallbacks
            )
        try:
            if request.context.offload_to_thread:  # it would block the event loop
                strategy = await asyncio.to_thread(_make_strategy, request, route)
            else:
                strategy = _make_strategy(request, route)
            await self._run_attempt(request, strategy)
        except GatewayError as error:
            if request.writer.started or request.is_rejected or not is_fallback_error(error):
                raise
            fallbacks = self._router.list_fallbacks(route, request.get_attributes)

            async def prepare(fallback: Route) -> FallbackAttempt | str:
                if request.context.offload_to_thread:  # as above
                    strategy = await asyncio.to_thread(
                        self._prepare_fallback, request, fallback, route.model
                    )
                else:
                    strategy = self._prepare_fallback(request, fallback, route.model)
                if isinstance(strategy, str):
                    return strategy
                return partial(self._run_attempt, request, strategy)

            await try_fallbacks(request, FallbackHistory(route, error), fallbacks, prepare)

    @staticmethod
    def _prepare_fallback(
        request: RoutedRequest, route: Route, model: Model
    ) -> ResponseStrategy | str:
        """The strategy for a fallback of ``model``; or why it is skipped."""
        if not has_fallback_access(request, route, model):
            return NO_ACCESS
        try:
            strategy = _make_strategy(request, route)
            translated, losses = strategy.translate()
        except ClientError as error:
            return type(error).__name__
        context_length = route.model.info.context_length
        if missing := find_missing_requirements(translated, losses, context_length):
            return describe_missing(*missing)
        return strategy

    def _run_attempt(
        self, request: RoutedRequest, strategy: ResponseStrategy
    ) -> Coroutine[Any, Any, None]:
        """Make one attempt at a target with this strategy."""
        record, context, prepared = request.record, request.context, strategy.prepared
        if (
            request.reservation is not None
            and strategy.route.target.computes_choices
            and isinstance(prepared.request, GenerationRequest)
            and prepared.request.sample_count > 1
        ):
            request.reservation.reserve_choices(prepared.request.sample_count)
        if prepared.passthrough is not None or not isinstance(prepared.request, GenerationRequest):
            record.stream = prepared.request.stream  # only text is streamed, whatever a body says
        record.unsupported_parameters = strategy.unsupported_parameters
        record.operation = prepared.request.kind
        if context.attempt_trace is not None:
            context.attempt_trace.set_request(prepared.request)
        if prepared.request.timeout is not None:
            context.deadline.shorten(prepared.request.timeout)
        if request.explain_recorder is not NULL_RECORDER:
            request.explain_recorder.record_attempt(strategy, self._max_body_size)
        if request.summary is not None:
            request.summary.start()
            strategy.observe_events = request.summary.add_events
        if request.capture is not None:
            strategy.observe_events = request.capture.start_attempt(strategy.observe_events)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        responder = Responder(
            strategy,
            context,
            request.writer,
            record,
            self._deadline_timer,
            request.headers,
            self._loop,
            request.store_response,
        )
        if client_id := request.routing_info.client_id or prepared.request.client_id:
            return self._run_named((request.adapter.name, record.key, client_id), responder)
        return responder.run(self.running_requests, stream=record.stream)

    async def _run_named(self, name: tuple[str, str, str], responder: Responder) -> None:
        """Run a request that its client may cancel by its id."""
        self.named_requests[name] = responder
        try:
            await responder.run(self.running_requests, stream=responder.record.stream)
        finally:
            if self.named_requests.get(name) is responder:
                del self.named_requests[name]


FallbackAttempt = Callable[[], Awaitable[None]]
"""Sends a request to a fallback. Raises GatewayError."""


async def try_fallbacks(
    request: RoutedRequest,
    history: FallbackHistory,
    fallbacks: Iterator[Route],
    prepare: Callable[[Route], Awaitable[FallbackAttempt | str]],
) -> None:
    """Send the request to the fallbacks in order, except those to skip.

    ``prepare`` returns how a fallback gets it, or why it is skipped. Raises the error of the last
    target that failed.
    """
    record, stream = request.record, request.routing_info.stream
    for route in fallbacks:
        attempt = await prepare(route) if history.fits_context(route) else CONTEXT_TOO_SHORT
        if isinstance(attempt, str):
            history.record_skipped(route, attempt)
            continue
        _record_fallback(record, history, route)
        set_target_labels(record, route, stream)
        try:
            await attempt()
        except GatewayError as error:
            if (
                request.writer.started
                or request.is_rejected
                or not history.record_failure(route, error)
            ):
                raise
        else:
            return
    _record_fallback(record, history, history.route)
    set_target_labels(record, history.route, stream)
    raise history.error


def has_fallback_access(request: RoutedRequest, route: Route, model: Model) -> bool:
    """Whether the request's principal may use a fallback of ``model``."""
    principal = request.principal
    if principal is None or route.model.info.name == model.info.name:
        return True
    return not model.fallback_requires_access or principal.may_use(route.model.info.name)


def _make_strategy(request: RoutedRequest, route: Route) -> ResponseStrategy:
    """The strategy for this target. Raises ClientError."""
    client_request, target = request.client_request, route.target
    response_context = ResponseContext(
        request.record.id,
        int(client_request.started_at),
        request.routing_info.model,
        target.version,
        target.backend_model,
        request.context.clock,
        route.model.info.context_length,
    )
    return ResponseStrategy(
        request.adapter, client_request, route, response_context, request.context
    )


def _record_fallback(record: RequestRecord, history: FallbackHistory, route: Route) -> None:
    """Note that ``route`` serves the request, or is the last that fails, after the others."""
    record.fallback_from = history.get_first_target(route)
    record.failed_attempts = history.list_failures(route)


def set_target_labels(record: RequestRecord, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
    """Note the target that is about to get the request."""
    record.model = route.model.info.name
    record.version = route.target.version
    record.backend = route.target.backend_name
    record.rule = route.reason.rule
    record.sticky = "pinned" if route.pinned else route.reason.sticky
    record.stream = stream
