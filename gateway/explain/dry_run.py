"""Dry runs: a request is handled up to where it would be sent to a worker, and then explained.

The code that serves requests makes the explanation. It reads the current routing table, API keys
and workers and changes none of them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.auth.api_keys import Principal
from gateway.explain.recorder import DryRunComplete, ExplanationRecorder, ExplanationStore
from gateway.explain.report import ExplainedResponse, ExplainRequest, Explanation
from gateway.observability.record import RequestRecord
from gateway.pipeline.handler import RequestHandler
from gateway.pipeline.recorder import EXPLAIN_HEADER, ExplainRecorder
from gateway.routing.paths import AdapterMount, EndpointMatch, PathRouter
from protocols.core.errors import (
    ClientError,
    MalformedRequest,
    MethodNotAllowed,
    PathNotFound,
    RequestTooLarge,
)
from protocols.core.interfaces import Clock, Headers, UpstreamAdapter, UpstreamRequest
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


class _DryRunSink:
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


class _DryRunRecorder:
    """Keeps the recorder and the record of one dry run; called as an ``ExplainPolicy``."""

    def __init__(self, clock: Clock, draw: float) -> None:
        self._clock = clock
        self._draw = draw
        self.record = RequestRecord("")
        self.recorder: ExplanationRecorder | None = None

    def __call__(
        self, record: RequestRecord, principal: Principal | None, *, open_to_all: bool
    ) -> ExplainRecorder:
        del principal, open_to_all
        self.recorder = ExplanationRecorder(record, self._clock, lambda: self._draw, dry=True)
        return self.recorder

    def record_request(self, record: RequestRecord) -> None:
        """See ``gateway.observability.record.RecordObserver``."""
        self.record = record


ServersByListener = Mapping[str, RequestHandler]
"""The handlers by the address of their listener, in the order of the configuration."""


async def run_dry(
    question: ExplainRequest, servers: ServersByListener, clock: Clock
) -> Explanation:
    """Explain how a request would be handled.

    Raises LookupError, with a message, for an unknown listener or API key.
    """
    address, server, found = find_endpoint(question, servers)
    path, _, query = question.path.partition("?")
    told = Explanation(
        id="",
        dry_run=True,
        listener=address,
        method=question.method,
        path=path,
        key=question.key or "",
    )
    if found is not None and found.endpoint.task in _UNEXPLAINED_TASKS:
        told.protocol = found.mount.adapter.name
        told.endpoint, told.task = found.endpoint.path, found.endpoint.task
        return told
    headers = {name.lower(): text for name, text in question.headers.items()}
    content = question.body_bytes
    if content:
        headers.setdefault("content-type", "application/json")
    http = _DryRequest(
        question.method, path, query, headers | {EXPLAIN_HEADER: "1"}, question.peer, content
    )
    sink, dry = _DryRunSink(), _DryRunRecorder(clock, question.random)
    try:
        server = server.build_dry_run_handler(question.key, dry, dry.record_request)
    except KeyError:
        raise LookupError(f"there is no key {question.key!r}") from None
    await server.handle(http, sink)
    if dry.recorder is not None:
        told = replace(dry.recorder.build_explanation(), listener=address)
    told.protocol = dry.record.protocol
    told.answer = (
        None if dry.record.error == DryRunComplete.__name__ else _explain_answer(dry.record, sink)
    )
    return told


def find_endpoint(
    question: ExplainRequest, servers: ServersByListener
) -> tuple[str, RequestHandler, EndpointMatch | None]:
    """The listener of a request, its handler and the endpoint, if any. Raises LookupError."""
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
    """The handler of the named listener; all if none is named. Raises LookupError."""
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
    """Returns the recorded explanations, and explains any request by a dry run.

    ``servers`` returns the handlers of the active configuration.
    """

    def __init__(
        self, kept: ExplanationStore, servers: Callable[[], ServersByListener], clock: Clock
    ) -> None:
        self.find_explanation = kept.find_explanation
        self._get_servers = servers
        self._clock = clock

    async def explain_request(self, question: ExplainRequest) -> Explanation:
        """Explain how a request would be handled now. Raises LookupError."""
        return await run_dry(question, self._get_servers(), self._clock)


# Sample requests in any protocol.

_SAMPLE_TEXT: Final = "Hello"


def build_sample_request(
    mount: AdapterMount, model: str, variant: str | None, *, stream: bool
) -> UpstreamRequest | None:
    """A small request for ``model`` to an endpoint of this variant, or to the first that fits.

    None if the protocol has no adapter for workers, or no endpoint fits.
    """
    dialect = mount.adapter
    if not isinstance(dialect, UpstreamAdapter):
        return None
    paths = PathRouter([mount])
    for request in _list_sample_requests(model, stream=stream):
        try:
            wire = dialect.encode_request(request)
            wire = replace(wire, path=mount.prefix + wire.path)
            found = paths.find_endpoint(wire.method, wire.path)
        except ClientError:
            continue
        if found.endpoint.operation == variant or variant is None:
            return wire
    return None


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
    question: ExplainRequest, wish: PartialRequest, servers: ServersByListener
) -> ExplainRequest:
    """The question with a path and a body. Raises LookupError, which names the missing option."""
    if wish.path is None:
        return _build_from_sample(question, wish, servers)
    question = replace(question, path=wish.path)
    _, _, found = find_endpoint(question, servers)
    if found is None or found.endpoint.task != "generate":
        return replace(question, base64=wish.body or b"")
    found = found.select_protocol([wish.protocol or ""])
    model = wish.model or next(iter(found.params.values()), None) or _read_model_name(wish.body)
    made = build_sample_request(
        found.mount, model or "", found.endpoint.operation, stream=wish.stream
    )
    if wish.body is None and (made is None or model is None):
        raise LookupError("no sample body exists for this path: give --model, or a --body")
    return replace(question, base64=_build_body(wish, made))


def _build_from_sample(
    question: ExplainRequest, wish: PartialRequest, servers: ServersByListener
) -> ExplainRequest:
    """The question with the path of a sample request."""
    model = wish.model or _read_model_name(wish.body)
    if model is None:
        raise LookupError("give the --model of the request")
    for address, mount in _list_mounts(question, servers):
        made = build_sample_request(mount, model, None, stream=wish.stream)
        if made is not None and wish.protocol in (None, mount.adapter.name):
            return replace(
                question, listener=address, path=made.path, base64=_build_body(wish, made)
            )
    raise LookupError(f"no sample path of {wish.protocol or 'any protocol'} exists: give --path")


def _list_mounts(
    question: ExplainRequest, servers: ServersByListener
) -> Iterator[tuple[str, AdapterMount]]:
    for address, server in select_servers(question, servers).items():
        yield from ((address, mount) for mount in server.path_router.mounts)


def _build_body(wish: PartialRequest, made: UpstreamRequest | None) -> bytes:
    """The given body with the given model and stream flag; or the body of the sample request.

    If the protocol has these two outside the body, the given body is unchanged.
    """
    if wish.body is None:
        return made.body if made is not None else b""
    try:
        fields = read_object(wish.body)
    except MalformedRequest:
        return wish.body
    have = read_object(made.body) if made is not None else {}
    said = {"model": wish.model is not None, "stream": wish.stream}
    changed = {name: have[name] for name, one in said.items() if one and name in have}
    return msgspec.json.encode(fields | changed) if changed else wish.body


def _read_model_name(body: bytes | None) -> str | None:
    """The model named in a body."""
    try:
        named = read_object(body or b"").get("model")
        return None if named is None else msgspec.json.decode(named, type=str)
    except (MalformedRequest, msgspec.DecodeError):
        return None
