"""How a target answers a client of another dialect: by way of the one internal request."""

from collections.abc import Sequence

from gateway.core import loss
from gateway.core.aggregate import folded
from gateway.core.context import Context
from gateway.core.errors import Unsupported
from gateway.core.loss import Loss
from gateway.core.ports import About, Call, Dialect, Encoder, Headers, Piece, Pieces, Reply, Take
from gateway.core.types import Event
from gateway.emulation import answer, gathered, planned
from gateway.fitting import fit
from gateway.router import Route


class Translation:
    """A decoded request and what writes its answer. Raises ClientError when it is made."""

    unsupported_parameters: tuple[Loss, ...]

    def __init__(
        self, dialect: Dialect, call: Call, route: Route, about: About, context: Context
    ) -> None:
        names = dialect.field_names(call)
        decoded = dialect.decode_request(call, route.model.info)
        self.request = fit(decoded, route, names, dialect.name)
        self._backend = route.target.backend
        self._context = context
        rule = "reject" if call.headers.get("x-interlingua-strict") == "1" else route.model.on_loss
        self.plan = planned(self.request, self._backend.unsupported_parameters(self.request, names))
        if rule == "reject" and (lost := self.plan.lost_parameters):
            listed = ", ".join(one.field for one in lost)
            model = route.model.info.name
            raise Unsupported(f"the model {model!r} can't honour: {listed}", param=lost[0].field)
        self.unsupported_parameters = () if rule == "ignore" else self.plan.unsupported_parameters
        self._encoder = dialect.create_encoder(call, self.request, about)

    def get_encoder(self) -> Encoder:
        """See ``gateway.exchange.Answering``."""
        return self._encoder

    def get_stream_headers(self) -> Headers:
        """See ``gateway.exchange.Answering``."""
        encoder = self._encoder
        return (
            ("Content-Type", encoder.content_type),
            *encoder.headers(),
            *self._build_loss_headers(),
        )

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """See ``gateway.exchange.Answering``."""
        return events

    def build_response(self, events: Sequence[Event], body: bytes | None) -> Reply:
        """See ``gateway.exchange.Answering``."""
        del body
        reply = self._encoder.encode_unary(folded(events))
        headers = (*reply.headers, *self._encoder.headers(), *self._build_loss_headers())
        return Reply(reply.status, reply.body, headers)

    async def collect(self) -> Piece:
        """See ``gateway.exchange.Answering``."""
        return None, await gathered(self._backend, self.request, self._context, self.plan)

    def stream(self, take: Take | None = None) -> Pieces:
        """See ``gateway.exchange.Answering``."""
        return answer(self._backend, self.request, self._context, self.plan, take)

    def _build_loss_headers(self) -> Headers:
        return (
            (("x-interlingua-loss", loss.header(self.unsupported_parameters)),)
            if self.unsupported_parameters
            else ()
        )
