"""The life of one exchange, from a request to its sink.

find        which dialect and endpoint the path belongs to, before anything of the body is read
admit       who asks
peek        which model (protocols/<dialect>)
route       which target (gateway/routing/router.py)
answer      by that target, or by one in its stead (gateway/pipeline/dispatcher.py)

Whatever goes wrong while nothing was sent is told in the caller's dialect, by ``refuse``.
"""

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, Protocol

from msgspec import Struct

from backends.aio import DeadlineTimer
from backends.interfaces import AttemptTrace, Deadline, RequestContext, Timeouts, Tokenizer
from gateway.auth.api_keys import Authenticator, KeysPending, Principal, authorize_model
from gateway.explain.recorder import EXPLAIN_HEADER, ExplainPolicy, ExplainRecorder, explain_nothing
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.pipeline.dispatcher import Dispatcher, RoutedRequest, set_target_labels
from gateway.pipeline.http import (
    HttpRequest,
    ResponseWriter,
    decompress_body,
    get_client_request_id,
    parse_seconds,
)
from gateway.pipeline.responder import record_error, send_reply
from gateway.pipeline.shadow import ShadowManager
from gateway.ratelimit.limiter import CounterRegistry, RateLimiter
from gateway.routing.paths import EndpointMatch, PathRouter
from gateway.routing.router import Route, Router
from protocols.core.errors import (
    DeadlineExceeded,
    GatewayError,
    InternalError,
    RequestNotFound,
    UnsupportedFeature,
)
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    HttpResponse,
    SupportsTokenize,
)

log = logging.getLogger("interlingua")

_TIMEOUT_HEADER = "x-interlingua-timeout"
"""The header that says how many seconds a client waits."""
_LARGE_BODY = 256 << 10
"""Bytes of a body that take some milliseconds to translate, or many where it has many parts."""
_MODEL_TASKS: Final = frozenset({"generate", "tokenize"})
"""The tasks that are a model's; the others need none."""


class HandlerSettings(Struct, frozen=True):
    """The limits of every exchange. ``body`` is in bytes."""

    max_body_size: int = 8 << 20
    timeouts: Timeouts = Timeouts()
    allow_protocol_header: bool = False
    """Whether a request may name its dialect where several have its path."""
    explain_without_key: bool = False
    """Whether who has no key may have requests explained."""
    config_hash: str = ""
    """The configuration's hash, for the record."""


class Tracer(Protocol):
    """Follows some exchanges from their begin; that they have ended they hear as all do."""

    def start_trace(self, record: RequestRecord, http: HttpRequest) -> None:
        """One begins. One that is followed has its ``record.trace`` and ``record.span`` now."""

    def get_trace(self, record: RequestRecord) -> AttemptTrace | None:
        """What is told how its answer comes about, if it is followed."""


class GatewayServices(Struct, frozen=True):
    """What the outside world gives an exchange; a test gives its own."""

    clock: Clock
    wall_clock: Callable[[], float]
    """Unix seconds."""
    new_id: Callable[[], str]
    draw: Callable[[], float]
    """A number in [0, 1), for splits."""
    observe_request: RecordObserver
    shadow_manager: ShadowManager
    counter_registry: CounterRegistry
    """What is used of the keys' limits."""
    explain_policy: ExplainPolicy = explain_nothing
    """What looks on where a request asks for it and its key may."""
    dropped_counts: Mapping[str, Callable[[], int]] = {}
    """How much of what was to be kept is lost, by what it is: see ``gateway.observability.metrics.system``."""
    tracer: Tracer | None = None
    """What is to be told of exchanges as they come about, where they are traced."""


class RequestHandler:
    """Serves one listener."""

    def __init__(
        self,
        paths: PathRouter,
        router: Router,
        keyring: Authenticator,
        settings: HandlerSettings,
        surroundings: GatewayServices,
        *,
        pages: Mapping[str, Callable[[], HttpResponse]],
        limiter: RateLimiter | None = None,
    ) -> None:
        """``pages``: what the gateway itself answers, to anybody, unless a dialect has the path.

        ``limiter`` is None where there are no limits.
        """
        self.path_router = paths
        self._static_pages = {
            path: page for path, page in pages.items() if not paths.has_path(path)
        }
        self._router = router
        self._authenticator = keyring
        self._limiter = limiter
        self._settings = settings
        self._clock = surroundings.clock
        self._wall_clock = surroundings.wall_clock
        self._new_id = surroundings.new_id
        self._observe_request = surroundings.observe_request
        self._explain_policy = surroundings.explain_policy
        self._tracer = surroundings.tracer
        lookout = DeadlineTimer(surroundings.clock, asyncio.get_running_loop)
        self.dispatcher = Dispatcher(
            router, settings.max_body_size, surroundings.shadow_manager, lookout
        )
        self.running_count = 0
        """The exchanges that it has now."""
        self._idle_event: asyncio.Event | None = None
        """That it has none, once somebody waits for it."""

    def adopt_running(self, former: "RequestHandler") -> None:
        """What runs at ``former`` may be stopped by its clients here, too."""
        self.dispatcher.named_requests = former.dispatcher.named_requests

    def for_dry_run(
        self, key: str | None, explain: ExplainPolicy, observe: RecordObserver
    ) -> "RequestHandler":
        """The same for a request of nobody's, as if it had the key of this name. Raises KeyError.

        What runs here can't be stopped there.
        """
        made = copy.copy(self)
        keyring = self._authenticator if key is None else self._authenticator.impersonate(key)
        made._authenticator, made.dispatcher = keyring, self.dispatcher.for_dry_run()  # noqa: SLF001 - its own
        made._explain_policy, made._observe_request = explain, observe  # noqa: SLF001 - as above
        made._limiter = made._tracer = None  # noqa: SLF001 - as above
        return made

    async def wait_idle(self) -> None:
        """Wait for the exchanges that run."""
        self._idle_event = self._idle_event or asyncio.Event()
        while self.running_count:
            self._idle_event.clear()
            await self._idle_event.wait()

    async def handle(self, http: HttpRequest, sink: ResponseWriter) -> None:
        """Answer one request. Raises only what cancels its task."""
        clock, config = self._clock, self._settings.config_hash
        began = clock()
        id_ = get_client_request_id(http.headers) or self._new_id()
        record = RequestRecord(id_, self._wall_clock(), "", http.path[:200], config=config)
        self.running_count += 1
        try:
            if http.path in self._static_pages:
                send_reply(sink, self._static_pages[http.path](), record)
            else:
                await self._process_request(http, sink, record)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            self.running_count -= 1
            if self._idle_event is not None and not self.running_count:
                self._idle_event.set()
            record.duration = clock() - began
            if self._limiter is not None:
                self._limiter.settle_request(record)
            self._observe_request(record)

    async def _process_request(
        self, http: HttpRequest, sink: ResponseWriter, record: RequestRecord
    ) -> None:
        try:
            found = self._match_endpoint(http, record)
        except GatewayError as error:
            dialect = self.path_router.find_owner(http.path).adapter
            record.dialect = dialect.name
            self._send_error(dialect, error, None, sink, record)
            return
        if self._tracer is not None:
            self._tracer.start_trace(record, http)
        dialect, headers, body = found.mount.adapter, http.headers, b""
        try:
            principal = await self._authenticate(found, http, record)
            watch = None
            if EXPLAIN_HEADER in headers and headers[EXPLAIN_HEADER] == "1":
                watch = self._explain_policy(
                    record, principal, open_to_all=self._settings.explain_without_key
                )
                sink = sink if watch is None else watch.wrap_sink(sink)
            body = await http.body(self._settings.max_body_size)
            if "content-encoding" in headers:
                body = self._decompress_body(http, body)
            call = _make_client_request(found, http, record, body)
            if watch is not None:
                watch.record_request(dialect, call, principal, http.peer)
            if found.endpoint.task in _MODEL_TASKS:
                context, peer = self._make_context(call, watch, record), http.peer
                envelope = dialect.read_routing_info(call)
                asked = RoutedRequest(
                    dialect, call, envelope, context, sink, record, principal, peer, watch
                )
                await self._dispatch(asked)
            else:
                self._send_info(dialect, call, sink, record)
        except GatewayError as error:
            self._send_error(
                dialect, error, _make_client_request(found, http, record, body), sink, record
            )
        except Exception:
            log.exception("exchange %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            self._send_error(
                dialect, bug, _make_client_request(found, http, record, body), sink, record
            )

    def _match_endpoint(self, http: HttpRequest, record: RequestRecord) -> EndpointMatch:
        """The endpoint. Raises PathNotFound or MethodNotAllowed."""
        found = self.path_router.find_endpoint(http.method, http.path)
        if found.alternatives:
            found = found.select_protocol(self._list_preferred_protocols(http, found))
        record.dialect = found.mount.adapter.name
        return found

    def _list_preferred_protocols(self, http: HttpRequest, found: EndpointMatch) -> Iterator[str]:
        """The dialects that are named for a request whose path several have, in their order."""
        if self._settings.allow_protocol_header:
            yield http.headers.get("x-interlingua-protocol", "")
        principal = self._authenticator.find_known_principal(http.headers)
        yield (principal and principal.protocol) or ""
        yield self._router.find_protocol(found.params.get("model", "")) or ""

    async def _authenticate(
        self, found: EndpointMatch, http: HttpRequest, record: RequestRecord
    ) -> Principal | None:
        """Who asks. Raises Unauthorized."""
        if found.endpoint.public:
            return None
        keyring, headers = self._authenticator, http.headers
        try:
            principal = keyring.authenticate(headers)
        except KeysPending:
            await keyring.wait_keys()
            principal = keyring.authenticate(headers)
        if principal is not None:
            record.key = principal.name
        return principal

    def _decompress_body(self, http: HttpRequest, body: bytes) -> bytes:
        encoding = http.headers["content-encoding"]
        return decompress_body(body, encoding, self._settings.max_body_size) if encoding else body

    def _send_info(
        self,
        dialect: ClientAdapter,
        call: ClientRequest,
        sink: ResponseWriter,
        record: RequestRecord,
    ) -> None:
        """Answer what is not a model's to answer."""
        if call.endpoint.task == "stop":
            self._cancel_request(dialect, call, record)
        send_reply(sink, dialect.handle_info_request(call, self._router), record)

    def _dispatch(self, asked: RoutedRequest) -> Coroutine[Any, Any, None]:
        """Have a model answer."""
        route, generates = (
            self._route_request(asked),
            asked.client_request.endpoint.task == "generate",
        )
        if self._limiter is not None:
            body = asked.client_request.body if generates else None
            model = route.model.info
            self._limiter.reserve(asked.record, route.requested_model, model, body, asked.adapter)
        return self.dispatcher.dispatch(asked, route) if generates else _tokenize(asked, route)

    def _route_request(self, asked: RoutedRequest) -> Route:
        """Which target answers. Raises Forbidden where the key is not good for its model."""
        watch, envelope, record = asked.explain_recorder, asked.routing_info, asked.record
        router = self._router if watch is None else watch.wrap_router(self._router)
        route = router.route(envelope.model, envelope.version, asked.get_attributes)
        if watch is not None:
            watch.record_route(router, envelope, route, asked.get_attributes())
        authorize_model(asked.principal, route.requested_model)
        set_target_labels(record, route, envelope.stream)
        record.split = route.split
        return route

    def _cancel_request(
        self, dialect: ClientAdapter, call: ClientRequest, record: RequestRecord
    ) -> None:
        """End the running request that the client names; only its own.

        Raises ModelNotFound or RequestNotFound.
        """
        envelope = dialect.read_routing_info(call)
        self._router.find_model(envelope.model, envelope.version)
        asked = envelope.client_id or ""
        running = (
            self.dispatcher.named_requests.get((dialect.name, record.key, asked)) if asked else None
        )
        if running is None:
            raise RequestNotFound("no running request has this id", id=asked)
        running.stop()

    def _make_context(
        self, call: ClientRequest, watch: ExplainRecorder | None, record: RequestRecord
    ) -> RequestContext:
        """What belongs to an exchange whose request is all here."""
        clock, timeouts, headers = self._clock, self._settings.timeouts, call.headers
        received = clock()
        deadline = Deadline(clock, timeouts.total, received)
        if (
            _TIMEOUT_HEADER in headers
            and (asked := parse_seconds(headers[_TIMEOUT_HEADER])) is not None
        ):
            deadline.shorten(asked)
        traceparent = headers.get("traceparent")
        return RequestContext(
            record.id,
            deadline,
            clock,
            timeouts,
            record.key or None,
            traceparent,
            received,
            watch,
            received,
            traceparent and headers.get("tracestate"),
            None if self._tracer is None else self._tracer.get_trace(record),
            len(call.body) >= _LARGE_BODY,
        )

    def _send_error(
        self,
        dialect: ClientAdapter,
        error: GatewayError,
        call: ClientRequest | None,
        sink: ResponseWriter,
        record: RequestRecord,
    ) -> None:
        record_error(record, error)
        if sink.started:  # only a bug comes here: what was begun is cut off, not ended
            record.outcome = "truncated"
            return
        send_reply(sink, dialect.encode_error(error, call), record)


async def _tokenize(asked: RoutedRequest, route: Route) -> None:
    """Tell the tokens of a text. Raises Unsupported."""
    dialect, call, context, backend = (
        asked.adapter,
        asked.client_request,
        asked.context,
        route.target.backend,
    )
    if not isinstance(dialect, SupportsTokenize) or not isinstance(backend, Tokenizer):
        raise UnsupportedFeature(f"the model {route.model.info.name!r} does not tell its tokens")
    text = dialect.read_text(call)
    try:
        async with asyncio.timeout(context.deadline.remaining()):
            tokens = await backend.tokenize(text, context)
    except TimeoutError:
        raise DeadlineExceeded("the request's time is up") from None
    send_reply(asked.writer, dialect.encode_tokens(call, tokens), asked.record)


def _make_client_request(
    found: EndpointMatch, http: HttpRequest, record: RequestRecord, body: bytes
) -> ClientRequest:
    return ClientRequest(
        found.endpoint,
        found.params,
        http.headers,
        http.query,
        body,
        http.path,
        record.id,
        record.began,
    )
