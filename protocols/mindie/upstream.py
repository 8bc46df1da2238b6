"""The internal request to a worker's request; unsupported parameters; pass-through.

Text prompts go to generate, always with ``details``, which hold the finish reason. What only
completions can do (token ids, log probabilities) goes to completions, if the release has them. Chat
requests go to /v1/chat/completions, unless the gateway renders them to text. A request without a
token limit asks for the maximum: generate would stop after twenty tokens.

Source: MindIE-LLM 0695772, http_handler.cpp and single_req_infer_interface/*; for ``perf_stat`` the
published pages of 1.0.
"""

import itertools
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast
from urllib.parse import quote

import msgspec
from msgspec import Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols import params
from protocols import prompt as protocols_prompt
from protocols.chat import upstream
from protocols.chat.messages import MessageStyle
from protocols.chat.passthrough import (
    JSON_HEADERS,
    OPTIONAL_BOOL,
    PLAIN_MESSAGES,
    TOOL_FIELDS,
    PassthroughRule,
    PassthroughRules,
    build_body_decoder,
    build_count_type,
    create_passthrough_reader,
    is_valid_chat,
    list_body_fields,
)
from protocols.chat.upstream import RequestWriter, WorkerProfile
from protocols.core import loss
from protocols.core.errors import GatewayError, MalformedRequest, UnsupportedFeature
from protocols.core.events import Event, TextDelta, Usage
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughReader,
    PassthroughRequest,
    PromptRenderer,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.loss import LossReason, ParameterSupport, UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    ReasoningPart,
    RefusalPart,
    Request,
    ResponseOptions,
    TextPart,
    VideoPart,
)
from protocols.json_body import read_object
from protocols.mindie import errors, responses
from protocols.mindie import params as mindie_params
from protocols.mindie.decoder import OpenAiStyleDecoder, TextDecoder
from protocols.mindie.params import (
    COMPLETION_PARAMS,
    INT32_MAX,
    MAX_STOP_STRINGS,
    MAX_TOTAL_STOP_LENGTH,
    MindieConfig,
    MindieParamTable,
    count_utf16_units,
    list_params,
)
from protocols.mindie.requests import MAX_BEAM_TOKENS, PRIORITY_STEP
from protocols.mindie.responses import STREAM_CONTENT_TYPE, TextEncoder, build_headers
from protocols.params import Param

# Parameters that workers accept: the parameter tables of their endpoints.
#
# A row of a worker gives the range that the worker accepts: other values are clamped and reported.
#
# Sources: those of ``protocols.mindie.params``; MindIE-LLM 0695772, samplers (which ignore
# watermark); for 1.0.RC1 the published page of generate_stream, by which neither a watermark nor
# ``typical_p`` has an effect, and a temperature below 0.001 spoils the text.

MIN_TEMPERATURE: Final = 0.001
"""The temperature for greedy decoding where 0 is rejected."""
_MIN_POSITIVE = 1e-6
"""The top_p for 0 where that is rejected: one token."""
_SEPARATE_FIELDS = ("stream", "priority", "timeout")
"""Fields that are written separately."""
_MESSAGE_STYLE = MessageStyle(
    part_format="joined",
    empty_content="",
    role_mapping=(("developer", "system"), ("function", "tool")),
)
_SINGLE_CHOICE_PARAM: Final = Param(wire="n", field="n", type="int", minimum=1, maximum=1)
"""Ignored by workers without such a field; they return one choice anyway."""


class MindieCapabilities(Struct, frozen=True, kw_only=True):
    """What a kind of worker supports."""

    early: bool
    """See ``protocols.mindie.params.MindieProfile``."""
    text_params: params.ParamTable
    """The parameters of generate."""
    openai_profile: WorkerProfile
    """The profile of the OpenAI-style endpoints."""
    vllm_validator: bool
    """Chat requests may set an output format and a thinking budget."""
    has_completions: bool
    """The worker has /v1/completions."""


def get_capabilities(setup: MindieConfig) -> MindieCapabilities:
    """Return the capabilities of workers with this configuration."""
    profile = setup.profile
    early = profile.early
    talk = list_worker_params(setup.chat_params)
    useless = ("watermark", *(("typical_p",) if early else ()))
    return MindieCapabilities(
        early=early,
        text_params=params.ParamTable(*list_worker_params(profile.text_params, useless=useless)),
        openai_profile=WorkerProfile(
            chat=(*talk, _SINGLE_CHOICE_PARAM) if early else talk,
            completion=list_worker_params(mindie_params.COMPLETION_PARAMS),
            labels=(),
            message_style=_MESSAGE_STYLE,
            max_chat_logprobs=20,
            max_completion_logprobs=5,
            template_arguments=not early,
            beam_search=not early,
        ),
        vllm_validator=setup.vllm_validator and not early,
        has_completions=profile.has_completions,
    )


def list_worker_params(
    table: MindieParamTable, *, useless: Container[str] = ()
) -> tuple[Param, ...]:
    """List the rows that name a request field; without ``useless`` ones, which have no effect."""
    return tuple(
        _build_worker_param(param, dropped=param.wire in useless)
        for param in list_params(table)
        if param.wire not in _SEPARATE_FIELDS and not param.field.startswith(("request.", "extra."))
    )


def _build_worker_param(param: Param, *, dropped: bool) -> Param:
    changes: dict[str, Any] = {"disabled_values": ()}
    if param.exclusive_minimum:
        changes["minimum"] = MIN_TEMPERATURE if param.wire == "temperature" else _MIN_POSITIVE
    if dropped:
        changes["loss_reason"] = "dropped"
    return replace(param, **changes)


# Adapts a request to a worker: removes unsupported parameters and reports them.
#
# Sources: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp (chat parameters),
# tokenizer.py (media), batch_context.py: without temperature, top_k and top_p the worker takes the
# likeliest token, with any of them it samples, and a temperature of 0 or ``do_sample`` false is
# greedy.

AdaptedRequest = tuple[GenerationRequest, tuple[UnsupportedParameter, ...]]

_SEED_COUNT = 2**63
_AUDIO_SUBTYPES: Final[Mapping[str, str]] = {"wav": "x-wav", "mp3": "mpeg"}
_MEDIA_NAMES: Final[Mapping[type[ContentPart], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
}


class _RequestAdaptation:
    """A request during its adaptation, and its unsupported parameters."""

    def __init__(self, request: GenerationRequest, names: Mapping[str, str]) -> None:
        self.request = request
        self.field_names = names
        self.unsupported: list[UnsupportedParameter] = []

    def replace_fields(self, **fields: Any) -> None:
        self.request = replace(self.request, **fields)

    def replace_sampling(self, **fields: Any) -> None:
        self.replace_fields(sampling=replace(self.request.sampling, **fields))

    def replace_stopping(self, **fields: Any) -> None:
        self.replace_fields(stopping=replace(self.request.stopping, **fields))

    def add_unsupported(
        self, path: str, reason: LossReason, detail: str = "", *, shown: str = ""
    ) -> None:
        wire = self.field_names.get(path, shown or path.rpartition(".")[2])
        self.unsupported.append(UnsupportedParameter(wire, reason, detail, path))

    @property
    def result(self) -> AdaptedRequest:
        return self.request, tuple(self.unsupported)


def adapt_generate_request(
    request: GenerationRequest,
    takes: MindieCapabilities,
    names: Mapping[str, str],
    most: int | None,
) -> AdaptedRequest:
    """Adapt a request for generate: one choice, one prompt, at most ``most`` tokens."""
    fit = _RequestAdaptation(request, names)
    _adapt_common_fields(fit, takes, most)
    _adapt_prompts(fit)
    many = request.n or 1
    if many > 1:
        fit.add_unsupported("n", "dropped")
    if (request.best_of or 1) > many:
        fit.add_unsupported("best_of", "dropped")
    fit.replace_fields(n=None, best_of=None)
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.do_sample is False:
        fit.replace_sampling(temperature=None, do_sample=False)
    elif takes.early and sampling.do_sample is None and _is_sampled(request):
        fit.replace_sampling(do_sample=True)
    return fit.result


def adapt_openai_request(
    request: GenerationRequest,
    takes: MindieCapabilities,
    names: Mapping[str, str],
    most: int | None,
) -> AdaptedRequest:
    """Adapt a request for the OpenAI-style endpoints."""
    fit = _RequestAdaptation(request, names)
    _adapt_common_fields(fit, takes, most)
    _adapt_prompts(fit)
    _adapt_messages(fit, early=takes.early)
    if request.output is not None and not takes.vllm_validator:
        fit.add_unsupported("output", "dropped", shown="response_format")
        fit.replace_fields(output=None)
    if request.sampling.do_sample and not _is_sampled(request):
        fit.replace_sampling(temperature=1.0)
    if takes.early:
        _adapt_for_early_release(fit)
        return fit.result
    if takes.vllm_validator:
        _adapt_thinking_budget(fit)
    _adapt_stop_strings(fit)
    _adapt_choice_count(fit)
    return fit.result


def _is_sampled(request: GenerationRequest) -> bool:
    sampling = request.sampling
    values = (sampling.temperature, sampling.top_p, sampling.top_k)
    return any(one is not None for one in values)


def _adapt_common_fields(
    fit: _RequestAdaptation, takes: MindieCapabilities, most: int | None
) -> None:
    request = fit.request
    if (seed := request.sampling.seed) is not None:
        taken = seed % _SEED_COUNT or (_SEED_COUNT - 1 if takes.early else 0)
        if taken != seed:
            fit.add_unsupported("sampling.seed", "approximated", f"{seed} as {taken}")
            fit.replace_sampling(seed=taken)
    if request.stopping.overflow == "error":
        fit.replace_stopping(overflow=None)  # every server reports usage
    max_tokens = request.stopping.max_tokens
    if most is not None and max_tokens is not None and max_tokens > most:
        fit.add_unsupported("stopping.max_tokens", "clamped", f"{max_tokens} to {most}")
        fit.replace_stopping(max_tokens=most)
    if request.source != "mindie":
        fit.unsupported += [UnsupportedParameter(name, "dropped") for name in request.extra]
        fit.replace_fields(extra={})
    fit.replace_fields(provided_fields=frozenset())


def _adapt_prompts(fit: _RequestAdaptation) -> None:
    if len(fit.request.prompts) > 1:
        fit.add_unsupported("prompts", "dropped", shown="prompt")
        fit.replace_fields(prompts=fit.request.prompts[:1])


# --- chat -----------------------------------------------------------------------------------------


def _adapt_messages(fit: _RequestAdaptation, *, early: bool) -> None:
    """Remove unsupported content, and empty assistant messages, which the worker rejects."""
    lost: set[str] = set()
    kept = []
    for message in fit.request.messages:
        parts = [_adapt_part(part, lost, early=early) for part in message.parts]
        fitted = replace(message, parts=tuple(part for part in parts if part is not None))
        if early and message.tool_calls:
            lost.add("tool calls")
            fitted = replace(fitted, tool_calls=())
        if _has_content(fitted) or not (early or message.role == "assistant"):
            kept.append(fitted)
    fit.replace_fields(messages=tuple(kept) or fit.request.messages)
    if lost:
        fit.add_unsupported("messages", "dropped", ", ".join(sorted(lost)))


def _adapt_part(part: ContentPart, lost: set[str], *, early: bool) -> ContentPart | None:
    match part:
        case RefusalPart(text):
            return TextPart(text)
        case TextPart() | ReasoningPart():
            return part
        case FilePart() | ImagePart() | AudioPart() | VideoPart() if early or _is_file_part(part):
            lost.add(_MEDIA_NAMES[type(part)])
            return None
        case AudioPart(data, str(form)):
            return AudioPart(f"data:audio/{_AUDIO_SUBTYPES.get(form, form)};base64,{data}")
        case _:
            return part


def _is_file_part(part: ContentPart) -> bool:
    return isinstance(part, FilePart)


def _has_content(message: Message) -> bool:
    has_parts = any(
        not isinstance(part, TextPart | ReasoningPart) or part.text for part in message.parts
    )
    return has_parts or bool(message.tool_calls)


def _adapt_for_early_release(fit: _RequestAdaptation) -> None:
    """Adapt a request for the first releases: a few scalars, no tools, no log probabilities."""
    request = fit.request
    if request.tools:
        fit.add_unsupported("tools", "dropped")
        fit.replace_fields(tools=(), tool_choice=None)
    if request.logprobs is not None:
        fit.add_unsupported("logprobs.top", "dropped", shown="logprobs")
        fit.replace_fields(logprobs=None)
    if request.sampling.do_sample is False:
        fit.add_unsupported(
            "sampling.do_sample", "approximated", f"as temperature {MIN_TEMPERATURE}"
        )
        fit.replace_sampling(do_sample=None, temperature=MIN_TEMPERATURE)
    if (request.n or 1) > 1:
        fit.add_unsupported("n", "dropped")
        fit.replace_fields(n=None)


def _adapt_thinking_budget(fit: _RequestAdaptation) -> None:
    """Write the thinking budget as a template argument, which also needs thinking enabled."""
    reasoning, how = fit.request.reasoning, fit.request.templating
    if reasoning is None or reasoning.budget is None or reasoning.budget < 1:
        return
    budget = b"%d" % min(reasoning.budget, INT32_MAX)
    arguments = {"enable_thinking": Raw(b"true"), "thinking_budget": Raw(budget)}
    fit.replace_fields(
        reasoning=replace(reasoning, budget=None),
        templating=replace(how, arguments={**(how.arguments or {}), **arguments}),
    )


def _adapt_stop_strings(fit: _RequestAdaptation) -> None:
    stops = fit.request.stopping.stop
    taken: list[str] = []
    room = MAX_TOTAL_STOP_LENGTH
    for stop in stops:
        size = count_utf16_units(stop)
        if 1 <= size <= min(MAX_STOP_STRINGS, room) and len(taken) < MAX_STOP_STRINGS:
            taken.append(stop)
            room -= size
    if len(taken) < len(stops):
        fit.add_unsupported("stopping.stop", "clamped", f"{len(stops)} to {len(taken)}")
        fit.replace_stopping(stop=tuple(taken))


def _adapt_choice_count(fit: _RequestAdaptation) -> None:
    """Map beam search to ``best_of``; drop what needs a temperature or fewer tokens."""
    request, sampling = fit.request, fit.request.sampling
    many, best, width = request.n or 1, request.best_of or 1, sampling.beam_width
    short = 0 < (request.stopping.max_tokens or INT32_MAX) <= MAX_BEAM_TOKENS
    if width is not None and short:
        fit.replace_fields(best_of=max(width, many))
        fit.replace_sampling(beam_width=many)
        return
    if width is not None:
        fit.add_unsupported(
            "sampling.beam_width", "dropped", f"only up to {MAX_BEAM_TOKENS} tokens"
        )
        fit.replace_sampling(beam_width=None)
    if best > many:
        fit.add_unsupported("best_of", "dropped")
    fit.replace_fields(best_of=None)
    if many > 1 and (not sampling.temperature or sampling.do_sample is False):
        fit.add_unsupported("n", "dropped", "no temperature")
        fit.replace_fields(n=None)


ChatMode = Literal["messages", "text"]

_JSON_HEADERS = (("Content-Type", "application/json"),)
_INVALID_ID_CHARS = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_LENGTH = 256
_MAX_TIMEOUT_SECONDS = 65535
"""Return the timeout in whole seconds."""
_MAX_PRIORITY = 5


class _SlotCount(msgspec.Struct):
    total_slots: int


class _ServerExtensions(msgspec.Struct):
    max_iter_times: int


class _ServerMetadata(msgspec.Struct):
    extensions: _ServerExtensions


_decode_slot_count = msgspec.json.Decoder(_SlotCount).decode
_decode_server_metadata = msgspec.json.Decoder(_ServerMetadata).decode


class MindieUpstream:
    """Encodes requests for one kind of worker, and creates the decoders of their responses."""

    def __init__(
        self, setup: MindieConfig, chats: ChatMode, renderer: PromptRenderer | None
    ) -> None:
        self._config = setup
        self._capabilities = get_capabilities(setup)
        self._chat_mode = chats
        self._renderer = renderer
        self._openai_writer = upstream.RequestWriter(
            self._capabilities.openai_profile, "/v1", powers=False
        )
        self._parameter_support = {
            **params.build_parameter_support(self._capabilities.text_params),
            **protocols_prompt.build_prompt_support(renderer),
            "priority": ParameterSupport("priority"),
        }
        self._max_tokens_by_model: dict[str, int] = {}

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = _require_generation(request)
        name = _build_request_id(request)
        if not self._uses_openai_endpoint(request):
            return self._encode_generate(request, name)
        wire = self._openai_writer.encode_request(self._adapt_request(request, {})[0])
        headers = (*wire.headers, ("req-id", name)) if name else wire.headers
        return UpstreamRequest(wire.path, wire.body, headers)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = _require_generation(request)
        fitted, lost = self._adapt_request(request, names)
        if self._uses_openai_endpoint(request):
            return lost + self._openai_writer.unsupported_parameters(fitted, names)
        if request.response_options.token_ids:
            lost += (
                UnsupportedParameter(
                    names.get("response_options.token_ids", "return_token_ids"), "dropped"
                ),
            )
        lost += protocols_prompt.find_prompt_losses(fitted, self._renderer, names)
        return lost + loss.find_unsupported_parameters(
            fitted, self._parameter_support, names, extra=True
        )

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = _require_generation(request)
        early = self._capabilities.early
        if self._uses_openai_endpoint(request):
            return OpenAiStyleDecoder(self._adapt_request(request, {})[0], early=early)
        return TextDecoder(request, early=early)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.SupportsCancel``."""
        body = _encode({"id": _build_request_id(request)})
        return UpstreamRequest(f"{_build_model_path(request.model)}/stopInfer", body, _JSON_HEADERS)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        slots = UpstreamRequest(f"{_build_model_path(model)}/getSlotCount", b"", method="GET")
        return slots, UpstreamRequest("/v2", b"", method="GET")

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``. Reads a model's token limit."""
        slots, server = (*answers, None, None)[:2]
        try:
            longest = _decode_server_metadata(server or b"").extensions.max_iter_times
            if 0 < longest <= INT32_MAX:
                self._max_tokens_by_model[model] = longest
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            total = _decode_slot_count(slots or b"").total_slots
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return total if total > 0 else None

    # --- choice of the endpoint -------------------------------------------------------------------

    def _uses_openai_endpoint(self, request: GenerationRequest) -> bool:
        """Whether the request goes to an OpenAI-style endpoint."""
        if upstream.uses_chat_endpoint(request):
            return self._chat_mode == "messages"
        ids = any(not isinstance(prompt, str) for prompt in request.prompts[:1])
        return self._capabilities.has_completions and (ids or request.logprobs is not None)

    def _adapt_request(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> AdaptedRequest:
        fit = (
            adapt_openai_request if self._uses_openai_endpoint(request) else adapt_generate_request
        )
        return fit(request, self._capabilities, names, self._get_max_tokens(request.model))

    def _get_max_tokens(self, model: str) -> int | None:
        """Return the maximum number of tokens of a response, if it is known."""
        known = (self._config.max_iter_times, self._max_tokens_by_model.get(model))
        return min((most for most in known if most is not None), default=None)

    # --- generate ---------------------------------------------------------------------------------

    def _encode_generate(self, request: GenerationRequest, name: str) -> UpstreamRequest:
        fitted, _ = self._adapt_request(request, {})
        body: dict[str, Any] = {"id": name} if name else {}
        body["text_input"] = protocols_prompt.build_prompt(fitted, self._renderer)
        body["parameters"] = self._write_parameters(fitted)
        way = "generate_stream" if request.stream else "generate"
        return UpstreamRequest(
            f"{_build_model_path(request.model)}/{way}", _encode(body), _JSON_HEADERS
        )

    def _write_parameters(self, request: GenerationRequest) -> dict[str, Any]:
        written = {
            "details": True,
            **params.write_params(self._capabilities.text_params, request.set_fields),
        }
        written.setdefault("max_new_tokens", self._get_max_tokens(request.model) or INT32_MAX)
        if request.priority is not None:
            step = min(max(request.priority, 0) // PRIORITY_STEP, _MAX_PRIORITY - 1)
            written["priority"] = step + 1
        if request.timeout is not None:
            written["timeout"] = math.ceil(min(max(request.timeout, 1.0), _MAX_TIMEOUT_SECONDS))
        if request.response_options.timing:
            written["perf_stat"] = True
        for field, raw in request.extra.items():
            written.setdefault(field, raw)
        return written


def _require_generation(request: Request) -> GenerationRequest:
    if isinstance(request, EmbeddingRequest):
        raise UnsupportedFeature("The model's workers do not support embeddings.")
    return request


def _build_model_path(name: str) -> str:
    return f"/v2/models/{quote(name, safe='')}"


def _build_request_id(request: Request) -> str:
    """Return a request id that the worker accepts; "" if there is none."""
    return _INVALID_ID_CHARS.sub("_", request.client_id or "")[:_MAX_ID_LENGTH]


# Pass-through between servers of one release. See ``protocols.chat.passthrough``.
#
# A generate request must already ask for details: without them, neither the end of a stream nor an
# interrupted response can be detected. A request with a client's id is translated, since workers
# must know it by the gateway's id, which cancels it.

_encode = msgspec.json.Encoder().encode

_GATEWAY_CHECKED_FIELDS: Final = frozenset({"n", "best_of", "use_beam_search", "stream"})
"""Fields that are checked together with others, or read separately."""
_GENERATE_FIELDS: Final = {"text_input", "parameters"}
_EVENT_STREAM_HEADERS: Final[Headers] = (("Content-Type", STREAM_CONTENT_TYPE),)
_INVALID_REQUEST_ID_CHARS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_PREFIX_LENGTH: Final = 200
_StopString = Annotated[str, Meta(min_length=1, max_length=512)]
_STOP_FIELD_TYPE: Final[Any] = (
    _StopString | Annotated[list[_StopString], Meta(max_length=32)] | UnsetType
)
"""The text length that is within every limit, with two units for each character."""
_PromptString = Annotated[str, Meta(min_length=1)]
_PARAMETER_TYPES: Final[Mapping[str, Any]] = {
    "details": bool,
    "priority": Annotated[int, Meta(ge=1, le=5)] | UnsetType,
    "timeout": Annotated[int, Meta(ge=1, le=65535)] | UnsetType,
    "batch_size": Annotated[int, Meta(ge=1, le=INT32_MAX)] | UnsetType,
}

_decode_prompt = msgspec.json.Decoder(_PromptString).decode


class _TokenCounter(Struct):
    """Counts the tokens that were passed on."""

    tokens: int = 0


class MindiePassthrough:
    """Prepares pass-through to one kind of worker."""

    def __init__(self, setup: MindieConfig, chats: ChatMode) -> None:
        """``chats``: chat requests go as messages; otherwise they are rendered to text."""
        self._config = setup
        self._early = setup.profile.early
        taken = get_capabilities(setup)
        self._openai_passthrough = PassthroughRules(
            _build_endpoint_rules(setup, taken, chats),
            read=self._build_openai_decoder,
            whole=errors.JSON_HEADERS,
            stream=_EVENT_STREAM_HEADERS,
        )
        self._text_param_names = {param.wire for param in list_params(setup.profile.text_params)}
        table = list_params(setup.profile.text_params)
        self._parameters_checker = check = build_body_decoder(
            PassthroughRule(
                path="",
                field_types=_PARAMETER_TYPES,
                worker_params=taken.text_params,
                client_params=table,
            )
        )
        self._checked_names = list_body_fields(check)
        self._request_numbers = itertools.count()

    def prepare_passthrough(
        self, client: MindieConfig, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``. ``client`` has its setup."""
        if not self._is_same_server(client) or "req-id" in call.headers:
            return None
        if len(call.body) > self._config.profile.max_text_length:
            return None
        name = self._build_unique_request_id(about)
        match call.endpoint.operation:
            case "chat" | "completion" as variant if variant in self._openai_passthrough:
                return self._prepare_openai(variant, call, about, name)
            case "text" | "text_stream" as variant if client.templating.mode == "raw":
                return self._prepare_generate(call, about, name, stream=variant == "text_stream")
            case _:
                return None

    def _is_same_server(self, client: MindieConfig) -> bool:
        mine = self._config
        return (
            client.profile is mine.profile
            and client.vllm_validator == mine.vllm_validator
            and client.max_iter_times is None
            and mine.max_iter_times is None
        )

    def _build_unique_request_id(self, about: ResponseContext) -> str:
        """A unique request id: the id of the client request may be chosen by the client."""
        shown = _INVALID_REQUEST_ID_CHARS.sub("_", about.id)[:_MAX_ID_PREFIX_LENGTH]
        return f"{shown}-{about.created:x}-{next(self._request_numbers):x}"

    # --- OpenAI style -----------------------------------------------------------------------------

    def _prepare_openai(
        self, variant: str, call: ClientRequest, about: ResponseContext, name: str
    ) -> PassthroughRequest | None:
        headers = build_headers(call)
        relay = self._openai_passthrough.prepare_passthrough(
            variant,
            call,
            about,
            lambda first: first + headers,
            names={"model": about.model, "id": name},
        )
        if relay is None:
            return None

        request = replace(relay.request, client_id=name)
        form = responses.ResponseVariant(is_chat=variant == "chat", early=self._early)
        return replace(
            relay,
            request=request,
            upstream_request=replace(
                relay.upstream_request, headers=(*relay.upstream_request.headers, ("req-id", name))
            ),
            create_encoder=lambda: responses.OpenAiStyleEncoder(
                form, cast("GenerationRequest", request), about, headers
            ),
        )

    def _build_openai_decoder(self, request: GenerationRequest) -> ResponseDecoder:
        return OpenAiStyleDecoder(request, early=self._early)

    # --- generate ---------------------------------------------------------------------------------

    def _prepare_generate(
        self, call: ClientRequest, about: ResponseContext, name: str, *, stream: bool
    ) -> PassthroughRequest | None:
        try:
            fields = read_object(call.body)
            if fields.keys() != _GENERATE_FIELDS:
                return None
            prompt = _decode_prompt(fields["text_input"])
            parameters = read_object(bytes(fields["parameters"]))
            body = self._parameters_checker.decode(fields["parameters"])
        except (MalformedRequest, msgspec.DecodeError):
            return None
        checked = parameters.keys() & self._checked_names
        if not (body.details and self._text_param_names.isdisjoint(parameters.keys() - checked)):
            return None
        fields["parameters"] = Raw(_encode(parameters))
        request = GenerationRequest(
            model=about.backend_model,
            kind="completion",
            prompts=(prompt,),
            stream=stream,
            client_id=name,
            priority=(body.priority - 1) * PRIORITY_STEP if "priority" in checked else None,
            timeout=float(body.timeout) if "timeout" in checked else None,
            response_options=ResponseOptions(details=True),
        )
        way = "generate_stream" if stream else "generate"
        path = f"/v2/models/{quote(about.backend_model, safe='')}/{way}"
        wire = UpstreamRequest(path, _encode(fields | {"id": name}), JSON_HEADERS)
        return self._build_passthrough(wire, request, call, about)

    def _build_passthrough(
        self,
        wire: UpstreamRequest,
        request: GenerationRequest,
        call: ClientRequest,
        about: ResponseContext,
    ) -> PassthroughRequest:
        headers, tally = build_headers(call), _TokenCounter()
        first = _EVENT_STREAM_HEADERS if request.stream else errors.JSON_HEADERS
        names = {"model_name": about.model, "id": request.client_id or ""}

        def passed() -> PassthroughReader:
            tally.tokens = 0
            decoder = _TokenCountingDecoder(TextDecoder(request, early=self._early), tally)
            return create_passthrough_reader(request, decoder, names, b"")

        def encoder() -> ResponseEncoder:
            made = TextEncoder(self._config.profile, request, about, headers)
            made.encode_events(
                [Usage(0, tally.tokens)]
            )  # reported in the event that ends a cancelled request
            return made

        return PassthroughRequest(request, wire, lambda: first + headers, passed, encoder)


class _TokenCountingDecoder:
    """A decoder that counts tokens."""

    def __init__(self, inner: ResponseDecoder, tally: _TokenCounter) -> None:
        self._inner = inner
        self._counter = tally

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._inner.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._inner.close())

    def _count_tokens(self, events: Sequence[Event]) -> Sequence[Event]:
        self._counter.tokens += sum(one.tokens for one in events if isinstance(one, TextDelta))
        return events


def _build_endpoint_rules(
    setup: MindieConfig, taken: MindieCapabilities, chats: ChatMode
) -> dict[str, PassthroughRule]:
    """The OpenAI-style endpoints that the workers have."""
    forwards: Callable[[str], bool] = RequestWriter(
        taken.openai_profile, "/v1", powers=False
    ).forwards_field
    later = (
        {} if taken.early else {**TOOL_FIELDS, "stop": _STOP_FIELD_TYPE, "logprobs": OPTIONAL_BOOL}
    )
    forms = {}
    if chats == "messages":
        top = {} if taken.early else {"top_logprobs": build_count_type(20)}
        forms["chat"] = PassthroughRule(
            path="/v1/chat/completions",
            field_types={"messages": PLAIN_MESSAGES, "stream": OPTIONAL_BOOL, **later, **top},
            worker_params=taken.openai_profile.chat,
            client_params=list_params(setup.chat_params),
            gateway_fields=_GATEWAY_CHECKED_FIELDS,
            forwards_field=forwards,
            is_valid_body=is_valid_chat,
        )
    if taken.has_completions:
        forms["completion"] = PassthroughRule(
            path="/v1/completions",
            field_types={
                "prompt": _PromptString,
                "stream": OPTIONAL_BOOL,
                "stop": _STOP_FIELD_TYPE,
                "logprobs": build_count_type(5),
            },
            worker_params=taken.openai_profile.completion,
            client_params=list_params(COMPLETION_PARAMS),
            gateway_fields=_GATEWAY_CHECKED_FIELDS,
            forwards_field=forwards,
        )
    return forms
