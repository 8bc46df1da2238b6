"""The paths of a MindIE server, and which module answers for each.

A path names its model, or the body does, or nobody: then it is the one that the listener was given.
Source: MindIE-LLM 0695772, http_handler.cpp. Versions in paths are documented and were never
served; cluster internals (roles, adapters, dresult) are not offered.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import GatewayError
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
from protocols.mindie import (
    chat,
    checks,
    chunks,
    described,
    errors,
    faults,
    info,
    inputs,
    tables,
    tokenizer,
)
from protocols.mindie import prompts as mindie_prompts
from protocols.mindie import tokens as mindie_tokens
from protocols.mindie.checks import build_param_error, get_field, read_body_fields
from protocols.mindie.pieces import NativeEncoder, TgiStyleEncoder, VllmStyleEncoder
from protocols.mindie.profiles import PROFILES, PROMPT_OPTIONS_BY_MODE, MindieConfig, PromptMode
from protocols.mindie.relay import MindiePassthrough
from protocols.mindie.texts import TextEncoder, TokensEncoder, build_headers
from protocols.mindie.worker import HEALTH_REQUEST, ChatMode, MindieUpstream
from protocols.params import Param

_MODEL_PATH = "/v2/models/{model}"


def _build_info_endpoint(path: str, variant: str, *, open: bool = False) -> Endpoint:  # noqa: A002 - the port's word
    return Endpoint("GET", path, "inform", variant, open)


def _build_generate_endpoint(path: str, variant: str) -> Endpoint:
    return Endpoint("POST", path, "generate", variant)


class MindIE:
    """MindIE, towards clients and workers.

    ``vllm_validator`` is the server's ``openAiSupport``: whether conversations are checked after
    vLLM's rules or the server's own. ``model`` answers where neither path nor body names one.
    ``prompts`` says how the text of a request that is no conversation becomes the model's input:
    as it is, or wrapped as a user's message. ``max_iter_times`` is the most tokens an answer may
    have. ``chats`` says how a worker is given conversations: as messages, or as text that
    ``renderer`` makes of them, at generate.

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
            raise ValueError(f"{profile!r} is no profile of MindIE; there are {known}")
        self._config = MindieConfig(
            profile=chosen,
            vllm_validator=vllm_validator,
            default_model=model,
            templating=PROMPT_OPTIONS_BY_MODE[prompts],
            max_iter_times=max_iter_times,
        )
        self._text_field_names = checks.map_field_names(chosen.text_params)
        self.param_tables: Mapping[str, tuple[Param, ...]] = {
            "text": checks.list_params(chosen.text_params),
            "text_stream": checks.list_params(chosen.text_params),
            "chat": checks.list_params(self._config.chat_params),
            **_PARAM_TABLES,
        }
        self._chat_field_names = (
            checks.map_field_names(self._config.chat_params) | _CHAT_FIELD_NAMES
        )
        self._upstream = MindieUpstream(self._config, chats, renderer)
        self._passthrough = MindiePassthrough(self._config, chats)

    # --- towards clients --------------------------------------------------------------------------

    def peek(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        variant = call.endpoint.operation
        match variant:
            case "text" | "text_stream" | "tokens":
                return RoutingInfo(info.read_path_model(call), stream=variant == "text_stream")
            case "stop":
                return self._read_stop_routing(call)
            case "tokenizer":
                self.read_text(call)
                return RoutingInfo(self._read_default_model(call))
            case "chat" | "completion":
                fields = read_body_fields(call)
                stream = get_field(fields, "stream") is True
                return RoutingInfo(chat.read_model_name(fields, self._config), stream=stream)
            case _:
                return self._read_default_routing(call)

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> Request:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del model
        setup = self._config
        match call.endpoint.operation:
            case "text" | "text_stream" as variant:
                return mindie_prompts.read_text_request(
                    call, setup, stream=variant == "text_stream"
                )
            case "tokens":
                return mindie_tokens.read_tokens_request(call, setup)
            case "chat":
                return chat.read_chat_request(call, setup)
            case "completion":
                return chat.read_completion_request(call, setup)
            case "native":
                return inputs.read_native_request(call, setup, self._read_default_model(call))
            case "generate" if inputs.detect_generate_style(call) == "prompt":
                return inputs.read_vllm_style_request(call, setup, self._read_default_model(call))
            case _:
                stream = self._read_default_routing(call).stream
                return inputs.read_tgi_style_request(
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
                output = mindie_tokens.read_output_name(
                    get_field(read_body_fields(call), "outputs")
                )
                return TokensEncoder(request, headers, output)
            case "chat":
                return chunks.OpenAiStyleEncoder(
                    chunks.ResponseVariant(early=profile.early), request, about, headers
                )
            case "completion":
                return chunks.OpenAiStyleEncoder(
                    chunks.ResponseVariant(is_chat=False), request, about, headers
                )
            case "native":
                return NativeEncoder(profile, request, about, headers)
            case "generate" if inputs.detect_generate_style(call) == "prompt":
                return VllmStyleEncoder(request, headers)
            case variant:
                return TgiStyleEncoder(profile, request, headers, listed=variant == "root")

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        return _add_headers(errors.build_error_response(error, call), call)

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``; also the answer of ``stop``, once it has stopped."""
        return _add_headers(info.build_info_response(call, catalog, self._config), call)

    def read_text(self, call: ClientRequest) -> str:
        """See ``protocols.core.interfaces.SupportsTokenize``."""
        return tokenizer.read_tokenizer_text(call, self._config)

    def encode_tokens(self, call: ClientRequest, tokens: Sequence[Token]) -> HttpResponse:
        """See ``protocols.core.interfaces.SupportsTokenize``."""
        return _add_headers(tokenizer.build_tokenizer_response(call, tokens), call)

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        match call.endpoint.operation:
            case "text" | "text_stream":
                return self._text_field_names
            case "chat":
                return self._chat_field_names
            case "generate" if inputs.detect_generate_style(call) == "prompt":
                return _VLLM_STYLE_FIELD_NAMES
            case _:
                return _FIELD_NAMES[call.endpoint.operation]

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return described.describe_api(self._config, self.param_tables)

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
        """See ``protocols.core.interfaces.SupportsPassthrough``: between servers of one release."""
        if not isinstance(client, MindIE):
            return None
        return self._passthrough.prepare_passthrough(client._config, call, about)  # noqa: SLF001

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return self._upstream.create_decoder(request)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return faults.read_worker_error(status, headers, body)

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.SupportsCancel``."""
        return self._upstream.encode_cancel(request)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        return self._upstream.metadata_requests(model)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        return self._upstream.load_metadata(model, answers)

    # --- what a call names ------------------------------------------------------------------------

    def _read_stop_routing(self, call: ClientRequest) -> RoutingInfo:
        """Raises InvalidParameter where the body names no request."""
        model = info.read_path_model(call)
        fields = read_body_fields(call)
        if "id" not in fields:
            raise build_param_error("Not found id.", "id", "missing")
        got = get_field(fields, "id")
        if got is None:
            raise build_param_error("id must not be null.", "id", "missing")
        return RoutingInfo(model, client_id=mindie_prompts.check_request_id(got))

    def _read_default_routing(self, call: ClientRequest) -> RoutingInfo:
        stream = _STREAM_READERS[call.endpoint.operation](call)
        return RoutingInfo(self._read_default_model(call), stream=stream)

    def _read_default_model(self, call: ClientRequest) -> str:
        """The model of an endpoint that asks for none: the body may name it all the same."""
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
    return inputs.detect_generate_style(call) == "prompt" and _read_body_stream(call)


def _always_streams(call: ClientRequest) -> bool:
    del call
    return True


_STREAM_READERS: Mapping[str, Callable[[ClientRequest], bool]] = {
    "generate": _read_generate_stream,
    "generate_stream": _always_streams,
    "native": _read_body_stream,
    "root": inputs.read_stream_flag,
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
_VLLM_STYLE_FIELD_NAMES = checks.map_field_names(tables.VLLM_STYLE_PARAMS)
_TGI_STYLE_FIELD_NAMES = {
    **checks.map_field_names(tables.TGI_STYLE_PARAMS),
    "adapter": "adapter_id",
}
_PARAM_TABLES: Mapping[str, tuple[Param, ...]] = {
    "tokens": checks.list_params(tables.TOKENS_PARAMS),
    "completion": checks.list_params(tables.COMPLETION_PARAMS),
    "generate": checks.list_params(tables.TGI_STYLE_PARAMS),
    "generate_stream": checks.list_params(tables.TGI_STYLE_PARAMS),
    "root": checks.list_params(tables.TGI_STYLE_PARAMS),
    "generate, of a prompt": checks.list_params(tables.VLLM_STYLE_PARAMS),
    "native": checks.list_params(tables.NATIVE_PARAMS),
}
_FIELD_NAMES: Mapping[str, Mapping[str, str]] = {
    "tokens": checks.map_field_names(tables.TOKENS_PARAMS),
    "native": checks.map_field_names(tables.NATIVE_PARAMS),
    "completion": {
        **checks.map_field_names(tables.COMPLETION_PARAMS),
        **_OUTPUT_FIELD_NAMES,
        "logprobs.top": "logprobs",
    },
    "generate": _TGI_STYLE_FIELD_NAMES,
    "generate_stream": _TGI_STYLE_FIELD_NAMES,
    "root": _TGI_STYLE_FIELD_NAMES,
}
