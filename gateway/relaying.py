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
from gateway.core.types import Event, Request
from gateway.emulation import Count, counted
from gateway.router import Route
from gateway.translation import Translation

_STRICT: Final = "x-interlingua-strict"
"""The header of who would rather have an error than a loss."""


class Relaying(Struct, eq=False):
    """A call that is passed on. It is translated only where its answer must be after all."""

    relay: Relay
    _backend: Relayer
    _dialect: Dialect
    _call: Call
    _route: Route
    _about: About
    _context: Context
    _translation: Translation | None = None
    losses: tuple[Loss, ...] = ()
    heard: Callable[[Sequence[Event]], Sequence[Event]] = tuple
    """See ``gateway.exchange.Answering``: with usage where the worker tells none."""
    _encoder: Encoder | None = None

    @property
    def request(self) -> Request:
        """See ``gateway.exchange.Answering``."""
        return self.relay.request

    def encoder(self) -> Encoder:
        """See ``gateway.exchange.Answering``."""
        if self._encoder is None:
            make = self.relay.encoder
            self._encoder = self._translated().encoder() if make is None else make()
        return self._encoder

    def opening(self) -> Headers:
        """See ``gateway.exchange.Answering``."""
        return self.relay.headers()

    def whole(self, events: Sequence[Event], body: bytes | None) -> Reply:
        """See ``gateway.exchange.Answering``."""
        if body is None:
            return self._translated().whole(events, None)
        return Reply(200, body, self.relay.headers())

    async def gathered(self) -> Piece:
        """See ``gateway.exchange.Answering``."""
        return counted(self.request, await self._backend.fetch(self.relay, self._context))

    def pieces(self, take: Take | None = None) -> Pieces:
        """See ``gateway.exchange.Answering``."""
        self.heard = Count(self.request).apply
        return self._backend.relay(self.relay, self._context, take)

    def _translated(self) -> Translation:
        if self._translation is None:
            self._translation = Translation(
                self._dialect, self._call, self._route, self._about, self._context
            )
        return self._translation


def relaying(
    dialect: Dialect,
    call: Call,
    route: Route,
    about: About,
    context: Context,
    *,
    translation: Translation | None = None,
) -> Relaying | None:
    """The call as it may be passed on; None where the gateway has something to do with it.

    ``translation`` is what it would be otherwise, if that is known.
    """
    relayer, headers = route.target.relayer, call.headers
    if relayer is None or (_STRICT in headers and headers[_STRICT] == "1"):
        return None
    relay = relayer.relayed(dialect, call, about)
    if relay is None:
        return None
    return Relaying(relay, relayer, dialect, call, route, about, context, translation)
