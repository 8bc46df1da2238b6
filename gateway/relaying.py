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

    passthrough: Relay
    _backend: Relayer
    _adapter: Dialect
    _client_request: Call
    _route: Route
    _response_context: About
    _context: Context
    _translation: Translation | None = None
    unsupported_parameters: tuple[Loss, ...] = ()
    process_events: Callable[[Sequence[Event]], Sequence[Event]] = tuple
    """See ``gateway.exchange.Answering``: with usage where the worker tells none."""
    _encoder: Encoder | None = None

    @property
    def request(self) -> Request:
        """See ``gateway.exchange.Answering``."""
        return self.passthrough.request

    def get_encoder(self) -> Encoder:
        """See ``gateway.exchange.Answering``."""
        if self._encoder is None:
            make = self.passthrough.create_encoder
            self._encoder = self._get_translation().get_encoder() if make is None else make()
        return self._encoder

    def get_stream_headers(self) -> Headers:
        """See ``gateway.exchange.Answering``."""
        return self.passthrough.build_headers()

    def build_response(self, events: Sequence[Event], body: bytes | None) -> Reply:
        """See ``gateway.exchange.Answering``."""
        if body is None:
            return self._get_translation().build_response(events, None)
        return Reply(200, body, self.passthrough.build_headers())

    async def collect(self) -> Piece:
        """See ``gateway.exchange.Answering``."""
        return counted(
            self.request, await self._backend.collect_passthrough(self.passthrough, self._context)
        )

    def stream(self, take: Take | None = None) -> Pieces:
        """See ``gateway.exchange.Answering``."""
        self.process_events = Count(self.request).apply
        return self._backend.stream_passthrough(self.passthrough, self._context, take)

    def _get_translation(self) -> Translation:
        if self._translation is None:
            self._translation = Translation(
                self._adapter,
                self._client_request,
                self._route,
                self._response_context,
                self._context,
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
    relayer, headers = route.target.passthrough_backend, call.headers
    if relayer is None or (_STRICT in headers and headers[_STRICT] == "1"):
        return None
    relay = relayer.prepare_passthrough(dialect, call, about)
    if relay is None:
        return None
    return Relaying(relay, relayer, dialect, call, route, about, context, translation)
