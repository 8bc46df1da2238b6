"""OpenAI's endpoints and the adapter for clients and workers."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protocols import params
from protocols.chat import errors, openapi, worker_errors
from protocols.chat.classification import (
    CLASSIFY_PARAMS,
    ClassificationDecoder,
    ClassificationEncoder,
    read_classify,
)
from protocols.chat.decoder import GenerationDecoder
from protocols.chat.embeddings import EmbeddingDecoder, EmbeddingEncoder
from protocols.chat.params import invalid_type_error, null_to_none
from protocols.chat.requests import (
    DEFAULT_REQUEST_RULES,
    FIELD_NAMES,
    RequestRules,
    read_chat,
    read_completion,
    read_embedding,
    read_model,
)
from protocols.chat.rerank import (
    RERANK_PARAMS,
    SCORE_PARAMS,
    RankingEncoder,
    RerankDecoder,
    RerankEncoder,
    ScoreEncoder,
    read_ranking,
    read_rerank,
    read_score,
)
from protocols.chat.responses import (
    ResponseStyle,
    create_header_builder,
)
from protocols.chat.stateful import CHAT_STATEFUL_FIELDS
from protocols.chat.tokenization import (
    TOKENIZE_PARAMS,
    DetokenizeDecoder,
    DetokenizeEncoder,
    TokenizeDecoder,
    TokenizeEncoder,
    read_detokenize,
    read_tokenize,
)
from protocols.chat.tool_names import ToolNameDecoder, find_long_names, shorten_tool_names
from protocols.chat.upstream import (
    PROFILES,
    RequestWriter,
    WorkerProfile,
    uses_chat_endpoint,
)
from protocols.core.catalog import Catalog, ModelInfo, ModelState
from protocols.core.errors import ContentFiltered, GatewayError, UnsupportedFeature
from protocols.core.events import Usage
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    Headers,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    ProxiedModel,
    RateLimitStatus,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    RoutingInfo,
    StoredResponse,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    CACHE_KEY,
    NO_KEYS,
    AnyRequest,
    ClassifyRequest,
    EmbeddingRequest,
    GenerationRequest,
    KeptKeys,
    RerankRequest,
    TokenizeRequest,
    build_tokenize_request,
)
from protocols.core.request_headers import RequestHeaders
from protocols.core.response_headers import ResponseHeaders
from protocols.core.stateful import StatefulField
from protocols.json_body import decode_value, read_fields, read_unchecked_fields
from protocols.openai import azure
from protocols.openai.annotations import (
    ChatAnnotationDecoder,
    ResponsesAnnotationDecoder,
)
from protocols.openai.hosted_apis import HOSTED_PROFILES
from protocols.openai.proxied import PATHS as PROXIED_PATHS
from protocols.openai.proxied import (
    REFUSED_OPERATIONS,
    build_proxied_endpoints,
    find_model,
)
from protocols.openai.proxied import read_usage as read_proxied_usage
from protocols.openai.responses_api import errors as responses_errors
from protocols.openai.responses_api import openapi as responses_openapi
from protocols.openai.responses_api import state
from protocols.openai.responses_api.decoder import ResponsesDecoder
from protocols.openai.responses_api.params import RESPONSES_PARAMS, RESPONSES_STATEFUL_FIELDS
from protocols.openai.responses_api.requests import (
    COMPACTION_REFUSAL,
    ResponsesRequest,
    find_uncounted_fields,
    read_request,
)
from protocols.openai.responses_api.requests import FIELD_NAMES as RESPONSES_FIELD_NAMES
from protocols.openai.responses_api.requests import SOURCE as RESPONSES_SOURCE
from protocols.openai.responses_api.responses import (
    HEARTBEAT_INTERVAL,
    InputTokensEncoder,
    ResponsesEncoder,
    build_input_tokens_response,
)
from protocols.openai.responses_api.upstream import SHARED_FIELDS, ResponsesRequestWriter
from protocols.openai.upstream import (
    build_passthrough_rules,
    create_encoder,
)
from protocols.openapi import (
    build_error_responses,
    build_operation,
    build_response,
    build_struct_schemas,
    parse_types,
    ref,
)
from protocols.passthrough import PassthroughResponse

# Rate limits in the headers of every response.
#
# Source: the headers of OpenAI's API, https://platform.openai.com/docs/guides/rate-limits, "Rate
# limits in headers": numbers, and durations such as ``120ms``, ``1s`` and ``6m0s``.


def format_rate_limit_headers(
    requests: RateLimitStatus | None, tokens: RateLimitStatus | None
) -> Headers:
    """The headers of each existing limit."""
    headers: Headers = ()
    for name, one in (("requests", requests), ("tokens", tokens)):
        if one is not None:
            headers += (
                (f"x-ratelimit-limit-{name}", str(one.limit)),
                (f"x-ratelimit-remaining-{name}", str(one.remaining)),
                (f"x-ratelimit-reset-{name}", format_duration(one.reset_after)),
            )
    return headers


def format_duration(seconds: float) -> str:
    """Rounded up, to a millisecond below one second and else to a second."""
    if 0 < seconds <= 0.999:  # noqa: PLR2004 - what is more rounds up to a whole one
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


_encode = msgspec.json.Encoder().encode

_VERSION_HEADERS: Final[Headers] = (("openai-version", "2020-10-01"),)
"""On every response, including errors: client logs and proxies read it."""


_TIMEOUT_HEADER: Final = "x-stainless-read-timeout"

_ModelName = Annotated[str, Meta(min_length=1)]


class _RoutingFields(Struct):
    model: _ModelName
    stream: bool | None = None
    request_id: str | None = None


_decode_routing_fields = JsonDecoder(_RoutingFields, skims=True).decode
_decode_model_name = JsonDecoder(_ModelName).decode
_decode_optional_bool = JsonDecoder(bool | None).decode


def build_endpoints(prefix: str) -> tuple[Endpoint, ...]:
    """The endpoints under ``prefix``, such as ``/v1``, and those without ``/v1``, as in LiteLLM."""
    root = prefix.removesuffix("/v1")
    return (
        *_build_basic_endpoints(prefix),
        *_build_responses_endpoints(prefix),
        *_build_basic_endpoints(root),
        *_build_responses_endpoints(root),
        *_build_ranking_endpoints(prefix, root),
        *build_proxied_endpoints(prefix),
        *_DATABRICKS_ENDPOINTS,
    )


_DATABRICKS_ENDPOINTS: Final = (
    Endpoint("POST", "/serving-endpoints/responses", operation="response", is_stateful=True),
)
"""Where Databricks' clients send requests of the Responses API, which that protocol lacks."""


def _build_basic_endpoints(prefix: str) -> tuple[Endpoint, ...]:
    return (
        Endpoint("POST", f"{prefix}/chat/completions", operation="chat"),
        Endpoint("POST", f"{prefix}/completions", operation="completion"),
        Endpoint("POST", f"{prefix}/embeddings", operation="embedding"),
        Endpoint("GET", f"{prefix}/models", "inform", "models", lists_models=True),
        Endpoint("GET", f"{prefix}/models/{{model}}", "inform", "model", takes_slashes=True),
    )


def _build_responses_endpoints(prefix: str) -> tuple[Endpoint, ...]:
    return (
        Endpoint("POST", f"{prefix}/responses", operation="response", is_stateful=True),
        Endpoint("GET", f"{prefix}/responses/{{response_id}}", "recall", "stored response"),
        Endpoint("DELETE", f"{prefix}/responses/{{response_id}}", "recall", "response deletion"),
        Endpoint(
            "GET", f"{prefix}/responses/{{response_id}}/input_items", "recall", "response items"
        ),
        Endpoint(
            "POST",
            f"{prefix}/responses/{{response_id}}/cancel",
            "recall",
            "response cancellation",
        ),
        Endpoint(
            "POST",
            f"{prefix}/responses/input_tokens",
            "tokenize",
            "response tokens",
            is_stateful=True,
        ),
        Endpoint("POST", f"{prefix}/responses/compact", "inform", "response compaction"),
    )


_AZURE_ENDPOINTS: Final = (
    *azure.ENDPOINTS,
    *_build_responses_endpoints(azure.ROOT),  # with an api-version, as AzureOpenAI calls them
    *_build_basic_endpoints(azure.V1_ROOT),
    *_build_responses_endpoints(azure.V1_ROOT),
    *build_proxied_endpoints(azure.V1_ROOT),
)


def _build_ranking_endpoints(prefix: str, root: str) -> Iterator[Endpoint]:
    """The endpoints of vLLM, Jina, NVIDIA and Cohere's first API, which OpenAI does not have."""
    yield Endpoint("POST", f"{prefix}/rerank", operation="rerank_v1")
    yield Endpoint("POST", f"{prefix}/ranking", operation="ranking")
    yield Endpoint("POST", f"{prefix}/score", operation="score")
    yield Endpoint("POST", f"{prefix}/classify", operation="classify")
    yield Endpoint("POST", f"{prefix}/tokenize", "tokenize", "tokenize")
    yield Endpoint("POST", f"{prefix}/detokenize", "tokenize", "detokenize")
    yield Endpoint("POST", f"{root}/rerank", operation="rerank")
    yield Endpoint("POST", f"{root}/score", operation="score")
    yield Endpoint("POST", f"{root}/classify", operation="classify")
    yield Endpoint("POST", f"{root}/tokenize", "tokenize", "tokenize")
    yield Endpoint("POST", f"{root}/detokenize", "tokenize", "detokenize")


def _read_any_routing_info(call: ClientRequest, client_id: str | None) -> RoutingInfo:
    """See ``OpenAI.read_routing_info``, for any body."""
    try:
        fields = _decode_routing_fields(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _read_checked_routing_info(call, client_id)
    return RoutingInfo(fields.model, None, fields.stream is True, client_id or fields.request_id)


def _read_checked_routing_info(call: ClientRequest, client_id: str | None) -> RoutingInfo:
    """The same, decoded field by field to find the exact error."""
    fields = read_fields(call)
    model = read_model(fields)
    raw = null_to_none(fields.get("stream"))
    stream = decode_value(raw) if raw is not None else False
    if not isinstance(stream, bool):
        raise invalid_type_error("stream", "a boolean", stream)
    return RoutingInfo(model, None, stream, client_id)


def read_timeout(headers: Mapping[str, str]) -> float | None:
    """The client's timeout in seconds, from its library's header; a hint, never an error."""
    text = headers.get(_TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None  # noqa: PLR2004 - and no infinity


_READERS: Final[Mapping[str, Callable[..., AnyRequest]]] = {
    "chat": read_chat,
    "completion": read_completion,
    "embedding": read_embedding,
    "rerank": read_rerank,
    "rerank_v1": read_rerank,
    "ranking": read_ranking,
    "score": read_score,
    "classify": read_classify,
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
}
_EXTENSION_PARAMS: Final[Mapping[str, params.ParamTable]] = {
    **dict.fromkeys(("rerank", "rerank_v1"), RERANK_PARAMS),
    "ranking": SCORE_PARAMS,
    "score": SCORE_PARAMS,
    "classify": CLASSIFY_PARAMS,
    "tokenize": TOKENIZE_PARAMS,
}
_COHERE_OPERATION: Final = "rerank_v1"
_TOKENIZER_OPERATIONS: Final = ("tokenize", "detokenize")


_RESPONSES_OPERATIONS: Final = frozenset(
    {
        "response",
        "stored response",
        "response deletion",
        "response items",
        "response cancellation",
        "response tokens",
        "response compaction",
    }
)
_REFUSED_OPERATIONS: Final[Mapping[str, str]] = {
    **REFUSED_OPERATIONS,
    "response compaction": COMPACTION_REFUSAL,
}
_DECODED_RESPONSES_REQUEST: Final = "responses_request"
"""The key under which a decoded request is kept, for the encoder of its response."""


_WORKER_APIS: Final = ("chat", "responses", "both")


def _map_field_names(rules: RequestRules) -> Mapping[str, Mapping[str, str]]:
    """The wire names of each kind of request, by field path."""
    return {
        "chat": {**params.map_field_names(rules.chat), **FIELD_NAMES},
        "completion": {**FIELD_NAMES, **params.map_field_names(rules.completion)},
        "embedding": params.map_field_names(rules.embedding),
        "response": RESPONSES_FIELD_NAMES,
        **{name: params.map_field_names(rows) for name, rows in _EXTENSION_PARAMS.items()},
    }


_PROFILES: Final[Mapping[str, WorkerProfile]] = {**PROFILES, **HOSTED_PROFILES}


def _get_profile(name: str) -> WorkerProfile:
    """The profile of this name. Raises ValueError."""
    if name not in _PROFILES:
        names = ", ".join(_PROFILES)
        raise ValueError(f"there is no profile {name!r} of openai; known: {names}")
    return _PROFILES[name]


_PREFIX: Final = "/v1"
_MIN_INTERVAL: Final = 0.1


def _check_options(worker_api: str, heartbeat_interval: float) -> None:
    if worker_api not in _WORKER_APIS:
        names = ", ".join(_WORKER_APIS)
        raise ValueError(f"worker_api is one of {names}, not {str(worker_api)[:32]!r}")
    if heartbeat_interval < _MIN_INTERVAL:
        raise ValueError(f"heartbeat_interval of openai must be at least {_MIN_INTERVAL}")


REQUEST_HEADERS: Final = RequestHeaders(
    ("openai-", "x-openai-", "x-ms-", "x-goog-", "azureml-"),
    {
        "x-ms-client-request-id": "handled",
        "x-ms-useragent": "handled",
        "x-ms-date": "handled",
        "x-ms-return-client-request-id": "handled",
        "x-openai-subagent": "handled",
        "x-goog-api-client": "handled",
        "x-goog-api-key": "handled",
        "openai-beta": "forwarded",
        "openai-organization": "reported",
        "openai-project": "reported",
        "idempotency-key": "reported",
        "azureml-model-deployment": "reported",
        "x-data-parallel-rank": "reported",
    },
)
"""The organization and the project are those of the gateway's own account at the service, which a
client must not choose, nor the engine of a worker (vLLM's ``x-data-parallel-rank``)."""
RESPONSE_HEADERS: Final = ResponseHeaders(
    ("openai-", "x-openai-", "azureml-", "apim-"),
    state=(
        "openai-organization", "openai-project", "openai-processing-ms", "openai-version",
        "openai-model", "azureml-model-*", "apim-request-id",
    ),
)  # fmt: skip
"""Sources: OpenAI's API reference, "Debugging requests"; Azure's answers (apim-, azureml-)."""


class OpenAI:
    """OpenAI's API: chat, completions, responses, embeddings and the list of models.

    ``profile`` is the kind of worker. ``unknown`` says what happens to fields that the protocol
    does not have. ``powers`` lets clients use fields that control a worker: a chat template of
    their own, priorities, caches. ``worker_api`` says how workers get conversations: as chat
    completions, in the Responses API, or in the API of the client (both).

    The profile ``azure`` is Azure OpenAI, with its own paths and errors. ``api_version`` is what
    its workers get: a date, or ``v1`` for the paths below ``/openai/v1``. ``filter_results:
    synthetic`` adds the fields of a content filter that found nothing; otherwise clients get those
    that an Azure worker sent, if the request is passed through.

    ``heartbeat_interval`` is the seconds of a worker's silence until a stream of the Responses API
    sends ``response.in_progress`` again; it starts after two such intervals.
    """

    name: str = "openai"
    profiles: ClassVar[tuple[str, ...]] = tuple(_PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}
    applies_model_settings: ClassVar[bool] = True
    own_headers: ClassVar[frozenset[str]] = REQUEST_HEADERS.forwarded
    stateful_fields: Sequence[StatefulField] = (*RESPONSES_STATEFUL_FIELDS, *CHAT_STATEFUL_FIELDS)
    request_headers: RequestHeaders = REQUEST_HEADERS
    response_headers: ResponseHeaders = RESPONSE_HEADERS
    query_parameters: ClassVar[frozenset[str]] = frozenset({"api-version"})
    """Azure's clients send it."""

    def __init__(
        self,
        profile: str | None = None,
        *,
        unknown: Literal["forward", "ignore", "reject"] = "forward",
        powers: bool = False,
        api_version: str = azure.DEFAULT_API_VERSION,
        filter_results: Literal["upstream", "synthetic"] = "upstream",
        worker_api: Literal["chat", "responses", "both"] = "chat",
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
    ) -> None:
        _check_options(worker_api, heartbeat_interval)
        self._heartbeat_interval = heartbeat_interval
        worker_profile = _get_profile(profile or self.profiles[0])
        self.path_prefixes: tuple[str, ...] = (_PREFIX,)
        self.endpoints: tuple[Endpoint, ...] = build_endpoints(_PREFIX)
        self.health_request = UpstreamRequest(f"{_PREFIX}/models", b"", method="GET")
        self._is_azure = profile == azure.PROFILE
        self._api_version = api_version
        self._adds_filter_results = self._is_azure and filter_results == "synthetic"
        if self._is_azure:
            self.path_prefixes = (azure.ROOT,)
            self.endpoints = _AZURE_ENDPOINTS
            self.health_request = azure.build_health_request(api_version)
        self._has_default_rules = worker_profile.request_rules is DEFAULT_REQUEST_RULES
        self._allows_passthrough = (
            self._has_default_rules and unknown == "forward" and not self._adds_filter_results
        )
        """Whether a client's bytes may go to any worker, with the meaning of OpenAI's API."""
        self._request_rules: RequestRules = msgspec.structs.replace(
            worker_profile.request_rules, unknown_fields=unknown
        )
        self._response_style = ResponseStyle(
            headers=_VERSION_HEADERS, elapsed_header="openai-processing-ms", source=self.name
        )
        self._request_writer = RequestWriter(
            worker_profile, _PREFIX, powers=powers, source=self.name
        )
        self._worker_api = worker_api
        self._limits_tool_names = worker_profile.limits_tool_names
        self._has_custom_tools = worker_profile.custom_tools or (
            self._is_azure and azure.has_custom_tools(api_version)
        )
        self._responses_writer = ResponsesRequestWriter(worker_profile, _PREFIX)
        self.request_kinds = worker_profile.request_kinds
        self._passthrough_rules = build_passthrough_rules(
            worker_profile,
            _PREFIX,
            self._request_writer.forwards_field,
            self.name,
            build_path=azure.create_path_builder(api_version) if self._is_azure else None,
        )
        self._field_names = _map_field_names(self._request_rules)
        self.param_tables: Mapping[str, tuple[params.Param, ...]] = {
            "chat": self._request_rules.chat,
            "completion": self._request_rules.completion,
            "embedding": self._request_rules.embedding,
            "response": RESPONSES_PARAMS,
            **({} if self._is_azure else _EXTENSION_PARAMS),
        }

    # --- towards clients --------------------------------------------------------------------------

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        client_id = call.headers.get("x-client-request-id")
        if self._is_azure:
            azure.check_request(call)
            if (deployment := azure.get_deployment(call)) is not None:
                return RoutingInfo(
                    deployment,
                    stream=azure.read_stream(call),
                    client_id=client_id or None,
                    replaces_model=True,
                )
        fields = read_unchecked_fields(call)
        if fields is None or "request_id" in fields:
            return _read_any_routing_info(call, client_id)
        try:
            model = _decode_model_name(fields["model"])
            stream = "stream" in fields and _decode_optional_bool(fields["stream"]) is True
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
            return _read_any_routing_info(call, client_id)
        return RoutingInfo(model, None, stream, client_id or None)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del model
        client_id = call.headers.get("x-client-request-id")
        timeout = read_timeout(call.headers)
        if call.endpoint.operation == "response":
            return self._decode_responses_request(call, timeout).request
        if call.endpoint.operation == "response tokens":
            request = self._decode_responses_request(call, timeout).request
            extra = {**request.extra, **find_uncounted_fields(call)}
            return build_tokenize_request(request, extra)
        read = _READERS[call.endpoint.operation]
        if not self._is_azure:
            return read(
                read_fields(call), self._request_rules, client_id=client_id, timeout=timeout
            )
        fields = azure.read_fields(call)
        return read(fields, self._request_rules, client_id=client_id, timeout=timeout)

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, context: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if call.endpoint.operation == "response":
            decoded: ResponsesRequest = call.__dict__[_DECODED_RESPONSES_REQUEST]
            build_headers = create_header_builder(self._response_style, context, ())
            return ResponsesEncoder(
                decoded, context, build_headers, heartbeat_interval=self._heartbeat_interval
            )
        style = self._response_style
        if call.endpoint.operation == "response tokens":
            return InputTokensEncoder(style, context)
        match request:
            case GenerationRequest() if self._adds_filter_results:
                return azure.FilterResultsEncoder(
                    create_encoder(style, request, context, self._build_headers(context))
                )
            case GenerationRequest():
                return create_encoder(style, request, context, self._build_headers(context))
            case EmbeddingRequest():
                headers = self._build_headers(context)
                return EmbeddingEncoder(style, request, context, headers=headers)
            case RerankRequest():
                return _create_rerank_encoder(call.endpoint.operation, style, request, context)
            case ClassifyRequest():
                return ClassificationEncoder(style, context)
            case TokenizeRequest():
                return TokenizeEncoder(style, request, context)
            case _:
                return DetokenizeEncoder(style, context)

    def _decode_responses_request(
        self, call: ClientRequest, timeout: float | None
    ) -> ResponsesRequest:
        """Decode a request, and keep it for ``create_encoder``."""
        decoded = read_request(
            read_fields(call),
            state.get_references(call),
            unknown=self._request_rules.unknown_fields,
            timeout=timeout,
        )
        call.__dict__[_DECODED_RESPONSES_REQUEST] = decoded
        return decoded

    def encode_token_count(self, call: ClientRequest, count: int) -> HttpResponse | None:
        """See ``protocols.core.interfaces.SupportsTokenEstimate``: for the Responses API."""
        if call.endpoint.operation != "response tokens":
            return None
        reply = build_input_tokens_response(count)
        return msgspec.structs.replace(reply, headers=reply.headers + _VERSION_HEADERS)

    def count_references(self, call: ClientRequest) -> Mapping[str, int]:
        """See ``protocols.core.interfaces.StoresResponses``."""
        return state.count_references(call.body)

    def read_parts(self, stored: StoredResponse, names: Container[str]) -> Mapping[str, bytes]:
        """See ``protocols.core.interfaces.StoresResponses``."""
        return state.read_parts(stored, names)

    def set_references(self, call: ClientRequest, parts: Mapping[str, bytes] | None) -> None:
        """See ``protocols.core.interfaces.StoresResponses``."""
        state.set_references(call, parts)

    def copy_references(self, call: ClientRequest, target: ClientRequest) -> None:
        """See ``protocols.core.interfaces.StoresResponses``."""
        state.copy_references(call, target)

    def read_stored_id(self, call: ClientRequest) -> str:
        """See ``protocols.core.interfaces.StoresResponses``."""
        return call.path_params["response_id"]

    def encode_stored(self, call: ClientRequest, stored: StoredResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.StoresResponses``."""
        reply = state.encode_stored(call, stored)
        return msgspec.structs.replace(reply, headers=reply.headers + _VERSION_HEADERS)

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if call is not None and call.endpoint.operation in _RESPONSES_OPERATIONS:
            reply = responses_errors.encode_error(error, call.headers)
        elif self._is_azure:
            return azure.build_error_response(error, call)
        else:
            reply = errors.build_error_response(error)
            if call is not None:
                reply = _adapt_error_response(reply, error, call.endpoint.operation)
        return msgspec.structs.replace(reply, headers=reply.headers + _VERSION_HEADERS)

    def rate_limit_headers(
        self, requests: RateLimitStatus | None, tokens: RateLimitStatus | None
    ) -> Headers:
        """See ``protocols.core.interfaces.RateLimitHeaders``."""
        return format_rate_limit_headers(requests, tokens)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if self._is_azure:
            azure.check_request(call)
        if call.endpoint.operation == "deployments":
            return _build_json_response(azure.list_deployments(catalog))
        if (refusal := _REFUSED_OPERATIONS.get(call.endpoint.operation)) is not None:
            raise UnsupportedFeature(refusal)
        if call.endpoint.operation == "models":
            cards = [
                build_model_card(model, name)
                for model in catalog.list_models()
                for name in model.listed_names
            ]
            return _build_json_response({"object": "list", "data": cards})
        name = call.path_params["model"]
        return _build_json_response(build_model_card(catalog.find_model(name), name))

    def find_proxied_model(self, call: ClientRequest) -> ProxiedModel:
        """See ``protocols.core.interfaces.SupportsProxy``."""
        if not self._is_azure:
            return find_model(call)
        azure.check_request(call)
        return find_model(call, azure.get_deployment(call))

    def get_proxied_path(self, operation: str, model: str) -> str | None:
        """See ``protocols.core.interfaces.SupportsProxy``."""
        if self._is_azure:
            return azure.build_proxied_path(operation, model, self._api_version)
        return _PREFIX + PROXIED_PATHS[operation]

    def read_proxied_usage(self, tail: bytes) -> Usage | None:
        """See ``protocols.core.interfaces.SupportsProxy``."""
        return read_proxied_usage(tail)

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return self._field_names.get(call.endpoint.operation, {})

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        error = ref("ErrorAnswer")
        failures = build_error_responses(errors.ERROR_STATUSES, error)
        types = parse_types(
            """
            ErrorAnswer = {error: ErrorBody}
            CohereErrorAnswer = {error: ErrorBody, message: string}
            ModelList = {object: "list", data: ModelCard[]}
            """
        )
        models = build_response(types["ModelList"])
        offered = {endpoint.operation for endpoint in self.endpoints}
        operations = {
            **openapi.build_operations(self._request_rules, failures, error),
            **responses_openapi.build_operations(
                failures,
                allows_unknown_fields=self._request_rules.unknown_fields != "reject",
            ),
            **openapi.build_rerank_operations(
                self._request_rules,
                failures,
                build_error_responses(errors.ERROR_STATUSES, ref("CohereErrorAnswer")),
            ),
            "models": build_operation("List the models.", models, failures),
            "model": build_operation(
                "Describe one model.", build_response(ref("ModelCard")), failures
            ),
        }
        return OpenApiFragment(
            {name: operation for name, operation in operations.items() if name in offered},
            {
                **openapi.build_response_schemas(self._response_style),
                **(responses_openapi.build_schemas() if "response" in offered else {}),
                **build_struct_schemas(ModelCard, errors.ErrorBody, *openapi.RERANK_RESPONSE_TYPES),
                **{name: types[name] for name in ("ErrorAnswer", "CohereErrorAnswer")},
            },
        )

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: AnyRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, GenerationRequest) and self._uses_responses_api(request):
            return self._responses_writer.unsupported_parameters(request, names)
        own_request = self._remove_foreign_extra(request)
        losses = self._request_writer.unsupported_parameters(own_request, names)
        if own_request is request:
            return losses
        shared = self._find_shared_fields(request)
        dropped = [name for name in request.extra if name not in shared]
        return losses + tuple(UnsupportedParameter(name, "dropped") for name in dropped)

    def encode_request(self, request: AnyRequest) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, GenerationRequest):
            if self._limits_tool_names and request.messages:
                request = shorten_tool_names(request)
            if self._uses_responses_api(request):
                return self._responses_writer.encode_request(request)
        own_request = self._request_writer.encode_request(self._remove_foreign_extra(request))
        if not self._is_azure:
            return own_request
        return azure.change_path(own_request, request.model, self._api_version)

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        kept = None if request.source in ("", self.name) else self._request_writer.kept_keys
        if kept is NO_KEYS or not isinstance(request, GenerationRequest):
            return kept
        return NO_KEYS if self._uses_responses_api(request) else kept

    def keeps_custom_tools(self, request: AnyRequest) -> bool:
        """See ``protocols.core.interfaces.KeepsCustomTools``."""
        is_response = isinstance(request, GenerationRequest) and self._uses_responses_api(request)
        return is_response or self._has_custom_tools

    def _uses_responses_api(self, request: GenerationRequest) -> bool:
        """Whether the worker gets the request in the Responses API."""
        if self._worker_api == "chat" or not uses_chat_endpoint(request):
            return False
        return self._worker_api == "responses" or request.source == RESPONSES_SOURCE

    def _remove_foreign_extra(self, request: AnyRequest) -> AnyRequest:
        """The request without fields that only workers of another protocol may get."""
        if not request.extra or request.source in ("", self.name):
            return request
        shared = self._find_shared_fields(request)
        extra = {shared[name]: raw for name, raw in request.extra.items() if name in shared}
        return msgspec.structs.replace(request, extra=extra)

    def _find_shared_fields(self, request: AnyRequest) -> Mapping[str, str]:
        """The fields of the client's protocol that workers have, too, and their names there."""
        shared = SHARED_FIELDS if request.source == RESPONSES_SOURCE else {}
        return {**shared, CACHE_KEY: CACHE_KEY} if self._request_writer.kept_keys else shared

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``."""
        if not isinstance(client, OpenAI) or not client._allows_passthrough:  # noqa: SLF001
            return None
        if client._is_azure and b'"data_sources"' in call.body:  # noqa: SLF001
            return None
        style = client._response_style  # noqa: SLF001
        if call.endpoint.operation == "response":
            if self._worker_api == "chat":
                return None
            build_headers = create_header_builder(style, about, ())
            return self._responses_writer.prepare_passthrough(
                call,
                state.get_references(call),
                about,
                lambda decoded: ResponsesEncoder(
                    decoded,
                    about,
                    build_headers,
                    heartbeat_interval=client._heartbeat_interval,  # noqa: SLF001
                ),
                partial(build_headers, (("Content-Type", ResponsesEncoder.content_type),)),
            )
        if self._worker_api == "responses" and call.endpoint.operation == "chat":
            return None
        keeps_results = self._is_azure and client._is_azure  # noqa: SLF001
        passed = self._passthrough_rules.prepare_passthrough(
            call.endpoint.operation,
            call,
            about,
            PassthroughResponse(
                create_header_builder(style, about, client._build_headers(about)),  # noqa: SLF001
                lambda request: create_encoder(style, request, about),
                {"model": about.model},
            ),
            timeout=read_timeout(call.headers) if _TIMEOUT_HEADER in call.headers else None,
        )
        if passed is None or not passed.request.stream or not keeps_results:
            return passed
        reader = partial(azure.create_stream_reader, self.create_decoder, passed.request, about)
        return msgspec.structs.replace(passed, create_reader=reader)

    def create_decoder(self, request: AnyRequest) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        match request:
            case GenerationRequest():
                decoder = self._create_generation_decoder(request)
                names = find_long_names(request) if request.tools else None
                if not names or not self._limits_tool_names:
                    return decoder
                return ToolNameDecoder(decoder, names)
            case EmbeddingRequest():
                return EmbeddingDecoder(request, source=self.name)
            case RerankRequest():
                return RerankDecoder(request)
            case ClassifyRequest():
                return ClassificationDecoder(request, source=self.name)
            case TokenizeRequest():
                return TokenizeDecoder(self.name)
            case _:
                return DetokenizeDecoder(self.name)

    def _create_generation_decoder(self, request: GenerationRequest) -> ResponseDecoder:
        if self._uses_responses_api(request):
            items = ResponsesDecoder(request)
            is_chat = request.source == self.name and not request.response_options.has_items
            return ChatAnnotationDecoder(items, self.name) if is_chat else items
        echoes = self._request_writer.expects_echo(request)
        choices = GenerationDecoder(request, echoes=echoes, source=self.name)
        has_items = request.response_options.has_items
        return ResponsesAnnotationDecoder(choices, self.name) if has_items else choices

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        error = worker_errors.read_worker_error(status, headers, body)
        if self._is_azure and isinstance(error, ContentFiltered):
            error.filter_results = azure.read_filter_results(body)
        return error

    def _build_headers(self, about: ResponseContext) -> Headers:
        """The headers of a response beside those of all responses."""
        return (("apim-request-id", about.id),) if self._is_azure else ()


def _adapt_error_response(reply: HttpResponse, error: GatewayError, operation: str) -> HttpResponse:
    """The error of an endpoint that OpenAI's API does not have.

    Cohere's clients read ``message`` of the body itself. A model without a tokenizer is a 501.
    """
    if operation == _COHERE_OPERATION:
        body = decode_json(reply.body)
        body = {"message": body["error"]["message"], **body}
        return msgspec.structs.replace(reply, body=_encode(body))
    if operation in _TOKENIZER_OPERATIONS and type(error) is UnsupportedFeature:
        body = decode_json(reply.body)
        body["error"]["type"] = "not_implemented_error"
        return msgspec.structs.replace(reply, status=501, body=_encode(body))
    return reply


def _create_rerank_encoder(
    operation: str, style: ResponseStyle, request: RerankRequest, context: ResponseContext
) -> ResponseEncoder:
    match operation:
        case "score":
            return ScoreEncoder(style, context)
        case "ranking":
            return RankingEncoder(style, context)
        case _:
            return RerankEncoder(style, request, context)


def _build_json_response(body: Any) -> HttpResponse:
    return HttpResponse(
        200, _encode(body), (("Content-Type", "application/json"), *_VERSION_HEADERS)
    )


class ModelExtension(Struct):
    """What no OpenAI client expects: versions that the gateway runs itself, by name."""

    versions: dict[str, ModelState]


class ModelCard(Struct):
    """A model in the list of models.

    ``max_model_len`` is vLLM's, which load generators read; ``interlingua`` is the gateway's own.
    """

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "interlingua"
    max_model_len: int | UnsetType = UNSET
    interlingua: ModelExtension | UnsetType = UNSET


def build_model_card(model: ModelInfo, name: str) -> ModelCard:
    """A model under the requested ``name``."""
    length = UNSET if model.context_length is None else model.context_length
    states = {one.name: one.state for one in model.versions if one.state is not None}
    extension = ModelExtension(states) if states else UNSET
    return ModelCard(name, model.created, max_model_len=length, interlingua=extension)
