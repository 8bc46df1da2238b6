"""Cohere's endpoints and the adapter for clients and workers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs

from protocols.chat.params import invalid_value_error
from protocols.chat.requests import read_model
from protocols.chat.rerank import RERANK_PARAMS, RerankDecoder, RerankEncoder, read_rerank
from protocols.chat.worker_errors import read_worker_error
from protocols.cohere import errors, openapi, upstream
from protocols.cohere.decoder import ChatDecoder
from protocols.cohere.params import CHAT_PARAMS, FIELD_NAMES, STREAM_PARAM
from protocols.cohere.requests import read_chat
from protocols.cohere.responses import RERANK_STYLE, ChatEncoder
from protocols.core.catalog import Catalog, ModelInfo, ModelTask
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import (
    GENERATION_KINDS,
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    RoutingInfo,
    UpstreamRequest,
)
from protocols.core.json_text import encode_ascii
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    GenerationRequest,
    KeptKeys,
    RequestKind,
    RerankRequest,
)
from protocols.core.request_headers import NO_REQUEST_HEADERS, RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.json_body import read_fields, read_object, read_unchecked_fields
from protocols.params import Param, read_params
from protocols.prompt import require_generation

_ENDPOINTS: Final = (
    Endpoint("POST", upstream.CHAT_PATH, operation="chat"),
    Endpoint("POST", upstream.RERANK_PATH, operation="rerank"),
)
_MODEL_ENDPOINTS: Final = (
    Endpoint("GET", "/v1/models", "inform", "models"),
    Endpoint("GET", "/v1/models/{model}", "inform", "model", takes_slashes=True),
)
_TASK_ENDPOINTS: Final[Mapping[ModelTask, str]] = {
    "chat": "chat",
    "embedding": "embed",
    "rerank": "rerank",
    "classify": "classify",
}
"""What the API calls the endpoints of a model, by its task."""
_LISTED_ENDPOINTS: Final = (*_TASK_ENDPOINTS.values(), "generate", "summarize", "rate")
"""Those that clients may ask for; no model is listed for the last ones."""


class Cohere:
    """Cohere's API v2: chat and rerank.

    Without ``models`` there is no list of models: its path is also that of OpenAI's.
    """

    name: str = "cohere"
    profiles: ClassVar[tuple[str, ...]] = ("2",)
    model_options: ClassVar[Mapping[str, Any]] = {}
    stateful_fields: Sequence[StatefulField] = ()
    request_headers: RequestHeaders = NO_REQUEST_HEADERS
    applies_model_settings: ClassVar[bool] = True
    path_prefixes: tuple[str, ...] = (upstream.CHAT_PATH, upstream.RERANK_PATH)
    request_kinds: frozenset[RequestKind] = GENERATION_KINDS | {"rerank"}
    health_request: UpstreamRequest = UpstreamRequest("/v1/models", b"", (), method="GET")
    param_tables: Mapping[str, tuple[Param, ...]] = {"chat": CHAT_PARAMS, "rerank": RERANK_PARAMS}

    def __init__(self, profile: str | None = None, *, models: bool = True) -> None:
        if profile not in (None, *self.profiles):
            known = ", ".join(self.profiles)
            raise ValueError(f"{self.name} has no profile {profile!r}; it has {known}")
        self.endpoints: tuple[Endpoint, ...] = (*_ENDPOINTS, *(_MODEL_ENDPOINTS if models else ()))

    # --- towards clients --------------------------------------------------------------------------

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        fields = read_unchecked_fields(call)
        if fields is None:
            fields = read_object(call.body)  # which raises the error
        model = read_model(fields)
        if call.endpoint.operation != "chat":
            return RoutingInfo(model)
        return RoutingInfo(model, stream=read_params(STREAM_PARAM, fields).get("stream", False))

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del model
        fields = read_fields(call)
        return read_chat(fields) if call.endpoint.operation == "chat" else read_rerank(fields)

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, context: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del call
        if isinstance(request, RerankRequest):
            return RerankEncoder(RERANK_STYLE, request, context, "2")
        assert isinstance(request, GenerationRequest)  # noqa: S101 - no endpoint has another kind
        return ChatEncoder(request, context)

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return errors.build_error_response(error, call.id if call else None)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if call.endpoint.operation == "model":
            name = call.path_params["model"]
            return HttpResponse(200, encode_ascii(_build_model(catalog.find_model(name), name)))
        wanted = _read_endpoint(call.query)
        models = [
            _build_model(info, name)
            for info in catalog.list_models()
            for name in info.listed_names
            if wanted in (None, _TASK_ENDPOINTS[info.task])
        ]
        return HttpResponse(200, encode_ascii({"models": models}))

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del call
        return FIELD_NAMES

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return openapi.describe_api()

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: AnyRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return upstream.find_unsupported_parameters(request, names, self.name)

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        return None if request.source == self.name else NO_KEYS

    def encode_request(self, request: AnyRequest) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return upstream.encode_request(request, self.name)

    def create_decoder(self, request: AnyRequest) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, RerankRequest):
            return RerankDecoder(request)
        return ChatDecoder(require_generation(request))  # type: ignore[arg-type]

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return read_worker_error(status, headers, body)

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, context: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``."""
        if not isinstance(client, Cohere) or call.endpoint.operation != "chat":
            return None
        try:
            request = read_chat(read_fields(call))
        except ClientError:
            return None
        request = request.bind_target(context.backend_model, self.name, context.context_length)
        return upstream.build_passthrough(call, context, request, ChatEncoder(request, context))


def _read_endpoint(query: str) -> str | None:
    """The endpoint whose models are listed. Raises InvalidParameter."""
    wanted = parse_qs(query).get("endpoint", [None])[-1]
    if wanted is not None and wanted not in _LISTED_ENDPOINTS:
        raise invalid_value_error("endpoint", wanted, _LISTED_ENDPOINTS)
    return wanted


def _build_model(info: ModelInfo, name: str) -> dict[str, Any]:
    length = {} if info.context_length is None else {"context_length": info.context_length}
    return {"name": name, "endpoints": [_TASK_ENDPOINTS[info.task]], "finetuned": False, **length}
