"""How a target answers a client of another dialect: by way of the one internal request."""

from collections.abc import Sequence

from backends.interfaces import EventSink, RequestContext, StreamItem, StreamItems
from gateway.emulation.execute import collect_emulated, stream_emulated
from gateway.emulation.planner import plan_emulation
from gateway.fitting import apply_model_settings
from gateway.routing.router import Route
from protocols.core import loss
from protocols.core.aggregate import aggregate
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    HttpResponse,
    ResponseContext,
    ResponseEncoder,
)
from protocols.core.loss import UnsupportedParameter


class TranslationStrategy:
    """A decoded request and what writes its answer. Raises ClientError when it is made."""

    unsupported_parameters: tuple[UnsupportedParameter, ...]

    def __init__(
        self,
        dialect: ClientAdapter,
        call: ClientRequest,
        route: Route,
        about: ResponseContext,
        context: RequestContext,
    ) -> None:
        names = dialect.field_names(call)
        decoded = dialect.decode_request(call, route.model.info)
        self.request = apply_model_settings(decoded, route, names, dialect.name)
        self._backend = route.target.backend
        self._context = context
        rule = "reject" if call.headers.get("x-interlingua-strict") == "1" else route.model.on_loss
        self.plan = plan_emulation(
            self.request, self._backend.unsupported_parameters(self.request, names)
        )
        if rule == "reject" and (lost := self.plan.lost_parameters):
            listed = ", ".join(one.field for one in lost)
            model = route.model.info.name
            raise UnsupportedFeature(
                f"the model {model!r} can't honour: {listed}", param=lost[0].field
            )
        self.unsupported_parameters = () if rule == "ignore" else self.plan.unsupported_parameters
        self._encoder = dialect.create_encoder(call, self.request, about)

    def get_encoder(self) -> ResponseEncoder:
        """See ``gateway.exchange.ResponseStrategy``."""
        return self._encoder

    def get_stream_headers(self) -> Headers:
        """See ``gateway.exchange.ResponseStrategy``."""
        encoder = self._encoder
        return (
            ("Content-Type", encoder.content_type),
            *encoder.headers(),
            *self._build_loss_headers(),
        )

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """See ``gateway.exchange.ResponseStrategy``."""
        return events

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        """See ``gateway.exchange.ResponseStrategy``."""
        del body
        reply = self._encoder.encode_unary(aggregate(events))
        headers = (*reply.headers, *self._encoder.headers(), *self._build_loss_headers())
        return HttpResponse(reply.status, reply.body, headers)

    async def collect(self) -> StreamItem:
        """See ``gateway.exchange.ResponseStrategy``."""
        return None, await collect_emulated(self._backend, self.request, self._context, self.plan)

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """See ``gateway.exchange.ResponseStrategy``."""
        return stream_emulated(self._backend, self.request, self._context, self.plan, take)

    def _build_loss_headers(self) -> Headers:
        return (
            (("x-interlingua-loss", loss.format_loss_header(self.unsupported_parameters)),)
            if self.unsupported_parameters
            else ()
        )
