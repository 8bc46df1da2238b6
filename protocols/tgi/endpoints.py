"""Paths and what is read of a body for routing, and the adapter.

Source: text-generation-inference 3.3, ``router/src/server.rs``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from msgspec.structs import replace

from protocols import params
from protocols.chat.requests import DEFAULT_REQUEST_RULES, FIELD_NAMES
from protocols.chat.responses import CompletionEncoder, ResponseStyle
from protocols.chat.stateful import CHAT_STATEFUL_FIELDS
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseEncoder,
    RoutingInfo,
    UpstreamRequest,
)
from protocols.core.json_text import encode_ascii
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    EmbeddingRequest,
    GenerationRequest,
    KeptKeys,
    PromptOptions,
    TokenizeRequest,
)
from protocols.core.request_headers import RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.json_body import (
    read_fields,
    read_object,
    read_unchecked_fields,
)
from protocols.params import Param
from protocols.passthrough_readers import (
    NameReplacer,
    RunningCountCorrection,
    UnaryPassthroughReader,
    VerbatimStreamReader,
)
from protocols.tgi import openapi, requests
from protocols.tgi.decoder import GenerateDecoder
from protocols.tgi.errors import JSON_HEADERS, TgiError, build_error_response
from protocols.tgi.params import REQUEST_HEADERS, TgiLimits, build_client_table
from protocols.tgi.requests import Fields, GenerateOptions
from protocols.tgi.responses import (
    SERVER_VERSION,
    GenerateEncoder,
    TokensEncoder,
    V1ChatEncoder,
    VectorEncoder,
)
from protocols.tgi.upstream import TgiUpstream

_NATIVE_OPERATIONS: Final = ("root", "generate", "generate_stream")
PromptMode = Literal["raw", "chat"]
_PROMPT_OPTIONS: Final[Mapping[PromptMode, PromptOptions]] = {
    "raw": PromptOptions(mode="raw"),
    "chat": PromptOptions(mode="server"),
}
_STYLE: Final = ResponseStyle(source="tgi")
_FIELD_NAMES: Final = {
    "prompts": "inputs",
    "output": "grammar",
    "logprobs.top": "details",
    "n": "best_of",
    "stopping.include_stop": "stop",
}
_ENDPOINTS: Final = (
    Endpoint("POST", "/", operation="root"),
    Endpoint("POST", "/generate", operation="generate"),
    Endpoint("POST", "/generate_stream", operation="generate_stream"),
    Endpoint("GET", "/info", "inform", "info"),
    *(Endpoint("GET", path, "inform", "health", public=True) for path in ("/health", "/ping")),
    Endpoint("POST", "/tokenize", "tokenize", "tokenize"),
)
_V1_ENDPOINTS: Final = (
    Endpoint("POST", "/v1/chat/completions", operation="chat"),
    Endpoint("POST", "/v1/completions", operation="completion"),
    Endpoint("GET", "/v1/models", "inform", "models"),
)


class TGI(TgiUpstream):
    """Text Generation Inference, towards clients and workers.

    Its requests name no model: ``model`` is that of a listener's clients. Without it, requests may
    have a field ``model``, and need none where the gateway serves a single one. ``prompts`` says
    how an input becomes the model's input: ``raw``, or ``chat`` (as a user's message). ``v1`` adds
    the server's paths under ``/v1``. ``max_best_of`` and ``max_stop_sequences`` are limits that
    ``/info`` reports.
    """

    stateful_fields: Sequence[StatefulField] = CHAT_STATEFUL_FIELDS
    request_headers: RequestHeaders = REQUEST_HEADERS
    param_tables: Mapping[str, tuple[Param, ...]]

    def __init__(
        self,
        profile: str | None = None,
        *,
        model: str = "",
        prompts: PromptMode = "raw",
        v1: bool = True,
        max_best_of: int = 2,
        max_stop_sequences: int = 4,
    ) -> None:
        super().__init__(profile)
        self._default_model = model
        self._templating = _PROMPT_OPTIONS[prompts]
        self._client_limits = TgiLimits(max_stop_sequences, max_best_of)
        self._table = build_client_table(self._client_limits)
        self.endpoints: tuple[Endpoint, ...] = (*_ENDPOINTS, *(_V1_ENDPOINTS if v1 else ()))
        rules = DEFAULT_REQUEST_RULES
        self.param_tables = {
            **dict.fromkeys(("root", "generate", "generate_stream"), self._table),
            **({"chat": rules.chat, "completion": rules.completion} if v1 else {}),
        }
        native = {**params.map_field_names(self._table), **_FIELD_NAMES}
        self._field_names = {
            "chat": {**params.map_field_names(rules.chat), **FIELD_NAMES},
            "completion": {**FIELD_NAMES, **params.map_field_names(rules.completion)},
            **dict.fromkeys(("root", "generate", "generate_stream"), native),
        }

    # --- towards clients --------------------------------------------------------------------------

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        return None if request.source == self.name else NO_KEYS

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        fields = read_unchecked_fields(call)
        if fields is None:
            fields = read_object(call.body)  # which raises the error
        model = requests.read_model(fields, self._default_model)
        return RoutingInfo(model, stream=_reads_stream(call, fields))

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        fields = read_fields(call)
        name = requests.read_model(fields, self._default_model)
        match call.endpoint.operation:
            case "chat":
                return requests.read_v1_chat(fields, name)
            case "completion":
                return requests.read_v1_completion(fields, name)
            case "tokenize":
                return TokenizeRequest(
                    model=name,
                    prompt=requests.read_inputs(fields),
                    templating=_PROMPT_OPTIONS["raw"],
                    return_texts=True,
                    extra={
                        key: raw
                        for key, raw in fields.items()
                        if key not in requests.REQUEST_FIELDS
                    },
                )
            case "root" if model is not None and model.task == "embedding":
                return requests.read_embedding(fields, name)
            case _:
                stream = _reads_stream(call, fields)
                request, options = requests.read_generate(
                    fields, self._table, name, self._templating, stream=stream
                )
                call.__dict__["options"] = options
                return request

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, context: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if isinstance(request, EmbeddingRequest):
            return VectorEncoder()
        if isinstance(request, TokenizeRequest):
            return TokensEncoder()
        assert isinstance(request, GenerationRequest)  # noqa: S101 - decode makes no other
        match call.endpoint.operation:
            case "chat":
                return V1ChatEncoder(_STYLE, request, context)
            case "completion":
                return CompletionEncoder(_STYLE, request, context)
            case operation:
                options: GenerateOptions = call.__dict__["options"]
                return GenerateEncoder(request, options, context, is_listed=operation == "root")

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del call
        return build_error_response(error)

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, context: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``: for prompts as they are."""
        if not isinstance(client, TGI) or call.endpoint.operation not in _NATIVE_OPERATIONS:
            return None
        try:
            request = client.decode_request(call)
        except ClientError:
            return None
        if not isinstance(request, GenerationRequest) or request.templating.mode != "raw":
            return None
        if not self._carries_exactly(request):
            return None
        request = request.bind_target(context.backend_model, self.name, context.context_length)
        encoder = client.create_encoder(call, request, context)
        kind = encoder.content_type if request.stream else "application/json"
        response_headers = (("Content-Type", kind), *encoder.headers())

        def create_reader() -> PassthroughReader:
            decoder = GenerateDecoder(request)
            if not request.stream:
                return UnaryPassthroughReader(decoder, NameReplacer({}))
            counts = RunningCountCorrection("generated_tokens", lambda: decoder.has_ignored_counts)
            return VerbatimStreamReader(decoder, NameReplacer({}), counts)

        return PassthroughRequest(
            request,
            UpstreamRequest(call.endpoint.path, _write_own_body(call), JSON_HEADERS),
            lambda: response_headers,
            create_reader,
            lambda: encoder,
        )

    def _carries_exactly(self, request: GenerationRequest) -> bool:
        """Whether workers take the request as it is, and report its usage in tokens.

        A unary response reports the prompt's tokens only with ``decoder_input_details``. Workers
        see a stop string only where a token ends with it, so requests with one are translated.
        """
        reports_usage = request.response_options.details and (
            request.stream or requests.PREFILL_FIELD in request.extra
        )
        if not reports_usage or request.stopping.stop:
            return False
        losses = self.unsupported_parameters(replace(request, extra={}), {})
        return all(one.reason == "approximated" for one in losses)

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return self._field_names.get(call.endpoint.operation, {})

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return openapi.describe_api(self._table, v1="chat" in self.param_tables)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        match call.endpoint.operation:
            case "health" if catalog.ready:
                return HttpResponse(200, b"", ())
            case "health":
                return HttpResponse(
                    503, encode_ascii(TgiError("unhealthy", "healthcheck")), JSON_HEADERS
                )
            case "models":
                cards = [_build_model_card(model) for model in catalog.list_models()]
                return _build_json_response({"object": "list", "data": cards})
            case _:
                return _build_json_response(self._describe_server(catalog))

    def _describe_server(self, catalog: Catalog) -> dict[str, Any]:
        """The server and its model. Limits that the gateway does not have are null."""
        models = catalog.list_models()
        model = (
            models[0]
            if models and not self._default_model
            else catalog.find_model(self._default_model)
        )
        length, limits = model.context_length, self._client_limits
        task = "text-generation" if model.task == "chat" else "feature-extraction"
        return {
            "model_id": model.name,
            "model_sha": None,
            "model_pipeline_tag": task,
            "max_concurrent_requests": None,
            "max_best_of": limits.max_best_of,
            "max_stop_sequences": limits.max_stop_strings,
            "max_input_tokens": None if length is None else length - 1,
            "max_total_tokens": length,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "gateway",
            "version": SERVER_VERSION,
            "sha": None,
            "docker_label": None,
        }


def _write_own_body(call: ClientRequest) -> bytes:
    """The client's body without ``model``, which is the gateway's."""
    fields = read_fields(call)
    if "model" not in fields:
        return call.body
    return encode_ascii({name: raw for name, raw in fields.items() if name != "model"})


def _reads_stream(call: ClientRequest, fields: Fields) -> bool:
    """Whether to stream: by the path, or by the field. Raises InvalidParameter."""
    match call.endpoint.operation:
        case "generate" | "tokenize":
            return False
        case "generate_stream":
            return True
        case _:
            values = params.read_params(_STREAM_TABLE, fields)
            return values.get("stream") is True


_STREAM_TABLE: Final = params.ParamTable(Param("stream", "stream", "bool"))


def _build_model_card(model: ModelInfo) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "gateway"}


def _build_json_response(body: Any) -> HttpResponse:
    return HttpResponse(200, encode_ascii(body), JSON_HEADERS)
