"""Dry runs: a request is handled up to where it would be sent to a worker, and then explained.

The code that serves requests makes the explanation. It reads the current routing table, API keys
and workers and changes none of them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.explain.recorder import (
    EXPLAIN_HEADER,
    DryRunComplete,
    ExplanationRecorder,
    ExplanationStore,
    list_model_names,
)
from gateway.explain.report import ExplainedResponse, ExplainRequest, Explanation
from gateway.observability.record import RequestRecord
from gateway.pipeline.handler import RequestHandler
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState, Stage
from gateway.routing.paths import AdapterMount, EndpointMatch, PathRouter
from gateway.routing.router import Router
from protocols.core.errors import (
    ClientError,
    MalformedRequest,
    MethodNotAllowed,
    PathNotFound,
    RequestTooLarge,
)
from protocols.core.interfaces import (
    ClientRequest,
    Clock,
    Headers,
    UpstreamAdapter,
    UpstreamRequest,
)
from protocols.core.json_text import decode_json
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Request,
    StopConditions,
    TextPart,
)
from protocols.json_body import read_object

_UNEXPLAINED_TASKS: Final = ("stop", "tokenize")
"""The tasks that would have an effect."""
_OMITTED_HEADERS: Final = frozenset({EXPLAIN_HEADER, "x-request-id"})


class _DryRequest(Struct):
    """A ``gateway.pipeline.http.HttpRequest``."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    peer: str
    content: bytes
    head: None = None

    async def body(self, limit: int) -> bytes:
        if len(self.content) > limit:
            raise RequestTooLarge(f"the body is larger than {limit} bytes", limit=limit)
        return self.content

    def reserve_memory(self, size: int) -> None:
        """Its body has the limits of the admin listener."""


class _DryRunWriter:
    """A ``gateway.pipeline.http.ResponseWriter`` that keeps the response."""

    needs_drain = False

    def __init__(self) -> None:
        self.started = False
        self.headers: Headers = ()
        self.body = b""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.write(body)

    def start(self, status: int, headers: Headers) -> None:
        del status
        self.started = True
        self.headers = headers

    def write(self, data: bytes) -> None:
        self.body += data

    def finish(self) -> None:
        """Nobody waits for the response."""

    async def drain(self) -> None:
        """Nobody waits for the response."""


class _DryRunStage(Stage):
    """Records one dry run; keeps its recorder and its record."""

    def __init__(self, clock: Clock, draw: float) -> None:
        self._clock = clock
        self._draw = draw
        self._router: Router
        self._max_body_size = 0
        self.record = RequestRecord("")
        self.recorder: ExplanationRecorder | None = None

    def build(self, router: Router, settings: HandlerSettings) -> Stage:
        """This stage, for one listener: a ``gateway.pipeline.services.StageFactory``."""
        self._router, self._max_body_size = router, settings.max_body_size
        return self

    def on_read(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        self.recorder = ExplanationRecorder(
            request.record,
            self._clock,
            lambda: self._draw,
            names=list_model_names(self._router),
            max_body_size=self._max_body_size,
            dry_run=True,
        )
        request.add_stage(self.recorder)
        self.recorder.on_read(request)

    def record_request(self, record: RequestRecord) -> None:
        """See ``gateway.observability.record.RecordObserver``."""
        self.record = record


ServersByListener = Mapping[str, RequestHandler]
"""The handlers by the address of their listener, in the order of the configuration."""


async def run_dry(
    request: ExplainRequest, handlers: ServersByListener, clock: Clock
) -> Explanation:
    """Explain how a request would be handled.

    Raises LookupError, with a message, for an unknown listener or API key.
    """
    address, handler, match = find_endpoint(request, handlers)
    path, _, query = request.path.partition("?")
    explanation = Explanation(
        id="",
        dry_run=True,
        listener=address,
        method=request.method,
        path=path,
        key=request.key or "",
    )
    if match is not None and match.endpoint.task in _UNEXPLAINED_TASKS:
        explanation.protocol = match.mount.adapter.name
        explanation.endpoint, explanation.task = match.endpoint.path, match.endpoint.task
        return explanation
    headers = {name.lower(): text for name, text in request.headers.items()}
    content = request.body_bytes
    if content:
        headers.setdefault("content-type", "application/json")
    http_request = _DryRequest(
        method=request.method,
        path=path,
        query=query,
        headers=headers,
        peer=request.peer,
        content=content,
    )
    writer, stage = _DryRunWriter(), _DryRunStage(clock, request.random)
    try:
        handler = handler.build_dry_run_handler(request.key, stage.build, stage.record_request)
    except KeyError:
        raise LookupError(f"there is no key {request.key!r}") from None
    await handler.handle(http_request, writer)
    if stage.recorder is not None:
        explanation = replace(stage.recorder.build_explanation(), listener=address)
    explanation.protocol = stage.record.protocol
    explanation.answer = (
        None
        if stage.record.error == DryRunComplete.__name__
        else _explain_answer(stage.record, writer)
    )
    return explanation


def find_endpoint(
    request: ExplainRequest, all_handlers: ServersByListener
) -> tuple[str, RequestHandler, EndpointMatch | None]:
    """The listener of a request, its handler and the endpoint, if any. Raises LookupError."""
    handlers = select_servers(request, all_handlers)
    path = request.path.partition("?")[0]
    for name, handler in handlers.items():
        try:
            return name, handler, handler.path_router.find_endpoint(request.method, path)
        except (PathNotFound, MethodNotAllowed):
            continue
    name, handler = next(iter(handlers.items()))
    return name, handler, None


def select_servers(request: ExplainRequest, handlers: ServersByListener) -> ServersByListener:
    """The handler of the named listener; all if none is named. Raises LookupError."""
    if (address := request.listener) is None:
        return handlers
    if address not in handlers:
        names = ", ".join(handlers)
        raise LookupError(f"there is no listener {address!r}; known: {names}")
    return {address: handlers[address]}


def _explain_answer(record: RequestRecord, writer: _DryRunWriter) -> ExplainedResponse:
    headers = [(name, text) for name, text in writer.headers if name not in _OMITTED_HEADERS]
    body = writer.body.decode(errors="replace")
    return ExplainedResponse(record.status, record.outcome, record.error, body, headers)


class ExplainService:
    """Returns the recorded explanations, and explains any request by a dry run.

    ``get_handlers`` returns the handlers of the active configuration.
    """

    def __init__(
        self, store: ExplanationStore, get_handlers: Callable[[], ServersByListener], clock: Clock
    ) -> None:
        self.find_explanation = store.find_explanation
        self._get_handlers = get_handlers
        self._clock = clock

    async def explain_request(self, request: ExplainRequest) -> Explanation:
        """Explain how a request would be handled now. Raises LookupError."""
        return await run_dry(request, self._get_handlers(), self._clock)


# Sample requests in any protocol.

_SAMPLE_TEXT: Final = "Hello"


def build_sample_request(
    mount: AdapterMount, model: str, operation: str | None, *, stream: bool
) -> UpstreamRequest | None:
    """A small request for ``model`` to an endpoint of this variant, or to the first that fits.

    None if the protocol has no adapter for workers, or no endpoint fits.
    """
    adapter = mount.adapter
    if not isinstance(adapter, UpstreamAdapter):
        return None
    paths = PathRouter([mount])
    for request in _list_sample_requests(model, stream=stream):
        try:
            upstream_request = adapter.encode_request(request)
            upstream_request = replace(upstream_request, path=mount.prefix + upstream_request.path)
            path, _, _ = upstream_request.path.partition("?")
            match = paths.find_endpoint(upstream_request.method, path)
            if operation in (match.endpoint.operation, None):
                # An endpoint may take several kinds, depending on the model: text is the usual one.
                mount.adapter.decode_request(_make_client_request(match, upstream_request))
                return upstream_request
        except ClientError:
            continue
    return None


def _make_client_request(match: EndpointMatch, sample: UpstreamRequest) -> ClientRequest:
    headers = {name.lower(): value for name, value in sample.headers}
    path, _, query = sample.path.partition("?")
    return ClientRequest(match.endpoint, match.params, headers, query, sample.body, path)


def _list_sample_requests(model: str, *, stream: bool) -> Iterator[Request]:
    conversation = (Message("user", (TextPart(_SAMPLE_TEXT),)),)
    yield GenerationRequest(kind="chat", model=model, messages=conversation, stream=stream)
    stopping = StopConditions(max_tokens=16)
    yield GenerationRequest(
        kind="completion", model=model, prompts=(_SAMPLE_TEXT,), stopping=stopping, stream=stream
    )
    yield EmbeddingRequest(model=model, inputs=(_SAMPLE_TEXT,))


# Completion of a partly described request.


class PartialRequest(Struct, frozen=True):
    """The known parts of a request; None for a part that is to be generated."""

    model: str | None = None
    path: str | None = None
    protocol: str | None = None
    body: bytes | None = None
    stream: bool = False


def complete_request(
    request: ExplainRequest, partial: PartialRequest, handlers: ServersByListener
) -> ExplainRequest:
    """The question with a path and a body. Raises LookupError, which names the missing option."""
    if partial.path is None:
        return _build_from_sample(request, partial, handlers)
    request = replace(request, path=partial.path)
    _, _, match = find_endpoint(request, handlers)
    if match is None or match.endpoint.task != "generate":
        return replace(request, base64=partial.body or b"")
    match = match.select_protocol([partial.protocol or ""])
    model = (
        partial.model or next(iter(match.params.values()), None) or _read_model_name(partial.body)
    )
    sample = build_sample_request(
        match.mount, model or "", match.endpoint.operation, stream=partial.stream
    )
    if partial.body is None and (sample is None or model is None):
        raise LookupError("no sample body exists for this path: give --model, or a --body")
    return replace(request, base64=_build_body(partial, sample))


def _build_from_sample(
    request: ExplainRequest, partial: PartialRequest, handlers: ServersByListener
) -> ExplainRequest:
    """The question with the path of a sample request."""
    model = partial.model or _read_model_name(partial.body)
    if model is None:
        raise LookupError("give the --model of the request")
    for address, mount in _list_mounts(request, handlers):
        sample = build_sample_request(mount, model, None, stream=partial.stream)
        if sample is not None and partial.protocol in (None, mount.adapter.name):
            return replace(
                request, listener=address, path=sample.path, base64=_build_body(partial, sample)
            )
    raise LookupError(f"no sample path of {partial.protocol or 'any protocol'} exists: give --path")


def _list_mounts(
    request: ExplainRequest, handlers: ServersByListener
) -> Iterator[tuple[str, AdapterMount]]:
    for address, handler in select_servers(request, handlers).items():
        yield from ((address, mount) for mount in handler.path_router.mounts)


def _build_body(partial: PartialRequest, sample: UpstreamRequest | None) -> bytes:
    """The given body with the given model and stream flag; or the body of the sample request.

    If the protocol has these two outside the body, the given body is unchanged.
    """
    if partial.body is None:
        return sample.body if sample is not None else b""
    try:
        fields = read_object(partial.body)
    except MalformedRequest:
        return partial.body
    sample_fields = read_object(sample.body) if sample is not None else {}
    overridden = {"model": partial.model is not None, "stream": partial.stream}
    changed = {
        name: sample_fields[name]
        for name, is_set in overridden.items()
        if is_set and name in sample_fields
    }
    return msgspec.json.encode(fields | changed) if changed else partial.body


def _read_model_name(body: bytes | None) -> str | None:
    """The model named in a body."""
    try:
        name = read_object(body or b"").get("model")
        return None if name is None else decode_json(name, kind=str)
    except (MalformedRequest, msgspec.DecodeError):
        return None
