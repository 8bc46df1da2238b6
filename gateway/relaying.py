"""How a target answers a client of its own dialect: by the client's bytes, and the worker's."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from backends.interfaces import (
    EventSink,
    PassthroughBackend,
    RequestContext,
    StreamItem,
    StreamItems,
)
from gateway.emulation.usage import UsageCounter, add_usage
from gateway.routing.router import Route
from gateway.translation import TranslationStrategy
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    HttpResponse,
    PassthroughRequest,
    ResponseContext,
    ResponseEncoder,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import Request

_STRICT_HEADER: Final = "x-interlingua-strict"
"""The header of who would rather have an error than a loss."""


class PassthroughStrategy(Struct, eq=False):
    """A call that is passed on. It is translated only where its answer must be after all."""

    passthrough: PassthroughRequest
    _backend: PassthroughBackend
    _adapter: ClientAdapter
    _client_request: ClientRequest
    _route: Route
    _response_context: ResponseContext
    _context: RequestContext
    _translation: TranslationStrategy | None = None
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    process_events: Callable[[Sequence[Event]], Sequence[Event]] = tuple
    """See ``gateway.exchange.ResponseStrategy``: with usage where the worker tells none."""
    _encoder: ResponseEncoder | None = None

    @property
    def request(self) -> Request:
        """See ``gateway.exchange.ResponseStrategy``."""
        return self.passthrough.request

    def get_encoder(self) -> ResponseEncoder:
        """See ``gateway.exchange.ResponseStrategy``."""
        if self._encoder is None:
            make = self.passthrough.create_encoder
            self._encoder = self._get_translation().get_encoder() if make is None else make()
        return self._encoder

    def get_stream_headers(self) -> Headers:
        """See ``gateway.exchange.ResponseStrategy``."""
        return self.passthrough.build_headers()

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        """See ``gateway.exchange.ResponseStrategy``."""
        if body is None:
            return self._get_translation().build_response(events, None)
        return HttpResponse(200, body, self.passthrough.build_headers())

    async def collect(self) -> StreamItem:
        """See ``gateway.exchange.ResponseStrategy``."""
        return add_usage(
            self.request, await self._backend.collect_passthrough(self.passthrough, self._context)
        )

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """See ``gateway.exchange.ResponseStrategy``."""
        self.process_events = UsageCounter(self.request).apply
        return self._backend.stream_passthrough(self.passthrough, self._context, take)

    def _get_translation(self) -> TranslationStrategy:
        if self._translation is None:
            self._translation = TranslationStrategy(
                self._adapter,
                self._client_request,
                self._route,
                self._response_context,
                self._context,
            )
        return self._translation


def try_passthrough(
    dialect: ClientAdapter,
    call: ClientRequest,
    route: Route,
    about: ResponseContext,
    context: RequestContext,
    *,
    translation: TranslationStrategy | None = None,
) -> PassthroughStrategy | None:
    """The call as it may be passed on; None where the gateway has something to do with it.

    ``translation`` is what it would be otherwise, if that is known.
    """
    relayer, headers = route.target.passthrough_backend, call.headers
    if relayer is None or (_STRICT_HEADER in headers and headers[_STRICT_HEADER] == "1"):
        return None
    relay = relayer.prepare_passthrough(dialect, call, about)
    if relay is None:
        return None
    return PassthroughStrategy(relay, relayer, dialect, call, route, about, context, translation)
