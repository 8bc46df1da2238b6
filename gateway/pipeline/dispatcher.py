"""How a request that has found its target is answered: by that one, or by one in its stead.

relay       the client's own bytes, where the target's workers speak the client's dialect, or
translate   the one internal request (gateway/pipeline/strategies.py, gateway/pipeline/strategies.py)
exchange    the answer, into the sink (gateway/pipeline/responder.py)
instead     another target that is able to, where this one fails (gateway/routing/fallback.py, abilities.py)
shadow      a copy beside it all, whose answer nobody gets (gateway/pipeline/shadow.py)
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
    """What an exchange is about, and who asks, whichever target answers."""

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
        """What the choice of a target may go by."""
        call, who = self.client_request, self.principal
        key, tags = ("", frozenset[str]()) if who is None else (who.name, who.tags)
        return RequestAttributes(self.adapter.name, call.headers, call.body, key, tags, self.peer)


class Dispatcher:
    """Gives them."""

    def __init__(
        self, router: Router, body: int, shadows: ShadowManager, lookout: DeadlineTimer
    ) -> None:
        """``body`` is the size of the largest, in bytes, as it is explained."""
        self.named_requests: dict[tuple[str, str, str], Responder] = {}
        """By dialect, key, and the client's own name for the request."""
        self.running_requests: set[Responder] = set()
        """All of them, named or not."""
        self._router = router
        self._max_body_size = body
        self._shadow_manager = shadows
        self._deadline_timer = lookout

    def dispatch(self, asked: RoutedRequest, route: Route) -> Coroutine[Any, Any, None]:
        """Ask the route's target, and in its stead those that it falls back to."""
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
        """Have a copy of the request answered, too, if it is drawn for that."""
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
            if asked.context.offload_to_thread:  # all others would wait for it
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
        """Ask those who answer in a target's stead, but for those that are not able to.

        Raises what the last one said that failed.
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
            trail.write_record(record, route)
            set_target_labels(record, route, stream)
            try:
                await self._run_attempt(asked, route, answering)
            except GatewayError as error:
                if asked.writer.started or not trail.record_failure(route, error):
                    raise
            else:
                return
        trail.write_record(record, trail.route)
        set_target_labels(record, trail.route, stream)
        raise trail.error

    def _choose_strategy(self, asked: RoutedRequest, route: Route) -> ResponseStrategy:
        """How a target answers. Raises ClientError."""
        about = self._make_response_context(asked, route)
        relayed = try_passthrough(asked.adapter, asked.client_request, route, about, asked.context)
        if relayed is not None:
            return relayed
        return TranslationStrategy(asked.adapter, asked.client_request, route, about, asked.context)

    def _prepare_fallback(self, asked: RoutedRequest, route: Route) -> ResponseStrategy | str:
        """How a target answers in another's stead; or why it can't."""
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
        """Have it answered so."""
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
        """Run one that may be stopped by its name."""
        self.named_requests[name] = exchange
        try:
            await exchange.run(self.running_requests, stream=exchange.record.stream)
        finally:
            if self.named_requests.get(name) is exchange:
                del self.named_requests[name]


def set_target_labels(record: RequestRecord, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
    """Note which target is asked."""
    record.model = route.model.info.name
    record.version = route.target.version
    record.backend = route.target.backend_name
    record.rule = route.reason.rule
    record.sticky = "pinned" if route.pinned else route.reason.sticky
    record.stream = stream
