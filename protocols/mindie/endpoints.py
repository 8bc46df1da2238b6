"""The endpoints of a MindIE server and their handlers.

The model is in the path or in the body; otherwise it is the default model of the listener.
Source: MindIE-LLM 0695772, http_handler.cpp. Versions in paths are documented, but no server
implements them; cluster internals (roles, adapters, dresult) are not supported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec
from msgspec.structs import replace

from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import GatewayError, PathNotFound
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    PromptRenderer,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    RoutingInfo,
    Token,
    UpstreamRequest,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import GenerationRequest, Request
from protocols.mindie import errors, openapi, params, requests, responses
from protocols.mindie.params import (
    MODEL_NAME_PATTERN,
    PROFILES,
    PROMPT_OPTIONS_BY_MODE,
    MindieConfig,
    PromptMode,
    build_param_error,
    get_field,
    read_body_fields,
)
from protocols.mindie.requests import get_invalid_length
from protocols.mindie.responses import (
    NativeEncoder,
    TextEncoder,
    TgiStyleEncoder,
    TokensEncoder,
    VllmStyleEncoder,
    build_headers,
    build_json_response,
    encode_json,
)
from protocols.mindie.upstream import HEALTH_REQUEST, ChatMode, MindiePassthrough, MindieUpstream
from protocols.params import Param

# Responses on the state of the server and its models.
#
# Values that a gateway does not have (device memory, scheduler slots) are the server's defaults,
# since clients read the keys; model readiness is real. Source: MindIE-LLM 0695772,
# parse_protocol.cpp and http_handler.cpp.

_encode = msgspec.json.Encoder().encode

_TOTAL_SLOTS: Final = 200
_MAX_BATCH_TOKENS: Final = 8192
_DEFAULT_MAX_SEQUENCE: Final = 2560
_DEFAULT_MAX_ITER_TIMES: Final = 512
_SERVER_NAME: Final = "MindIE Server"


def build_info_response(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """See ``protocols.core.interfaces.ClientAdapter``. Raises ModelNotFound or PathNotFound."""
    return _INFO_HANDLERS[call.endpoint.operation](call, catalog, setup)


def read_path_model(call: ClientRequest) -> str:
    """Return the model name of a path. Raises PathNotFound for an invalid name."""
    name = call.path_params["model"]
    if not MODEL_NAME_PATTERN.fullmatch(name):
        raise PathNotFound("no endpoint of this path")
    return name


def _build_json_response(value: Any) -> HttpResponse:
    return HttpResponse(200, _encode(value), errors.JSON_HEADERS)


def _find_model(call: ClientRequest, catalog: Catalog) -> ModelInfo:
    return catalog.find_model(read_path_model(call))


def _describe_server(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del call, catalog
    return _build_json_response(
        {
            "name": _SERVER_NAME,
            "version": setup.profile.version,
            "extensions": {
                "max_iter_times": setup.max_iter_times or _DEFAULT_MAX_ITER_TIMES,
                "prefill_policy_type": 0,
                "decode_policy_type": 0,
                "max_prefill_batch_size": 50,
                "max_prefill_tokens": _MAX_BATCH_TOKENS,
            },
        }
    )


def _describe_tensor(name: str) -> dict[str, Any]:
    return {"name": name, "shape": [-1], "datatype": "UINT32"}


def _describe_model(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del setup
    _find_model(call, catalog)
    return _build_json_response(
        {
            "name": call.path_params["model"],
            "platform": _SERVER_NAME,
            "inputs": [_describe_tensor("input0")],
            "outputs": [_describe_tensor("output0")],
        }
    )


def _describe_model_config(
    call: ClientRequest, catalog: Catalog, setup: MindieConfig
) -> HttpResponse:
    del setup
    model = _find_model(call, catalog)
    return _build_json_response(
        {
            "model_name": call.path_params["model"],
            "input_datatype": "INT64",
            "output_datatype": "INT64",
            "max_seq_len": model.context_length or _DEFAULT_MAX_SEQUENCE,
            "npu_mem_size": -1,
            "cpu_mem_size": 0,
            "world_size": 1,
            "model_weight_path": model.name,
            "model_instance_type": "Standard",
        }
    )


def _describe_slots(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """Return the slot counts. A model that is not ready has no free slot."""
    del setup
    model = _find_model(call, catalog)
    free = model.ready and catalog.ready
    return _build_json_response(
        {
            "total_slots": _TOTAL_SLOTS,
            "free_slots": _TOTAL_SLOTS if free else 0,
            "available_tokens_length": (model.context_length or _DEFAULT_MAX_SEQUENCE)
            * _TOTAL_SLOTS
            if free
            else 0,
        }
    )


def _describe_server_info(
    call: ClientRequest, catalog: Catalog, setup: MindieConfig
) -> HttpResponse:
    del call
    models = catalog.list_models()
    return _build_json_response(
        {
            "docker_label": None,
            "max_batch_total_tokens": _MAX_BATCH_TOKENS,
            "max_best_of": 1,
            "max_concurrent_requests": _TOTAL_SLOTS,
            "max_stop_sequences": None,
            "max_waiting_tokens": None,
            "sha": None,
            "validation_workers": None,
            "version": setup.profile.version,
            "waiting_served_ratio": None,
            "models": [_describe_info_model(model) for model in models],
            "max_input_length": max(
                (m.context_length or _DEFAULT_MAX_SEQUENCE for m in models),
                default=_DEFAULT_MAX_SEQUENCE,
            ),
        }
    )


def _describe_info_model(model: ModelInfo) -> dict[str, Any]:
    return {
        "model_device_type": "npu",
        "model_dtype": "float16",
        "model_id": model.name,
        "model_pipeline_tag": "text-generation",
        "model_sha": None,
        "max_total_tokens": model.context_length or _DEFAULT_MAX_SEQUENCE,
    }


def _build_model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": _SERVER_NAME}


def _list_models(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del call, setup
    data = [_build_model_card(model.name, model.created) for model in catalog.list_models()]
    return _build_json_response({"object": "list", "data": data})


def _get_model_card(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del setup
    return _build_json_response(
        _build_model_card(call.path_params["model"], _find_model(call, catalog).created)
    )


def _check_live(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """Return the liveness response: 200 until shutdown, even if no worker is available."""
    del call, setup
    return (
        errors.build_empty_response(200)
        if catalog.ready
        else errors.build_status_response(503, errors.SERVICE_STOPPED)
    )


def _check_ready(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """Return 200 if any model is ready, otherwise 503 with no body, as while an engine starts."""
    if not catalog.ready or any(model.ready for model in catalog.list_models()):
        return _check_live(call, catalog, setup)
    return errors.build_empty_response(503)


def _check_model_ready(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    if not catalog.ready or _find_model(call, catalog).ready:
        return _check_live(call, catalog, setup)
    return errors.build_empty_response(503)


def _confirm_stop(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """Return the response to a cancelled request, which repeats its id."""
    del catalog, setup
    return _build_json_response(dict(read_body_fields(call)))


_INFO_HANDLERS: Mapping[str, Callable[[ClientRequest, Catalog, MindieConfig], HttpResponse]] = {
    "server": _describe_server,
    "metadata": _describe_model,
    "config": _describe_model_config,
    "slots": _describe_slots,
    "info": _describe_server_info,
    "models": _list_models,
    "model": _get_model_card,
    "live": _check_live,
    "ready": _check_ready,
    "model_ready": _check_model_ready,
    "stop": _confirm_stop,
}


# /v1/tokenizer: the tokens of a text: their count and, by default, their texts.
#
# Source: MindIE-LLM 0695772, http_handler.cpp (HandleTokenizer) and infer_tokenizer.cpp (TikToken).


def read_tokenizer_text(call: ClientRequest, setup: MindieConfig) -> str:
    """Return the text to tokenize. Raises InvalidParameter or MalformedRequest."""
    got = get_field(read_body_fields(call), "inputs")
    if not isinstance(got, str):
        raise build_param_error("Inputs in request body is invalid.", "inputs", "type")
    limit = setup.profile.max_text_length
    if (length := get_invalid_length(got, limit)) is not None:
        text = f"Inputs data length in [0, {limit}], but the length of inputs is {length}"
        raise build_param_error(text, "inputs", "too_long" if length else "empty")
    return got


def build_tokenizer_response(call: ClientRequest, tokens: Sequence[Token]) -> HttpResponse:
    """Build the response. A token without text (special, or part of a character) only counts."""
    shown = get_field(read_body_fields(call), "do_decode") is not False
    texts = [text for _, text in tokens if shown and text]
    return build_json_response(encode_json({"token_number": len(tokens), "tokens": texts}))


_MODEL_PATH = "/v2/models/{model}"


def _build_info_endpoint(path: str, variant: str, *, open: bool = False) -> Endpoint:  # noqa: A002 - the port's word
    return Endpoint("GET", path, "inform", variant, open)


def _build_generate_endpoint(path: str, variant: str) -> Endpoint:
    return Endpoint("POST", path, "generate", variant)


class MindIE:
    """MindIE, towards clients and workers.

    ``vllm_validator`` is the server's ``openAiSupport``: whether chat requests are checked by the
    rules of vLLM or by the server's own. ``model`` is the model of requests that name none.
    ``prompts`` says how a text prompt becomes the model's input: ``raw``, or ``chat`` (wrapped as a
    user message). ``max_iter_times`` is the maximum number of tokens of a response. ``chats`` says
    how chat requests are sent to a worker: as messages, or as text prompts to generate, rendered by
    ``renderer``.

    Raises ValueError for an unknown profile.
    """

    name = "mindie"
    health_request: UpstreamRequest = HEALTH_REQUEST
    profiles: ClassVar[tuple[str, ...]] = tuple(PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}
    path_prefixes: tuple[str, ...] = ("/v2", "/v1", "/")
    endpoints: tuple[Endpoint, ...] = (
        _build_generate_endpoint(f"{_MODEL_PATH}/generate", "text"),
        _build_generate_endpoint(f"{_MODEL_PATH}/generate_stream", "text_stream"),
        _build_generate_endpoint(f"{_MODEL_PATH}/infer", "tokens"),
        Endpoint("POST", f"{_MODEL_PATH}/stopInfer", "stop", "stop"),
        Endpoint("POST", "/v1/tokenizer", "tokenize", "tokenizer"),
        _build_generate_endpoint("/v1/chat/completions", "chat"),
        _build_generate_endpoint("/v1/completions", "completion"),
        _build_generate_endpoint("/generate", "generate"),
        _build_generate_endpoint("/generate_stream", "generate_stream"),
        _build_generate_endpoint("/infer", "native"),
        _build_generate_endpoint("/infer_token", "native"),
        _build_generate_endpoint("/", "root"),
        _build_info_endpoint("/v2", "server"),
        _build_info_endpoint(_MODEL_PATH, "metadata"),
        _build_info_endpoint(f"{_MODEL_PATH}/config", "config"),
        _build_info_endpoint(f"{_MODEL_PATH}/ready", "model_ready"),
        _build_info_endpoint(f"{_MODEL_PATH}/getSlotCount", "slots"),
        _build_info_endpoint("/v2/health/live", "live", open=True),
        _build_info_endpoint("/v2/health/ready", "ready", open=True),
        _build_info_endpoint("/health", "ready", open=True),
        _build_info_endpoint("/info", "info"),
        _build_info_endpoint("/v1/models", "models"),
        _build_info_endpoint("/v1/models/{model}", "model"),
    )

    def __init__(
        self,
        profile: str | None = None,
        *,
        vllm_validator: bool = True,
        model: str = "",
        prompts: PromptMode = "raw",
        max_iter_times: int | None = None,
        chats: ChatMode = "messages",
        renderer: PromptRenderer | None = None,
    ) -> None:
        chosen = PROFILES.get(profile or self.profiles[0])
        if chosen is None:
            known = ", ".join(self.profiles)
            raise ValueError(f"{profile!r} is not a profile of mindie; accepted: {known}")
        self._config = MindieConfig(
            profile=chosen,
            vllm_validator=vllm_validator,
            default_model=model,
            templating=PROMPT_OPTIONS_BY_MODE[prompts],
            max_iter_times=max_iter_times,
        )
        self._text_field_names = params.map_field_names(chosen.text_params)
        self.param_tables: Mapping[str, tuple[Param, ...]] = {
            "text": params.list_params(chosen.text_params),
            "text_stream": params.list_params(chosen.text_params),
            "chat": params.list_params(self._config.chat_params),
            **_PARAM_TABLES,
        }
        self._chat_field_names = (
            params.map_field_names(self._config.chat_params) | _CHAT_FIELD_NAMES
        )
        self._upstream = MindieUpstream(self._config, chats, renderer)
        self._passthrough = MindiePassthrough(self._config, chats)

    # --- towards clients --------------------------------------------------------------------------

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        variant = call.endpoint.operation
        match variant:
            case "text" | "text_stream" | "tokens":
                return RoutingInfo(read_path_model(call), stream=variant == "text_stream")
            case "stop":
                return self._read_stop_routing(call)
            case "tokenizer":
                self.read_text(call)
                return RoutingInfo(self._read_default_model(call))
            case "chat" | "completion":
                fields = read_body_fields(call)
                stream = get_field(fields, "stream") is True
                return RoutingInfo(requests.read_model_name(fields, self._config), stream=stream)
            case _:
                return self._read_default_routing(call)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> Request:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del model
        setup = self._config
        match call.endpoint.operation:
            case "text" | "text_stream" as variant:
                return requests.read_text_request(call, setup, stream=variant == "text_stream")
            case "tokens":
                return requests.read_tokens_request(call, setup)
            case "chat":
                return requests.read_chat_request(call, setup)
            case "completion":
                return requests.read_completion_request(call, setup)
            case "native":
                return requests.read_native_request(call, setup, self._read_default_model(call))
            case "generate" if requests.detect_generate_style(call) == "prompt":
                return requests.read_vllm_style_request(call, setup, self._read_default_model(call))
            case _:
                stream = self._read_default_routing(call).stream
                return requests.read_tgi_style_request(
                    call, setup, self._read_default_model(call), stream=stream
                )

    def create_encoder(
        self, call: ClientRequest, request: Request, about: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        assert isinstance(request, GenerationRequest)  # noqa: S101 - decode makes no other
        profile, headers = self._config.profile, build_headers(call)
        match call.endpoint.operation:
            case "text" | "text_stream":
                return TextEncoder(profile, request, about, headers)
            case "tokens":
                output = requests.read_output_name(get_field(read_body_fields(call), "outputs"))
                return TokensEncoder(request, headers, output)
            case "chat":
                return responses.OpenAiStyleEncoder(
                    responses.ResponseVariant(early=profile.early), request, about, headers
                )
            case "completion":
                return responses.OpenAiStyleEncoder(
                    responses.ResponseVariant(is_chat=False), request, about, headers
                )
            case "native":
                return NativeEncoder(profile, request, about, headers)
            case "generate" if requests.detect_generate_style(call) == "prompt":
                return VllmStyleEncoder(request, headers)
            case variant:
                return TgiStyleEncoder(profile, request, headers, listed=variant == "root")

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return _add_headers(errors.build_error_response(error, call), call)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``. Also answers a completed ``stop``."""
        return _add_headers(build_info_response(call, catalog, self._config), call)

    def read_text(self, call: ClientRequest) -> str:
        """See ``protocols.core.interfaces.SupportsTokenize``."""
        return read_tokenizer_text(call, self._config)

    def encode_tokens(self, call: ClientRequest, tokens: Sequence[Token]) -> HttpResponse:
        """See ``protocols.core.interfaces.SupportsTokenize``."""
        return _add_headers(build_tokenizer_response(call, tokens), call)

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        match call.endpoint.operation:
            case "text" | "text_stream":
                return self._text_field_names
            case "chat":
                return self._chat_field_names
            case "generate" if requests.detect_generate_style(call) == "prompt":
                return _VLLM_STYLE_FIELD_NAMES
            case _:
                return _FIELD_NAMES[call.endpoint.operation]

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return openapi.describe_api(self._config, self.param_tables)

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return self._upstream.unsupported_parameters(request, names)

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return self._upstream.encode_request(request)

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``. Both sides have one release."""
        if not isinstance(client, MindIE):
            return None
        return self._passthrough.prepare_passthrough(client._config, call, about)  # noqa: SLF001

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return self._upstream.create_decoder(request)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.SupportsCancel``."""
        return self._upstream.encode_cancel(request)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        return self._upstream.metadata_requests(model)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        return self._upstream.load_metadata(model, answers)

    # --- routing ----------------------------------------------------------------------------------

    def _read_stop_routing(self, call: ClientRequest) -> RoutingInfo:
        """Read the request id of a cancel request. Raises InvalidParameter if the body has none."""
        model = read_path_model(call)
        fields = read_body_fields(call)
        if "id" not in fields:
            raise build_param_error("Not found id.", "id", "missing")
        got = get_field(fields, "id")
        if got is None:
            raise build_param_error("id must not be null.", "id", "missing")
        return RoutingInfo(model, client_id=requests.check_request_id(got))

    def _read_default_routing(self, call: ClientRequest) -> RoutingInfo:
        stream = _STREAM_READERS[call.endpoint.operation](call)
        return RoutingInfo(self._read_default_model(call), stream=stream)

    def _read_default_model(self, call: ClientRequest) -> str:
        """Return the model of an endpoint without a required model; the body may still name one."""
        got = get_field(read_body_fields(call), "model")
        name = got if isinstance(got, str) and got else self._config.default_model
        if not name:
            raise build_param_error("Request contains not model or model null", "model", "missing")
        return name


def _add_headers(reply: HttpResponse, call: ClientRequest | None) -> HttpResponse:
    if call is None:
        return reply
    return replace(reply, headers=(*reply.headers, *build_headers(call)))


def _read_body_stream(call: ClientRequest) -> bool:
    return get_field(read_body_fields(call), "stream") is True


def _read_generate_stream(call: ClientRequest) -> bool:
    return requests.detect_generate_style(call) == "prompt" and _read_body_stream(call)


def _always_streams(call: ClientRequest) -> bool:
    del call
    return True


_STREAM_READERS: Mapping[str, Callable[[ClientRequest], bool]] = {
    "generate": _read_generate_stream,
    "generate_stream": _always_streams,
    "native": _read_body_stream,
    "root": requests.read_stream_flag,
}


_OUTPUT_FIELD_NAMES = {"output": "response_format", "sampling.beam_width": "use_beam_search"}
_CHAT_FIELD_NAMES = {
    **_OUTPUT_FIELD_NAMES,
    "tools": "tools",
    "tool_choice": "tool_choice",
    "logprobs.top": "top_logprobs",
    "templating.template": "chat_template",
    "templating.arguments": "chat_template_kwargs",
}
_VLLM_STYLE_FIELD_NAMES = params.map_field_names(params.VLLM_STYLE_PARAMS)
_TGI_STYLE_FIELD_NAMES = {
    **params.map_field_names(params.TGI_STYLE_PARAMS),
    "adapter": "adapter_id",
}
_PARAM_TABLES: Mapping[str, tuple[Param, ...]] = {
    "tokens": params.list_params(params.TOKENS_PARAMS),
    "completion": params.list_params(params.COMPLETION_PARAMS),
    "generate": params.list_params(params.TGI_STYLE_PARAMS),
    "generate_stream": params.list_params(params.TGI_STYLE_PARAMS),
    "root": params.list_params(params.TGI_STYLE_PARAMS),
    "generate, of a prompt": params.list_params(params.VLLM_STYLE_PARAMS),
    "native": params.list_params(params.NATIVE_PARAMS),
}
_FIELD_NAMES: Mapping[str, Mapping[str, str]] = {
    "tokens": params.map_field_names(params.TOKENS_PARAMS),
    "native": params.map_field_names(params.NATIVE_PARAMS),
    "completion": {
        **params.map_field_names(params.COMPLETION_PARAMS),
        **_OUTPUT_FIELD_NAMES,
        "logprobs.top": "logprobs",
    },
    "generate": _TGI_STYLE_FIELD_NAMES,
    "generate_stream": _TGI_STYLE_FIELD_NAMES,
    "root": _TGI_STYLE_FIELD_NAMES,
}
