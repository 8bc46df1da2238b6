"""The client of a worker: sends requests as a pool would, and reads bounded responses."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Literal, cast

import httpx
from msgspec import Struct, field
from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext, ignore_memory
from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.aggregate import ResponseAccumulator, UnaryChoice, UnaryResponse, aggregate
from protocols.core.catalog import ModelInfo, ModelTask
from protocols.core.errors import (
    ClientError,
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import ChoiceEnd, Embedding, Event, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    ResponseContext,
    ResponseDecoder,
    SupportsCancel,
    UpstreamAdapter,
    UpstreamRequest,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Request,
    SamplingParams,
    StopConditions,
    TextPart,
)

_MAX_BODY: Final = 8 << 20
"""Bytes of a response body."""
_PORT: Final = 1
"""The index of the port in an address."""


class UnexpectedResponse(Exception):
    """The response is not what the probe requires; the text says how it differs."""


class NotOffered(Exception):
    """The probe can't run: the protocol or the given options don't allow it; the text says why."""


class WorkerRefused(Exception):
    """The worker rejected the request as a client error, as it may."""


class Inconclusive(Exception):
    """The probe failed, possibly for another reason than the one that it tests."""


class Unreachable(Exception):
    """The worker accepts no connection."""


class WorkerTarget(Struct, frozen=True):
    """The worker: its base URL, the models to request, and how.

    ``mode``: whether texts are sent as chat messages or as prompts.
    """

    url: str
    model: str | None = None
    embedder: str | None = None
    key: str | None = None
    mode: Literal["chat", "prompt"] = "chat"


class WorkerResponse(Struct):
    """A worker's response. ``error``: what the adapter makes of a response that is no success."""

    status: int = 0
    headers: Mapping[str, str] = {}
    chunks: list[bytes] = field(default_factory=list[bytes])
    events: list[Event] = field(default_factory=list[Event])
    error: GatewayError | None = None
    result: UnaryResponse | None = None
    port: int | None = None
    """The local port, which identifies the connection."""

    @property
    def body(self) -> bytes:
        """The bytes that were read."""
        return b"".join(self.chunks)

    @property
    def is_refused(self) -> bool:
        """Whether it is a client error, by its status or its error code."""
        if self.error is None or isinstance(self.error, RateLimitExceeded):
            return False
        return self.status in range(400, 500) or isinstance(self.error, ClientError)

    @property
    def answer(self) -> UnaryResponse:
        """The answer. Raises UnexpectedResponse, WorkerRefused or Inconclusive without one."""
        if isinstance(self.error, RateLimitExceeded | Overloaded):
            raise Inconclusive(f"the worker is busy ({self.status})")
        if self.is_refused:
            raise WorkerRefused(self.summary)
        if self.error is not None or self.result is None:
            raise UnexpectedResponse(self.summary)
        return self.result

    @property
    def choice(self) -> UnaryChoice:
        """The only choice. Raises as ``answer`` does."""
        choices = self.answer.choices
        if len(choices) != 1:
            raise UnexpectedResponse(f"expected one choice, got {len(choices)}")
        return choices[0]

    @property
    def summary(self) -> str:
        """What went wrong, in one line."""
        error_text = str(self.error) if self.error is not None else "no answer"
        worker_text = "" if self.error is None else self.error.worker_text
        status = f"{self.status}: " if self.status not in (0, 200) else ""
        note = f" (the worker said: {worker_text})" if worker_text not in error_text else ""
        return f"{status}{error_text}{note}"


class WorkerClient:
    """Sends the requests of one probe to a worker. ``needs``: the fields that the probe needs."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        adapter: UpstreamAdapter,
        target: WorkerTarget,
        *,
        needs: Sequence[str] = (),
        baselines: dict[str, str] | None = None,
    ) -> None:
        self.http = http
        self.adapter = adapter
        self.target = target
        self.quirks: list[str] = []
        self._needs = needs
        self._baselines = {} if baselines is None else baselines
        self._request_numbers = itertools.count()

    def for_probe(self, needs: Sequence[str]) -> "WorkerClient":
        """A client for another probe of the same worker."""
        return WorkerClient(
            self.http, self.adapter, self.target, needs=needs, baselines=self._baselines
        )

    # --- requests ---------------------------------------------------------------------------------

    def text_request(self, text: str, **options: Any) -> GenerationRequest:
        """A request with ``text``, greedy and short unless ``options`` say otherwise."""
        if self.target.mode == "prompt":
            return self.prompt_request(text, **options)
        return self.chat_request(Message("user", (TextPart(text),)), **options)

    def chat_request(self, *messages: Message, **options: Any) -> GenerationRequest:
        """A chat request. Raises NotOffered if texts are to be sent as prompts."""
        if self.target.mode == "prompt":
            raise NotOffered("texts are sent as prompts (--prompts)")
        return self._request(kind="chat", messages=messages, **options)

    def prompt_request(self, *prompts: str | tuple[int, ...], **options: Any) -> GenerationRequest:
        """A completion request."""
        return self._request(kind="completion", prompts=prompts, **options)

    def _request(self, **fields: Any) -> GenerationRequest:
        if self.target.model is None:
            raise NotOffered("no text model given (--model)")
        defaults = {
            "sampling": SamplingParams(temperature=0.0),
            "stopping": StopConditions(max_tokens=48),
        }
        return GenerationRequest(model=self.target.model, **(defaults | fields))

    def embedding_request(self, *inputs: str, **options: Any) -> EmbeddingRequest:
        """An embeddings request. Raises NotOffered without a model for it."""
        if self.target.embedder is None:
            raise NotOffered("no embedding model given (--embedder)")
        return EmbeddingRequest(model=self.target.embedder, inputs=inputs, **options)

    # --- responses --------------------------------------------------------------------------------

    async def send(
        self, request: Request, until: Callable[[WorkerResponse], bool] | None = None
    ) -> WorkerResponse:
        """Send a request; stop reading when ``until`` holds. Raises NotOffered and Unreachable."""
        request = self._with_client_id(request)
        return await self.send_encoded(self.encode(request), request, until)

    async def baseline(self, text: str) -> str:
        """The plain answer to ``text``, requested once. Raises Inconclusive without one."""
        if text not in self._baselines:
            try:
                self._baselines[text] = (await self.send(self.text_request(text))).choice.text
            except (UnexpectedResponse, WorkerRefused) as error:
                raise Inconclusive(f"the plain request: {error}") from None
        return self._baselines[text]

    def encode(self, request: Request) -> UpstreamRequest:
        """The HTTP request. Raises NotOffered if the protocol can't express a needed field."""
        try:
            for loss in self.adapter.unsupported_parameters(request, {}):
                if loss.path in self._needs:
                    detail = f" ({loss.detail})" if loss.detail else ""
                    raise NotOffered(f"the protocol can't carry {loss.path}: {loss.reason}{detail}")
            return self.adapter.encode_request(request)
        except UnsupportedFeature as error:
            raise NotOffered(error.message) from None

    async def send_encoded(
        self,
        upstream_request: UpstreamRequest,
        request: Request,
        until: Callable[[WorkerResponse], bool] | None = None,
    ) -> WorkerResponse:
        """Send these bytes; decode the response as one to ``request``. Raises Unreachable."""
        response = WorkerResponse()
        try:
            async with self._open(upstream_request, response) as http_response:
                if http_response.status_code == httpx.codes.OK:
                    await _read_stream(
                        http_response, response, self.adapter.create_decoder(request), until
                    )
                else:
                    await _read_body(http_response, response)
                    headers = response.headers
                    response.error = self.adapter.read_error(
                        response.status, headers, response.body
                    )
        except GatewayError as error:
            response.error = error
        return response

    async def fetch(self, upstream_request: UpstreamRequest) -> WorkerResponse:
        """Send these bytes; do not decode the response, whatever its status."""
        response = WorkerResponse()
        with suppress(StreamBroken):
            async with self._open(upstream_request, response) as http_response:
                await _read_body(http_response, response)
        return response

    async def send_and_disconnect(self, request: Request) -> WorkerResponse:
        """Send a request and disconnect after the first event, as a pool does."""
        request = self._with_client_id(request)
        response = await self.send_encoded(
            self.encode(request), request, lambda got: bool(got.events)
        )
        if isinstance(self.adapter, SupportsCancel) and response.error is None:
            await self.fetch(self.adapter.encode_cancel(request))
        return response

    def _with_client_id(self, request: Request) -> Request:
        """The request with an id of its own, if the protocol cancels requests by id."""
        if not isinstance(self.adapter, SupportsCancel):
            return request
        return replace(request, client_id=f"probe-{id(self):x}-{next(self._request_numbers)}")

    @asynccontextmanager
    async def _open(
        self, upstream_request: UpstreamRequest, response: WorkerResponse
    ) -> AsyncIterator[httpx.Response]:
        headers = [("Accept-Encoding", "identity"), *upstream_request.headers]
        if self.target.key is not None:
            headers.append(("Authorization", f"Bearer {self.target.key}"))
        url = self.target.url + upstream_request.path
        try:
            async with self.http.stream(
                upstream_request.method, url, content=upstream_request.body, headers=headers
            ) as http_response:
                response.status = http_response.status_code
                response.headers = {k.lower(): v for k, v in http_response.headers.items()}
                stream = http_response.extensions.get("network_stream")
                address = stream.get_extra_info("client_addr") if stream is not None else None
                response.port = address[_PORT] if address else None
                yield http_response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(str(error)) from None
        except httpx.TransportError as error:
            raise StreamBroken(
                f"the connection broke: {str(error) or type(error).__name__}"
            ) from None


async def _read_chunks(
    http_response: httpx.Response, response: WorkerResponse
) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in http_response.aiter_raw():
        response.chunks.append(chunk)
        size += len(chunk)
        if size > _MAX_BODY:
            raise WorkerFailed(f"the answer is larger than {_MAX_BODY} bytes")
        yield chunk


async def _read_body(http_response: httpx.Response, response: WorkerResponse) -> None:
    async for _ in _read_chunks(http_response, response):
        pass


async def _read_stream(
    http_response: httpx.Response,
    response: WorkerResponse,
    decoder: ResponseDecoder,
    until: Callable[[WorkerResponse], bool] | None,
) -> None:
    async for chunk in _read_chunks(http_response, response):
        response.events += decoder.feed(chunk)
        if until is not None and until(response):
            return
    response.events += decoder.close()
    response.result = fold_events(response.events)


def fold_events(events: Sequence[Event]) -> UnaryResponse:
    """The answer from the events of a body. Raises StreamBroken."""
    fold = ResponseAccumulator()
    fold.add(events)
    if not any(isinstance(event, StreamEnd) for event in events):
        fold.add([StreamEnd()])
    return fold.result()


async def run_concurrently(*requests: Any) -> list[WorkerResponse]:
    """The responses to requests that run at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(request) for request in requests]
    return [task.result() for task in tasks]


def expect(condition: object, message: str) -> None:
    """Raises UnexpectedResponse with ``message`` unless ``condition`` holds."""
    if not condition:
        raise UnexpectedResponse(message)


class Probe(Struct, frozen=True):
    """A test of one property of a worker.

    ``run`` returns what it observed, or raises NotOffered, WorkerRefused, UnexpectedResponse or
    Inconclusive. ``fields`` are those that it tests: a worker that rejects or ignores them does not
    support them. Without ``fields``, a rejection is a failure. ``needs`` are further fields that
    the probe can't do without.
    """

    name: str
    what: str
    """The property, as a sentence."""
    run: Callable[[WorkerClient], Awaitable[str]]
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


# --- what the protocol itself can express ---------------------------------------------------------

_INVALID: Final = (
    MalformedRequest("the body is not JSON"),
    InvalidParameter("a field is of another type", param="prompt", problem="type"),
)
_EVENTS: Final[tuple[Event, ...]] = (TextDelta("hi"), ChoiceEnd("eos"), Usage(3, 1), StreamEnd())


def reports_usage(adapter: UpstreamAdapter, request: GenerationRequest | EmbeddingRequest) -> bool:
    """Whether a response to ``request`` can hold usage."""
    client = _client_adapter(adapter)
    if client is None:
        return True
    try:
        decoder = adapter.create_decoder(request)
        read = [*decoder.feed(_encode_response(client, adapter, request)), *decoder.close()]
    except GatewayError:
        return True
    return any(isinstance(event, Usage) for event in read)


def error_statuses(adapter: UpstreamAdapter) -> frozenset[int]:
    """The statuses of the protocol for a request that can't be decoded."""
    client = _client_adapter(adapter)
    if client is None:
        return frozenset()
    return frozenset(client.encode_error(fault, None).status for fault in _INVALID)


def _client_adapter(adapter: UpstreamAdapter) -> ClientAdapter | None:
    """The same adapter if clients speak the protocol, too: then it can write a response."""
    return cast("ClientAdapter", adapter) if hasattr(adapter, "read_routing_info") else None


def _encode_response(
    client: ClientAdapter,
    adapter: UpstreamAdapter,
    request: GenerationRequest | EmbeddingRequest,
) -> bytes:
    upstream_request = adapter.encode_request(request)
    match = PathRouter([AdapterMount(client)]).find_endpoint(
        upstream_request.method, upstream_request.path
    )
    headers = {name.lower(): value for name, value in upstream_request.headers}
    call = ClientRequest(
        match.endpoint, match.params, headers, "", upstream_request.body, upstream_request.path
    )
    context = RequestContext("probe", Deadline(_frozen_clock, 60.0), _frozen_clock, ignore_memory)
    response_context = ResponseContext("probe", 1, request.model, "1", request.model, context.clock)
    task: ModelTask = "embedding" if isinstance(request, EmbeddingRequest) else "chat"
    decoded = client.decode_request(call, ModelInfo(request.model, (), task))
    encoder = client.create_encoder(call, cast("Request", decoded), response_context)
    if request.stream:
        return encoder.encode_events(_EVENTS)
    events = _EVENTS
    if isinstance(request, EmbeddingRequest):
        vectors = [Embedding(index, (0.5,)) for index in range(len(request.inputs))]
        events = (*vectors, Usage(3), StreamEnd())
    return encoder.encode_unary(aggregate(events)).body


def _frozen_clock() -> float:
    return 0.0
