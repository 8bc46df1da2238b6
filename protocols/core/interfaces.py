"""What a dialect and a backend must offer. A port is what its caller needs, and no more.

Dialect        one wire protocol towards clients
Tokenizing     a dialect whose clients may ask for the tokens of a text
Described      a dialect that can tell what its endpoints take and answer
Metering       a dialect that tells its clients what is left to them
WorkerDialect  one wire protocol towards workers
Renderer       makes one prompt of a conversation
Learning       a worker dialect that asks a worker about a model first
Cancelling     a worker dialect with a request that stops another
Relaying       a worker dialect that takes a client's own bytes
Backend        what answers a request
Warming        a backend that takes a while until it is at its best
Pouring        a backend that gives its events to who takes them at once, or all together
Relayer        a backend whose workers take a client's own bytes
Choosing       a backend that tells how it chooses one of its workers
Tokenizer      a backend that knows the tokens of a text

A module that speaks both ways registers one object that is a Dialect and a WorkerDialect.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from protocols.core.aggregate import UnaryResponse
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import GatewayError
from protocols.core.events import Event
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import GenerationRequest, Request

Clock = Callable[[], float]
"""Monotonic seconds."""


Headers = tuple[tuple[str, str], ...]
Token = tuple[int, str]
"""A token's id, and the text that it completes: "" within a character of several tokens."""


class Endpoint(Struct, frozen=True):
    """One row of a dialect's table of paths.

    ``path`` is absolute; ``{name}`` stands for one segment, given percent-decoded in
    ``Call.params``. ``task`` says what the server does: ``generate`` answers a Request; ``inform``
    asks the dialect to answer from the catalog; ``stop`` ends the running request whose
    ``client_id`` the dialect's ``peek`` reads; ``tokenize`` is for a dialect that is Tokenizing.
    ``variant`` is the dialect's own.
    """

    method: str
    path: str
    task: Literal["generate", "inform", "stop", "tokenize"] = "generate"
    operation: str = ""
    public: bool = False
    """No key is asked for."""
    strict_slash: bool = False
    """A slash at the end makes it another path."""


class ClientRequest(Struct, frozen=True, dict=True):
    """What a client sent, and what a dialect keeps of it. Header names are lower case."""

    endpoint: Endpoint
    path_params: Mapping[str, str]
    headers: Mapping[str, str]
    query: str
    body: bytes
    path: str
    """As it was sent, not decoded."""
    id: str = ""
    """The gateway's name for the exchange."""
    started_at: float = 0.0
    """In Unix seconds."""


class RoutingInfo(Struct, frozen=True, gc=False):
    """The little that routing needs; everything else stays bytes."""

    model: str
    version: str | None = None
    stream: bool = False
    client_id: str | None = None


class ResponseContext(Struct, frozen=True):
    """What an answer says of itself beside the events.

    ``created`` is in Unix seconds. ``model`` is the name the client asked for, ``served`` the
    version's name and ``served_model`` the backend's name for the model. ``clock`` gives monotonic
    seconds.
    """

    id: str
    created: int
    model: str
    version: str
    backend_model: str
    clock: Clock


class HttpResponse(Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes = b""
    headers: Headers = (("Content-Type", "application/json"),)


class ResponseEncoder(Protocol):
    """Writes one answer, either as a stream or whole. Stateful, since most dialects are."""

    content_type: str
    """Of a stream."""

    def headers(self) -> Headers:
        """What this dialect adds to an answer's headers, once the first events are written."""

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """The bytes of these events in a stream. Done writes the dialect's end."""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """The bytes that tell of an error in a stream that has begun; no normal end follows."""

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """The answer in one piece."""


class ClientAdapter(Protocol):
    """One wire protocol towards clients, with no I/O. Its errors are ClientErrors."""

    name: str
    path_prefixes: tuple[str, ...]
    """Path prefixes under which an unknown path is answered in this dialect's words."""
    endpoints: tuple[Endpoint, ...]

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """Which model, and whether streamed."""

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> Request:
        """The whole request, checked after this dialect's rules.

        ``model`` is the one that it goes to; without it, the rules that are a model's are left out.
        """

    def create_encoder(
        self, call: ClientRequest, request: Request, about: ResponseContext
    ) -> ResponseEncoder:
        """What writes the answer to this request."""

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """The answer that tells of an error, before anything was sent.

        ``call`` is None when the path is unknown or the body could not be had.
        """

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """The answer of an ``inform`` endpoint."""

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """The wire name of each field path of the internal request, for reports of loss."""


@runtime_checkable
class SupportsTokenize(Protocol):
    """What a dialect with ``tokenize`` endpoints has beside. The model is the one it peeks."""

    def read_text(self, call: ClientRequest) -> str:
        """The text to be cut into tokens. Raises ClientError."""

    def encode_tokens(self, call: ClientRequest, tokens: Sequence[Token]) -> HttpResponse:
        """The answer."""


class OpenApiFragment(Struct, frozen=True):
    """Endpoints in the words of OpenAPI 3.1.

    ``operations`` holds an operation, without its path's parameters, for each ``Endpoint.variant``
    that is told of. ``schemas`` are what these refer to as ``#/components/schemas/NAME``.
    """

    operations: Mapping[str, Mapping[str, Any]]
    schemas: Mapping[str, Any]


@runtime_checkable
class OpenApiProvider(Protocol):
    """What a dialect has beside that tells of itself."""

    def openapi_fragment(self) -> OpenApiFragment:
        """What its endpoints take and answer. Names no model."""


class RateLimitStatus(Struct, frozen=True):
    """What is left of a limit; in ``reset`` seconds all of it will be."""

    limit: int
    remaining: int
    reset_after: float


@runtime_checkable
class RateLimitHeaders(Protocol):
    """What a dialect has beside that tells its clients what is left to them."""

    def rate_limit_headers(
        self, requests: RateLimitStatus | None, tokens: RateLimitStatus | None
    ) -> Headers:
        """What it adds to the headers of every answer; None where there is no such limit."""


class UpstreamRequest(Struct, frozen=True):
    """A request as it will be sent to a worker; ``path`` follows the worker's base URL."""

    path: str
    body: bytes
    headers: Headers = ()
    method: str = "POST"


class ResponseDecoder(Protocol):
    """Reads one worker's answer, fed with whatever the socket gave."""

    def feed(self, data: bytes) -> Sequence[Event]:
        """The events that are complete. Raises WorkerError."""

    def close(self) -> Sequence[Event]:
        """The rest, at the end of the body. Raises StreamBroken if the answer is not at its end."""


@runtime_checkable
class UpstreamAdapter(Protocol):
    """One wire protocol towards workers, with no I/O."""

    name: str
    health_request: UpstreamRequest
    """Answered with 200 by a worker that can take requests."""

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """What this dialect can't carry of the request; ``names`` as from ``Dialect.names``."""

    def encode_request(self, request: Request) -> UpstreamRequest:
        """The request in this dialect, without what ``losses`` reports."""

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """What reads the answer to ``encode(request)``, when its status is 200."""

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """What an answer of another status means. No worker's text is passed on unfiltered."""


class PromptRenderer(Protocol):
    """Makes one prompt of a conversation, as a model's template has it."""

    def render_prompt(self, request: GenerationRequest) -> str:
        """The prompt for ``request.messages``. Raises ClientError when the template refuses it."""


@runtime_checkable
class ModelMetadataReader(Protocol):
    """What a WorkerDialect may also be: one that asks about a model before it is sent requests."""

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """What to ask a worker about ``model``."""

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """Remember what the answers tell: a body for each question, None if it was not had.

        Gives how many requests the worker takes at a time, where it told. Never raises: what can't
        be read leaves the profile's own rules.
        """


@runtime_checkable
class SupportsCancel(Protocol):
    """What a WorkerDialect may also be: one with a request that stops another.

    A request to its workers carries a ``client_id`` that is the gateway's own.
    """

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """What stops ``request``."""


class PassthroughReader(Protocol):
    """Reads a worker's answer that is passed on as it is, fed like a Decoder.

    It gives what may be passed on now (whole events of a stream, never a piece of one; an answer in
    one piece as one piece), and what that means. None stands for bytes that are not what the client
    waits for: its dialect's encoder writes the events instead.
    """

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``Decoder.feed``. The pieces are those that the worker sent, as far as is known."""

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``Decoder.close``."""


class PassthroughRequest(Struct, frozen=True):
    """A client's own bytes on their way to a worker.

    ``request`` is what they ask, as far as choosing a worker and counting need it.
    ``headers`` gives those of the answer, as its encoder would have them, when the first is there.
    ``passage`` makes a new one for each try. ``encoder`` makes what writes an error into a stream,
    where the call may be one that can't be translated. ``read_error`` is in the place of
    ``WorkerDialect.read_error``, where a client of this dialect hears more.
    """

    request: Request
    upstream_request: UpstreamRequest
    build_headers: Callable[[], Headers]
    create_reader: Callable[[], PassthroughReader]
    create_encoder: Callable[[], ResponseEncoder] | None = None
    read_error: Callable[[int, Mapping[str, str], bytes], GatewayError] | None = None


@runtime_checkable
class SupportsPassthrough(Protocol):
    """What a WorkerDialect may also be: one that takes a client's own bytes."""

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """A call in ``client``'s dialect as a worker takes it, under the model's name there.

        None where the call has to be translated: the dialect is another, the body is not plainly
        right, or it asks for what a worker is not to be told.
        """
