"""OVMS endpoints and the adapter."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from msgspec import json

from protocols import params
from protocols.chat.extra_keys import ExtraKeyEncoder
from protocols.chat.stateful import CHAT_STATEFUL_FIELDS
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import GatewayError, InvalidParameter, ModelNotFound, PathNotFound
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    ResponseContext,
    ResponseEncoder,
    RoutingInfo,
)
from protocols.core.request import (
    AnyRequest,
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
)
from protocols.core.request_headers import NO_REQUEST_HEADERS, RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.ovms import errors, openapi, requests
from protocols.ovms import params as ovms_params
from protocols.ovms.responses import (
    RESPONSE_KEYS,
    GenerationEncoder,
    KserveServerMetadata,
    ModelCard,
    ModelList,
    OvmsEmbeddingEncoder,
    OvmsRerankEncoder,
    ResponseVariant,
)
from protocols.ovms.upstream import OvmsUpstream, build_passthrough
from protocols.passthrough import PassthroughResponse

_encode = json.Encoder().encode
_WRONG_ENDPOINT_ERROR = (
    "Wrong endpoint. Allowed endpoints: /v[13]/chat/completions, /v[13]/completions, "
    "/v[13]/responses, /v[13]/tokenize"
)
_NOT_JSON_ERROR = "Non-json request received in {} calculator"
_CALCULATOR_NAMES = {"embedding": "embeddings", "rerank": "rerank"}
_GENERATION_OPERATIONS = ("chat", "completion")
_FIELD_NAMES = {
    "tools": "tools",
    "tool_choice": "tool_choice",
    "output": "response_format",
    "templating.arguments": "chat_template_kwargs",
    **params.map_field_names(row.param for row in ovms_params.ALL_PARAMS),
}


def _build_endpoints(root: str) -> tuple[Endpoint, ...]:
    """Build the endpoints under one root.

    The server answers GET of an unknown path with "wrong URL", not with "wrong method", and the
    graph in the body rejects a POST of one: hence the endpoints without a function.
    """
    return (
        Endpoint("POST", f"{root}/chat/completions", operation="chat"),
        Endpoint("POST", f"{root}/completions", operation="completion"),
        Endpoint("POST", f"{root}/embeddings", operation="embedding"),
        Endpoint("POST", f"{root}/rerank", operation="rerank"),
        Endpoint("GET", f"{root}/models", "inform", "models", lists_models=True),
        Endpoint("GET", f"{root}/models/{{model}}", "inform", "model"),
        Endpoint("GET", f"{root}/models/{{owner}}/{{model}}", "inform", "model"),
        *(
            Endpoint("GET", f"{root}/{path}", "inform", "nothing", public=True)
            for path in (
                "chat/completions",
                "completions",
                "embeddings",
                "rerank",
                "{a}",
                "{a}/{b}",
            )
        ),
        *(
            Endpoint("POST", f"{root}/{path}", operation="nothing")
            for path in ("models", "models/{model}", "{a}", "{a}/{b}")
        ),
    )


_KSERVE_ENDPOINTS = (
    Endpoint("GET", "/v2", "inform", "server", public=True),
    Endpoint("GET", "/v2/health/live", "inform", "live", public=True),
    Endpoint("GET", "/v2/health/ready", "inform", "ready", public=True),
    Endpoint("GET", "/v2/models/{model}/ready", "inform", "model ready"),
    Endpoint("GET", "/v2/models/{model}/versions/{version}/ready", "inform", "model ready"),
    Endpoint("POST", "/v2/models/{model}/infer", "inform", "infer"),
    Endpoint("POST", "/v2/models/{model}/versions/{version}/infer", "inform", "infer"),
)


class OVMS(OvmsUpstream):
    """OpenVINO Model Server's REST API for language models.

    The profile ``2024`` is the first release with chat: no usage, no id, no tools, no stop strings,
    greedy by default. ``v1`` adds the paths under ``/v1``, ``kserve`` the health paths under
    ``/v2``: on a listener with several protocols, both belong to others.
    """

    stateful_fields: Sequence[StatefulField] = CHAT_STATEFUL_FIELDS
    request_headers: RequestHeaders = NO_REQUEST_HEADERS
    name = "ovms"
    applies_model_settings: ClassVar[bool] = True
    profiles: ClassVar[tuple[str, ...]] = ("2026", "2024")

    def __init__(
        self, profile: str | None = None, *, v1: bool = False, kserve: bool = False
    ) -> None:
        release = self.profiles[0] if profile is None else profile
        if release not in self.profiles:
            names = ", ".join(self.profiles)
            raise ValueError(f"ovms has no profile {release!r}; it has {names}")
        super().__init__(release, self.name)
        self._profile = release
        self._passthrough = build_passthrough(release)
        self.param_tables: Mapping[str, tuple[params.Param, ...]] = (
            ovms_params.EARLY_PARAM_TABLES if self._early else ovms_params.PARAM_TABLES
        )
        roots = ("/v3", "/v1") if v1 else ("/v3",)
        self.path_prefixes: tuple[str, ...] = (*roots, "/v2") if kserve else roots
        self.endpoints: tuple[Endpoint, ...] = (
            *(endpoint for root in ("/v3/v1", *roots) for endpoint in _build_endpoints(root)),
            *(_KSERVE_ENDPOINTS if kserve else ()),
        )

    # --- towards clients --------------------------------------------------------------------------

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """Read the model and ``stream``, with the checks before the graph lookup.

        If the content is not JSON or the name is empty, the model is the path after the root.
        """
        model, stream = "", False
        if requests.has_json_body(call):
            generates = call.endpoint.operation in _GENERATION_OPERATIONS
            _, model, stream = requests.read_routing_fields(call, generates=generates)
        return RoutingInfo(model or _read_path_model(call), stream=stream)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """Decode the request as the graph does."""
        del model
        if not requests.has_json_body(call):
            task = _CALCULATOR_NAMES.get(call.endpoint.operation, "text generation")
            raise InvalidParameter(_NOT_JSON_ERROR.format(task), param="messages")
        match call.endpoint.operation:
            case "chat" | "completion" as kind:
                return requests.read_generation_request(
                    call, chat=kind == "chat", early=self._early
                )
            case "embedding":
                return requests.read_embedding_request(call)
            case "rerank":
                return requests.read_rerank_request(call)
            case _:
                raise InvalidParameter(_WRONG_ENDPOINT_ERROR, param="path")

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, context: ResponseContext
    ) -> ResponseEncoder:
        """Create the encoder of the response."""
        if isinstance(request, EmbeddingRequest):
            return OvmsEmbeddingEncoder(request.encoding)
        if isinstance(request, RerankRequest):
            return OvmsRerankEncoder(request)
        assert isinstance(request, GenerationRequest)  # noqa: S101 - decode makes no other
        usage = request.stream and request.response_options.usage != "none"
        form = ResponseVariant(
            is_chat=call.endpoint.operation == "chat", early=self._early, with_usage=usage
        )
        return ExtraKeyEncoder(GenerationEncoder(form, context), self.name, RESPONSE_KEYS)

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """Build the error response."""
        variant = call.endpoint.operation if call else ""
        if isinstance(error, ModelNotFound) and variant == "model":
            return errors.build_unknown_model_response()
        node = errors.NODES.get(variant, errors.GENERATION_NODE)
        return errors.build_error_response(
            error, node=node, stream=call is not None and self._is_stream(call)
        )

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """Return models and, if enabled, health. Raises ModelNotFound and PathNotFound."""
        match call.endpoint.operation:
            case "models":
                ready = [
                    _build_model_card(info, info.name)
                    for info in catalog.list_models()
                    if info.ready
                ]
                return HttpResponse(200, _encode(ModelList(ready)))
            case "model":
                name = "/".join(call.path_params.values())
                info = catalog.find_model(name)
                if not info.ready:
                    raise ModelNotFound("the model has no version that can answer", model=name)
                return HttpResponse(200, _encode(_build_model_card(info, name)))
            case "server":
                return HttpResponse(
                    200, _encode(KserveServerMetadata("OpenVINO Model Server", self._profile))
                )
            case "live":
                return HttpResponse(200)
            case "ready":
                return _build_health_response(ready=catalog.ready)
            case "model ready":
                version = call.path_params.get("version")
                info = catalog.find_model(call.path_params["model"], version)
                versions = [v for v in info.versions if version in (None, v.name)]
                return _build_health_response(ready=any(v.ready for v in versions))
            case "infer":
                name = call.path_params["model"]
                raise ModelNotFound("no model here takes tensors", model=name)
            case _:
                raise PathNotFound("no endpoint is called so")

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """Return the wire name of each field path."""
        del call
        return _FIELD_NAMES

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        operations = {endpoint.operation for endpoint in self.endpoints}
        return openapi.describe_api(operations, self.param_tables, early=self._early)

    def _is_stream(self, call: ClientRequest) -> bool:
        """Whether a stream was requested: errors before that are not errors of the graph."""
        if call.endpoint.operation not in _GENERATION_OPERATIONS:
            return False
        try:
            return self.read_routing_info(call).stream
        except GatewayError:
            return False

    # --- towards workers --------------------------------------------------------------------------

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``. Both sides have one release."""
        alike = isinstance(client, OVMS) and client._profile == self._profile  # noqa: SLF001
        if not alike or not requests.has_json_body(call):
            return None
        response = PassthroughResponse(
            tuple,
            lambda request: self.create_encoder(call, request, about),
            {"model": about.model},
        )
        return self._passthrough.prepare_passthrough(call.endpoint.operation, call, about, response)


def _read_path_model(call: ClientRequest) -> str:
    """Return the path after ``/v3/`` or ``/v1/``."""
    root = call.endpoint.path[:4]
    return call.path.partition(root)[2]


def _build_model_card(info: ModelInfo, name: str) -> ModelCard:
    return ModelCard(name, "model", info.created)


def _build_health_response(*, ready: bool) -> HttpResponse:
    return (
        HttpResponse(200)
        if ready
        else HttpResponse(503, errors.encode_error_body("Server is not ready"))
    )
