"""A request on its way to a server: what would be refused or misread is taken away, and told.

Sources: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp (what a conversation may
ask), tokenizer.py (media), batch_context.py: who names no temperature, top_k or top_p gets the
likeliest token, who names one of them is sampled for, and a temperature of 0 or ``do_sample`` false
is greedy.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw
from msgspec.structs import replace

from protocols.core.loss import LossReason, UnsupportedParameter
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
from protocols.mindie.checks import count_utf16_units
from protocols.mindie.requests import MAX_BEAM_TOKENS
from protocols.mindie.tables import INT32_MAX, MAX_STOP_STRINGS, MAX_TOTAL_STOP_LENGTH
from protocols.mindie.takes import MIN_TEMPERATURE, MindieCapabilities

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
    """The request as far as it has been fitted, and what that cost."""

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
    """For generate, which gives one answer to one prompt. ``most`` tokens are its longest."""
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
    """For the endpoints in OpenAI's manner."""
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
    asked = (sampling.temperature, sampling.top_p, sampling.top_k)
    return any(one is not None for one in asked)


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
        fit.replace_stopping(overflow=None)  # every server says so
    asked = request.stopping.max_tokens
    if most is not None and asked is not None and asked > most:
        fit.add_unsupported("stopping.max_tokens", "clamped", f"{asked} to {most}")
        fit.replace_stopping(max_tokens=most)
    if request.source != "mindie":
        fit.unsupported += [UnsupportedParameter(name, "dropped") for name in request.extra]
        fit.replace_fields(extra={})
    fit.replace_fields(given=frozenset())


def _adapt_prompts(fit: _RequestAdaptation) -> None:
    if len(fit.request.prompts) > 1:
        fit.add_unsupported("prompts", "dropped", shown="prompt")
        fit.replace_fields(prompts=fit.request.prompts[:1])


# --- conversations --------------------------------------------------------------------------------


def _adapt_messages(fit: _RequestAdaptation, *, early: bool) -> None:
    """Without what the server can't see. An assistant that said nothing is refused there."""
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
    said = any(not isinstance(p, TextPart | ReasoningPart) or p.text for p in message.parts)
    return said or bool(message.tool_calls)


def _adapt_for_early_release(fit: _RequestAdaptation) -> None:
    """The first releases know a few scalars, and nothing of tools or log probabilities."""
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
    """How long to think is an argument of the template, which has to be told to think."""
    reasoning, how = fit.request.reasoning, fit.request.templating
    if reasoning is None or reasoning.budget is None or reasoning.budget < 1:
        return
    budget = b"%d" % min(reasoning.budget, INT32_MAX)
    asked = {"enable_thinking": Raw(b"true"), "thinking_budget": Raw(budget)}
    fit.replace_fields(
        reasoning=replace(reasoning, budget=None),
        templating=replace(how, arguments={**(how.arguments or {}), **asked}),
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
    """Several answers need a temperature by which they can differ, or beams."""
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
