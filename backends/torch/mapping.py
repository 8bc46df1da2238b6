"""Core requests to messages, messages to core events; and what the engine does not do."""

import array
import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from backends.torch import offers, spec, wishes
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    Overloaded,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
)
from protocols.core.loss import ParameterSupport, UnsupportedParameter, find_unsupported_parameters
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
    VideoPart,
)

_PARAMETER_SECTIONS = {
    "sampling": (
        "temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "seed",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "watermark", "beam_width", "diversity_penalty",
        "length_penalty",
    ),
    "stopping": (
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos",
        "truncate_prompt", "overflow", "skip_special_tokens",
    ),
    "": (
        "n", "best_of", "echo", "priority",
        "tools", "parallel_tools", "output",
    ),
    "logprobs": (
        "top", "prompt",
    ),
    "templating": (
        "arguments", "continue_final", "add_generation_prompt", "add_special_tokens",
    ),
}  # fmt: skip
_GENERATION_SUPPORT = {
    f"{section}.{name}" if section else name: ParameterSupport(name)
    for section, fields in _PARAMETER_SECTIONS.items()
    for name in fields
}
_SAMPLING_DEFAULTS: Final[Mapping[str, float | None]] = {
    "temperature": 0, "top_p": 1, "top_k": None, "min_p": 0, "typical_p": 1, "seed": None,
}  # fmt: skip
"""What a beam search, which draws nothing, does not look at; and what says as much."""
_EMBEDDING_SUPPORT = {
    path: ParameterSupport(path)
    for path in ("instruction", "dimensions", "normalize", "truncate", "overflow")
}

_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
    RefusalPart: "refusals",
    ReasoningPart: "earlier reasoning",
}
_DEFAULT_WATERMARK: Final = wishes.WatermarkSettings()
_ROLE_ALIASES = {"developer": "system", "function": "tool"}


def find_unsupported_params(
    request: Request, names: Mapping[str, str], *, templates: bool
) -> tuple[UnsupportedParameter, ...]:
    """What the engine will not do of a request."""
    if isinstance(request, EmbeddingRequest):
        return find_unsupported_parameters(request, _EMBEDDING_SUPPORT, names)
    carries = (
        {**_GENERATION_SUPPORT, "templating.template": ParameterSupport("template")}
        if templates
        else _GENERATION_SUPPORT
    )
    found = (
        *find_unsupported_parameters(request, carries, names),
        *_find_unused_sampling(request, names),
    )
    found = (*found, *offers.find_unsupported_tools(request, names))
    parts = {type(part) for message in request.messages for part in message.parts}
    if unseen := sorted(told for kind, told in _UNSUPPORTED_PARTS.items() if kind in parts):
        where = names.get("messages", "messages")
        return (*found, UnsupportedParameter(where, "dropped", ", ".join(unseen), "messages"))
    return found


def _find_unused_sampling(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    if request.sampling.beam_width is None:
        return
    for name, neutral in _SAMPLING_DEFAULTS.items():
        if getattr(request.sampling, name) not in (None, neutral):
            path = f"sampling.{name}"
            yield UnsupportedParameter(
                names.get(path, name), "dropped", "a beam search draws nothing", path
            )


# --- requests -----------------------------------------------------------------------------------


def build_generate_command(
    request: GenerationRequest,
    job: int,
    timeout: float,
    *,
    templates: bool,
    watermark: wishes.WatermarkSettings = _DEFAULT_WATERMARK,
    tenant: str | None = None,
) -> spec.GenerateCommand:
    """The engine's order for this request.

    ``watermark`` is how a text is marked, if it is; ``tenant`` is who asks.
    """
    n = request.n or 1
    logprobs = request.logprobs
    return spec.GenerateCommand(
        job,
        _build_prompt_input(request, templates=templates),
        _build_sampling_params(request, watermark),
        _build_stop_params(request),
        n,
        max(n, request.best_of or n),
        None if logprobs is None else logprobs.top,
        None if logprobs is None else _get_prompt_logprobs(request),
        request.want.token_ids,
        bool(request.echo) and bool(request.prompts),
        128 if request.priority is None else request.priority,
        timeout,
        tenant=tenant,
        beams=build_beam_search_params(request),
        output_format=offers.build_output_format(request),
        function_choice=offers.build_function_choice(request),
    )


def _get_prompt_logprobs(request: GenerationRequest) -> int | None:
    """An echo has the logprobs that the text has, unless others were asked for."""
    if request.logprobs is None or not request.echo:
        return None
    if request.logprobs.prompt is not None:
        return request.logprobs.prompt
    return request.logprobs.top


def _build_prompt_input(request: GenerationRequest, *, templates: bool) -> wishes.PromptInput:
    how = request.templating
    stopping = request.stopping
    keep = stopping.truncate_prompt
    if keep is None and stopping.overflow == "truncate":
        keep = -1
    return wishes.PromptInput(
        turns=tuple(_build_turn(message) for message in request.messages),
        functions=offers.build_functions(request),
        prompts=request.prompts,
        as_user_message=how.mode == "server",
        template=how.template if templates else None,
        template_arguments=msgspec.json.encode(how.arguments or {}),
        continue_final=bool(how.continue_final),
        generation_prompt=how.add_generation_prompt is not False,
        special_tokens=how.add_special_tokens,
        truncate_to=keep,
    )


def _build_turn(message: Message) -> wishes.ChatTurn:
    return wishes.ChatTurn(
        _ROLE_ALIASES.get(message.role, message.role),
        message.text,
        message.name,
        tuple(
            wishes.FunctionCall(call.id, call.name, call.arguments) for call in message.tool_calls
        ),
        message.tool_call_id,
    )


def returns_best_only(request: GenerationRequest) -> bool:
    """Whether nothing is told of an answer before its end, since the best are chosen then."""
    return (request.best_of or 0) > (request.n or 1) or build_beam_search_params(
        request
    ) is not None


def build_beam_search_params(request: GenerationRequest) -> wishes.BeamSearchParams | None:
    """The search, where there is anything to search: a beam alone is the likeliest token's way."""
    given = request.sampling
    width = max(given.beam_width or 0, request.n or 1)
    if given.beam_width is None or width == 1 or request.stopping.max_tokens == 0:
        return None
    penalty = given.length_penalty
    return wishes.BeamSearchParams(
        width,
        # Whoever wants beams to differ wants each to differ from all others.
        groups=width if given.diversity_penalty else 1,
        diversity_penalty=given.diversity_penalty or 0.0,
        length_penalty=1.0 if penalty is None else penalty,
    )


def _build_sampling_params(
    request: GenerationRequest, watermark: wishes.WatermarkSettings
) -> wishes.EngineSamplingParams:
    given = request.sampling
    greedy = given.do_sample is False or given.beam_width is not None
    return wishes.EngineSamplingParams(
        temperature=0.0 if greedy else given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        typical_p=given.typical_p,
        seed=given.seed,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=given.logit_bias or {},
        allowed_token_ids=given.allowed_token_ids,
        bad_words=given.bad_words,
        watermark=watermark if given.watermark else None,
    )


def _build_stop_params(request: GenerationRequest) -> wishes.StopParams:
    given = request.stopping
    return wishes.StopParams(
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens or 0,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        include_stop=bool(given.include_stop),
        ignore_eos=bool(given.ignore_eos),
        skip_special_tokens=given.skip_special_tokens is not False,
    )


def build_embed_command(request: EmbeddingRequest, job: int, timeout: float) -> spec.EmbedCommand:
    """The engine's order for this request."""
    keep = request.truncate
    if keep is None and request.overflow == "truncate":
        keep = -1
    return spec.EmbedCommand(
        job,
        request.inputs,
        request.instruction,
        request.dimensions,
        request.normalize,
        keep,
        timeout,
    )


# --- answers ------------------------------------------------------------------------------------


def map_engine_event(news: spec.EngineEvent) -> list[Event]:
    """The events that a message means; the client sees to Finished, Tokens and Failed."""
    match news:
        case spec.PrefillDoneEvent(_, prompt_tokens):
            return [StreamStart(prompt_tokens)]
        case spec.TextEvent(_, choice, text, count, ids, tokens):
            return [TextDelta(text, choice, count, ids, tuple(map(_build_token_logprob, tokens)))]
        case spec.PromptEchoEvent(_, choice, text, tokens):
            return [PromptEcho(choice, text, tuple(map(_build_token_logprob, tokens)))]
        case spec.ToolCallEvent(_, choice, call, number, name):
            return [ToolCallStart(choice, call, number, name)]
        case spec.ToolArgumentsEvent(_, choice, call, text):
            return [ToolCallDelta(choice, call, text)]
        case spec.ReasoningEvent(_, choice, text):
            return [ReasoningDelta(text, choice)]
        case spec.ChoiceEndEvent(_, choice, reason, stop):
            return [ChoiceEnd(reason, choice, stop)]
        case spec.EmbeddingsEvent(_, first, dimensions, data):
            return list(_decode_vectors(first, dimensions, data))
        case _:
            return []


def _decode_vectors(first: int, dimensions: int, data: bytes) -> list[Embedding]:
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    rows = range(0, len(values), dimensions)
    return [
        Embedding(first + number, tuple(values[at : at + dimensions]))
        for number, at in enumerate(rows)
    ]


def _build_token_logprob(token: spec.EngineToken) -> TokenLogprob:
    text, data = _decode_token(token.data)
    top = tuple(
        TopLogprob(*_decode_token(one.data)[:1], one.logprob, one.id, _decode_token(one.data)[1])
        for one in token.top
    )
    return TokenLogprob(text, token.logprob, top, token.id, data)


def _decode_token(data: bytes) -> tuple[str, bytes | None]:
    """A token's text, and its bytes where they are not that text's."""
    text = data.decode(errors="replace")
    return text, None if text.encode() == data else data


def build_engine_error(failed: spec.RequestFailedEvent) -> GatewayError:
    """The error that a failed job means."""
    match failed.kind:
        case "invalid":
            return InvalidParameter(failed.message, param=failed.param or "")
        case "unsupported":
            return UnsupportedFeature(failed.message, param=failed.param)
        case "too_long":
            return ContextTooLong(
                failed.message, param=failed.param, tokens=failed.tokens, limit=failed.limit
            )
        case "overloaded":
            return Overloaded(failed.message)
        case "deadline":
            return DeadlineExceeded(failed.message)
        case "failed":
            return WorkerFailed(failed.message)
