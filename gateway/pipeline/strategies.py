"""The two ways in which a target serves a request: translation and pass-through."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import (
    EventSink,
    PassthroughBackend,
    RequestContext,
    StreamItem,
    StreamItems,
)
from gateway.emulation.execute import collect_emulated, stream_emulated
from gateway.emulation.planner import plan_emulation
from gateway.emulation.usage import UsageCounter, add_usage
from gateway.routing.router import Route
from protocols.core import loss
from protocols.core.aggregate import aggregate
from protocols.core.errors import InvalidParameter, UnsupportedFeature
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
from protocols.core.request import GenerationRequest, Request, SamplingParams, StopConditions

# The model's name, defaults and limits, applied to a client's request.

SectionT = TypeVar("SectionT", SamplingParams, StopConditions)

MAX_CHOICES = 8192
"""The maximum number of choices of a request, over all its prompts. Each costs memory before its
first token, and no protocol promises more."""

MAX_TOP_LOGPROBS = 1000
"""The maximum number of alternatives per token. Each has to be found, written and read."""


def apply_model_settings(
    request: Request, route: Route, names: Mapping[str, str], source: str
) -> Request:
    """The request for the route's target.

    ``names`` maps field paths to the client's wire names, ``source`` is its protocol. Raises
    InvalidParameter if a parameter exceeds the model's limit or one of the gateway's.
    """
    if not isinstance(request, GenerationRequest):
        return request.bind_target(route.target.backend_model, source)
    if request.choice_count > MAX_CHOICES:
        raise _build_limit_error(names.get("n", "n"), MAX_CHOICES, request.choice_count, "in all")
    if request.logprobs is not None and request.logprobs.top > MAX_TOP_LOGPROBS:
        name = names.get("logprobs.top", "logprobs")
        raise _build_limit_error(name, MAX_TOP_LOGPROBS, request.logprobs.top, "here")
    fitted = request.bind_target(route.target.backend_model, source)
    defaults = route.model.defaults
    if defaults.sampling or defaults.stopping:
        sampling = _fill_defaults(request.sampling, defaults.sampling)
        stopping = _fill_defaults(request.stopping, defaults.stopping)
        fitted = replace(fitted, sampling=sampling, stopping=stopping)
    most = route.model.info.max_tokens
    return fitted if most is None else _limit_max_tokens(fitted, most, names)


def select_unset_defaults(
    section: SamplingParams | StopConditions, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The defaults that apply to ``section``: those of fields that the client did not set."""
    return {
        name: default for name, default in defaults.items() if getattr(section, name) in (None, ())
    }


def _fill_defaults(section: SectionT, defaults: Mapping[str, Any]) -> SectionT:
    silent = select_unset_defaults(section, defaults)
    return replace(section, **silent) if silent else section


def _limit_max_tokens(
    request: GenerationRequest, most: int, names: Mapping[str, str]
) -> GenerationRequest:
    asked = request.stopping.max_tokens
    if asked is None:
        return replace(request, stopping=replace(request.stopping, max_tokens=most))
    if asked > most:
        param = names.get("stopping.max_tokens", "max_tokens")
        raise _build_limit_error(param, most, asked, "for this model")
    return request


def _build_limit_error(param: str, most: int, asked: int, where: str) -> InvalidParameter:
    text = f"'{param}' must be at most {most} {where}, got {asked}"
    return InvalidParameter(text, param=param, problem="above", got=asked)


class TranslationStrategy:
    """The internal request and its encoder. The constructor raises ClientError."""

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
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return self._encoder

    def get_stream_headers(self) -> Headers:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        encoder = self._encoder
        return (
            ("Content-Type", encoder.content_type),
            *encoder.headers(),
            *self._build_loss_headers(),
        )

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return events

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        del body
        reply = self._encoder.encode_unary(aggregate(events))
        headers = (*reply.headers, *self._encoder.headers(), *self._build_loss_headers())
        return HttpResponse(reply.status, reply.body, headers)

    async def collect(self) -> StreamItem:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return None, await collect_emulated(self._backend, self.request, self._context, self.plan)

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return stream_emulated(self._backend, self.request, self._context, self.plan, take)

    def _build_loss_headers(self) -> Headers:
        return (
            (("x-interlingua-loss", loss.format_loss_header(self.unsupported_parameters)),)
            if self.unsupported_parameters
            else ()
        )


# Pass-through: the client's bytes go to the worker, and the worker's to the client.

_STRICT_HEADER: Final = "x-interlingua-strict"
"""The request header of a client that wants an error instead of an unsupported parameter."""


class PassthroughStrategy(Struct, eq=False):
    """A request that is passed through. It is translated only if its response has to be."""

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
    """See ``gateway.pipeline.responder.ResponseStrategy``. Adds usage if the worker sends none."""
    _encoder: ResponseEncoder | None = None

    @property
    def request(self) -> Request:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return self.passthrough.request

    def get_encoder(self) -> ResponseEncoder:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        if self._encoder is None:
            make = self.passthrough.create_encoder
            self._encoder = self._get_translation().get_encoder() if make is None else make()
        return self._encoder

    def get_stream_headers(self) -> Headers:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return self.passthrough.build_headers()

    def build_response(self, events: Sequence[Event], body: bytes | None) -> HttpResponse:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        if body is None:
            return self._get_translation().build_response(events, None)
        return HttpResponse(200, body, self.passthrough.build_headers())

    async def collect(self) -> StreamItem:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return add_usage(
            self.request, await self._backend.collect_passthrough(self.passthrough, self._context)
        )

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
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
    """The strategy for pass-through; None if the gateway has to change the request.

    ``translation`` is the strategy otherwise, if it was built before.
    """
    relayer, headers = route.target.passthrough_backend, call.headers
    if relayer is None or (_STRICT_HEADER in headers and headers[_STRICT_HEADER] == "1"):
        return None
    relay = relayer.prepare_passthrough(dialect, call, about)
    if relay is None:
        return None
    return PassthroughStrategy(relay, relayer, dialect, call, route, about, context, translation)
