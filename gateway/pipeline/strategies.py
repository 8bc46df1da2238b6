"""How a target serves a request: by pass-through, or by translation."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import (
    BackendRequest,
    EventSink,
    PassthroughSource,
    PreparedRequest,
    RequestContext,
    StreamItem,
    StreamItems,
)
from gateway.config.schema import OnLoss
from gateway.emulation.execute import (
    EventProcessor,
    keep_events,
    send_emulated,
    send_emulated_unary,
)
from gateway.emulation.planner import NO_EMULATION, EmulationPlan, plan_emulation, plan_passthrough
from gateway.pipeline.model_settings import apply_model_settings, list_clamped_fields
from gateway.routing.router import Model, Route
from protocols.core import loss
from protocols.core.aggregate import aggregate
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import Event, ResponseExtra
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    HttpResponse,
    ResponseContext,
    ResponseEncoder,
    StorableEncoder,
    StoredResponse,
    SupportsHeartbeat,
    get_query_parameters,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import AnyRequest, GenerationRequest, select_names
from protocols.core.response_losses import LossyEvent, find_losses, get_single_losses
from protocols.core.stateful import refuse_lost_state
from protocols.params import find_sent_param

_STRICT_HEADER: Final = "x-interlingua-strict"
"""The request header of a client that wants an error instead of an unsupported parameter."""
EventObserver = Callable[[Sequence[Event]], None]


class RequestDecoder(Struct, eq=False):
    """Decodes a client's request for one target, once.

    The backend may keep it with the request: it does not refer to the attempt, which would be a
    reference cycle with all that a request holds.
    """

    _adapter: ClientAdapter
    _client_request: ClientRequest
    _route: Route
    _decoded: tuple[AnyRequest, Mapping[str, str]] | None = None

    def decode(self) -> tuple[AnyRequest, Mapping[str, str]]:
        """See ``backends.interfaces.BackendRequest.decode``."""
        if self._decoded is None:
            adapter, client_request, route = self._adapter, self._client_request, self._route
            names = adapter.field_names(client_request)
            decoded = adapter.decode_request(client_request, route.model.info)
            find_param = partial(find_sent_param, adapter, client_request.endpoint.operation)
            if isinstance(decoded, GenerationRequest) and (
                decoded.legacy_functions or decoded.output is not None
            ):
                names = select_names(decoded, names)
            request = apply_model_settings(decoded, route, names, adapter.name, find_param)
            self._decoded = request, names
        return self._decoded


class TargetAttempt(Struct, eq=False):
    """What one attempt at a target needs: the request for its backend, and its response.

    ``prepare`` makes it, and chooses between pass-through and translation. A request that is passed
    through is decoded only if its response has to be encoded.
    """

    adapter: ClientAdapter
    client_request: ClientRequest
    route: Route
    context: RequestContext
    prepared: PreparedRequest
    """The request as the backend gets it, before emulation."""
    _response_context: ResponseContext
    _decoder: RequestDecoder
    _encoder: ResponseEncoder | None = None
    process_events: EventProcessor = keep_events
    """The events to report for a batch of the response. Call it for each batch, in order."""
    observe_events: EventObserver | None = None
    """Receives the events that ``process_events`` returns, if it is set before ``stream``."""
    plan: EmulationPlan = NO_EMULATION
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    """The parameters to report as unsupported."""

    def __repr__(self) -> str:
        way = "translated" if self.prepared.passthrough is None else "passed through"
        return f"<TargetAttempt {self.context.id} at {self.route.target_name}, {way}>"

    @classmethod
    def prepare(
        cls,
        adapter: ClientAdapter,
        client_request: ClientRequest,
        route: Route,
        *,
        response_context: ResponseContext,
        context: RequestContext,
    ) -> "TargetAttempt":
        """Choose between pass-through and translation. Raises ClientError."""
        decoder = RequestDecoder(adapter, client_request, route)
        source = PassthroughSource(adapter, client_request, response_context)
        prepared = route.target.backend.prepare(BackendRequest(decoder.decode, source))
        attempt = cls(
            adapter=adapter,
            client_request=client_request,
            route=route,
            context=context,
            prepared=prepared,
            _response_context=response_context,
            _decoder=decoder,
        )
        passthrough = prepared.passthrough
        sent = () if passthrough is None else passthrough.upstream_request.headers
        lost = find_lost_arguments(adapter, client_request, sent, route.model)
        if passthrough is None:
            attempt._plan_translation(lost)
        elif lost or prepared.unsupported_parameters:
            attempt.plan = plan_passthrough((*prepared.unsupported_parameters, *lost))
            attempt._apply_loss_rule()
        return attempt

    def _plan_translation(self, lost: Sequence[UnsupportedParameter]) -> None:
        request = self.prepared.request
        unsupported = (*self.prepared.unsupported_parameters, *lost)
        if isinstance(request, GenerationRequest) and request.clamped_fields:
            unsupported = (*unsupported, *list_clamped_fields(request.clamped_fields))
        if unsupported:
            refuse_lost_state(self.adapter.stateful_fields, request.extra, unsupported)
            self.plan = plan_emulation(request, unsupported)
            self._apply_loss_rule()
        self._encoder = self._create_encoder()

    def check_content(self) -> None:
        """Raise UnsupportedFeature for content that the target can't see, if the model refuses it.

        Of fallbacks, the pipeline skips those that can't see it, whatever the model says.
        """
        lost = self.plan.unsupported_parameters
        if lost and self.route.model.unsupported_content == "refuse":
            loss.refuse_lost_content(lost)

    def translate(self) -> tuple[AnyRequest, Sequence[UnsupportedParameter]]:
        """The request as it would be translated, and its unsupported parameters.

        Raises ClientError.
        """
        if self.prepared.passthrough is None:
            return self.prepared.request, self.plan.unsupported_parameters
        prepared = self.route.target.backend.prepare(BackendRequest(self._decoder.decode))
        plan = plan_emulation(prepared.request, prepared.unsupported_parameters)
        return prepared.request, plan.unsupported_parameters

    def stream(self, sink: EventSink | None = None) -> StreamItems:
        """Send the request; see ``backends.interfaces.Backend.send``."""
        route, context = self.route, self.context
        context.model_timeouts = route.model.timeouts
        backend = route.target.backend
        items, process = send_emulated(backend, self.prepared, context, self.plan, sink)
        observe = self.observe_events
        self.process_events = process if observe is None else _observe_events(process, observe)
        return items

    def send_unary(self) -> Coroutine[Any, Any, Sequence[StreamItem]]:
        """Send a unary request; see ``backends.interfaces.Backend.send_unary``."""
        route, context = self.route, self.context
        context.model_timeouts = route.model.timeouts
        items, process = send_emulated_unary(
            route.target.backend, self.prepared, context, self.plan
        )
        observe = self.observe_events
        self.process_events = process if observe is None else _observe_events(process, observe)
        return items

    def get_encoder(self) -> ResponseEncoder:
        """The encoder of the response; the same one each time."""
        if self._encoder is None:
            passthrough = self.prepared.passthrough
            if passthrough is None or passthrough.create_encoder is None:
                self._encoder = self._create_encoder()
            else:
                self._encoder = passthrough.create_encoder()
        return self._encoder

    def release_body(self) -> None:
        """Let go of the body that was sent to the worker, since it will not be sent again.

        The client's is not needed any more, either.
        """
        if (passthrough := self.prepared.passthrough) is not None:
            if passthrough.create_encoder is None:
                self.get_encoder()  # which reads the client's body
            self.prepared = replace(self.prepared, passthrough=passthrough.without_body())

    def get_heartbeat_encoder(self) -> SupportsHeartbeat | None:
        """The encoder of a stream that has to be kept alive; None if the worker writes it."""
        if self.prepared.passthrough is not None:
            return None
        encoder = self.get_encoder()
        if not hasattr(encoder, "heartbeat_interval"):  # isinstance would be fifty calls
            return None
        return cast("SupportsHeartbeat", encoder)

    def get_stream_headers(self) -> Headers:
        """The headers of a stream, after its first events."""
        if self.prepared.passthrough is not None:
            return self.prepared.passthrough.build_headers() + loss.build_loss_headers(
                self.unsupported_parameters
            )
        encoder = self.get_encoder()
        return (
            ("Content-Type", encoder.content_type),
            *encoder.headers(),
            *loss.build_loss_headers(self.unsupported_parameters),
        )

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        """The unary response; ``body`` is set if the worker wrote it already.

        Raises StreamBroken if the events are incomplete.
        """
        passthrough = self.prepared.passthrough
        if body is not None and passthrough is not None:
            headers = passthrough.build_headers()
            if self.unsupported_parameters:
                headers += loss.build_loss_headers(self.unsupported_parameters)
            return HttpResponse(200, body, headers)
        encoder = self.get_encoder()
        response = encoder.encode_unary(aggregate(events))
        self.report_unwritten()
        headers = (
            *response.headers,
            *encoder.headers(),
            *loss.build_loss_headers(self.unsupported_parameters),
        )
        return HttpResponse(response.status, response.body, headers)

    def report_lost_event(self, event: LossyEvent, *, is_encoded: bool = False) -> None:
        """Report what the client's protocol lacks, unless the client gets it.

        ``is_encoded``: a unary response is not passed through as the worker wrote it.
        """
        if (passthrough := self.prepared.passthrough) is not None:
            is_own = not isinstance(event, ResponseExtra) or event.source != ""
            if is_own or not (is_encoded or passthrough.encodes_events):
                return
        encoder = self.get_encoder() if passthrough is None else None
        if lost := find_losses(event, encoder):
            self._report_losses(lost)

    def report_unwritten(self) -> None:
        """Report what the encoder has left out of what it has encoded so far."""
        if lost := get_single_losses(self._encoder):
            self._report_losses(lost)

    def _report_losses(self, lost: Iterable[UnsupportedParameter]) -> None:
        if self.route.model.on_loss == "ignore" or loss.is_full(self.unsupported_parameters):
            return
        self.unsupported_parameters = loss.limit_losses(lost, self.unsupported_parameters)

    def get_worker_headers(self) -> Headers:
        """The worker's headers for the client; those that it misses are reported."""
        context = self.context
        if context.worker_protocol == self.adapter.name:
            return context.worker_headers
        if lost := context.worker_header_rules.find_lost(context.worker_headers):
            self._report_losses(lost)
        return ()

    def get_stored_response(self) -> StoredResponse | None:
        """The response to store, after its end was encoded."""
        encoder = self._encoder
        return encoder.stored_response if isinstance(encoder, StorableEncoder) else None

    def _apply_loss_rule(self) -> None:
        """Raise UnsupportedFeature, or set the parameters to report."""
        rule = get_loss_rule(self.route.model, self.client_request.headers)
        if rule == "reject" and (lost := self.plan.lost_parameters):
            fields = ", ".join(dict.fromkeys(parameter.field for parameter in lost))
            model = self.route.model.info.name
            raise UnsupportedFeature(
                f"the model {model!r} can't honour: {fields}", param=lost[0].field
            )
        if rule != "ignore":
            self.unsupported_parameters = self.plan.unsupported_parameters

    def _create_encoder(self) -> ResponseEncoder:
        passthrough = self.prepared.passthrough
        request = self.prepared.request if passthrough is None else self._decoder.decode()[0]
        return self.adapter.create_encoder(
            self.client_request,
            request,  # type: ignore[arg-type]  # the adapter has decoded it itself
            self._response_context,
        )


def get_loss_rule(model: Model, headers: Mapping[str, str]) -> OnLoss:
    """What becomes of a request of which something would be lost."""
    is_strict = _STRICT_HEADER in headers and headers[_STRICT_HEADER] == "1"
    return "reject" if is_strict else model.on_loss


def find_lost_arguments(
    adapter: ClientAdapter, call: ClientRequest, sent: Headers, model: Model
) -> tuple[UnsupportedParameter, ...]:
    """What a request says in its headers and its query, but not to the worker of the model."""
    lost = loss.find_lost_headers(
        call.headers, adapter.request_headers, sent, model.routing_headers
    )
    if call.query:
        lost += loss.find_lost_query(call.query, get_query_parameters(adapter))
    return lost


def _observe_events(process: EventProcessor, observe: EventObserver) -> EventProcessor:
    def process_and_observe(events: Sequence[Event]) -> Sequence[Event]:
        events = process(events)
        observe(events)
        return events

    return process_and_observe
