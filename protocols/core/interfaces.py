"""Interfaces between the gateway, the protocols and their callers.

ClientAdapter        one wire protocol towards clients
StoresResponses      a client adapter whose requests refer to earlier responses
SupportsProxy        an adapter with endpoints that are forwarded without translation
OpenApiProvider      a client adapter that describes its endpoints
RateLimitHeaders     a client adapter that reports rate limits in headers
SupportsTokenEstimate a client adapter whose response may be an estimated number of tokens
HasQueryParameters   a client adapter that knows parameters of queries of its requests
HasVersionHeader     a client adapter whose requests have a header of their own
SupportsHeartbeat    a response encoder that keeps a waiting client connected
HidesFinishReasons   a response encoder whose protocol lacks words for incomplete answers
WritesContentKinds   a response encoder that writes more than text
WritesMatchedStop    a response encoder that writes which stop string matched
ReportsLosses        a response encoder that leaves out single parts of an answer
SupportsHostedTools  a response encoder that writes what a worker's own tools did
SupportsSignedReasoning a response encoder that writes signatures of reasoning
SupportsResponseExtra a response encoder that writes a worker's keys without a place in events
SelectsResponseExtra a response encoder that writes some of these keys
SupportsKeepAlive    a client adapter of servers that close the connection after a response
UpstreamAdapter      one wire protocol towards workers
ModelMetadataReader  an upstream adapter that reads a model's metadata from a worker first
HasOwnHeaders        an upstream adapter whose requests have headers of their own
HasResponseHeaders   an upstream adapter whose responses have headers of the protocol
SupportsRequestKinds an upstream adapter that carries more kinds of requests
KeepsExtraFields     an upstream adapter that sends keys which the internal request does not have
SupportsCancel       an upstream adapter with a request that cancels another
SupportsPassthrough  an upstream adapter that forwards a client's own bytes
PromptRenderer       renders a conversation as one prompt

A class that serves both directions is a ClientAdapter and an UpstreamAdapter. The interfaces of
backends are in ``backends.interfaces``.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, runtime_checkable

from msgspec import Raw, Struct
from msgspec.structs import force_setattr, replace

from protocols.core.aggregate import UnaryResponse
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import GatewayError, UnsupportedFeature
from protocols.core.events import Event, FinishReason, ReasoningDelta, ResponseExtra, Usage
from protocols.core.loss import LossReason, UnsupportedParameter
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    GenerationRequest,
    KeptKeys,
    Request,
    RequestKind,
)
from protocols.core.request_headers import RequestHeaders
from protocols.core.response_headers import COMMON_RESPONSE_HEADERS, ResponseHeaders
from protocols.core.stateful import StatefulField

Clock = Callable[[], float]
"""Monotonic seconds."""


Headers = tuple[tuple[str, str], ...]


class Endpoint(Struct, frozen=True):
    """One endpoint of a protocol.

    ``path`` is absolute; ``{name}`` matches one segment, percent-decoded in
    ``ClientRequest.path_params``. ``task`` says what the gateway does: ``generate`` answers a
    Request; ``inform`` answers from the catalog; ``stop`` cancels the running request whose
    ``client_id`` is in the RoutingInfo; ``tokenize`` is ``generate``, but takes no tokens of a rate
    limit; ``proxy`` forwards the request without translation and needs SupportsProxy; ``recall``
    answers from the stored responses and needs StoresResponses. ``operation`` is the adapter's own
    name for what the endpoint does.
    """

    method: str
    path: str
    task: Literal["generate", "inform", "stop", "tokenize", "proxy", "recall"] = "generate"
    operation: str = ""
    public: bool = False
    """No API key is required, so its response may not depend on any one model."""
    strict_slash: bool = False
    """A trailing slash makes it another path."""
    takes_slashes: bool = False
    """Its last parameter ends the path, and may have slashes that are not encoded."""
    lists_models: bool = False
    """Its response depends on the catalog alone, so that it may be cached."""
    is_stateful: bool = False
    """A ``generate`` endpoint whose requests may refer to stored responses, and whose responses may
    be stored. It needs StoresResponses."""


class ClientRequest(Struct, frozen=True, dict=True):
    """One HTTP request of a client, with the decoded forms that adapters cache on it.

    Header names are lower case.
    """

    endpoint: Endpoint
    path_params: Mapping[str, str]
    headers: Mapping[str, str]
    query: str
    body: bytes
    path: str
    """As the client sent it, not percent-decoded."""
    id: str = ""
    """The gateway's id of the request."""
    started_at: float = 0.0
    """Unix time in seconds."""

    def release_body(self) -> None:
        """Let go of the body, which is empty from now on: nothing reads it any more."""
        force_setattr(self, "body", b"")
        self.__dict__.pop("fields", None)


class RoutingInfo(Struct, frozen=True, gc=False):
    """The fields that routing needs; the rest of the body is not decoded.

    ``model`` is "" where the request names none: then it is for the only model, if there is one.
    """

    model: str
    version: str | None = None
    stream: bool = False
    client_id: str | None = None
    other_names: tuple[str, ...] = ()
    """Further names of ``model``, tried in order if no model is called so.

    If there are any, case does not count where no name matches exactly.
    """
    inform: bool = False
    """``ClientAdapter.handle_info_request`` answers this request, and no model runs."""
    replaces_model: bool = False
    """Workers get the routed model instead of the body's ``model``, also where that is another."""


class ModelSettings(Struct, frozen=True):
    """What a model's configuration changes of its requests: a limit, and defaults by field path.

    ``stream_usage``: workers are asked for the usage of streams that are passed through.
    """

    max_tokens: int | None = None
    defaults: Mapping[str, Any] = {}
    stream_usage: bool = True


NO_SETTINGS: Final = ModelSettings()


class ResponseContext(Struct, frozen=True):
    """Metadata of a response that is not in its events.

    ``settings`` are the model's, for a request that is passed through. ``created`` is Unix time in
    seconds. ``model`` is the name that the client requested, ``version`` the name of the version
    and ``backend_model`` the backend's name of the model.
    ``clock`` returns monotonic seconds, ``context_length`` is the model's, if known.
    """

    id: str
    created: int
    model: str
    version: str
    backend_model: str
    clock: Clock
    context_length: int | None = None
    settings: ModelSettings = NO_SETTINGS


class HttpResponse(Struct, frozen=True):
    """A complete, non-streaming HTTP response."""

    status: int
    body: bytes = b""
    headers: Headers = (("Content-Type", "application/json"),)


class ResponseEncoder(Protocol):
    """Encodes one response, streaming or unary. It has state: use one for each response."""

    content_type: str
    """Content type of a stream."""

    def headers(self) -> Headers:
        """The protocol's response headers, valid once the first events are encoded."""

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """These events as bytes of a stream. StreamEnd writes the protocol's end marker."""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """The error as bytes of a stream that has started; no end marker follows."""

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """The complete response."""


@runtime_checkable
class SupportsHeartbeat(Protocol):
    """A response encoder whose clients give up a stream in which nothing happens."""

    heartbeat_interval: float
    """Seconds of silence after which ``encode_heartbeat`` is called, again and again."""

    def encode_heartbeat(self, silence: float) -> bytes:
        """Bytes for a client that has got no event for ``silence`` seconds; may be empty.

        They begin the stream if it has not begun: its status is then 200, whatever follows.
        """


@runtime_checkable
class SupportsHostedTools(Protocol):
    """A response encoder that writes HostedToolCall events; others leave them out."""

    writes_hosted_tools: bool


@runtime_checkable
class SupportsSignedReasoning(Protocol):
    """A response encoder that writes signatures of reasoning; others leave them out."""

    def writes_signature(self, event: ReasoningDelta) -> bool:
        """Whether clients get its signature or its encrypted reasoning."""


@runtime_checkable
class HidesFinishReasons(Protocol):
    """A response encoder whose protocol has no word for why some answers are incomplete."""

    hidden_reasons: frozenset[FinishReason]
    """Those of INCOMPLETE_REASONS that are written with a word for a complete answer."""


@runtime_checkable
class WritesContentKinds(Protocol):
    """A response encoder that writes more than text.

    Any other drops reasoning, refusals and tool calls: see ``protocols.core.response_losses``.
    """

    content_losses: Mapping[type[Event], LossReason]
    """What becomes of ReasoningDelta, RefusalDelta and ToolCallStart; of a missing one, nothing.

    ``approximated``: clients get it as another kind of content.
    """


@runtime_checkable
class WritesDetails(Protocol):
    """A response encoder that writes details of a worker's usage, or its fingerprint."""

    written_details: frozenset[str]
    """``system_fingerprint``, and the counts of ``USAGE_DETAILS``."""


@runtime_checkable
class WritesMatchedStop(Protocol):
    """A response encoder that writes which stop string matched; for others, that is lost."""

    writes_matched_stop: bool


@runtime_checkable
class ReportsLosses(Protocol):
    """A response encoder that leaves out single parts of what it can write otherwise."""

    losses: Sequence[UnsupportedParameter]
    """Those of all that was encoded so far."""


@runtime_checkable
class SupportsResponseExtra(Protocol):
    """A response encoder that writes ResponseExtra events of one protocol."""

    extra_source: str
    """The protocol."""


@runtime_checkable
class SelectsResponseExtra(Protocol):
    """One that writes only some of these keys."""

    def writes_key(self, event: ResponseExtra, path: tuple[str, ...]) -> bool:
        """Whether clients get the value at this path in the event's object."""


class ClientAdapter(Protocol):
    """One wire protocol towards clients. It does no I/O and raises ClientErrors."""

    name: str
    path_prefixes: tuple[str, ...]
    """An unknown path under one of these prefixes gets this protocol's error body."""
    endpoints: tuple[Endpoint, ...]
    stateful_fields: Sequence[StatefulField]
    """The fields of its requests that refer to what a server keeps."""
    request_headers: RequestHeaders
    """The headers that say something to a server of this protocol."""

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """Read the requested model, whether to stream, and the client's request id."""

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """Decode and validate the complete request.

        ``model`` is the target model; without it, rules that depend on the model are skipped.
        """

    def create_encoder(
        self, call: ClientRequest, request: Request, context: ResponseContext
    ) -> ResponseEncoder:
        """Create the encoder of the response to this request, which it has decoded itself.

        An adapter that decodes other kinds than Request encodes these, too.
        """

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """The error as a response, if none has been started.

        ``call`` is None if the path is unknown or the body could not be read.
        """

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """Answer a request to an ``inform`` endpoint, or one whose RoutingInfo says ``inform``."""

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """Wire name by field path of the internal request, for translation loss reports."""


class StoredResponse(Struct, frozen=True):
    """A response that later requests of the same API key may refer to.

    ``id`` is the response's, ``item_ids`` are those of its items. ``body`` is the adapter's own.
    """

    id: str
    item_ids: tuple[str, ...]
    body: bytes


@runtime_checkable
class StoresResponses(Protocol):
    """A client adapter with stateful endpoints. The pipeline does the I/O.

    Before it decodes a request to a stateful endpoint, it finds the responses that
    ``count_references`` names, reads the parts of them that the request refers to with
    ``read_parts``, and passes these to ``set_references``.
    """

    def count_references(self, call: ClientRequest) -> Mapping[str, int]:
        """The ids of earlier responses or items that the request names, and how often.

        Never raises.
        """

    def read_parts(self, stored: StoredResponse, names: Container[str]) -> Mapping[str, bytes]:
        """The parts of a stored response with these ids: what they add to a request, as JSON."""

    def set_references(self, call: ClientRequest, parts: Mapping[str, bytes] | None) -> None:
        """Keep these parts, by the named id, for ``decode_request``.

        An id without a response is left out; None means that no responses are stored at all.
        """

    def copy_references(self, call: ClientRequest, target: ClientRequest) -> None:
        """Let ``target``, a copy of a request, refer to the same."""

    def encode_stored(self, call: ClientRequest, stored: StoredResponse) -> HttpResponse:
        """Answer a ``recall`` request. Raises ClientError.

        A DELETE request is answered after the response was removed.
        """

    def read_stored_id(self, call: ClientRequest) -> str:
        """The id of the response that a ``recall`` request is for."""


@runtime_checkable
class StorableEncoder(ResponseEncoder, Protocol):
    """An encoder of a stateful endpoint's response."""

    stored_response: StoredResponse | None
    """The response to store, after its last event was encoded; None if it is not to be stored."""


class ProxiedModel(Struct, frozen=True):
    """The model that a request to a ``proxy`` endpoint names; "" if it names none.

    ``write`` returns the content type and the body for a worker with another name of the model, or
    as it was read if that is "". Both are written anew, from what was read.
    """

    name: str
    write: Callable[[str], tuple[str, bytes]]
    read_fields: Callable[[], Iterable[tuple[str, bytes | Raw]]]
    """All names of the body's fields, as they are written, and their values as JSON.

    The files of a form have none.
    """


@runtime_checkable
class SupportsProxy(Protocol):
    """An adapter with ``proxy`` endpoints: workers of the same protocol get what clients sent.

    Nothing but the model's name is replaced in a request, and nothing but the usage is read of a
    response.
    """

    def find_proxied_model(self, call: ClientRequest) -> ProxiedModel:
        """The model of a request. Raises ClientError, also for what workers may read otherwise."""

    def get_proxied_path(self, operation: str, model: str) -> str | None:
        """The path of a worker for the endpoint's operation; None if workers have none."""

    def read_proxied_usage(self, tail: bytes) -> Usage | None:
        """The usage at the end of a response in JSON or of events, if there is one."""


@runtime_checkable
class SupportsTokenEstimate(Protocol):
    """A client adapter with ``tokenize`` endpoints that answer with a number of tokens.

    The gateway estimates it where nobody counts.
    """

    def encode_token_count(self, call: ClientRequest, count: int) -> HttpResponse | None:
        """The response with this number; None if the endpoint answers with something else."""


class OpenApiFragment(Struct, frozen=True):
    """The OpenAPI 3.1 description of one adapter's endpoints.

    ``operations`` has an operation object, without path parameters, by ``Endpoint.operation``.
    ``schemas`` are the components that these reference as ``#/components/schemas/NAME``.
    """

    operations: Mapping[str, Mapping[str, Any]]
    schemas: Mapping[str, Any]


@runtime_checkable
class OpenApiProvider(Protocol):
    """A client adapter that describes its endpoints."""

    def openapi_fragment(self) -> OpenApiFragment:
        """Requests and responses of its endpoints, independent of the models."""


class RateLimitStatus(Struct, frozen=True):
    """What remains of a rate limit; it is full again after ``reset_after`` seconds."""

    limit: int
    remaining: int
    reset_after: float


@runtime_checkable
class SupportsKeepAlive(Protocol):
    """A client adapter of servers that close the connection after a response."""

    def keep_connections(self) -> None:
        """Keep connections from now on, unless the client closes them."""


@runtime_checkable
class RateLimitHeaders(Protocol):
    """A client adapter that reports rate limits in response headers."""

    def rate_limit_headers(
        self, requests: RateLimitStatus | None, tokens: RateLimitStatus | None
    ) -> Headers:
        """Headers for every response; an argument is None if there is no such limit."""


@runtime_checkable
class HasVersionHeader(Protocol):
    """A client adapter whose clients send a header that no other protocol has.

    On a path that several protocols of a listener have, a request with the header is this
    protocol's, and one without it another's.
    """

    version_header: str
    """The header's name, in lower case."""


@runtime_checkable
class HasBinaryData(Protocol):
    """A client adapter whose requests may have binary data behind their JSON."""

    def get_json_size(self, endpoint: Endpoint, headers: Mapping[str, str], size: int) -> int:
        """How many of the body's ``size`` bytes are JSON; those that follow are never decoded."""


class UpstreamRequest(Struct, frozen=True):
    """An HTTP request to a worker; ``path`` is relative to the worker's base URL."""

    path: str
    body: bytes
    headers: Headers = ()
    method: str = "POST"

    def without_body(self) -> "UpstreamRequest":
        """What is kept of a request that is not sent again."""
        return UpstreamRequest(self.path, b"", self.headers, self.method)


class ResponseDecoder(Protocol):
    """Decodes one response of a worker incrementally. It has state."""

    def feed(self, data: bytes) -> Sequence[Event]:
        """Decode more bytes of the body into events. Raises WorkerError."""

    def close(self) -> Sequence[Event]:
        """The last events, at the end of the body. Raises StreamBroken if it is incomplete."""


@runtime_checkable
class UpstreamAdapter(Protocol):
    """One wire protocol towards workers. It does no I/O.

    It gets the kinds of Request; one that carries more kinds implements SupportsRequestKinds.
    """

    name: str
    health_request: UpstreamRequest
    """Health check: a worker that is ready answers with status 200."""

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """Parameters that this protocol cannot carry.

        ``names`` is the result of ``ClientAdapter.field_names``.
        """

    def encode_request(self, request: Request) -> UpstreamRequest:
        """Encode the request, without its unsupported parameters."""

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """Create the decoder of a response with status 200 to this request."""

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """Map a response of another status to an error. Worker texts are always filtered."""


@runtime_checkable
class SupportsRequestKinds(Protocol):
    """An upstream adapter whose methods take other kinds of requests than Request, too."""

    request_kinds: frozenset[RequestKind]
    """The kinds that its workers may answer, those of Request included."""


GENERATION_KINDS: Final[frozenset[RequestKind]] = frozenset({"chat", "completion"})
BASIC_KINDS: Final[frozenset[RequestKind]] = frozenset({"chat", "completion", "embedding"})
"""The kinds of Request."""
_API_NAMES: Final = {
    "chat": "Chat",
    "completion": "Completions",
    "embedding": "Embeddings",
    "rerank": "Rerank (Score)",
    "classify": "Classify",
    "tokenize": "Tokenize",
    "detokenize": "Detokenize",
}


def build_unsupported_kind_error(
    kind: RequestKind, error_class: type[UnsupportedFeature] = UnsupportedFeature
) -> UnsupportedFeature:
    """The error of a target that does not answer requests of this kind."""
    return error_class(f"The model does not support the {_API_NAMES[kind]} API.", param="model")


def get_request_kinds(adapter: UpstreamAdapter) -> frozenset[RequestKind]:
    """The kinds of requests that the adapter takes."""
    return adapter.request_kinds if isinstance(adapter, SupportsRequestKinds) else BASIC_KINDS


class PromptRenderer(Protocol):
    """Renders a conversation as one prompt, by the model's chat template."""

    def render_prompt(self, request: GenerationRequest) -> str:
        """The prompt for ``request.messages``. Raises ClientError if the template rejects them."""


@runtime_checkable
class ModelMetadataReader(Protocol):
    """An upstream adapter that needs a model's metadata before it sends requests."""

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """The requests for the metadata of ``model``."""

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """Store the metadata: one body for each metadata request, None if that failed.

        Returns how many requests the worker accepts at a time, None if unknown. Never raises: if
        metadata cannot be read, the rules of the profile hold.
        """


@runtime_checkable
class HasQueryParameters(Protocol):
    """A client adapter whose requests have queries. The parameters of all others are unknown."""

    query_parameters: frozenset[str]
    """The parameters that the adapter reads, or that say nothing to a worker."""


def get_query_parameters(adapter: ClientAdapter) -> frozenset[str]:
    """The query parameters that the adapter knows."""
    return adapter.query_parameters if isinstance(adapter, HasQueryParameters) else frozenset()


@runtime_checkable
class HasOwnHeaders(Protocol):
    """An upstream adapter whose requests have headers of their own, which workers then get."""

    own_headers: frozenset[str]
    """Their names, in lower case."""


def get_own_headers(adapter: UpstreamAdapter) -> frozenset[str]:
    """The names of the headers of the adapter's own."""
    return adapter.own_headers if isinstance(adapter, HasOwnHeaders) else frozenset()


@runtime_checkable
class HasResponseHeaders(Protocol):
    """An upstream adapter whose workers' responses have headers of the protocol."""

    response_headers: ResponseHeaders


def get_response_headers(adapter: UpstreamAdapter) -> ResponseHeaders:
    """The headers of responses of the adapter's workers."""
    if isinstance(adapter, HasResponseHeaders):
        return adapter.response_headers
    return COMMON_RESPONSE_HEADERS


@runtime_checkable
class LearnsFromErrors(Protocol):
    """An upstream adapter that finds out from an error how a model takes requests."""

    def learn_from_error(self, model: str, error: GatewayError) -> bool:
        """Whether requests to the model are encoded in another form from now on."""


@runtime_checkable
class KeepsExtraFields(Protocol):
    """An upstream adapter that sends keys inside messages and tools that only the client knows.

    See ``protocols.core.extra``. For any other adapter, these keys are removed and reported.
    """

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """The keys that ``encode_request`` writes for this request; None: all of them."""


def build_kept_keys_reader(
    adapter: UpstreamAdapter,
) -> Callable[[AnyRequest], KeptKeys | None]:
    """Tells the unknown keys that the adapter's workers get, by default none; None: all of them.

    Build it once: whether an adapter keeps any is too slow to find out for each request.
    """
    return adapter.get_kept_keys if isinstance(adapter, KeepsExtraFields) else _keep_none


def _keep_none(_: AnyRequest) -> KeptKeys:
    return NO_KEYS


def _is_never(_: AnyRequest) -> bool:
    return False


@runtime_checkable
class KeepsCustomTools(Protocol):
    """An upstream adapter that sends custom tools, whose input is text.

    For any other adapter, functions stand for them: see ``protocols.core.custom_tools``.
    """

    def keeps_custom_tools(self, request: AnyRequest) -> bool:
        """Whether the worker gets the custom tools of this request."""


def build_custom_tools_check(adapter: UpstreamAdapter) -> Callable[[AnyRequest], bool]:
    """Tells whether the adapter's workers get the custom tools of a request, by default not."""
    return adapter.keeps_custom_tools if isinstance(adapter, KeepsCustomTools) else _is_never


@runtime_checkable
class SupportsCancel(Protocol):
    """An upstream adapter with a request that cancels another.

    The gateway sets the ``client_id`` of requests to its workers.
    """

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """The request that cancels ``request``."""


class PassthroughReader(Protocol):
    """Reads a worker's response that is passed through.

    It returns the bytes for the client now (complete events of a stream, or a complete unary
    response) and the events that they hold. Bytes that would break the client's protocol are
    replaced by those of its encoder. None instead of bytes means that the body has another form
    than the client asked for: the caller encodes the events.
    """

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``ResponseDecoder.feed``. ``pieces`` are consecutive pieces of the body."""

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``ResponseDecoder.close``."""


class PassthroughRequest(Struct, frozen=True):
    """A client's own bytes, to be forwarded to a worker.

    ``request`` has the fields that load balancing and metrics need. ``build_headers`` returns the
    response headers, once the first event is there. ``create_reader`` makes a new reader for each
    attempt. ``create_encoder`` makes the encoder of errors in a stream, if the request may be one
    that cannot be translated. ``read_error`` replaces ``UpstreamAdapter.read_error`` if clients of
    the same protocol get more details.
    """

    request: AnyRequest
    upstream_request: UpstreamRequest
    build_headers: Callable[[], Headers]
    create_reader: Callable[[], PassthroughReader]
    create_encoder: Callable[[], ResponseEncoder] | None = None
    read_error: Callable[[int, Mapping[str, str], bytes], GatewayError] | None = None
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    """What the model's settings changed of the request."""
    encodes_events: bool = False
    """Whether an encoder writes what the client gets: what it can't write is lost."""

    def without_body(self) -> "PassthroughRequest":
        """What is kept of a request that is not sent again."""
        return replace(self, upstream_request=self.upstream_request.without_body())


@runtime_checkable
class SupportsPassthrough(Protocol):
    """An upstream adapter that forwards a client's own bytes."""

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, context: ResponseContext
    ) -> PassthroughRequest | None:
        """A client's request for a worker, with the backend's model name.

        None if the request must be translated: the protocols differ, the body may be invalid, or
        it has fields that must not reach a worker.
        """


@runtime_checkable
class AppliesModelSettings(Protocol):
    """An upstream adapter that applies ``ResponseContext.settings`` to what it passes through.

    Requests to models with settings are translated for any other.
    """

    applies_model_settings: bool
