"""How a target answers a client of its own dialect: by the client's bytes, and the worker's."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from gateway.core.context import Context
from gateway.core.loss import Loss
from gateway.core.ports import (
    About,
    Call,
    Dialect,
    Encoder,
    Headers,
    Piece,
    Pieces,
    Relay,
    Relayer,
    Reply,
    Take,
)
from gateway.core.types import Event, GenerateRequest, Request
from gateway.emulation import Count, counted
from gateway.router import Route
from gateway.translation import Translation

_STRICT: Final = "x-interlingua-strict"
"""The header of who would rather have an error than a loss."""


class Relaying(Struct, eq=False):
    """A call that is passed on. It is translated only where its answer must be after all."""

    _relay: Relay
    _backend: Relayer
    _context: Context
    _translate: Callable[[], Translation]
    request: Request
    streams: bool
    """Whether the worker answers in pieces, which its own dialect may say otherwise."""
    losses: tuple[Loss, ...] = ()
    heard: Callable[[Sequence[Event]], Sequence[Event]] = tuple
    """See ``gateway.exchange.Answering``: with usage where the worker tells none."""
    _encoder: Encoder | None = None

    def encoder(self) -> Encoder:
        """See ``gateway.exchange.Answering``."""
        if self._encoder is None:
            make = self._relay.encoder
            self._encoder = self._translate().encoder() if make is None else make()
        return self._encoder

    def opening(self) -> Headers:
        """See ``gateway.exchange.Answering``."""
        return self._relay.headers()

    def whole(self, events: Sequence[Event], body: bytes | None) -> Reply:
        """See ``gateway.exchange.Answering``."""
        if body is None:
            return self._translate().whole(events, None)
        return Reply(200, body, self._relay.headers())

    async def gathered(self) -> Piece:
        """See ``gateway.exchange.Answering``."""
        return counted(self.request, await self._backend.fetch(self._relay, self._context))

    def pieces(self, take: Take | None = None) -> Pieces:
        """See ``gateway.exchange.Answering``."""
        self.heard = Count(self.request).apply
        return self._backend.relay(self._relay, self._context, take)


def relaying(
    dialect: Dialect,
    call: Call,
    route: Route,
    about: About,
    translate: Callable[[], Translation],
) -> Relaying | None:
    """The call as it may be passed on; None where the gateway has something to do with it."""
    relayer, headers = route.target.relayer, call.headers
    if relayer is None or (_STRICT in headers and headers[_STRICT] == "1"):
        return None
    relay = relayer.relayed(dialect, call, about)
    if relay is None:
        return None
    request = relay.request
    streams = type(request) is GenerateRequest and request.stream
    return Relaying(relay, relayer, about.context, translate, request, streams)
