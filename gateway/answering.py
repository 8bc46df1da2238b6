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

    dialect: Dialect
    call: Call
    envelope: Envelope
    context: Context
    sink: Sink
    record: Record
    principal: Principal | None
    peer: str
    watch: Watch | None
    noted: Noted | None = None
    """What is to be told of the answer."""

    def traits(self) -> Traits:
        """What the choice of a target may go by."""
        call, who = self.call, self.principal
        key, tags = ("", frozenset[str]()) if who is None else (who.name, who.tags)
        return Traits(self.dialect.name, call.headers, call.body, key, tags, self.peer)


class Answers:
    """Gives them."""

    def __init__(
        self, router: Router, body: int, shadows: Shadows | None, lookout: Lookout
    ) -> None:
        """``body`` is the size of the largest, in bytes, as it is explained."""
        self.running: dict[tuple[str, str, str], Exchange] = {}
        """By dialect, key, and the client's own name for the request."""
        self.live: set[Exchange] = set()
        """All of them, named or not."""
        self._router = router
        self._body = body
        self._shadows = shadows
        self._lookout = lookout

    def alone(self) -> "Answers":
        """The same for what must not be seen here: nothing is stopped by it, and nothing copied."""
        return Answers(self._router, self._body, None, self._lookout)

    def give(self, asked: Asked, route: Route) -> Coroutine[Any, Any, None]:
        """Ask the route's target, and in its stead those that it falls back to."""
        shadow = route.model.shadow
        if shadow is None or (pair := self._cast(asked, route, shadow)) is None:
            return self._give(asked, route)
        return self._beside(pair, replace(asked, noted=pair.main), route)

    async def _beside(self, pair: Pair, asked: Asked, route: Route) -> None:
        with pair.beside():
            await self._give(asked, route)

    def _cast(self, asked: Asked, route: Route, shadow: Shadow) -> Pair | None:
        """Have a copy of the request answered, too, if it is drawn for that."""
        if self._shadows is None:
            return None
        copied = self._router.copied(route, shadow, asked.traits)
        if copied is None:
            return None
        original = Original(asked.dialect, asked.call, route, asked.context, asked.record)
        return self._shadows.cast(original, copied, shadow)

    async def _give(self, asked: Asked, route: Route) -> None:
        if asked.watch is not None:
            rest = self._router.after(route, asked.traits)
            asked.watch.follow((one, self._able(asked, one)) for one in rest)
        try:
            if asked.context.large:  # all others would wait for it
                answering = await asyncio.to_thread(self._answering, asked, route)
            else:
                answering = self._answering(asked, route)
            await self._exchange(asked, route, answering)
        except GatewayError as error:
            if asked.sink.started or not passes_on(error):
                raise
            rest = self._router.after(route, asked.traits)
            await self._instead(asked, Trail(route, error), rest)

    async def _instead(self, asked: Asked, trail: Trail, rest: Iterator[Route]) -> None:
        """Ask those who answer in a target's stead, but for those that are not able to.

        Raises what the last one said that failed.
        """
        record, stream = asked.record, asked.envelope.stream
        for route in rest:
            if not trail.fits(route):
                answering: Answering | str = NO_ROOM
            elif asked.context.large:  # as above
                answering = await asyncio.to_thread(self._able, asked, route)
            else:
                answering = self._able(asked, route)
            if isinstance(answering, str):
                trail.passed_over(route, answering)
                continue
            trail.tell(record, route)
            label(record, route, stream)
            try:
                await self._exchange(asked, route, answering)
            except GatewayError as error:
                if asked.sink.started or not trail.went_on(route, error):
                    raise
            else:
                return
        trail.tell(record, trail.route)
        label(record, trail.route, stream)
        raise trail.error

    def _answering(self, asked: Asked, route: Route) -> Answering:
        """How a target answers. Raises ClientError."""
        about = self._about(asked, route)
        relayed = relaying(asked.dialect, asked.call, route, about, asked.context)
        if relayed is not None:
            return relayed
        return Translation(asked.dialect, asked.call, route, about, asked.context)

    def _able(self, asked: Asked, route: Route) -> Answering | str:
        """How a target answers in another's stead; or why it can't."""
        about = self._about(asked, route)
        try:
            translation = Translation(asked.dialect, asked.call, route, about, asked.context)
        except ClientError as error:
            return type(error).__name__
        losses = translation.plan.losses
        if missing := lacking(translation.request, losses, route.model.info.context):
            return lacks(*missing)
        relayed = relaying(
            asked.dialect, asked.call, route, about, asked.context, translation=translation
        )
        return translation if relayed is None else relayed

    @staticmethod
    def _about(asked: Asked, route: Route) -> About:
        target = route.target
        began, model = int(asked.call.began), asked.envelope.model
        return About(
            asked.record.id, began, model, target.version, target.model, asked.context.clock
        )

    def _exchange(
        self, asked: Asked, route: Route, answering: Answering
    ) -> Coroutine[Any, Any, None]:
        """Have it answered so."""
        record, context = asked.record, asked.context
        request = answering.request
        if type(answering) is Relaying:
            record.stream = request.stream
        record.losses = answering.losses
        record.operation = request.kind
        if context.trace is not None:
            context.trace.wants(request)
        if request.timeout is not None:
            context.deadline.shorten(request.timeout)
        if asked.watch is not None:
            asked.watch.answers(
                Asking(asked.dialect, asked.call, route, answering, context, self._body)
            )
        if asked.noted is not None:
            answering = Overheard(answering, asked.noted)
        exchange = Exchange(answering, context, asked.sink, record, self._lookout)
        if client_id := asked.envelope.client_id or request.client_id:
            return self._named((asked.dialect.name, record.key, client_id), exchange)
        return exchange.run(self.live, stream=record.stream)

    async def _named(self, name: tuple[str, str, str], exchange: Exchange) -> None:
        """Run one that may be stopped by its name."""
        self.running[name] = exchange
        try:
            await exchange.run(self.live, stream=exchange.record.stream)
        finally:
            if self.running.get(name) is exchange:
                del self.running[name]


def label(record: Record, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
    """Note which target is asked."""
    record.model = route.model.info.name
    record.version = route.target.version
    record.backend = route.target.backend_name
    record.rule = route.why.rule
    record.sticky = "pinned" if route.pinned else route.why.sticky
    record.stream = stream
