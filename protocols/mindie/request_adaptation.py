"""Adapts a request to a worker: removes unsupported parameters and reports them.

A row of a worker's parameter table gives the range that the worker accepts: other values are
clamped and reported. Without temperature, top_k and top_p the worker takes the likeliest token,
with any of them it samples, and a temperature of 0 or ``do_sample`` false is greedy.

Sources: those of ``protocols.mindie.params``; MindIE-LLM 0695772, samplers (which ignore
watermark), single_req_vllm_openai_infer_interface.cpp (chat parameters), tokenizer.py (media),
batch_context.py (sampling); for 1.0.RC1 the published page of generate_stream, by which neither a
watermark nor ``typical_p`` has an effect, and a temperature below 0.001 spoils the text.
"""

from collections.abc import Container, Mapping
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols import params
from protocols.chat.messages import MessageStyle
from protocols.chat.upstream import WorkerProfile
from protocols.core import loss
from protocols.core.loss import LossReason, UnsupportedParameter
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
    TextPart,
    VideoPart,
)
from protocols.mindie import params as mindie_params
from protocols.mindie.params import (
    INT32_MAX,
    MAX_STOP_STRINGS,
    MAX_TOTAL_STOP_LENGTH,
    MindieConfig,
    MindieParamTable,
    count_utf16_units,
    list_params,
)
from protocols.mindie.requests import MAX_BEAM_TOKENS
from protocols.params import Param

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


class RequestAdaptation:
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
        self._unsupported += loss.find_spoken_refusals(before)
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
        case RefusalPart(text, extra):
            return TextPart(text, extra)
        case AudioPart(data, str(audio_format)):
            subtype = _AUDIO_SUBTYPES.get(audio_format, audio_format)
            return replace(part, data=f"data:audio/{subtype};base64,{data}", format=None)
        case _:
            return part


def _has_content(message: Message) -> bool:
    has_parts = any(
        not isinstance(part, TextPart | ReasoningPart) or part.text for part in message.parts
    )
    return has_parts or bool(message.tool_calls)
