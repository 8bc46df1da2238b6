"""Handles one HTTP request, from its headers to the end of its response.

1. find the protocol and the endpoint of the path (``routing.paths``), before the body is read
2. authenticate the caller (``auth.api_keys``)
3. read the model's name from the body (the protocol's ``read_routing_info``)
4. route to a target (``routing.router``) and reserve its part of the key's limits (``ratelimit``)
5. send it to that target, or to a fallback (``pipeline.dispatcher``)

An error before the response has begun is answered in the caller's protocol, by ``_send_error``.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from backends.aio import DeadlineTimer
from backends.interfaces import AttemptTrace, Deadline, RequestContext, Timeouts
from gateway.auth.api_keys import Authenticator, KeysPending, Principal, may_explain
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.observability.recording_writer import RecordingPolicy, RequestRecorder
from gateway.pipeline.dispatcher import Dispatcher, RoutedRequest, set_target_labels
from gateway.pipeline.feedback import FEEDBACK_PATH, FeedbackEndpoint, ResponseIdReader
from gateway.pipeline.http import (
    HttpRequest,
    ResponseWriter,
    decompress_body,
    get_client_request_id,
    parse_seconds,
)
from gateway.pipeline.proxy import ProxiedBody, ProxiedRequest, get_proxy_adapter
from gateway.pipeline.recorder import (
    EXPLAIN_HEADER,
    NULL_RECORDER,
    ExplainPolicy,
    ExplainRecorder,
    explain_nothing,
)
from gateway.pipeline.recording import RequestCapture
from gateway.pipeline.responder import record_error, send_reply
from gateway.pipeline.shadow import ShadowManager
from gateway.ratelimit.limiter import CounterRegistry, RateLimiter, Reservation
from gateway.routing.paths import EndpointMatch, PathRouter
from gateway.routing.router import PrincipalCatalog, Route, Router
from gateway.store.references import ReferenceLoader
from protocols.core.catalog import Catalog
from protocols.core.errors import (
    GatewayError,
    InternalError,
    InvalidParameter,
    RequestNotFound,
    StoredObjectNotFound,
    Unauthorized,
    UnsupportedFeature,
)
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    Headers,
    HttpResponse,
    RoutingInfo,
    StoresResponses,
    SupportsTokenEstimate,
)

log = logging.getLogger("interlingua")

_TIMEOUT_HEADER = "x-interlingua-timeout"
"""The request header with the client's timeout, in seconds."""
_LARGE_BODY = 256 << 10
"""A body of so many bytes takes milliseconds to translate, so a thread does it."""
_BODILESS_METHODS: Final = frozenset({"GET", "HEAD"})
"""The methods of requests whose body is not read."""
_LONG_LIST: Final = 100
"""Models from which on building their list would delay other requests."""
_CACHED_LISTS: Final = 32
_MODEL_TASKS: Final = frozenset({"generate", "tokenize"})
"""The tasks that need a model."""


class HandlerSettings(Struct, frozen=True):
    """The settings of a listener's requests. ``max_body_size`` is in bytes."""

    max_body_size: int = 8 << 20
    timeouts: Timeouts = Timeouts()
    allow_protocol_header: bool = False
    """Whether a request header may select the protocol of a path that several have."""
    explain_without_key: bool = False
    """Whether requests without a key may request an explanation."""
    config_hash: str = ""
    """The configuration's hash, for the access log."""
    default_model: str = ""
    """The model of forwarded requests that name none; "" if they are refused."""


class Tracer(Protocol):
    """Traces some requests from their start; a ``RecordObserver`` ends their spans."""

    def start_trace(self, record: RequestRecord, http: HttpRequest) -> None:
        """Start the span of a sampled request; set ``record.trace_id`` and ``record.span_id``."""

    def get_trace(self, record: RequestRecord) -> AttemptTrace | None:
        """The observer of a sampled request's attempts."""


class GatewayServices(Struct, frozen=True):
    """The services that all requests share; a test passes in its own."""

    clock: Clock
    wall_clock: Callable[[], float]
    """Unix seconds."""
    new_id: Callable[[], str]
    draw: Callable[[], float]
    """A random number in [0, 1), for traffic splits."""
    observe_request: RecordObserver
    shadow_manager: ShadowManager
    counter_registry: CounterRegistry
    """The usage of the keys' limits."""
    explain_policy: ExplainPolicy = explain_nothing
    """Returns the recorder of a request whose explanation is requested."""
    dropped_counts: Mapping[str, Callable[[], int]] = {}
    """Counts dropped log lines, usage rows and traces; see ``observability.metrics.system``."""
    tracer: Tracer | None = None
    """Traces requests, if tracing is configured."""
    reference_loader: ReferenceLoader | None = None
    """Loads what requests to stateful endpoints refer to, if responses are stored at all."""
    request_recorder: RequestRecorder | None = None
    """Records the requests of models and routes with a recording policy."""
    feedback: FeedbackEndpoint | None = None
    """Takes feedback on responses, if it is collected."""


class ActiveRequest(Struct, eq=False):
    """One HTTP request that is being handled."""

    http: HttpRequest
    writer: ResponseWriter
    record: RequestRecord
    reservation: Reservation | None = None
    """What it took of its key's limits, if it has any."""
    capture: RequestCapture | None = None
    """Captures it, if it is recorded."""

    @property
    def headers(self) -> Headers:
        """The rate-limit headers of its response."""
        return () if self.reservation is None else self.reservation.headers


class RequestHandler:
    """Handles the requests of one listener."""

    def __init__(
        self,
        path_router: PathRouter,
        router: Router,
        authenticator: Authenticator,
        settings: HandlerSettings,
        services: GatewayServices,
        *,
        pages: Mapping[str, Callable[[], HttpResponse]],
        limiter: RateLimiter | None = None,
    ) -> None:
        """``pages`` need no key: the gateway's own responses, unless a protocol has the path.

        ``limiter`` is None without rate limits.
        """
        self.path_router = path_router
        self._static_pages = {
            path: page for path, page in pages.items() if not path_router.has_page(path)
        }
        self._router = router
        self._authenticator = authenticator
        self._limiter = limiter
        self._settings = settings
        self._services = services
        self._clock = services.clock
        self._wall_clock = services.wall_clock
        self._new_id = services.new_id
        self._observe_request = services.observe_request
        self._explain_policy = services.explain_policy
        self._tracer = services.tracer
        self._reference_loader = services.reference_loader
        self._feedback = services.feedback
        deadline_timer = DeadlineTimer(services.clock, asyncio.get_running_loop)
        self.dispatcher = Dispatcher(
            router, settings.max_body_size, services.shadow_manager, deadline_timer
        )
        self._model_lists: dict[Hashable, tuple[tuple[bool, ...], HttpResponse]] = {}
        """Responses with lists of models, and the readiness for which they are valid."""
        self.running_count = 0
        """How many requests are running."""
        self._idle_event: asyncio.Event | None = None
        """Set while none is running, once ``wait_idle`` was called."""

    def adopt_running(self, former: "RequestHandler") -> None:
        """Let clients cancel requests that still run in ``former`` through this handler."""
        self.dispatcher.named_requests = former.dispatcher.named_requests

    def build_dry_run_handler(
        self, key: str | None, explain: ExplainPolicy, observe: RecordObserver
    ) -> "RequestHandler":
        """A handler of the same listener for one dry run, as if it had the API key of this name.

        It takes nothing of any limit and is not traced. Raises KeyError for an unknown key.
        """
        keys = self._authenticator if key is None else self._authenticator.impersonate(key)
        services = replace(
            self._services,
            explain_policy=explain,
            observe_request=observe,
            tracer=None,
            feedback=None,
        )
        pages = self._static_pages
        return RequestHandler(
            self.path_router, self._router, keys, self._settings, services, pages=pages
        )

    async def wait_idle(self) -> None:
        """Wait until no request is running."""
        self._idle_event = self._idle_event or asyncio.Event()
        while self.running_count:
            self._idle_event.clear()
            await self._idle_event.wait()

    async def handle(self, http: HttpRequest, writer: ResponseWriter) -> None:
        """Answer one request. Raises CancelledError only."""
        clock, config = self._clock, self._settings.config_hash
        started_at = clock()
        request_id = get_client_request_id(http.headers) or self._new_id()
        record = RequestRecord(
            request_id,
            self._wall_clock(),
            "",
            http.path[:200],
            http.method,
            http.peer,
            config_hash=config,
        )
        request = ActiveRequest(http, writer, record)
        self.running_count += 1
        try:
            if http.path in self._static_pages and http.method in _BODILESS_METHODS:
                send_reply(writer, self._static_pages[http.path](), record)
            else:
                await self._process_request(request)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            self.running_count -= 1
            if self._idle_event is not None and not self.running_count:
                self._idle_event.set()
            record.duration = clock() - started_at
            if request.reservation is not None:
                request.reservation.settle(record)
            self._observe_request(record)
            if request.capture is not None:
                request.capture.end(record)

    async def _process_request(self, request: ActiveRequest) -> None:
        http, record = request.http, request.record
        try:
            match = self.path_router.find_endpoint(http.method, http.path)
            if match.alternatives:
                match = await self._select_protocol(http, match)
            adapter = match.mount.adapter
            record.protocol = adapter.name
        except GatewayError as error:
            adapter = self.path_router.find_owner(http.path, http.headers).adapter
            record.protocol = adapter.name
            if self._feedback is not None and http.path == FEEDBACK_PATH:
                await self._take_feedback(self._feedback, request)
                return
            _send_error(adapter, error, None, request)
            return
        if self._tracer is not None:
            self._tracer.start_trace(record, http)
        headers, body = http.headers, b""
        try:
            principal = None
            if not match.endpoint.public:
                try:
                    principal = self._authenticator.authenticate(headers)
                except KeysPending:
                    principal = await self._authenticate_later(headers)
            record.key = "" if principal is None else principal.name
            recorder: ExplainRecorder = NULL_RECORDER
            if EXPLAIN_HEADER in headers and headers[EXPLAIN_HEADER] == "1":
                recorder = self._start_explanation(request, principal)
            has_body = match.endpoint.method not in _BODILESS_METHODS and (
                match.endpoint.task != "proxy"
            )
            body = await http.body(self._settings.max_body_size) if has_body else b""
            if has_body and "content-encoding" in headers:
                body = await self._decompress_body(http, body)
            client_request = _make_client_request(match, http, record, body)
            if recorder is not NULL_RECORDER:
                recorder.record_request(adapter, client_request, principal, http.peer)
            await self._answer_request(match, client_request, request, principal, recorder)
        except GatewayError as error:
            _send_error(adapter, error, _make_client_request(match, http, record, body), request)
        except Exception:
            log.exception("request %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            _send_error(adapter, bug, _make_client_request(match, http, record, body), request)

    async def _take_feedback(self, endpoint: FeedbackEndpoint, request: ActiveRequest) -> None:
        """Answer a request to the endpoint for feedback, which belongs to no protocol."""
        record = request.record
        try:
            try:
                principal = self._authenticator.authenticate(request.http.headers)
            except KeysPending:
                principal = await self._authenticate_later(request.http.headers)
            record.key = "" if principal is None else principal.name
            response = await endpoint.answer(request.http, principal)
        except GatewayError as error:
            record_error(record, error)
            response = endpoint.build_error(error)
        except Exception:
            log.exception("request %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            record_error(record, bug)
            response = endpoint.build_error(bug)
        send_reply(request.writer, response, record)

    async def _answer_request(
        self,
        match: EndpointMatch,
        client_request: ClientRequest,
        request: ActiveRequest,
        principal: Principal | None,
        recorder: ExplainRecorder,
    ) -> None:
        """Do what the endpoint is for."""
        endpoint, adapter = match.endpoint, match.mount.adapter
        if endpoint.task not in _MODEL_TASKS:
            if endpoint.task == "proxy":
                await self._forward(match, request, principal, recorder)
            elif endpoint.task == "recall":
                await self._send_stored(adapter, client_request, request)
            else:
                await self._send_info(adapter, client_request, request, principal)
            return
        if self._feedback is not None:
            request.writer = ResponseIdReader(request.writer, request.record)
        info = (
            adapter.read_routing_info(client_request)
            if len(client_request.body) < _LARGE_BODY
            else await asyncio.to_thread(adapter.read_routing_info, client_request)
        )
        routed = RoutedRequest(
            adapter,
            client_request,
            info,
            self._make_context(client_request, recorder, request.record),
            request.writer,
            request.record,
            principal,
            request.http.peer,
            recorder,
        )
        if endpoint.is_stateful:
            await self._prepare_stateful(routed, request.http)
        await self._dispatch(routed, request)

    async def _forward(
        self,
        match: EndpointMatch,
        request: ActiveRequest,
        principal: Principal | None,
        recorder: ExplainRecorder,
    ) -> None:
        """Forward a request that is not translated. Raises GatewayError."""
        http, record, adapter = request.http, request.record, match.mount.adapter
        body = ProxiedBody(http, self._settings.max_body_size)
        client_request = await body.find_model(
            get_proxy_adapter(adapter),
            lambda beginning: _make_client_request(match, http, record, beginning),
        )
        model = body.model or self._settings.default_model
        if not model:
            text = "you must provide the field 'model'"
            raise InvalidParameter(text, param="model", problem="missing")
        routed = RoutedRequest(
            adapter,
            client_request,
            RoutingInfo(model),
            self._make_context(client_request, NULL_RECORDER, record),
            request.writer,
            record,
            principal,
            http.peer,
            recorder,
        )
        route = self._route_request(routed)
        if route.model.recording is not None:
            self._capture_request(routed, request, route.model.recording)
        self._reserve_limits(routed, route, request, None)
        proxied = ProxiedRequest(routed, self._router, body)
        await proxied.run(self.dispatcher.running_requests, route)

    def _start_explanation(
        self, request: ActiveRequest, principal: Principal | None
    ) -> ExplainRecorder:
        """The recorder of a request whose explanation is requested."""
        recorder = self._explain_policy(
            request.record, principal, open_to_all=self._settings.explain_without_key
        )
        request.writer = recorder.wrap_writer(request.writer)
        return recorder

    async def _select_protocol(self, http: HttpRequest, match: EndpointMatch) -> EndpointMatch:
        """The endpoint of a path that several protocols have. Raises MethodNotAllowed."""
        principal = None
        with suppress(Unauthorized):  # raised again once the protocol of the error is known
            try:
                principal = self._authenticator.authenticate(http.headers)
            except KeysPending:
                principal = await self._authenticate_later(http.headers)
        return match.select_protocol(self._list_preferred_protocols(http, match, principal))

    def _list_preferred_protocols(
        self, http: HttpRequest, match: EndpointMatch, principal: Principal | None
    ) -> Iterator[str]:
        """Protocol names for a path that several protocols have, the preferred one first."""
        if self._settings.allow_protocol_header:
            yield http.headers.get("x-interlingua-protocol", "")
        yield from match.list_header_protocols(http.headers)
        models = None if self._authenticator.allows_anonymous else frozenset[str]()
        if principal is not None:
            yield principal.protocol or ""
            models = principal.models
        yield self._router.find_protocol(match.params.get("model", ""), models) or ""
        yield from match.list_default_protocols()

    async def _authenticate_later(self, headers: Mapping[str, str]) -> Principal | None:
        """Authenticate once the issuer's keys are there. Raises Unauthorized."""
        await self._authenticator.wait_keys()
        return self._authenticator.authenticate(headers)

    async def _decompress_body(self, http: HttpRequest, body: bytes) -> bytes:
        """Decode the body in a thread: a small one may become a large one."""
        encoding = http.headers["content-encoding"]
        if not encoding:
            return body
        return await asyncio.to_thread(
            decompress_body, body, encoding, self._settings.max_body_size
        )

    async def _prepare_stateful(self, routed: RoutedRequest, http: HttpRequest) -> None:
        """Load what a request refers to. Raises as ``ReferenceLoader.load_parts``."""
        adapter, call, loader = routed.adapter, routed.client_request, self._reference_loader
        assert isinstance(adapter, StoresResponses)  # noqa: S101 - as its endpoint says
        if loader is None:
            adapter.set_references(call, None)
            return
        owner, context = routed.record.key, routed.context
        counts = (
            await asyncio.to_thread(adapter.count_references, call)
            if context.offload_to_thread
            else adapter.count_references(call)
        )
        parts = await loader.load_parts(
            owner,
            counts,
            lambda stored: adapter.read_parts(stored, counts),
            account=http,
            body_size=len(call.body),
            limit=self._settings.max_body_size,
        )
        size = sum(len(part) * counts[name] for name, part in parts.items())
        context.offload_to_thread = len(call.body) + size >= _LARGE_BODY
        if size < _LARGE_BODY:
            adapter.set_references(call, parts)
        else:
            await asyncio.to_thread(adapter.set_references, call, parts)
        if not routed.explain_recorder.dry_run:
            routed.store_response = partial(loader.store.add_response, owner)

    async def _send_stored(
        self, adapter: ClientAdapter, call: ClientRequest, request: ActiveRequest
    ) -> None:
        """Answer from a stored response. Raises StoredObjectNotFound or Overloaded."""
        assert isinstance(adapter, StoresResponses)  # noqa: S101 - as its endpoint says
        name, loader, owner = (
            adapter.read_stored_id(call),
            self._reference_loader,
            request.record.key,
        )
        stored = None if loader is None else await loader.load_response(owner, name, request.http)
        if loader is None or stored is None:
            text = f"Response with id '{name[:128]}' not found."
            raise StoredObjectNotFound(text, id=name)
        if call.endpoint.method == "DELETE":
            await loader.store.remove_response(owner, name)
        response = (
            adapter.encode_stored(call, stored)
            if len(stored.body) < _LARGE_BODY
            else await asyncio.to_thread(adapter.encode_stored, call, stored)
        )
        send_reply(request.writer, response, request.record)

    async def _send_info(
        self,
        adapter: ClientAdapter,
        client_request: ClientRequest,
        request: ActiveRequest,
        principal: Principal | None,
    ) -> None:
        """Answer a request that needs no model."""
        catalog = PrincipalCatalog(
            self._router,
            None if principal is None else principal.models,
            may_explain(principal, open_to_all=self._settings.explain_without_key),
        )
        if client_request.endpoint.task == "stop":
            info = await asyncio.to_thread(adapter.read_routing_info, client_request)
            self._cancel_request(adapter, info, request.record, catalog)
        response = await self._build_info_response(adapter, client_request, catalog)
        send_reply(request.writer, response, request.record)

    async def _build_info_response(
        self, adapter: ClientAdapter, client_request: ClientRequest, catalog: PrincipalCatalog
    ) -> HttpResponse:
        """A list of models is cached while no model changes; a long one is built in a thread."""
        if not client_request.endpoint.lists_models:
            return adapter.handle_info_request(client_request, catalog)
        path = client_request.endpoint.path
        key = (id(adapter), path, catalog.allowed_models, catalog.shows_targets)
        readiness = self._router.read_readiness()
        cached = self._model_lists.get(key)
        if cached is not None and cached[0] == readiness:
            return cached[1]
        if self._router.model_count > _LONG_LIST:
            response = await asyncio.to_thread(adapter.handle_info_request, client_request, catalog)
        else:
            response = adapter.handle_info_request(client_request, catalog)
        if len(self._model_lists) >= _CACHED_LISTS:
            self._model_lists.pop(next(iter(self._model_lists)))
        self._model_lists[key] = readiness, response
        return response

    def _dispatch(self, routed: RoutedRequest, request: ActiveRequest) -> Coroutine[Any, Any, None]:
        """Route the request, reserve its part of the limits, and send it to its target."""
        info = routed.routing_info
        if info.inform:
            return self._send_info(routed.adapter, routed.client_request, request, routed.principal)
        if info.other_names or not info.model:
            routed.routing_info = replace(info, model=self._router.find_name(info))
        route = self._route_request(routed)
        if route.model.recording is not None:
            self._capture_request(routed, request, route.model.recording)
        if self._limiter is not None:
            takes_tokens = routed.client_request.endpoint.task == "generate"
            body = routed.client_request.body if takes_tokens else None
            self._reserve_limits(routed, route, request, body)
        return self.dispatcher.dispatch(routed, route)

    def _capture_request(
        self, routed: RoutedRequest, request: ActiveRequest, policy: RecordingPolicy
    ) -> None:
        """Capture the request, if it is drawn."""
        recorder = self._services.request_recorder
        if (
            recorder is None
            or routed.explain_recorder.dry_run
            or self._services.draw() >= policy.config.share
        ):
            return
        capture = RequestCapture(
            policy,
            recorder.record_request,
            routed.client_request,
            routed.context,
            routed.writer,
            has_bodies=routed.client_request.endpoint.task in _MODEL_TASKS,
        )
        request.capture = routed.capture = capture
        request.writer = routed.writer = capture

    def _reserve_limits(
        self, routed: RoutedRequest, route: Route, request: ActiveRequest, body: bytes | None
    ) -> None:
        """Take the request's part of its key's limits; ``body`` is None if it asks for no tokens.

        Raises RateLimitExceeded, QuotaExceeded or Overloaded.
        """
        if self._limiter is None:
            return
        reservation = request.reservation = self._limiter.reserve(
            routed.record.key, route.requested_model, route.model.info, body, routed.adapter
        )
        if reservation is not None:
            reservation.check()
            routed.reservation, routed.headers = reservation, reservation.headers

    def _route_request(self, routed: RoutedRequest) -> Route:
        """Choose a target. Raises Forbidden where the key may not use the model.

        That is checked first, so that such a request takes no longer than one for an unknown model.
        """
        recorder, routing_info, record = routed.explain_recorder, routed.routing_info, routed.record
        principal = routed.principal
        if principal is not None and principal.models is not None:
            self._router.check_access(routing_info.model, principal.models)
        route = self._router.route(
            routing_info.model, routing_info.version, routed.get_attributes, recorder.route_observer
        )
        if recorder is not NULL_RECORDER:
            recorder.record_route(self._router, routing_info, route, routed.get_attributes)
        set_target_labels(record, route, routing_info.stream)
        record.split = route.split
        if self._feedback is not None and route.reason.bucket is not None:
            record.user_hash = f"{route.reason.bucket:013x}"
        return route

    def _cancel_request(
        self,
        adapter: ClientAdapter,
        info: RoutingInfo,
        record: RequestRecord,
        catalog: Catalog,
    ) -> None:
        """Cancel a running request of the same API key, by the client's id for it.

        Raises ModelNotFound or RequestNotFound.
        """
        catalog.find_model(info.model, info.version)
        client_id = info.client_id or ""
        responder = (
            self.dispatcher.named_requests.get((adapter.name, record.key, client_id))
            if client_id
            else None
        )
        if responder is None:
            raise RequestNotFound("no running request has this id", id=client_id)
        responder.stop()

    def _make_context(
        self, client_request: ClientRequest, recorder: ExplainRecorder, record: RequestRecord
    ) -> RequestContext:
        """The context of a request whose body was read."""
        clock, timeouts, headers = self._clock, self._settings.timeouts, client_request.headers
        received_at = clock()
        deadline = Deadline(clock, timeouts.total, received_at)
        if (
            _TIMEOUT_HEADER in headers
            and (seconds := parse_seconds(headers[_TIMEOUT_HEADER])) is not None
        ):
            deadline.shorten(seconds)
        traceparent = headers.get("traceparent")
        return RequestContext(
            record.id,
            deadline,
            clock,
            timeouts,
            record.key or None,
            traceparent,
            received_at,
            recorder.request_observer,
            received_at,
            traceparent and headers.get("tracestate"),
            None if self._tracer is None else self._tracer.get_trace(record),
            len(client_request.body) >= _LARGE_BODY,
        )


def _send_error(
    adapter: ClientAdapter,
    error: GatewayError,
    client_request: ClientRequest | None,
    request: ActiveRequest,
) -> None:
    record_error(request.record, error)
    if request.writer.started:  # a bug: the response is cut off, not ended
        request.record.outcome = "truncated"
        return
    error.request_id = request.record.id
    response, headers = adapter.encode_error(error, client_request), request.headers
    if client_request is not None and isinstance(adapter, SupportsTokenEstimate):
        estimate = _estimate_tokens(adapter, error, client_request)
        if estimate is not None:
            response, headers = estimate, (*headers, _ESTIMATE_HEADER)
    send_reply(request.writer, response, request.record, headers)


_ESTIMATE_HEADER: Final = ("x-interlingua-loss", "input_tokens=approximated")


def _estimate_tokens(
    adapter: SupportsTokenEstimate, error: GatewayError, client_request: ClientRequest
) -> HttpResponse | None:
    """The estimated number of tokens of a text that the target can't count now."""
    is_targets = isinstance(error, UnsupportedFeature) or error.origin != "client"
    if client_request.endpoint.task != "tokenize" or not is_targets:
        return None
    try:
        return adapter.estimate_tokens(client_request)
    except GatewayError:
        return None


def _make_client_request(
    match: EndpointMatch, http: HttpRequest, record: RequestRecord, body: bytes
) -> ClientRequest:
    return ClientRequest(
        match.endpoint,
        match.params,
        http.headers,
        http.query,
        body,
        http.path,
        record.id,
        record.started_at,
    )
