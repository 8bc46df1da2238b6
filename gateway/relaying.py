"""How a target answers a client of its own dialect: by the client's bytes, and the worker's."""

import functools
from collections.abc import Callable, Sequence
from typing import cast

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
from gateway.core.types import Event, GenerateRequest
from gateway.emulation import Count
from gateway.router import Route
from gateway.translation import Translation


class Relaying:
    """A call that is passed on. It is translated only where its answer must be after all."""

    losses: tuple[Loss, ...]

    def __init__(
        self, relay: Relay, backend: Relayer, context: Context, translate: Callable[[], Translation]
    ) -> None:
        self.losses = ()
        self.request = relay.request
        self.streams = type(relay.request) is GenerateRequest and relay.request.stream
        """Whether the worker answers in pieces, which its own dialect may say otherwise."""
        self._relay = relay
        self._backend = backend
        self._context = context
        self._translate = translate
        self._encoder: Encoder | None = None
        self.heard = Count(relay.request).apply
        """See ``gateway.exchange.Answering``: with usage where the worker tells none."""

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
        said: list[Event] = []
        body = None
        for data, events in await self._backend.fetch(self._relay, self._context):
            if events:
                said += self.heard(events)
            body = data or body
        return body, said

    def pieces(self, take: Take | None = None) -> Pieces:
        """See ``gateway.exchange.Answering``."""
        return self._backend.relay(self._relay, self._context, take)


def relaying(
    dialect: Dialect,
    call: Call,
    route: Route,
    about: About,
    translate: Callable[[], Translation],
) -> Relaying | None:
    """The call as it may be passed on; None where the gateway has something to do with it."""
    backend, model = route.target.backend, route.model
    if not _relays(type(backend)) or model.on_loss == "reject":
        return None
    if model.defaults.any or model.info.max_tokens is not None:
        return None
    if call.headers.get("x-interlingua-strict") == "1":
        return None
    relayer = cast("Relayer", backend)
    relay = relayer.relayed(dialect, call, about)
    return None if relay is None else Relaying(relay, relayer, about.context, translate)


@functools.cache
def _relays(kind: type) -> bool:
    """Whether such backends pass calls on. Asked once of each: a port is long to compare."""
    return issubclass(kind, Relayer)
