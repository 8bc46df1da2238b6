"""Core requests to messages, messages to core events; and what the engine does not do."""

import array
import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from backends.torch import offers, spec
from gateway.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    Overloaded,
    Unsupported,
    WorkerFailed,
)
from gateway.core.loss import Carry, Loss, losses
from gateway.core.types import (
    AudioPart,
    CallArguments,
    CallStart,
    EmbedRequest,
    End,
    Event,
    FilePart,
    GenerateRequest,
    ImagePart,
    Message,
    Part,
    PromptEcho,
    ReasoningPart,
    RefusalPart,
    Request,
    Start,
    Text,
    Thought,
    TokenLogprob,
    TopLogprob,
    Vector,
    VideoPart,
)

_SECTIONS = {
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
_GENERATE = {
    f"{section}.{name}" if section else name: Carry(name)
    for section, fields in _SECTIONS.items()
    for name in fields
}
_DRAWING: Final[Mapping[str, float | None]] = {
    "temperature": 0, "top_p": 1, "top_k": None, "min_p": 0, "typical_p": 1, "seed": None,
}  # fmt: skip
"""What a beam search, which draws nothing, does not look at; and what says as much."""
_EMBED = {
    path: Carry(path) for path in ("instruction", "dimensions", "normalize", "truncate", "overflow")
}

_UNSEEN: Final[Mapping[type[Part], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
    RefusalPart: "refusals",
    ReasoningPart: "earlier reasoning",
}
_MARK: Final = spec.Watermark()
_ROLES = {"developer": "system", "function": "tool"}


def lost(request: Request, names: Mapping[str, str], *, templates: bool) -> tuple[Loss, ...]:
    """What the engine will not do of a request."""
    if isinstance(request, EmbedRequest):
        return losses(request, _EMBED, names)
    carries = {**_GENERATE, "templating.template": Carry("template")} if templates else _GENERATE
    found = (*losses(request, carries, names), *_undrawn(request, names))
    found = (*found, *offers.lost(request, names))
    parts = {type(part) for message in request.messages for part in message.parts}
    if unseen := sorted(told for kind, told in _UNSEEN.items() if kind in parts):
        where = names.get("messages", "messages")
        return (*found, Loss(where, "dropped", ", ".join(unseen), "messages"))
    return found


def _undrawn(request: GenerateRequest, names: Mapping[str, str]) -> Iterator[Loss]:
    if request.sampling.beam_width is None:
        return
    for name, neutral in _DRAWING.items():
        if getattr(request.sampling, name) not in (None, neutral):
            path = f"sampling.{name}"
            yield Loss(names.get(path, name), "dropped", "a beam search draws nothing", path)


# --- requests -----------------------------------------------------------------------------------


def generate(
    request: GenerateRequest,
    job: int,
    timeout: float,
    *,
    templates: bool,
    watermark: spec.Watermark = _MARK,
    tenant: str | None = None,
) -> spec.Generate:
    """The engine's order for this request.

    ``watermark`` is how a text is marked, if it is; ``tenant`` is who asks.
    """
    n = request.n or 1
    logprobs = request.logprobs
    return spec.Generate(
        job,
        _input(request, templates=templates),
        _picking(request, watermark),
        _ending(request),
        n,
        max(n, request.best_of or n),
        None if logprobs is None else logprobs.top,
        None if logprobs is None else _prompt_logprobs(request),
        request.want.token_ids,
        bool(request.echo) and bool(request.prompts),
        128 if request.priority is None else request.priority,
        timeout,
        tenant=tenant,
        beams=beams(request),
        output_format=offers.form(request),
        function_choice=offers.calling(request),
    )


def _prompt_logprobs(request: GenerateRequest) -> int | None:
    """An echo has the logprobs that the text has, unless others were asked for."""
    if request.logprobs is None or not request.echo:
        return None
    if request.logprobs.prompt is not None:
        return request.logprobs.prompt
    return request.logprobs.top


def _input(request: GenerateRequest, *, templates: bool) -> spec.Input:
    how = request.templating
    stopping = request.stopping
    keep = stopping.truncate_prompt
    if keep is None and stopping.overflow == "truncate":
        keep = -1
    return spec.Input(
        turns=tuple(_turn(message) for message in request.messages),
        functions=offers.functions(request),
        prompts=request.prompts,
        as_user_message=how.mode == "server",
        template=how.template if templates else None,
        template_arguments=msgspec.json.encode(how.arguments or {}),
        continue_final=bool(how.continue_final),
        generation_prompt=how.add_generation_prompt is not False,
        special_tokens=how.add_special_tokens,
        truncate_to=keep,
    )


def _turn(message: Message) -> spec.Turn:
    return spec.Turn(
        _ROLES.get(message.role, message.role),
        message.text,
        message.name,
        tuple(spec.Call(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
    )


def whole(request: GenerateRequest) -> bool:
    """Whether nothing is told of an answer before its end, since the best are chosen then."""
    return (request.best_of or 0) > (request.n or 1) or beams(request) is not None


def beams(request: GenerateRequest) -> spec.Beams | None:
    """The search, where there is anything to search: a beam alone is the likeliest token's way."""
    given = request.sampling
    width = max(given.beam_width or 0, request.n or 1)
    if given.beam_width is None or width == 1 or request.stopping.max_tokens == 0:
        return None
    penalty = given.length_penalty
    return spec.Beams(
        width,
        # Whoever wants beams to differ wants each to differ from all others.
        groups=width if given.diversity_penalty else 1,
        diversity_penalty=given.diversity_penalty or 0.0,
        length_penalty=1.0 if penalty is None else penalty,
    )


def _picking(request: GenerateRequest, watermark: spec.Watermark) -> spec.Picking:
    given = request.sampling
    greedy = given.do_sample is False or given.beam_width is not None
    return spec.Picking(
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


def _ending(request: GenerateRequest) -> spec.Ending:
    given = request.stopping
    return spec.Ending(
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens or 0,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        include_stop=bool(given.include_stop),
        ignore_eos=bool(given.ignore_eos),
        skip_special_tokens=given.skip_special_tokens is not False,
    )


def embed(request: EmbedRequest, job: int, timeout: float) -> spec.Embed:
    """The engine's order for this request."""
    keep = request.truncate
    if keep is None and request.overflow == "truncate":
        keep = -1
    return spec.Embed(
        job,
        request.inputs,
        request.instruction,
        request.dimensions,
        request.normalize,
        keep,
        timeout,
    )


# --- answers ------------------------------------------------------------------------------------


def events(news: spec.News) -> list[Event]:
    """The events that a message means; the client sees to Finished, Tokens and Failed."""
    match news:
        case spec.Started(_, prompt_tokens):
            return [Start(prompt_tokens)]
        case spec.Piece(_, choice, text, count, ids, tokens):
            return [Text(text, choice, count, ids, tuple(map(_token, tokens)))]
        case spec.Echo(_, choice, text, tokens):
            return [PromptEcho(choice, text, tuple(map(_token, tokens)))]
        case spec.Called(_, choice, call, number, name):
            return [CallStart(choice, call, number, name)]
        case spec.Argued(_, choice, call, text):
            return [CallArguments(choice, call, text)]
        case spec.Thinking(_, choice, text):
            return [Thought(text, choice)]
        case spec.Ended(_, choice, reason, stop):
            return [End(reason, choice, stop)]
        case spec.Vectors(_, first, dimensions, data):
            return list(_vectors(first, dimensions, data))
        case _:
            return []


def _vectors(first: int, dimensions: int, data: bytes) -> list[Vector]:
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    rows = range(0, len(values), dimensions)
    return [
        Vector(first + number, tuple(values[at : at + dimensions]))
        for number, at in enumerate(rows)
    ]


def _token(token: spec.Token) -> TokenLogprob:
    text, data = _spelled(token.data)
    top = tuple(
        TopLogprob(*_spelled(one.data)[:1], one.logprob, one.id, _spelled(one.data)[1])
        for one in token.top
    )
    return TokenLogprob(text, token.logprob, top, token.id, data)


def _spelled(data: bytes) -> tuple[str, bytes | None]:
    """A token's text, and its bytes where they are not that text's."""
    text = data.decode(errors="replace")
    return text, None if text.encode() == data else data


def error(failed: spec.Failed) -> GatewayError:
    """The error that a failed job means."""
    match failed.kind:
        case "invalid":
            return InvalidParameter(failed.message, param=failed.param or "")
        case "unsupported":
            return Unsupported(failed.message, param=failed.param)
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
