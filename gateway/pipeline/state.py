"""The state of one request, and the stages that observe it.

``RequestHandler`` creates the state once and passes it along. Each step of the path fills in its
part and reads those of the steps before it, in this order:

    received        http, writer, record
    found           match, adapter
    authenticated   principal
    read            client_request
    decoded         routing_info, context
    routed          route
    limited         reservation

A field without a default has no value before its step: reading it too early is an AttributeError, a
bug that tests find, and not a None that each reader would have to expect. ``record`` is the part
for operators. It holds no prompts and no keys, and is all that is left of a request that has ended.

A feature beside the path (explain, tracing, recording, ...) is a ``Stage``. The stages of a
listener are built with its configuration (``services.StageFactory``), those that begin with the
routing for each model (``RouteStages``), and a request has those of them that want it: mostly none,
and then the path does nothing for them. They observe in the order of the factories. A stage may
refuse a request, by raising a GatewayError before the response has begun.

What must never happen:

- A request that fails by a fault of a stage: the exception is logged, and that stage gets no
  further calls of the request.
- A prompt, a body or the text of a key in ``record``, which outlives the request and is logged.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from backends.interfaces import AttemptTrace, RequestContext, RequestObserver
from gateway.auth.api_keys import Principal
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import HttpRequest, ResponseWriter, ResponseWriterWrapper
from gateway.pipeline.strategies import TargetAttempt
from gateway.ratelimit.reservation import Reservation
from gateway.routing.paths import EndpointMatch
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.router import Model, Route, RouteObserver
from protocols.core.errors import GatewayError
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    RoutingInfo,
    StoredResponse,
)

log = logging.getLogger("interlingua")

ResponseSaver = Callable[[StoredResponse], Awaitable[None]]
"""Stores a response. Never fails."""


class RequestState:
    """One request, from its first byte to its record. See above for the order of its steps."""

    match: EndpointMatch
    adapter: ClientAdapter
    client_request: ClientRequest
    routing_info: RoutingInfo
    context: RequestContext
    """What backends see of the request."""
    route: Route
    """The first target; a fallback does not change it."""
    principal: Principal | None = None
    """The caller; None without keys."""
    reservation: Reservation | None = None
    """What it took of its key's limits, if it has any."""
    headers: Headers = ()
    """The rate-limit headers of its response."""
    store_response: ResponseSaver | None = None
    """Stores the response, if its endpoint is stateful."""
    copies_size: int = 0
    """Bytes taken of the memory budget for a large body's copies, which ``release_body`` frees."""
    stages: "tuple[Stage, ...]"
    """The stages that observe it, in their order."""
    is_dry_run: bool = False
    """Whether the request is only explained. No worker and no shadow may get it."""
    route_observer: RouteObserver | None = None
    backend_observer: RequestObserver | None = None
    attempt_trace: AttemptTrace | None = None

    def __init__(self, http: HttpRequest, writer: ResponseWriter, record: RequestRecord) -> None:
        self.http = http
        self.writer = writer
        self.record = record
        self.stages = ()

    def __repr__(self) -> str:
        record = self.record
        target = f"{record.model}@{record.version}" if record.model else "not routed"
        stages = ", ".join(type(stage).__name__ for stage in self.stages)
        return f"<RequestState {record.id} {record.method} {record.path}, {target} [{stages}]>"

    @property
    def is_rejected(self) -> bool:
        """Whether its choices exceed a concurrency limit of its key."""
        return self.reservation is not None and self.reservation.rejection is not None

    @property
    def is_inference(self) -> bool:
        """Whether a model answers it from the whole body: it is not forwarded."""
        return self.match.endpoint.task in ("generate", "tokenize")

    def build_client_request(self, body: bytes) -> ClientRequest:
        """The request with this body, as adapters read it."""
        http, record = self.http, self.record
        return ClientRequest(
            endpoint=self.match.endpoint,
            path_params=self.match.params,
            headers=http.headers,
            query=http.query,
            body=body,
            path=http.path,
            id=record.id,
            started_at=record.started_at,
        )

    def find_client_request(self) -> ClientRequest | None:
        """The request as adapters read it; without its body as long as that was not read.

        None if there is no endpoint of its path.
        """
        if hasattr(self, "client_request"):
            return self.client_request
        return self.build_client_request(b"") if hasattr(self, "match") else None

    def release_body(self) -> None:
        """Let go of the body, since no target will get the request any more."""
        if not any(stage.needs_body for stage in self.stages):
            self.client_request.release_body()
            if self.copies_size:
                self.http.reserve_memory(-self.copies_size)
                self.copies_size = 0

    def get_attributes(self) -> RequestAttributes:
        """The attributes that route conditions and sticky sources read."""
        request, principal = self.client_request, self.principal
        key, tags = (
            ("", frozenset[str]()) if principal is None else (principal.name, principal.tags)
        )
        return RequestAttributes(
            protocol=self.adapter.name,
            headers=request.headers,
            body=request.body,
            key=key,
            tags=tags,
            address=self.http.peer,
        )

    def add_stage(self, stage: "Stage") -> None:
        """Let ``stage`` observe what follows."""
        self.stages += (stage,)
        if stage.observes_response and not isinstance(self.writer, ObservedWriter):
            self.writer = ObservedWriter(self)

    def notify(self, point: "Callable[[Stage], object]", *, may_refuse: bool = True) -> None:
        """Call a point of all stages. Raises GatewayError where one may refuse the request."""
        for stage in self.stages:
            try:
                point(stage)
            except Exception as error:
                if may_refuse and isinstance(error, GatewayError):
                    raise
                self.drop_stage(stage, error)

    def drop_stage(self, stage: "Stage", error: Exception) -> None:
        """Log the exception of a stage, which gets no further calls of this request."""
        text = "%s failed for request %s, which goes on without it"
        log.error(text, type(stage).__name__, self.record.id, exc_info=error)
        self.stages = tuple(one for one in self.stages if one is not stage)


class Stage:
    """A feature beside the path, at the points of one request in their order.

    A method that is not overridden does nothing. A stage of a listener gets all requests; it may
    add a stage to one of them (``RequestState.add_stage``), which has that request's data.
    """

    header: ClassVar[str] = ""
    """The request header whose value ``1`` asks for the stage; "" for a stage of all requests."""
    observes_response: ClassVar[bool] = False
    """Whether it gets ``add_headers`` and ``on_data``."""
    observes_events: ClassVar[bool] = False
    """Whether it gets ``on_events``."""
    needs_body: ClassVar[bool] = True
    """Whether the request's body is kept for it when a stream has begun."""

    def on_found(self, request: RequestState, /) -> None:
        """The endpoint was found. Not called for a stage with a ``header``."""

    def on_read(self, request: RequestState, /) -> None:
        """The caller is known, and the body was read unless it is forwarded."""

    def on_routed(self, request: RequestState, /) -> None:
        """The first target was chosen; it got nothing yet."""

    def on_admitted(self, request: RequestState, /) -> None:
        """The limits of its key have room for it: it is about to be sent."""

    def on_fallback(self, request: RequestState, route: Route, skipped: str, /) -> None:
        """Only in dry runs: a fallback that exists, and why it would be skipped, if it would."""

    def on_attempt(self, request: RequestState, attempt: TargetAttempt, /) -> None:
        """The request is about to be sent to a target."""

    def on_events(self, request: RequestState, events: Sequence[Event], /) -> None:
        """A batch of the target's events, as they are reported to the client."""

    def add_headers(self, request: RequestState, status: int, /) -> Headers:
        """The response begins. Returns further headers of it."""
        del request, status
        return ()

    def on_data(self, request: RequestState, data: bytes, /, *, is_whole: bool) -> None:
        """A part of the response's body is written; or, if ``is_whole``, all of it."""

    def on_end(self, request: RequestState, /) -> None:
        """The request has ended, and its record is complete."""


class RouteStage(Stage):
    """A stage that begins when a request is routed: it gets no point before ``on_routed``."""

    def observes_model(self, model: Model, /) -> bool:
        """Whether requests to this model need the stage; asked when a configuration is built.

        What a rule of the model adds to another one (``RouteRule``) counts, too.
        """
        del model
        return True


class RouteStages:
    """The stages of a listener's requests that begin when they are routed, for each model.

    They are selected when the configuration is built: a request to a model without any pays for
    none. One that a rule or a wildcard sends elsewhere gets those of all models.
    """

    def __init__(self, stages: Sequence[RouteStage], models: Sequence[Model]) -> None:
        self._by_model = {
            model.info.name: tuple(stage for stage in stages if stage.observes_model(model))
            for model in models
        }
        self._all = tuple(
            stage for stage in stages if any(stage in some for some in self._by_model.values())
        )
        self.is_empty = not self._all
        """Whether no request has any."""

    def select(self, route: Route) -> tuple[RouteStage, ...]:
        """The stages of requests with this route."""
        if route.original_model:
            return self._all
        return self._by_model.get(route.model.info.name, self._all)


class ObservedWriter(ResponseWriterWrapper):
    """The writer of a request with stages that observe its response."""

    def __init__(self, request: RequestState) -> None:
        super().__init__(request.writer)
        self._request = request

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        headers = self._add_headers(status, headers)
        self._report(body, is_whole=True)
        self._writer.send_response(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        self._writer.start(status, self._add_headers(status, headers))

    def write(self, data: bytes) -> None:
        """See ``gateway.pipeline.http.ResponseWriter``."""
        self._report(data, is_whole=False)
        self._writer.write(data)

    def _add_headers(self, status: int, headers: Headers) -> Headers:
        request = self._request
        for stage in request.stages:
            try:
                headers = (*headers, *stage.add_headers(request, status))
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is answered
                request.drop_stage(stage, error)
        return headers

    def _report(self, data: bytes, *, is_whole: bool) -> None:
        request = self._request
        for stage in request.stages:
            try:
                stage.on_data(request, data, is_whole=is_whole)
            except Exception as error:  # noqa: BLE001 - as above
                request.drop_stage(stage, error)
