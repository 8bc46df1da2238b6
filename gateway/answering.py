"""How a request that has found its target is answered: by that one, or by one in its stead.

relay       the client's own bytes, where the target's workers speak the client's dialect, or
translate   the one internal request (gateway/relaying.py, gateway/translation.py)
exchange    the answer, into the sink (gateway/exchange.py)
instead     another target that is able to, where this one fails (gateway/instead.py, abilities.py)
shadow      a copy beside it all, whose answer nobody gets (gateway/shadow.py)
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gateway.abilities import lacking
from gateway.auth import Principal
from gateway.core.context import Context
from gateway.core.errors import ClientError, GatewayError
from gateway.core.lookout import Lookout
from gateway.core.ports import About, Call, Dialect, Envelope
from gateway.exchange import Answering, Exchange
from gateway.instead import NO_ROOM, Trail, lacks, passes_on
from gateway.noting import Noted, Overheard
from gateway.relaying import Relaying, relaying
from gateway.router import Route, Router, Shadow
from gateway.seam import Sink
from gateway.shadow import Original, Pair, Shadows
from gateway.telemetry import Record
from gateway.traits import Traits
from gateway.translation import Translation
from gateway.watching.telling import Asking
from gateway.watching.watch import Watch


class Asked(Struct, frozen=True):
    """What an exchange is about, and who asks, whichever target answers."""

    adapter: Dialect
    client_request: Call
    routing_info: Envelope
    context: Context
    writer: Sink
    record: Record
    principal: Principal | None
    peer: str
    explain_recorder: Watch | None
    summary: Noted | None = None
    """What is to be told of the answer."""

    def get_attributes(self) -> Traits:
        """What the choice of a target may go by."""
        call, who = self.client_request, self.principal
        key, tags = ("", frozenset[str]()) if who is None else (who.name, who.tags)
        return Traits(self.adapter.name, call.headers, call.body, key, tags, self.peer)


class Answers:
    """Gives them."""

    def __init__(
        self, router: Router, body: int, shadows: Shadows | None, lookout: Lookout
    ) -> None:
        """``body`` is the size of the largest, in bytes, as it is explained."""
        self.named_requests: dict[tuple[str, str, str], Exchange] = {}
        """By dialect, key, and the client's own name for the request."""
        self.running_requests: set[Exchange] = set()
        """All of them, named or not."""
        self._router = router
        self._max_body_size = body
        self._shadow_manager = shadows
        self._deadline_timer = lookout

    def for_dry_run(self) -> "Answers":
        """The same for what must not be seen here: nothing is stopped by it, and nothing copied."""
        return Answers(self._router, self._max_body_size, None, self._deadline_timer)

    def dispatch(self, asked: Asked, route: Route) -> Coroutine[Any, Any, None]:
        """Ask the route's target, and in its stead those that it falls back to."""
        shadow = route.model.shadow
        if shadow is None or (pair := self._start_shadow(asked, route, shadow)) is None:
            return self._dispatch_with_fallback(asked, route)
        return self._dispatch_with_shadow(pair, replace(asked, summary=pair.primary_summary), route)

    async def _dispatch_with_shadow(self, pair: Pair, asked: Asked, route: Route) -> None:
        with pair.observe_primary():
            await self._dispatch_with_fallback(asked, route)

    def _start_shadow(self, asked: Asked, route: Route, shadow: Shadow) -> Pair | None:
        """Have a copy of the request answered, too, if it is drawn for that."""
        if self._shadow_manager is None:
            return None
        copied = self._router.route_shadow(route, shadow, asked.get_attributes)
        if copied is None:
            return None
        original = Original(asked.adapter, asked.client_request, route, asked.context, asked.record)
        return self._shadow_manager.start(original, copied, shadow)

    async def _dispatch_with_fallback(self, asked: Asked, route: Route) -> None:
        if asked.explain_recorder is not None:
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
            if asked.writer.started or not passes_on(error):
                raise
            rest = self._router.list_fallbacks(route, asked.get_attributes)
            await self._try_fallbacks(asked, Trail(route, error), rest)

    async def _try_fallbacks(self, asked: Asked, trail: Trail, rest: Iterator[Route]) -> None:
        """Ask those who answer in a target's stead, but for those that are not able to.

        Raises what the last one said that failed.
        """
        record, stream = asked.record, asked.routing_info.stream
        for route in rest:
            if not trail.fits_context(route):
                answering: Answering | str = NO_ROOM
            elif asked.context.offload_to_thread:  # as above
                answering = await asyncio.to_thread(self._prepare_fallback, asked, route)
            else:
                answering = self._prepare_fallback(asked, route)
            if isinstance(answering, str):
                trail.record_skipped(route, answering)
                continue
            trail.write_record(record, route)
            label(record, route, stream)
            try:
                await self._run_attempt(asked, route, answering)
            except GatewayError as error:
                if asked.writer.started or not trail.record_failure(route, error):
                    raise
            else:
                return
        trail.write_record(record, trail.route)
        label(record, trail.route, stream)
        raise trail.error

    def _choose_strategy(self, asked: Asked, route: Route) -> Answering:
        """How a target answers. Raises ClientError."""
        about = self._make_response_context(asked, route)
        relayed = relaying(asked.adapter, asked.client_request, route, about, asked.context)
        if relayed is not None:
            return relayed
        return Translation(asked.adapter, asked.client_request, route, about, asked.context)

    def _prepare_fallback(self, asked: Asked, route: Route) -> Answering | str:
        """How a target answers in another's stead; or why it can't."""
        about = self._make_response_context(asked, route)
        try:
            translation = Translation(
                asked.adapter, asked.client_request, route, about, asked.context
            )
        except ClientError as error:
            return type(error).__name__
        losses = translation.plan.unsupported_parameters
        if missing := lacking(translation.request, losses, route.model.info.context_length):
            return lacks(*missing)
        relayed = relaying(
            asked.adapter,
            asked.client_request,
            route,
            about,
            asked.context,
            translation=translation,
        )
        return translation if relayed is None else relayed

    @staticmethod
    def _make_response_context(asked: Asked, route: Route) -> About:
        target = route.target
        began, model = int(asked.client_request.started_at), asked.routing_info.model
        return About(
            asked.record.id, began, model, target.version, target.backend_model, asked.context.clock
        )

    def _run_attempt(
        self, asked: Asked, route: Route, answering: Answering
    ) -> Coroutine[Any, Any, None]:
        """Have it answered so."""
        record, context = asked.record, asked.context
        request = answering.request
        if type(answering) is Relaying:
            record.stream = request.stream
        record.losses = answering.unsupported_parameters
        record.operation = request.kind
        if context.attempt_trace is not None:
            context.attempt_trace.set_request(request)
        if request.timeout is not None:
            context.deadline.shorten(request.timeout)
        if asked.explain_recorder is not None:
            asked.explain_recorder.record_attempt(
                Asking(
                    asked.adapter,
                    asked.client_request,
                    route,
                    answering,
                    context,
                    self._max_body_size,
                )
            )
        if asked.summary is not None:
            answering = Overheard(answering, asked.summary)
        exchange = Exchange(answering, context, asked.writer, record, self._deadline_timer)
        if client_id := asked.routing_info.client_id or request.client_id:
            return self._run_named((asked.adapter.name, record.key, client_id), exchange)
        return exchange.run(self.running_requests, stream=record.stream)

    async def _run_named(self, name: tuple[str, str, str], exchange: Exchange) -> None:
        """Run one that may be stopped by its name."""
        self.named_requests[name] = exchange
        try:
            await exchange.run(self.running_requests, stream=exchange.record.stream)
        finally:
            if self.named_requests.get(name) is exchange:
                del self.named_requests[name]


def label(record: Record, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
    """Note which target is asked."""
    record.model = route.model.info.name
    record.version = route.target.version
    record.backend = route.target.backend_name
    record.rule = route.reason.rule
    record.sticky = "pinned" if route.pinned else route.reason.sticky
    record.stream = stream
