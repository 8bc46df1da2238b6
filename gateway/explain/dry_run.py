"""Dry runs: a request is handled up to where it would be sent to a worker, and then explained.

The code that serves requests makes the explanation. It reads the current routing table, API keys
and workers and changes none of them.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.explain.explanation_store import ExplanationStore, list_model_names
from gateway.explain.recorder import EXPLAIN_HEADER, DryRunComplete, ExplanationRecorder
from gateway.explain.report import ExplainedResponse, ExplainRequest, Explanation
from gateway.observability.record import RequestRecord
from gateway.pipeline.handler import RequestHandler
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState, Stage
from gateway.routing.paths import EndpointMatch
from gateway.routing.router import Router
from protocols.core.errors import MethodNotAllowed, PathNotFound, RequestTooLarge
from protocols.core.interfaces import Clock, Headers

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

    def reserve_response(self, size: int) -> None:
        """Nothing is sent, so there is no response."""


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

    def flush(self) -> None:
        """Nobody waits for the response."""

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
