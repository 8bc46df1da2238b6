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
from protocols.chat.field_keys import find_lost_keys
from protocols.chat.field_types import (
    OPTIONAL_BOOL,
    PLAIN_MESSAGES,
    TOOL_FIELDS,
    build_count_type,
)
from protocols.chat.messages import MessageStyle
from protocols.chat.tools import is_valid_chat
from protocols.chat.upstream import RequestWriter, WorkerProfile
from protocols.core import loss
from protocols.core.errors import GatewayError, MalformedRequest
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
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import LossReason, ParameterSupport, UnsupportedParameter
from protocols.core.places import locate_message
from protocols.core.request import (
    AudioPart,
    ContentPart,
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
from protocols.json_body import JSON_ERRORS, read_object
from protocols.mindie import errors, responses
from protocols.mindie import params as mindie_params
from protocols.mindie.decoder import SOURCE, OpenAiStyleDecoder, TextDecoder
from protocols.mindie.messages import PromptPartKeys
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
from protocols.passthrough import (
    JSON_HEADERS,
    PassthroughResponse,
    PassthroughRule,
    PassthroughRules,
    build_body_decoder,
    list_body_fields,
)
from protocols.passthrough_readers import (
    NameReplacer,
    RunningCountCorrection,
    UnaryPassthroughReader,
    VerbatimStreamReader,
)

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
    includes_reasoning=False,
    role_mapping=(("developer", "system"), ("function", "tool")),
)
_SINGLE_CHOICE_PARAM: Final = Param("n", "n", "int", 1, 1)
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
    chat = list_worker_params(setup.chat_params)
    useless = ("watermark", *(("typical_p",) if early else ()))
    return MindieCapabilities(
        early=early,
        text_params=params.ParamTable(*list_worker_params(profile.text_params, useless=useless)),
        openai_profile=WorkerProfile(
            chat=(*chat, _SINGLE_CHOICE_PARAM) if early else chat,
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
"""What the first releases do not take."""
_UNSENT_PARTS: Final[Mapping[type[ContentPart], str]] = {FilePart: "files"}


class _RequestAdaptation:
    """A request during its adaptation, and its unsupported parameters."""

    def __init__(
        self,
        request: GenerationRequest,
        capabilities: MindieCapabilities,
        names: Mapping[str, str],
        max_tokens: int | None,
    ) -> None:
        """``max_tokens`` is the maximum for a response."""
        self._request = request
        self._capabilities = capabilities
        self._field_names = names
        self._max_tokens = max_tokens
        self._unsupported: list[UnsupportedParameter] = []

    def adapt_for_generate(self) -> AdaptedRequest:
        """Adapt the request for generate: one choice, one prompt."""
        request, sampling = self._request, self._request.sampling
        self._adapt_common_fields()
        choices = request.n or 1
        if choices > 1:
            self._add_unsupported("n", "dropped")
        if (request.best_of or 1) > choices:
            self._add_unsupported("best_of", "dropped")
        self._replace_fields(n=None, best_of=None)
        if sampling.temperature == 0 or sampling.do_sample is False:
            self._replace_sampling(temperature=None, do_sample=False)
        elif self._capabilities.early and sampling.do_sample is None and _is_sampled(request):
            self._replace_sampling(do_sample=True)
        return self._request, tuple(self._unsupported)

    def adapt_for_openai(self) -> AdaptedRequest:
        """Adapt the request for the OpenAI-style endpoints."""
        request, capabilities = self._request, self._capabilities
        self._adapt_common_fields()
        self._adapt_messages()
        if request.output is not None and not capabilities.vllm_validator:
            self._add_unsupported("output", "dropped", wire="response_format")
            self._replace_fields(output=None)
        if request.sampling.do_sample and not _is_sampled(request):
            self._replace_sampling(temperature=1.0)
        if capabilities.early:
            self._adapt_for_early_release()
        else:
            if capabilities.vllm_validator:
                self._adapt_thinking_budget()
            self._adapt_stop_strings()
            self._adapt_choice_count()
        return self._request, tuple(self._unsupported)

    def _replace_fields(self, **fields: Any) -> None:
        self._request = replace(self._request, **fields)

    def _replace_sampling(self, **fields: Any) -> None:
        self._replace_fields(sampling=replace(self._request.sampling, **fields))

    def _replace_stopping(self, **fields: Any) -> None:
        self._replace_fields(stopping=replace(self._request.stopping, **fields))

    def _add_unsupported(
        self, path: str, reason: LossReason, detail: str = "", *, wire: str = ""
    ) -> None:
        """``wire`` is the name that is shown if clients have none, by default the path's end."""
        name = self._field_names.get(path, wire or path.rpartition(".")[2])
        self._unsupported.append(UnsupportedParameter(name, reason, detail, path))

    def _adapt_common_fields(self) -> None:
        request, limit = self._request, self._max_tokens
        if (seed := request.sampling.seed) is not None:
            adapted = seed % _SEED_COUNT or (_SEED_COUNT - 1 if self._capabilities.early else 0)
            if adapted != seed:
                self._add_unsupported("sampling.seed", "approximated", f"{seed} as {adapted}")
                self._replace_sampling(seed=adapted)
        if request.stopping.overflow == "error":
            self._replace_stopping(overflow=None)  # every server reports usage
        max_tokens = request.stopping.max_tokens
        if limit is not None and max_tokens is not None and max_tokens > limit:
            self._add_unsupported("stopping.max_tokens", "clamped", f"{max_tokens} to {limit}")
            self._replace_stopping(max_tokens=limit)
        if request.source != "mindie":
            self._unsupported += [UnsupportedParameter(name, "dropped") for name in request.extra]
            self._replace_fields(extra={})
        self._replace_fields(provided_fields=frozenset())
        if len(request.prompts) > 1:
            self._add_unsupported("prompts", "dropped", wire="prompt")
            self._replace_fields(prompts=request.prompts[:1])

    # --- chat -------------------------------------------------------------------------------------

    def _adapt_messages(self) -> None:
        """Remove unsupported content, and empty assistant messages, which the worker rejects."""
        early = self._capabilities.early
        unsent = _MEDIA_NAMES if early else _UNSENT_PARTS
        before = self._request.messages
        self._unsupported += loss.find_unseen_content(before, unsent)
        if early:
            self._unsupported += loss.find_lost_calls(before)
        messages = []
        for i, message in enumerate(before):
            parts = [_adapt_part(part) for part in message.parts if type(part) not in unsent]
            adapted = replace(message, parts=tuple(parts), at=locate_message(message, i))
            if early and message.tool_calls:
                adapted = replace(adapted, tool_calls=())
            if _has_content(adapted) or not (early or message.role == "assistant"):
                messages.append(adapted)
                continue
            if any(isinstance(part, ReasoningPart) for part in message.parts):
                self._unsupported.append(
                    UnsupportedParameter(adapted.at, "dropped", loss.REASONING, "messages")
                )
            if message.extra is not None:
                self._unsupported.append(UnsupportedParameter(adapted.at, "dropped"))
        if messages:
            self._replace_fields(messages=tuple(messages))

    def _adapt_for_early_release(self) -> None:
        """Adapt a request for the first releases: a few scalars, no tools, no log probabilities."""
        request = self._request
        if request.tools:
            self._add_unsupported("tools", "dropped")
            self._replace_fields(tools=(), tool_choice=None)
        if request.logprobs is not None:
            self._add_unsupported("logprobs.top", "dropped", wire="logprobs")
            self._replace_fields(logprobs=None)
        if request.sampling.do_sample is False:
            detail = f"as temperature {MIN_TEMPERATURE}"
            self._add_unsupported("sampling.do_sample", "approximated", detail)
            self._replace_sampling(do_sample=None, temperature=MIN_TEMPERATURE)
        if (request.n or 1) > 1:
            self._add_unsupported("n", "dropped")
            self._replace_fields(n=None)

    def _adapt_thinking_budget(self) -> None:
        """Write the thinking budget as a template argument, which also needs thinking enabled."""
        reasoning, templating = self._request.reasoning, self._request.templating
        if reasoning is None or reasoning.budget is None or reasoning.budget < 1:
            return
        budget = b"%d" % min(reasoning.budget, INT32_MAX)
        arguments = {"enable_thinking": Raw(b"true"), "thinking_budget": Raw(budget)}
        self._replace_fields(
            reasoning=replace(reasoning, budget=None),
            templating=replace(templating, arguments={**(templating.arguments or {}), **arguments}),
        )

    def _adapt_stop_strings(self) -> None:
        stops = self._request.stopping.stop
        accepted: list[str] = []
        remaining_length = MAX_TOTAL_STOP_LENGTH
        for stop in stops:
            length = count_utf16_units(stop)
            max_length = min(MAX_STOP_STRINGS, remaining_length)
            if 1 <= length <= max_length and len(accepted) < MAX_STOP_STRINGS:
                accepted.append(stop)
                remaining_length -= length
        if len(accepted) < len(stops):
            detail = f"{len(stops)} to {len(accepted)}"
            self._add_unsupported("stopping.stop", "clamped", detail)
            self._replace_stopping(stop=tuple(accepted))

    def _adapt_choice_count(self) -> None:
        """Map beam search to ``best_of``; drop what needs a temperature or fewer tokens."""
        request, sampling = self._request, self._request.sampling
        choices, width = request.n or 1, sampling.beam_width
        if width is not None:
            if 0 < (request.stopping.max_tokens or INT32_MAX) <= MAX_BEAM_TOKENS:
                self._replace_fields(best_of=max(width, choices))
                self._replace_sampling(beam_width=choices)
                return
            detail = f"only up to {MAX_BEAM_TOKENS} tokens"
            self._add_unsupported("sampling.beam_width", "dropped", detail)
            self._replace_sampling(beam_width=None)
        if (request.best_of or 1) > choices:
            self._add_unsupported("best_of", "dropped")
        self._replace_fields(best_of=None)
        if choices > 1 and (not sampling.temperature or sampling.do_sample is False):
            self._add_unsupported("n", "dropped", "no temperature")
            self._replace_fields(n=None)


def _is_sampled(request: GenerationRequest) -> bool:
    sampling = request.sampling
    values = (sampling.temperature, sampling.top_p, sampling.top_k)
    return any(value is not None for value in values)


def _adapt_part(part: ContentPart) -> ContentPart:
    match part:
        case RefusalPart(text):
            return TextPart(text)
        case AudioPart(data, str(audio_format)):
            subtype = _AUDIO_SUBTYPES.get(audio_format, audio_format)
            return AudioPart(f"data:audio/{subtype};base64,{data}")
        case _:
            return part


def _has_content(message: Message) -> bool:
    has_parts = any(
        not isinstance(part, TextPart | ReasoningPart) or part.text for part in message.parts
    )
    return has_parts or bool(message.tool_calls)


ChatMode = Literal["messages", "text"]

_JSON_HEADERS = (("Content-Type", "application/json"),)
_INVALID_ID_CHARS = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_LENGTH = 256
_MAX_TIMEOUT_SECONDS = 65535
_MAX_PRIORITY = 5


class _SlotCount(msgspec.Struct):
    total_slots: int


class _ServerExtensions(msgspec.Struct):
    max_iter_times: int


class _ServerMetadata(msgspec.Struct):
    extensions: _ServerExtensions


_decode_slot_count = JsonDecoder(_SlotCount).decode
_decode_server_metadata = JsonDecoder(_ServerMetadata).decode


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
            self._capabilities.openai_profile, "/v1", powers=False, source=SOURCE
        )
        self._parameter_support = {
            **params.build_parameter_support(self._capabilities.text_params),
            **protocols_prompt.build_prompt_support(renderer),
            "priority": ParameterSupport("priority"),
        }
        self._max_tokens_by_model: dict[str, int] = {}

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = protocols_prompt.require_generation(request)
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
        request = protocols_prompt.require_generation(request)
        adapted, unsupported = self._adapt_request(request, names)
        if self._uses_openai_endpoint(request):
            return unsupported + self._openai_writer.unsupported_parameters(adapted, names)
        unsupported += protocols_prompt.find_prompt_losses(adapted, self._renderer, names)
        body = {"text_input": self._write_prompt(adapted)}
        unsupported += find_lost_keys(body, adapted.field_extra)
        return unsupported + loss.find_unsupported_parameters(
            adapted, self._parameter_support, names, extra=True
        )

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = protocols_prompt.require_generation(request)
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
            max_tokens = _decode_server_metadata(server or b"").extensions.max_iter_times
            if 0 < max_tokens <= INT32_MAX:
                self._max_tokens_by_model[model] = max_tokens
        except JSON_ERRORS:
            pass
        try:
            total = _decode_slot_count(slots or b"").total_slots
        except JSON_ERRORS:
            return None
        return total if total > 0 else None

    # --- choice of the endpoint -------------------------------------------------------------------

    def _uses_openai_endpoint(self, request: GenerationRequest) -> bool:
        """Whether the request goes to an OpenAI-style endpoint."""
        if upstream.uses_chat_endpoint(request):
            return self._chat_mode == "messages"
        has_ids = any(not isinstance(prompt, str) for prompt in request.prompts[:1])
        return self._capabilities.has_completions and (has_ids or request.logprobs is not None)

    def _adapt_request(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> AdaptedRequest:
        max_tokens = self._get_max_tokens(request.model)
        adaptation = _RequestAdaptation(request, self._capabilities, names, max_tokens)
        if self._uses_openai_endpoint(request):
            return adaptation.adapt_for_openai()
        return adaptation.adapt_for_generate()

    def _get_max_tokens(self, model: str) -> int | None:
        """Return the maximum number of tokens of a response, if it is known."""
        limits = (self._config.max_iter_times, self._max_tokens_by_model.get(model))
        return min((limit for limit in limits if limit is not None), default=None)

    # --- generate ---------------------------------------------------------------------------------

    def _encode_generate(self, request: GenerationRequest, name: str) -> UpstreamRequest:
        adapted, _ = self._adapt_request(request, {})
        body: dict[str, Any] = {"id": name} if name else {}
        body["text_input"] = self._write_prompt(adapted)
        body["parameters"] = self._write_parameters(adapted)
        find_lost_keys(body, adapted.field_extra)
        endpoint = "generate_stream" if request.stream else "generate"
        path = f"{_build_model_path(request.model)}/{endpoint}"
        return UpstreamRequest(path, _encode(body), _JSON_HEADERS)

    def _write_prompt(self, request: GenerationRequest) -> str | list[dict[str, Any]]:
        """The prompt; in the client's parts if one of them has unknown keys."""
        prompt = protocols_prompt.build_prompt(request, self._renderer)
        for extra in () if self._capabilities.early else request.field_extra:
            if isinstance(extra, PromptPartKeys) and "".join(extra.texts) == prompt:
                return [{"type": "text", "text": text} for text in extra.texts]
        return prompt

    def _write_parameters(self, request: GenerationRequest) -> dict[str, Any]:
        table = self._capabilities.text_params
        parameters = {"details": True, **params.write_params(table, request.set_fields)}
        parameters.setdefault("max_new_tokens", self._get_max_tokens(request.model) or INT32_MAX)
        if request.priority is not None:
            step = min(max(request.priority, 0) // PRIORITY_STEP, _MAX_PRIORITY - 1)
            parameters["priority"] = step + 1
        if request.timeout is not None:
            parameters["timeout"] = math.ceil(min(max(request.timeout, 1.0), _MAX_TIMEOUT_SECONDS))
        if request.response_options.timing:
            parameters["perf_stat"] = True
        for name, raw in request.extra.items():
            parameters.setdefault(name, raw)
        return parameters


def _build_model_path(name: str) -> str:
    return f"/v2/models/{quote(name, safe='')}"


def _build_request_id(request: Request) -> str:
    """Return a request id that the worker accepts; "" if there is none."""
    return _INVALID_ID_CHARS.sub("_", request.client_id or "")[:_MAX_ID_LENGTH]


# Pass-through between servers of one release. See ``protocols.passthrough``.
#
# A generate request must already ask for details: without them, neither the end of a stream nor an
# interrupted response can be detected. A request with a client's id is translated, since workers
# must know it by the gateway's id, which cancels it.

_encode = msgspec.json.Encoder().encode

_GATEWAY_CHECKED_FIELDS: Final = frozenset({"n", "best_of", "use_beam_search", "stream"})
"""Fields that are checked together with others, or read separately."""
_GENERATE_FIELDS: Final = {"text_input", "parameters"}
_FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls"})
_EARLY_FINISH_REASONS: Final = frozenset({"eos_token", "length"})
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

_COUNT_KEY: Final = "generated_tokens"

_decode_prompt = JsonDecoder(_PromptString).decode


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
            create_decoder=self._build_openai_decoder,
            reads_text=False,
            finish_reasons=_EARLY_FINISH_REASONS if self._early else _FINISH_REASONS,
            unary_headers=errors.JSON_HEADERS,
            stream_headers=_EVENT_STREAM_HEADERS,
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
            case "chat" | "completion" as variant:
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
        style = responses.ResponseVariant(is_chat=variant == "chat", early=self._early)

        def create_encoder(request: GenerationRequest) -> ResponseEncoder:
            named = replace(request, client_id=name)
            return responses.create_openai_style_encoder(style, named, about, headers)

        passthrough = self._openai_passthrough.prepare_passthrough(
            variant,
            call,
            about,
            PassthroughResponse(
                lambda first: first + headers,
                create_encoder,
                {"model": about.model, "id": name},
            ),
        )
        if passthrough is None:
            return None
        request = replace(cast("GenerationRequest", passthrough.request), client_id=name)
        wire = passthrough.upstream_request
        return replace(
            passthrough,
            request=request,
            upstream_request=replace(wire, headers=(*wire.headers, ("req-id", name))),
            create_encoder=lambda: create_encoder(request),
        )

    def _build_openai_decoder(
        self, request: GenerationRequest, *, skims: bool = False
    ) -> OpenAiStyleDecoder:
        del skims
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
            context_length=about.context_length,
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
        headers, counter = build_headers(call), _TokenCounter()
        first = _EVENT_STREAM_HEADERS if request.stream else errors.JSON_HEADERS
        names = {"model_name": about.model, "id": request.client_id or ""}

        def create_reader() -> PassthroughReader:
            counter.tokens = 0
            decoder = TextDecoder(request, early=self._early)
            counting = _TokenCountingDecoder(decoder, counter)
            if not request.stream:
                return UnaryPassthroughReader(counting, NameReplacer(names))

            counts = RunningCountCorrection(_COUNT_KEY, lambda: decoder.has_ignored_counts)
            return VerbatimStreamReader(counting, NameReplacer(names), counts)

        def create_encoder() -> ResponseEncoder:
            encoder = TextEncoder(self._config.profile, request, about, headers)
            # Reported in the event that ends a cancelled request.
            encoder.encode_events([Usage(0, counter.tokens)])
            return encoder

        return PassthroughRequest(
            request, wire, lambda: first + headers, create_reader, create_encoder
        )


class _TokenCountingDecoder:
    """A decoder that counts tokens."""

    def __init__(self, decoder: ResponseDecoder, counter: _TokenCounter) -> None:
        self._decoder = decoder
        self._counter = counter

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._decoder.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._decoder.close())

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
