"""The paths of a MindIE server, and which module answers for each.

A path names its model, or the body does, or nobody: then it is the one that the listener was given.
Source: MindIE-LLM 0695772, http_handler.cpp. Versions in paths are documented and were never
served; cluster internals (roles, adapters, dresult) are not offered.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from gateway.core.catalog import Catalog, ModelInfo
from gateway.core.errors import GatewayError
from gateway.core.loss import Loss
from gateway.core.ports import (
    About,
    Call,
    Decoder,
    Description,
    Dialect,
    Encoder,
    Endpoint,
    Envelope,
    Relay,
    Renderer,
    Reply,
    Token,
    WireRequest,
)
from gateway.core.types import GenerateRequest, Request
from protocols.mindie import (
    chat,
    checks,
    chunks,
    described,
    errors,
    faults,
    info,
    inputs,
    prompts,
    tables,
    tokenizer,
    tokens,
)
from protocols.mindie.checks import body, get, wrong
from protocols.mindie.pieces import InputsEncoder, NativeEncoder, PromptEncoder
from protocols.mindie.profiles import PROFILES, TEMPLATINGS, Prompts, Setup
from protocols.mindie.relay import ServerRelays
from protocols.mindie.texts import TextEncoder, TokensEncoder, headers_of
from protocols.mindie.worker import PROBE, Chats, Writer
from protocols.params import Param

_MODEL = "/v2/models/{model}"


def _get(path: str, variant: str, *, open: bool = False) -> Endpoint:  # noqa: A002 - the port's word
    return Endpoint("GET", path, "inform", variant, open)


def _post(path: str, variant: str) -> Endpoint:
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
    health_request: WireRequest = PROBE
    profiles: ClassVar[tuple[str, ...]] = tuple(PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}
    path_prefixes: tuple[str, ...] = ("/v2", "/v1", "/")
    endpoints: tuple[Endpoint, ...] = (
        _post(f"{_MODEL}/generate", "text"),
        _post(f"{_MODEL}/generate_stream", "text_stream"),
        _post(f"{_MODEL}/infer", "tokens"),
        Endpoint("POST", f"{_MODEL}/stopInfer", "stop", "stop"),
        Endpoint("POST", "/v1/tokenizer", "tokenize", "tokenizer"),
        _post("/v1/chat/completions", "chat"),
        _post("/v1/completions", "completion"),
        _post("/generate", "generate"),
        _post("/generate_stream", "generate_stream"),
        _post("/infer", "native"),
        _post("/infer_token", "native"),
        _post("/", "root"),
        _get("/v2", "server"),
        _get(_MODEL, "metadata"),
        _get(f"{_MODEL}/config", "config"),
        _get(f"{_MODEL}/ready", "model_ready"),
        _get(f"{_MODEL}/getSlotCount", "slots"),
        _get("/v2/health/live", "live", open=True),
        _get("/v2/health/ready", "ready", open=True),
        _get("/health", "ready", open=True),
        _get("/info", "info"),
        _get("/v1/models", "models"),
        _get("/v1/models/{model}", "model"),
    )

    def __init__(
        self,
        profile: str | None = None,
        *,
        vllm_validator: bool = True,
        model: str = "",
        prompts: Prompts = "raw",
        max_iter_times: int | None = None,
        chats: Chats = "messages",
        renderer: Renderer | None = None,
    ) -> None:
        chosen = PROFILES.get(profile or self.profiles[0])
        if chosen is None:
            known = ", ".join(self.profiles)
            raise ValueError(f"{profile!r} is no profile of MindIE; there are {known}")
        self._config = Setup(
            profile=chosen,
            vllm_validator=vllm_validator,
            default_model=model,
            templating=TEMPLATINGS[prompts],
            max_iter_times=max_iter_times,
        )
        self._text_field_names = checks.names(chosen.text_params)
        self.param_tables: Mapping[str, tuple[Param, ...]] = {
            "text": checks.rows(chosen.text_params),
            "text_stream": checks.rows(chosen.text_params),
            "chat": checks.rows(self._config.chat_params),
            **_TABLES,
        }
        self._chat_field_names = checks.names(self._config.chat_params) | _CHAT_NAMES
        self._upstream = Writer(self._config, chats, renderer)
        self._passthrough = ServerRelays(self._config, chats)

    # --- towards clients --------------------------------------------------------------------------

    def peek(self, call: Call) -> Envelope:
        """See ``gateway.core.ports.Dialect``."""
        variant = call.endpoint.operation
        match variant:
            case "text" | "text_stream" | "tokens":
                return Envelope(info.model_name(call), stream=variant == "text_stream")
            case "stop":
                return self._read_stop_routing(call)
            case "tokenizer":
                self.read_text(call)
                return Envelope(self._read_default_model(call))
            case "chat" | "completion":
                fields = body(call)
                stream = get(fields, "stream") is True
                return Envelope(chat.read_model(fields, self._config), stream=stream)
            case _:
                return self._read_default_routing(call)

    def decode_request(self, call: Call, model: ModelInfo | None = None) -> Request:
        """See ``gateway.core.ports.Dialect``."""
        del model
        setup = self._config
        match call.endpoint.operation:
            case "text" | "text_stream" as variant:
                return prompts.read_text(call, setup, stream=variant == "text_stream")
            case "tokens":
                return tokens.read_tokens(call, setup)
            case "chat":
                return chat.read_chat(call, setup)
            case "completion":
                return chat.read_completion(call, setup)
            case "native":
                return inputs.read_native(call, setup, self._read_default_model(call))
            case "generate" if inputs.manner(call) == "prompt":
                return inputs.read_vllm(call, setup, self._read_default_model(call))
            case _:
                stream = self._read_default_routing(call).stream
                return inputs.read_inputs(
                    call, setup, self._read_default_model(call), stream=stream
                )

    def create_encoder(self, call: Call, request: Request, about: About) -> Encoder:
        """See ``gateway.core.ports.Dialect``."""
        assert isinstance(request, GenerateRequest)  # noqa: S101 - decode makes no other
        profile, headers = self._config.profile, headers_of(call)
        match call.endpoint.operation:
            case "text" | "text_stream":
                return TextEncoder(profile, request, about, headers)
            case "tokens":
                output = tokens.output_name(get(body(call), "outputs"))
                return TokensEncoder(request, headers, output)
            case "chat":
                return chunks.Encoder(chunks.Form(early=profile.early), request, about, headers)
            case "completion":
                return chunks.Encoder(chunks.Form(is_chat=False), request, about, headers)
            case "native":
                return NativeEncoder(profile, request, about, headers)
            case "generate" if inputs.manner(call) == "prompt":
                return PromptEncoder(request, headers)
            case variant:
                return InputsEncoder(profile, request, headers, listed=variant == "root")

    def encode_error(self, error: GatewayError, call: Call | None) -> Reply:
        """See ``gateway.core.ports.Dialect``."""
        return _headed(errors.refuse(error, call), call)

    def handle_info_request(self, call: Call, catalog: Catalog) -> Reply:
        """See ``gateway.core.ports.Dialect``; also the answer of ``stop``, once it has stopped."""
        return _headed(info.inform(call, catalog, self._config), call)

    def read_text(self, call: Call) -> str:
        """See ``gateway.core.ports.Tokenizing``."""
        return tokenizer.read(call, self._config)

    def encode_tokens(self, call: Call, tokens: Sequence[Token]) -> Reply:
        """See ``gateway.core.ports.Tokenizing``."""
        return _headed(tokenizer.told(call, tokens), call)

    def field_names(self, call: Call) -> Mapping[str, str]:
        """See ``gateway.core.ports.Dialect``."""
        match call.endpoint.operation:
            case "text" | "text_stream":
                return self._text_field_names
            case "chat":
                return self._chat_field_names
            case "generate" if inputs.manner(call) == "prompt":
                return _PROMPT_NAMES
            case _:
                return _NAMES[call.endpoint.operation]

    def openapi_fragment(self) -> Description:
        """See ``gateway.core.ports.Described``."""
        return described.describe(self._config, self.param_tables)

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._upstream.unsupported_parameters(request, names)

    def encode_request(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._upstream.encode_request(request)

    def prepare_passthrough(self, client: Dialect, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relaying``: between servers of one release."""
        if not isinstance(client, MindIE):
            return None
        return self._passthrough.prepare_passthrough(client._config, call, about)  # noqa: SLF001

    def create_decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._upstream.create_decoder(request)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``gateway.core.ports.WorkerDialect``."""
        return faults.read_error(status, headers, body)

    def encode_cancel(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.Cancelling``."""
        return self._upstream.encode_cancel(request)

    def metadata_requests(self, model: str) -> Sequence[WireRequest]:
        """See ``gateway.core.ports.Learning``."""
        return self._upstream.metadata_requests(model)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``gateway.core.ports.Learning``."""
        return self._upstream.load_metadata(model, answers)

    # --- what a call names ------------------------------------------------------------------------

    def _read_stop_routing(self, call: Call) -> Envelope:
        """Raises InvalidParameter where the body names no request."""
        model = info.model_name(call)
        fields = body(call)
        if "id" not in fields:
            raise wrong("Not found id.", "id", "missing")
        got = get(fields, "id")
        if got is None:
            raise wrong("id must not be null.", "id", "missing")
        return Envelope(model, client_id=prompts.check_id(got))

    def _read_default_routing(self, call: Call) -> Envelope:
        stream = _STREAMS[call.endpoint.operation](call)
        return Envelope(self._read_default_model(call), stream=stream)

    def _read_default_model(self, call: Call) -> str:
        """The model of an endpoint that asks for none: the body may name it all the same."""
        got = get(body(call), "model")
        name = got if isinstance(got, str) and got else self._config.default_model
        if not name:
            raise wrong("Request contains not model or model null", "model", "missing")
        return name


def _headed(reply: Reply, call: Call | None) -> Reply:
    if call is None:
        return reply
    return replace(reply, headers=(*reply.headers, *headers_of(call)))


def _body_stream(call: Call) -> bool:
    return get(body(call), "stream") is True


def _generate_stream(call: Call) -> bool:
    return inputs.manner(call) == "prompt" and _body_stream(call)


def _always(call: Call) -> bool:
    del call
    return True


_STREAMS: Mapping[str, Callable[[Call], bool]] = {
    "generate": _generate_stream,
    "generate_stream": _always,
    "native": _body_stream,
    "root": inputs.stream_of,
}


_OUTPUT_NAMES = {"output": "response_format", "sampling.beam_width": "use_beam_search"}
_CHAT_NAMES = {
    **_OUTPUT_NAMES,
    "tools": "tools",
    "tool_choice": "tool_choice",
    "logprobs.top": "top_logprobs",
    "templating.template": "chat_template",
    "templating.arguments": "chat_template_kwargs",
}
_PROMPT_NAMES = checks.names(tables.PROMPT)
_INPUTS_NAMES = {**checks.names(tables.INPUTS), "adapter": "adapter_id"}
_TABLES: Mapping[str, tuple[Param, ...]] = {
    "tokens": checks.rows(tables.TOKENS),
    "completion": checks.rows(tables.COMPLETION),
    "generate": checks.rows(tables.INPUTS),
    "generate_stream": checks.rows(tables.INPUTS),
    "root": checks.rows(tables.INPUTS),
    "generate, of a prompt": checks.rows(tables.PROMPT),
    "native": checks.rows(tables.NATIVE),
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "tokens": checks.names(tables.TOKENS),
    "native": checks.names(tables.NATIVE),
    "completion": {
        **checks.names(tables.COMPLETION),
        **_OUTPUT_NAMES,
        "logprobs.top": "logprobs",
    },
    "generate": _INPUTS_NAMES,
    "generate_stream": _INPUTS_NAMES,
    "root": _INPUTS_NAMES,
}
