"""The endpoints of a MindIE server and their handlers.

The model is in the path or in the body; otherwise it is the default model of the listener.
Source: MindIE-LLM 0695772, http_handler.cpp. Versions in paths are documented, but no server
implements them; cluster internals (roles, adapters, dresult) are not supported.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from protocols.chat.responses import ResponseStyle
from protocols.chat.stateful import CHAT_STATEFUL_FIELDS
from protocols.chat.unary import UnaryEncoder
from protocols.core.aggregate import UnaryResponse
from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import GatewayError, PathNotFound
from protocols.core.interfaces import (
    GENERATION_KINDS,
    ClientAdapter,
    ClientRequest,
    Endpoint,
    Headers,
    HttpResponse,
    OpenApiFragment,
    PassthroughRequest,
    PromptRenderer,
    ResponseContext,
    ResponseEncoder,
    RoutingInfo,
    UpstreamRequest,
)
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    GenerationRequest,
    KeptKeys,
    PromptOptions,
    RequestKind,
    TokenizeRequest,
)
from protocols.core.request_headers import RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.core.vectors import encode_array
from protocols.mindie import (
    chat_requests,
    errors,
    openai_responses,
    openapi,
    params,
    requests,
)
from protocols.mindie.params import (
    MODEL_NAME_PATTERN,
    PROFILES,
    PROMPT_OPTIONS_BY_MODE,
    MindieConfig,
    PromptMode,
    build_param_error,
    check_value,
    get_field,
    read_body_fields,
)
from protocols.mindie.passthrough import MindiePassthrough
from protocols.mindie.requests import get_invalid_length
from protocols.mindie.responses import (
    KeepAliveEncoder,
    NativeEncoder,
    TextEncoder,
    TgiStyleEncoder,
    TokensEncoder,
    VllmStyleEncoder,
    build_headers,
    build_json_response,
    encode_json,
)
from protocols.mindie.upstream import ChatMode, MindieUpstream
from protocols.params import Param

# Responses on the state of the server and its models.
#
# Values that a gateway does not have (device memory, scheduler slots) are the server's defaults,
# since clients read the keys; model readiness is real. Source: MindIE-LLM 0695772,
# parse_protocol.cpp and http_handler.cpp.

_TOTAL_SLOTS: Final = 200
_MAX_BATCH_TOKENS: Final = 8192
_DEFAULT_MAX_SEQUENCE: Final = 2560
_DEFAULT_MAX_ITER_TIMES: Final = 512
_SERVER_NAME: Final = "MindIE Server"


def read_path_model(call: ClientRequest) -> str:
    """Return the model name of a path. Raises PathNotFound for an invalid name."""
    name = call.path_params["model"]
    if not MODEL_NAME_PATTERN.fullmatch(name):
        raise PathNotFound("no endpoint of this path")
    return name


def _find_model(call: ClientRequest, catalog: Catalog) -> ModelInfo:
    return catalog.find_model(read_path_model(call))


def _describe_server(_call: ClientRequest, _catalog: Catalog, setup: MindieConfig) -> Any:
    return {
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


def _describe_model(call: ClientRequest, catalog: Catalog, _setup: MindieConfig) -> Any:
    _find_model(call, catalog)
    return {
        "name": call.path_params["model"],
        "platform": _SERVER_NAME,
        "inputs": [{"name": "input0", "shape": [-1], "datatype": "UINT32"}],
        "outputs": [{"name": "output0", "shape": [-1], "datatype": "UINT32"}],
    }


def _describe_model_config(call: ClientRequest, catalog: Catalog, _setup: MindieConfig) -> Any:
    model = _find_model(call, catalog)
    return {
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


def _describe_slots(call: ClientRequest, catalog: Catalog, _setup: MindieConfig) -> Any:
    """Return the slot counts. A model that is not ready has no free slot."""
    model = _find_model(call, catalog)
    free_slots = _TOTAL_SLOTS if model.ready and catalog.ready else 0
    return {
        "total_slots": _TOTAL_SLOTS,
        "free_slots": free_slots,
        "available_tokens_length": (model.context_length or _DEFAULT_MAX_SEQUENCE) * free_slots,
    }


def _describe_server_info(_call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> Any:
    models: list[dict[str, Any]] = [
        {
            "model_device_type": "npu",
            "model_dtype": "float16",
            "model_id": model.name,
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
            "max_total_tokens": model.context_length or _DEFAULT_MAX_SEQUENCE,
        }
        for model in catalog.list_models()
    ]
    lengths = [model["max_total_tokens"] for model in models]
    return {
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
        "models": models,
        "max_input_length": max(lengths, default=_DEFAULT_MAX_SEQUENCE),
    }


def _list_models(_call: ClientRequest, catalog: Catalog, _setup: MindieConfig) -> Any:
    data = [_build_model_card(model.name, model.created) for model in catalog.list_models()]
    return {"object": "list", "data": data}


def _get_model_card(call: ClientRequest, catalog: Catalog, _setup: MindieConfig) -> Any:
    return _build_model_card(call.path_params["model"], _find_model(call, catalog).created)


def _build_model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": _SERVER_NAME}


_DESCRIPTIONS: Mapping[str, Callable[[ClientRequest, Catalog, MindieConfig], Any]] = {
    "server": _describe_server,
    "metadata": _describe_model,
    "config": _describe_model_config,
    "slots": _describe_slots,
    "info": _describe_server_info,
    "models": _list_models,
    "model": _get_model_card,
    "stop": lambda call, _catalog, _setup: read_body_fields(call),  # repeats the id
}


def build_info_response(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """See ``protocols.core.interfaces.ClientAdapter``. Raises ModelNotFound or PathNotFound."""
    operation = call.endpoint.operation
    if operation in _DESCRIPTIONS:
        return build_json_response(encode_json(_DESCRIPTIONS[operation](call, catalog, setup)))
    if operation == "timed_health":
        return _build_timed_health_response(call, catalog)
    if not catalog.ready:
        return errors.build_status_response(503, errors.SERVICE_STOPPED)
    return errors.build_empty_response(200 if _is_ready(call, catalog) else 503)


def _build_timed_health_response(call: ClientRequest, catalog: Catalog) -> HttpResponse:
    """Build the response to ``/health/timed-N``; N is the most seconds that a probe may take.

    The gateway needs no probe: it knows whether workers are healthy. While it stops, it is healthy.
    Source: MindIE-LLM, http_handler.cpp (InitializeServiceStatusResource, CheckWaitTime).
    Raises PathNotFound.
    """
    probe = _TIMED_HEALTH.fullmatch(call.path_params["probe"])
    if probe is None:
        raise PathNotFound("There is no such endpoint.", method="GET", path=call.path)
    if catalog.ready:
        if not any(model.ready for model in catalog.list_models()):
            return errors.build_empty_response(503)
        digits, most = probe[1] or "1", _MAX_PROBE_SECONDS
        if len(digits) > len(str(most)):
            text = f"Max wait time is {most}, input is invalid or too long"
            return errors.build_status_response(404, text)
        if not 1 <= int(digits) <= most:
            text = f"Wait time should be in range of [1, {most}], input is not valid"
            return errors.build_status_response(404, text)
    return build_json_response(b'{"status":"healthy"}')


_TIMED_HEALTH: Final = re.compile(r"timed(?:-([0-9]+))?", re.ASCII)
_MAX_PROBE_SECONDS: Final = 600


def _is_ready(call: ClientRequest, catalog: Catalog) -> bool:
    """Whether the server lives, any of its models is ready, or the model of the path is."""
    match call.endpoint.operation:
        case "live":
            return True
        case "ready":
            return any(model.ready for model in catalog.list_models())
        case _:
            return _find_model(call, catalog).ready


# /v1/tokenizer: the tokens of a text: their count and, by default, their texts.
#
# Source: MindIE-LLM 0695772, http_handler.cpp (HandleTokenizer) and infer_tokenizer.cpp (TikToken).


def read_tokenizer_text(call: ClientRequest, setup: MindieConfig) -> str:
    """Return the text to tokenize. Raises InvalidParameter or MalformedRequest."""
    inputs: str = check_value(
        get_field(read_body_fields(call), "inputs"),
        str,
        "inputs",
        "Inputs in request body is invalid.",
    )
    limit = setup.profile.max_text_length
    if (length := get_invalid_length(inputs, limit)) is not None:
        text = f"Inputs data length in [0, {limit}], but the length of inputs is {length}"
        raise build_param_error(text, "inputs", "too_long" if length else "empty")
    return inputs


class TokenizerEncoder(UnaryEncoder):
    """Encodes the response to a tokenizer request."""

    def __init__(
        self, request: TokenizeRequest, context: ResponseContext, headers: Headers
    ) -> None:
        super().__init__(ResponseStyle(), context, headers)
        self._request = request

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """A token without text (special, or part of a character) only counts."""
        ids, texts = response.tokens.ids, response.tokens.texts
        shown = [text for text in texts if text] if self._request.return_texts else []
        return build_json_response(
            encode_json({"token_number": len(ids), "tokens": encode_array(shown)})
        )


_MODEL_PATH = "/v2/models/{model}"


def _build_info_endpoint(path: str, variant: str, *, open: bool = False) -> Endpoint:  # noqa: A002 - the port's word
    return Endpoint("GET", path, "inform", variant, open)


def _build_generate_endpoint(path: str, variant: str) -> Endpoint:
    return Endpoint("POST", path, "generate", variant)


class MindIE(MindieUpstream):
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
    health_request = UpstreamRequest("/v2/health/ready", b"", method="GET")
    profiles: ClassVar[tuple[str, ...]] = tuple(PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}
    applies_model_settings: ClassVar[bool] = True
    param_tables: Mapping[str, tuple[Param, ...]]
    stateful_fields: Sequence[StatefulField] = CHAT_STATEFUL_FIELDS
    request_headers: RequestHeaders = RequestHeaders((), {"req-id": "handled"})
    path_prefixes: tuple[str, ...] = ("/v2", "/v1", "/")
    request_kinds: frozenset[RequestKind] = GENERATION_KINDS
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
        _build_info_endpoint("/health/{probe}", "timed_health", open=True),
        _build_info_endpoint("/info", "info"),
        _build_info_endpoint("/v1/models", "models"),
        Endpoint("GET", "/v1/models/{model}", "inform", "model", takes_slashes=True),
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
        config = MindieConfig(
            profile=chosen,
            vllm_validator=vllm_validator,
            default_model=model,
            templating=PROMPT_OPTIONS_BY_MODE[prompts],
            max_iter_times=max_iter_times,
        )
        super().__init__(config, chats, renderer)
        tables = {
            "text": chosen.text_params,
            "text_stream": chosen.text_params,
            "chat": config.chat_params,
            "tokens": params.TOKENS_PARAMS,
            "completion": params.COMPLETION_PARAMS,
            "generate": params.TGI_STYLE_PARAMS,
            "generate_stream": params.TGI_STYLE_PARAMS,
            "root": params.TGI_STYLE_PARAMS,
            "generate, of a prompt": params.VLLM_STYLE_PARAMS,
            "native": params.NATIVE_PARAMS,
        }
        self.param_tables = {
            operation: params.list_params(table) for operation, table in tables.items()
        }
        self._field_names = {
            operation: {**params.map_field_names(table), **_FIELD_NAMES.get(operation, {})}
            for operation, table in tables.items()
        }
        self._passthrough = MindiePassthrough(self._config, chats)

    # --- towards clients --------------------------------------------------------------------------

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        return None if request.source == self.name else NO_KEYS

    def keep_connections(self) -> None:
        """See ``protocols.core.interfaces.SupportsKeepAlive``."""
        self._config = replace(self._config, keep_alive=True)

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        variant = call.endpoint.operation
        match variant:
            case "text" | "text_stream" | "tokens":
                return RoutingInfo(read_path_model(call), stream=variant == "text_stream")
            case "stop":
                return self._read_stop_routing(call)
            case "tokenizer":
                read_tokenizer_text(call, self._config)
                return RoutingInfo(self._read_default_model(call))
            case "chat" | "completion":
                fields = read_body_fields(call)
                stream = get_field(fields, "stream") is True
                return RoutingInfo(
                    chat_requests.read_model_name(fields, self._config), stream=stream
                )
            case _:
                return self._read_default_routing(call)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> AnyRequest:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del model
        setup = self._config
        match _get_operation(call):
            case "text" | "text_stream" as variant:
                return requests.read_text_request(call, setup, stream=variant == "text_stream")
            case "tokens":
                return requests.read_tokens_request(call, setup)
            case "tokenizer":
                fields = read_body_fields(call)
                with_texts = get_field(fields, "do_decode") is not False
                return TokenizeRequest(
                    model=self._read_default_model(call),
                    prompt=read_tokenizer_text(call, setup),
                    templating=PromptOptions("raw"),
                    return_texts=with_texts,
                    extra=requests.find_fields_beside(fields, "inputs", "do_decode"),
                )
            case "chat":
                return chat_requests.read_chat_request(call, setup)
            case "completion":
                return chat_requests.read_completion_request(call, setup)
            case "native":
                return requests.read_native_request(call, setup, self._read_default_model(call))
            case "generate, of a prompt":
                return requests.read_vllm_style_request(call, setup, self._read_default_model(call))
            case _:
                stream = self._read_default_routing(call).stream
                return requests.read_tgi_style_request(
                    call, setup, self._read_default_model(call), stream=stream
                )

    def create_encoder(
        self, call: ClientRequest, request: AnyRequest, about: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        encoder = self._create_encoder(call, request, about)
        return KeepAliveEncoder(encoder) if self._config.keep_alive else encoder

    def _create_encoder(
        self, call: ClientRequest, request: AnyRequest, about: ResponseContext
    ) -> ResponseEncoder:
        if isinstance(request, TokenizeRequest):
            return TokenizerEncoder(request, about, build_headers(call))
        assert isinstance(request, GenerationRequest)  # noqa: S101 - decode makes no other
        profile, headers = self._config.profile, build_headers(call)
        match _get_operation(call):
            case "text" | "text_stream":
                return TextEncoder(profile, request, about, headers)
            case "tokens":
                output = requests.read_output_name(get_field(read_body_fields(call), "outputs"))
                return TokensEncoder(request, headers, output)
            case "chat":
                return openai_responses.create_openai_style_encoder(
                    openai_responses.ResponseVariant(early=profile.early), request, about, headers
                )
            case "completion":
                return openai_responses.create_openai_style_encoder(
                    openai_responses.ResponseVariant(is_chat=False), request, about, headers
                )
            case "native":
                return NativeEncoder(profile, request, about, headers)
            case "generate, of a prompt":
                return VllmStyleEncoder(request, headers)
            case variant:
                return TgiStyleEncoder(profile, request, headers, listed=variant == "root")

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return self._add_headers(errors.build_error_response(error, call), call)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``. Also answers a completed ``stop``."""
        return self._add_headers(build_info_response(call, catalog, self._config), call)

    def _add_headers(self, reply: HttpResponse, call: ClientRequest | None) -> HttpResponse:
        headers = reply.headers if call is None else (*reply.headers, *build_headers(call))
        if self._config.keep_alive:
            headers = errors.keep_connection(headers)
        return replace(reply, headers=headers)

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return self._field_names.get(_get_operation(call), {})

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return openapi.describe_api(self._config, self.param_tables)

    # --- towards workers --------------------------------------------------------------------------

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``. Both sides have one release."""
        if not isinstance(client, MindIE):
            return None
        config = client._config  # noqa: SLF001
        passed = self._passthrough.prepare_passthrough(config, call, about)
        if passed is None or not config.keep_alive:
            return passed
        build = passed.build_headers
        return replace(passed, build_headers=lambda: errors.keep_connection(build()))

    # --- routing ----------------------------------------------------------------------------------

    def _read_stop_routing(self, call: ClientRequest) -> RoutingInfo:
        """Read the request id of a cancel request. Raises InvalidParameter if the body has none."""
        model = read_path_model(call)
        fields = read_body_fields(call)
        if "id" not in fields:
            raise build_param_error("Not found id.", "id", "missing")
        request_id = get_field(fields, "id")
        if request_id is None:
            raise build_param_error("id must not be null.", "id", "missing")
        return RoutingInfo(model, client_id=requests.check_request_id(request_id))

    def _read_default_routing(self, call: ClientRequest) -> RoutingInfo:
        stream = _STREAM_READERS[call.endpoint.operation](call)
        return RoutingInfo(self._read_default_model(call), stream=stream)

    def _read_default_model(self, call: ClientRequest) -> str:
        """Return the model of an endpoint without a required model; the body may still name one."""
        model = get_field(read_body_fields(call), "model")
        name = model if isinstance(model, str) and model else self._config.default_model
        if not name:
            raise build_param_error("Request contains not model or model null", "model", "missing")
        return name


def _get_operation(call: ClientRequest) -> str:
    """Return the operation; of a vLLM-style /generate request, ``generate, of a prompt``."""
    operation = call.endpoint.operation
    if operation == "generate" and requests.detect_generate_style(call) == "prompt":
        return "generate, of a prompt"
    return operation


def _read_body_stream(call: ClientRequest) -> bool:
    return get_field(read_body_fields(call), "stream") is True


def _read_generate_stream(call: ClientRequest) -> bool:
    return requests.detect_generate_style(call) == "prompt" and _read_body_stream(call)


_STREAM_READERS: Mapping[str, Callable[[ClientRequest], bool]] = {
    "generate": _read_generate_stream,
    "generate_stream": lambda _call: True,
    "native": _read_body_stream,
    "root": requests.read_stream_flag,
}


_OUTPUT_FIELD_NAMES = {"output": "response_format", "sampling.beam_width": "use_beam_search"}
_TGI_STYLE_FIELD_NAMES = {"adapter": "adapter_id"}
_FIELD_NAMES: Mapping[str, Mapping[str, str]] = {
    "chat": {
        **_OUTPUT_FIELD_NAMES,
        "tools": "tools",
        "tool_choice": "tool_choice",
        "logprobs.top": "top_logprobs",
        "templating.template": "chat_template",
        "templating.arguments": "chat_template_kwargs",
    },
    "completion": {**_OUTPUT_FIELD_NAMES, "logprobs.top": "logprobs"},
    "generate": _TGI_STYLE_FIELD_NAMES,
    "generate_stream": _TGI_STYLE_FIELD_NAMES,
    "root": _TGI_STYLE_FIELD_NAMES,
}
"""Wire names of fields that have no row in a table, by operation."""
