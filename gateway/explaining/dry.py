"""Serves a request up to where it would be sent: what is told is told by the very code that serves.

It meets the table, the keys and the workers as they are, and leaves all of them as they are.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.auth.api_keys import Principal
from gateway.observability.record import RequestRecord
from gateway.routing.paths import EndpointMatch
from gateway.server import RequestHandler
from gateway.watching.account import ExplainedResponse, Explanation
from gateway.watching.kept import ExplanationStore
from gateway.watching.question import ExplainRequest
from gateway.watching.watch import EXPLAIN_HEADER, DryRunComplete, ExplainRecorder
from protocols.core.errors import MethodNotAllowed, PathNotFound, RequestTooLarge
from protocols.core.interfaces import Clock, Headers

_UNEXPLAINED_TASKS: Final = ("stop", "tokenize")
"""The tasks that would do something."""
_OMITTED_HEADERS: Final = frozenset({EXPLAIN_HEADER, "x-request-id"})


class _DryRequest(Struct):
    """A ``gateway.seam.HttpRequest``."""

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


class _DryRunSink:
    """A ``gateway.seam.ResponseWriter`` whose answer nobody gets."""

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
        """There is nobody to wait."""

    async def drain(self) -> None:
        """There is nobody to wait."""


class _DryRunRecorder:
    """What is kept of a request that is served dry; called as an ``Explain``."""

    def __init__(self, clock: Clock, draw: float) -> None:
        self._clock = clock
        self._draw = draw
        self.record = RequestRecord("")
        self.recorder: ExplainRecorder | None = None

    def __call__(
        self, record: RequestRecord, principal: Principal | None, *, open_to_all: bool
    ) -> ExplainRecorder | None:
        del principal, open_to_all
        self.recorder = ExplainRecorder(record, self._clock, lambda: self._draw, dry=True)
        return self.recorder

    def record_request(self, record: RequestRecord) -> None:
        """See ``gateway.observability.record.RecordObserver``."""
        self.record = record


ServersByListener = Mapping[str, RequestHandler]
"""By the address of their listener, in the order of the configuration."""


async def run_dry(
    question: ExplainRequest, servers: ServersByListener, clock: Clock
) -> Explanation:
    """What would become of a request.

    Raises LookupError, with its text, for a listener or a key that there is not.
    """
    address, server, found = find_endpoint(question, servers)
    path, _, query = question.path.partition("?")
    told = Explanation(
        id="", dry=True, listener=address, method=question.method, path=path, key=question.key or ""
    )
    if found is not None and found.endpoint.task in _UNEXPLAINED_TASKS:
        told.dialect = found.mount.adapter.name
        told.endpoint, told.task = found.endpoint.path, found.endpoint.task
        return told
    headers = {name.lower(): text for name, text in question.headers.items()}
    content = question.body_bytes
    if content:
        headers.setdefault("content-type", "application/json")
    http = _DryRequest(
        question.method, path, query, headers | {EXPLAIN_HEADER: "1"}, question.peer, content
    )
    sink, dry = _DryRunSink(), _DryRunRecorder(clock, question.draw)
    try:
        server = server.for_dry_run(question.key, dry, dry.record_request)
    except KeyError:
        raise LookupError(f"there is no key {question.key!r}") from None
    await server.handle(http, sink)
    if dry.recorder is not None:
        told = replace(dry.recorder.build_explanation(), listener=address)
    told.dialect = dry.record.dialect
    told.answer = (
        None if dry.record.error == DryRunComplete.__name__ else _explain_answer(dry.record, sink)
    )
    return told


def find_endpoint(
    question: ExplainRequest, servers: ServersByListener
) -> tuple[str, RequestHandler, EndpointMatch | None]:
    """Where a request comes in, and the endpoint that it finds there first. Raises LookupError."""
    asked = select_servers(question, servers)
    path = question.path.partition("?")[0]
    for name, server in asked.items():
        try:
            return name, server, server.path_router.find_endpoint(question.method, path)
        except (PathNotFound, MethodNotAllowed):
            continue
    name, server = next(iter(asked.items()))
    return name, server, None


def select_servers(question: ExplainRequest, servers: ServersByListener) -> ServersByListener:
    """Those of the listener that is named; all where none is. Raises LookupError."""
    if (address := question.listener) is None:
        return servers
    if address not in servers:
        known = ", ".join(servers)
        raise LookupError(f"there is no listener {address!r}; known: {known}")
    return {address: servers[address]}


def _explain_answer(record: RequestRecord, sink: _DryRunSink) -> ExplainedResponse:
    headers = [(name, text) for name, text in sink.headers if name not in _OMITTED_HEADERS]
    body = sink.body.decode(errors="replace")
    return ExplainedResponse(record.status, record.outcome, record.error, body, headers)


class ExplainService:
    """Tells of requests: of the last that asked to be explained, and of any, dry.

    ``servers`` gives those that serve now.
    """

    def __init__(
        self, kept: ExplanationStore, servers: Callable[[], ServersByListener], clock: Clock
    ) -> None:
        self.find_explanation = kept.find_explanation
        self._get_servers = servers
        self._clock = clock

    async def explain_request(self, question: ExplainRequest) -> Explanation:
        """What would become of a request now. Raises LookupError."""
        return await run_dry(question, self._get_servers(), self._clock)
