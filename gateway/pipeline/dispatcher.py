"""Sends a routed request to its target, or to a fallback if the target fails.

pass-through  the client's bytes, if the workers speak its protocol (``pipeline.strategies``)
translation   the internal request otherwise (``pipeline.strategies``)
response      the events, written to the client (``pipeline.responder``)
fallback      the next target that meets the request's requirements (``routing.fallback``)
shadow        a copy of the request for another target (``pipeline.shadow``)
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from backends.aio import DeadlineTimer
from backends.interfaces import RequestContext
from gateway.auth.api_keys import Principal
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import ResponseWriter
from gateway.pipeline.recorder import ExplainRecorder
from gateway.pipeline.responder import Responder, ResponseStrategy
from gateway.pipeline.shadow import (
    ObservedStrategy,
    PrimaryRequest,
    ResponseSummary,
    ShadowManager,
    ShadowPair,
)
from gateway.pipeline.strategies import PassthroughStrategy, TranslationStrategy, try_passthrough
from gateway.routing.fallback import (
    CONTEXT_TOO_SHORT,
    FallbackHistory,
    describe_missing,
    is_fallback_error,
)
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.requirements import find_missing_requirements
from gateway.routing.router import Route, Router, ShadowRule
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    ResponseContext,
    RoutingInfo,
)


class RoutedRequest(Struct, frozen=True):
    """A request and its principal, whichever target answers it."""

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
    headers: Headers = ()
    """Headers of the response, whichever target answers: the rate-limit headers."""

    def get_attributes(self) -> RequestAttributes:
        """The attributes that route conditions and sticky sources read."""
        call, who = self.client_request, self.principal
        key, tags = ("", frozenset[str]()) if who is None else (who.name, who.tags)
        return RequestAttributes(self.adapter.name, call.headers, call.body, key, tags, self.peer)


class Dispatcher:
    """Has requests answered, each by one target after the other until one succeeds."""

    def __init__(
        self, router: Router, body: int, shadows: ShadowManager, lookout: DeadlineTimer
    ) -> None:
        """``body`` is the maximum size of a request's body, in bytes, for explanations."""
        self.named_requests: dict[tuple[str, str, str], Responder] = {}
        """By protocol, API key and the client's own id for the request."""
        self.running_requests: set[Responder] = set()
        """All running requests, with or without such an id."""
        self._router = router
        self._max_body_size = body
        self._shadow_manager = shadows
        self._deadline_timer = lookout

    def dispatch(self, asked: RoutedRequest, route: Route) -> Coroutine[Any, Any, None]:
        """Ask the route's target, then its fallbacks; start a shadow if one is drawn."""
        shadow = route.model.shadow
        if shadow is None or (pair := self._start_shadow(asked, route, shadow)) is None:
            return self._dispatch_with_fallback(asked, route)
        return self._dispatch_with_shadow(pair, replace(asked, summary=pair.primary_summary), route)

    async def _dispatch_with_shadow(
        self, pair: ShadowPair, asked: RoutedRequest, route: Route
    ) -> None:
        with pair.observe_primary():
            await self._dispatch_with_fallback(asked, route)

    def _start_shadow(
        self, asked: RoutedRequest, route: Route, shadow: ShadowRule
    ) -> ShadowPair | None:
        """Start the request's shadow, if it is drawn for one."""
        if asked.explain_recorder.dry_run:
            return None
        copied = self._router.route_shadow(route, shadow, asked.get_attributes)
        if copied is None:
            return None
        original = PrimaryRequest(
            asked.adapter, asked.client_request, route, asked.context, asked.record
        )
        return self._shadow_manager.start(original, copied, shadow)

    async def _dispatch_with_fallback(self, asked: RoutedRequest, route: Route) -> None:
        if asked.explain_recorder.dry_run:
            rest = self._router.list_fallbacks(route, asked.get_attributes)
            asked.explain_recorder.record_fallbacks(
                (one, self._prepare_fallback(asked, one)) for one in rest
            )
        try:
            if asked.context.offload_to_thread:  # it would block the event loop
                answering = await asyncio.to_thread(self._choose_strategy, asked, route)
            else:
                answering = self._choose_strategy(asked, route)
            await self._run_attempt(asked, route, answering)
        except GatewayError as error:
            if asked.writer.started or not is_fallback_error(error):
                raise
            rest = self._router.list_fallbacks(route, asked.get_attributes)
            await self._try_fallbacks(asked, FallbackHistory(route, error), rest)

    async def _try_fallbacks(
        self, asked: RoutedRequest, trail: FallbackHistory, rest: Iterator[Route]
    ) -> None:
        """Ask the fallbacks in their order, except those that lack a requirement.

        Raises the error of the last target that failed.
        """
        record, stream = asked.record, asked.routing_info.stream
        for route in rest:
            if not trail.fits_context(route):
                answering: ResponseStrategy | str = CONTEXT_TOO_SHORT
            elif asked.context.offload_to_thread:  # as above
                answering = await asyncio.to_thread(self._prepare_fallback, asked, route)
            else:
                answering = self._prepare_fallback(asked, route)
            if isinstance(answering, str):
                trail.record_skipped(route, answering)
                continue
            _record_fallback(record, trail, route)
            set_target_labels(record, route, stream)
            try:
                await self._run_attempt(asked, route, answering)
            except GatewayError as error:
                if asked.writer.started or not trail.record_failure(route, error):
                    raise
            else:
                return
        _record_fallback(record, trail, trail.route)
        set_target_labels(record, trail.route, stream)
        raise trail.error

    def _choose_strategy(self, asked: RoutedRequest, route: Route) -> ResponseStrategy:
        """Pass-through or translation for this target. Raises ClientError."""
        about = self._make_response_context(asked, route)
        relayed = try_passthrough(asked.adapter, asked.client_request, route, about, asked.context)
        if relayed is not None:
            return relayed
        return TranslationStrategy(asked.adapter, asked.client_request, route, about, asked.context)

    def _prepare_fallback(self, asked: RoutedRequest, route: Route) -> ResponseStrategy | str:
        """The strategy for a fallback; or why it is skipped."""
        about = self._make_response_context(asked, route)
        try:
            translation = TranslationStrategy(
                asked.adapter, asked.client_request, route, about, asked.context
            )
        except ClientError as error:
            return type(error).__name__
        losses = translation.plan.unsupported_parameters
        if missing := find_missing_requirements(
            translation.request, losses, route.model.info.context_length
        ):
            return describe_missing(*missing)
        relayed = try_passthrough(
            asked.adapter,
            asked.client_request,
            route,
            about,
            asked.context,
            translation=translation,
        )
        return translation if relayed is None else relayed

    @staticmethod
    def _make_response_context(asked: RoutedRequest, route: Route) -> ResponseContext:
        target = route.target
        began, model = int(asked.client_request.started_at), asked.routing_info.model
        return ResponseContext(
            asked.record.id, began, model, target.version, target.backend_model, asked.context.clock
        )

    def _run_attempt(
        self, asked: RoutedRequest, route: Route, answering: ResponseStrategy
    ) -> Coroutine[Any, Any, None]:
        """Make one attempt at a target with this strategy."""
        record, context = asked.record, asked.context
        request = answering.request
        if type(answering) is PassthroughStrategy:
            record.stream = request.stream
        record.unsupported_parameters = answering.unsupported_parameters
        record.operation = request.kind
        if context.attempt_trace is not None:
            context.attempt_trace.set_request(request)
        if request.timeout is not None:
            context.deadline.shorten(request.timeout)
        asked.explain_recorder.record_attempt(
            asked.adapter,
            asked.client_request,
            route,
            answering,
            context,
            max_body_size=self._max_body_size,
        )
        if asked.summary is not None:
            answering = ObservedStrategy(answering, asked.summary)
        exchange = Responder(
            answering, context, asked.writer, record, self._deadline_timer, asked.headers
        )
        if client_id := asked.routing_info.client_id or request.client_id:
            return self._run_named((asked.adapter.name, record.key, client_id), exchange)
        return exchange.run(self.running_requests, stream=record.stream)

    async def _run_named(self, name: tuple[str, str, str], exchange: Responder) -> None:
        """Run a request that its client may cancel by its id."""
        self.named_requests[name] = exchange
        try:
            await exchange.run(self.running_requests, stream=exchange.record.stream)
        finally:
            if self.named_requests.get(name) is exchange:
                del self.named_requests[name]


def _record_fallback(record: RequestRecord, history: FallbackHistory, route: Route) -> None:
    """Note that ``route`` answers, or is the last that fails, after the others failed."""
    record.fallback_from = history.get_first_target(route)
    record.failed_attempts = history.list_failures(route)


def set_target_labels(record: RequestRecord, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
    """Note the target that is about to be asked."""
    record.model = route.model.info.name
    record.version = route.target.version
    record.backend = route.target.backend_name
    record.rule = route.reason.rule
    record.sticky = "pinned" if route.pinned else route.reason.sticky
    record.stream = stream
