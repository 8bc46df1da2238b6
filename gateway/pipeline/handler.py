"""Handles one HTTP request, from its headers to the end of its response.

1. find the protocol and the endpoint of the path (``routing.paths``), before the body is read
2. authenticate the caller (``auth.api_keys``)
3. read the body, unless it is forwarded
4. call the handler of the endpoint's task (``pipeline.tasks``)
5. record the request

An error before the response has begun is answered in the caller's protocol, by ``_send_error``.
What a request is at any of these steps is its ``RequestState``; what observes it are its stages
(``pipeline.state``). Neither a task nor a stage is named here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from backends.deadline_timer import DeadlineTimer
from gateway.auth.api_keys import Authenticator, KeysPending, Principal
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.pipeline.admission import Admission
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.http import (
    LARGE_BODY,
    HttpRequest,
    ResponseWriter,
    decompress_body,
    get_client_request_id,
)
from gateway.pipeline.responder import record_error, send_reply
from gateway.pipeline.services import GatewayServices, HandlerSettings, StageFactory
from gateway.pipeline.state import RequestState, RouteStage, RouteStages
from gateway.pipeline.tasks.registry import build_endpoint_handlers
from gateway.ratelimit.limiter import RateLimiter
from gateway.routing.paths import EndpointMatch, PathRouter
from gateway.routing.router import Router
from protocols.core.errors import (
    GatewayError,
    InternalError,
    Unauthorized,
    drop_tracebacks,
)
from protocols.core.interfaces import (
    ClientAdapter,
    HasBinaryData,
    HttpResponse,
)
from protocols.core.response_headers import merge_headers
from protocols.core.worker_error_keys import restore_worker_keys

log = logging.getLogger("interlingua")

_BODILESS_METHODS: Final = frozenset({"GET", "HEAD"})
"""The methods of requests whose body is not read."""


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
        pages: Mapping[str, Callable[[HttpRequest], HttpResponse]],
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
        self._settings = settings
        self._services = services
        self._clock = services.clock
        self._wall_clock = services.wall_clock
        self._new_id = services.new_id
        self._observe_request = services.observe_request
        self._check_counts = settings.body_counts.needs_check
        self._own_endpoints = services.own_endpoints
        self._failed_keys = services.failed_keys
        deadline_timer = DeadlineTimer(services.clock, asyncio.get_running_loop)
        self.dispatcher = Dispatcher(router, deadline_timer)
        stages = [factory(router, settings) for factory in services.stage_factories]
        route_stages = [stage for stage in stages if isinstance(stage, RouteStage)]
        self._stages = tuple(
            stage for stage in stages if not (stage.header or isinstance(stage, RouteStage))
        )
        """The stages of all requests."""
        self._header_stages = tuple((stage.header, stage) for stage in stages if stage.header)
        """The stages of requests that ask for them, by header."""
        admission = Admission(router, limiter, RouteStages(route_stages, router.models))
        self._endpoint_handlers = build_endpoint_handlers(
            router, admission, self.dispatcher, settings, services
        )
        self.running_count = 0
        """How many requests are running."""
        self._idle_event: asyncio.Event | None = None
        """Set while none is running, once ``wait_idle`` was called."""

    def __repr__(self) -> str:
        return f"<RequestHandler {self.running_count} requests running>"

    def adopt_running(self, former: "RequestHandler") -> None:
        """Let clients cancel requests that still run in ``former`` through this handler."""
        self.dispatcher.named_requests = former.dispatcher.named_requests

    def build_dry_run_handler(
        self, key: str | None, build_stage: StageFactory, observe: RecordObserver
    ) -> "RequestHandler":
        """A handler of the same listener for one dry run, as if it had the API key of this name.

        It takes nothing of any limit and has only this stage. Raises KeyError for an unknown key.
        """
        keys = self._authenticator if key is None else self._authenticator.impersonate(key)
        services = replace(
            self._services,
            stage_factories=(build_stage,),
            observe_request=observe,
            own_endpoints={},
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
        clock = self._clock
        started_at = clock()
        record = RequestRecord(
            id=get_client_request_id(http.headers) or self._new_id(),
            started_at=self._wall_clock(),
            path=http.path[:200],
            method=http.method,
            client=http.peer,
            config_hash=self._settings.config_hash,
        )
        request = RequestState(http, writer, record)
        self.running_count += 1
        try:
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
            if request.stages:
                request.notify(lambda stage: stage.on_end(request), may_refuse=False)

    async def _process_request(self, request: RequestState) -> None:
        http, record = request.http, request.record
        try:
            match = self.path_router.find_endpoint(http.method, http.path)
            if match.alternatives:
                match = await self._select_protocol(http, match)
        except GatewayError as error:
            await self._answer_other_path(request, error)
            return
        endpoint, adapter = match.endpoint, match.mount.adapter
        request.match, request.adapter = match, adapter
        record.protocol = adapter.name
        try:
            if self._stages:
                self._begin_stages(request)
            if not endpoint.public:
                principal = self._authenticator.find_principal(http.headers)
                if principal is None:
                    principal = await self._authenticate_request(request)
                if principal is not None:
                    request.principal, record.key = principal, principal.name
            handler, body = self._endpoint_handlers[endpoint.task], b""
            if handler.reads_body and endpoint.method not in _BODILESS_METHODS:
                body = await http.body(self._settings.max_body_size)
                if "content-encoding" in http.headers or self._check_counts(len(body)):
                    body = await self._decode_body(request, body)
            request.client_request = request.build_client_request(body)
            del body  # it may be released before the request ends
            if self._header_stages or request.stages:
                self._report_read(request)
            await handler.answer(request)
        except GatewayError as error:
            _send_error(error, request)
            drop_tracebacks(error)
        except Exception:
            log.exception("request %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            _send_error(bug, request)

    def _begin_stages(self, request: RequestState) -> None:
        """Let the stages of all requests observe it. Raises GatewayError where one refuses it."""
        for stage in self._stages:
            request.add_stage(stage)
        request.notify(lambda stage: stage.on_found(request))

    def _report_read(self, request: RequestState) -> None:
        """Report to the stages that the request was read, also to those that its headers ask for.

        Raises GatewayError where one refuses the request.
        """
        for header, stage in self._header_stages:
            if request.http.headers.get(header) == "1":
                request.add_stage(stage)
        if request.stages:
            request.notify(lambda stage: stage.on_read(request))

    async def _answer_other_path(self, request: RequestState, error: GatewayError) -> None:
        """Answer a request to a path of no protocol: with a page, by the gateway, or ``error``."""
        http, record = request.http, request.record
        page = self._static_pages.get(http.path)
        if page is not None and http.method in _BODILESS_METHODS:
            send_reply(request.writer, page(http), record)
            return
        request.adapter = self.path_router.find_owner(http.path, http.headers).adapter
        record.protocol = request.adapter.name
        endpoint = self._own_endpoints.get(http.path)
        if endpoint is None:
            _send_error(error, request)
            return
        try:
            principal = request.principal = await self._authenticate_request(request)
            record.key = "" if principal is None else principal.name
            response = await endpoint.answer(http, principal)
        except GatewayError as failure:
            record_error(record, failure)
            response = endpoint.build_error(failure)
        except Exception:
            log.exception("request %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            record_error(record, bug)
            response = endpoint.build_error(bug)
        send_reply(request.writer, response, record)

    async def _select_protocol(self, http: HttpRequest, match: EndpointMatch) -> EndpointMatch:
        """The endpoint of a path that several protocols have. Raises MethodNotAllowed."""
        principal = None
        with suppress(Unauthorized):  # raised again once the protocol of the error is known
            principal = await self._authenticate(http.headers)
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

    async def _authenticate_request(self, request: RequestState) -> Principal | None:
        """The caller. Raises Unauthorized, and RateLimitExceeded after too many wrong keys."""
        try:
            return await self._authenticate(request.http.headers)
        except Unauthorized as error:
            if self._failed_keys is None:
                raise
            answer, is_logged = self._failed_keys.count_failure(request.http.peer, error)
            request.record.is_throttled = not is_logged
            raise answer from None

    async def _authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        """The caller, once the issuer's keys are there. Raises Unauthorized."""
        try:
            return self._authenticator.authenticate(headers)
        except KeysPending:
            await self._authenticator.wait_keys()
            return self._authenticator.authenticate(headers)

    async def _decode_body(self, request: RequestState, body: bytes) -> bytes:
        """The body without its content encoding. Raises ClientError for too many values in it."""
        http, adapter = request.http, request.adapter
        settings, encoding = self._settings, http.headers.get("content-encoding")
        if encoding:  # a small body may become a large one
            body = await asyncio.to_thread(decompress_body, body, encoding, settings.max_body_size)
        if settings.body_counts.needs_check(len(body)):
            text = body
            if isinstance(adapter, HasBinaryData):
                endpoint = request.match.endpoint
                text = body[: adapter.get_json_size(endpoint, http.headers, len(body))]
            check = settings.body_counts.check
            if len(text) < LARGE_BODY:
                check((text,))
            else:
                await asyncio.to_thread(check, (text,))
        return body


def _send_error(error: GatewayError, request: RequestState) -> None:
    record_error(request.record, error)
    if request.writer.started:  # a bug: the response is cut off, not ended
        request.record.outcome = "truncated"
        return
    error.request_id = request.record.id
    adapter: ClientAdapter = request.adapter
    response = adapter.encode_error(error, request.find_client_request())
    if error.worker_protocol == adapter.name:
        response = replace(
            response,
            body=restore_worker_keys(response.body, error, adapter.name),
            headers=merge_headers(response.headers, error.worker_headers, request.headers),
        )
    send_reply(request.writer, response, request.record, request.headers)
