"""Core requests to messages, messages to core events; and what the engine does not do."""

import array
import sys
from collections.abc import Mapping

import msgspec

from backends.torch import spec
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
    EmbedRequest,
    End,
    Event,
    GenerateRequest,
    Message,
    PromptEcho,
    Request,
    Start,
    Text,
    TextPart,
    TokenLogprob,
    TopLogprob,
    Vector,
)

_SECTIONS = {
    "sampling": (
        "temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "seed",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "allowed_token_ids", "bad_words",
    ),
    "stopping": (
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos",
        "truncate_prompt", "overflow", "skip_special_tokens",
    ),
    "": (
        "n", "best_of", "echo", "priority",
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
_EMBED = {
    path: Carry(path) for path in ("instruction", "dimensions", "normalize", "truncate", "overflow")
}

_ROLES = {"developer": "system", "function": "tool"}


def lost(request: Request, names: Mapping[str, str], *, templates: bool) -> tuple[Loss, ...]:
    """What the engine will not do of a request."""
    if isinstance(request, EmbedRequest):
        return losses(request, _EMBED, names)
    carries = {**_GENERATE, "templating.template": Carry("template")} if templates else _GENERATE
    found = losses(request, carries, names)
    if request.tools and request.tool_choice not in (None, "auto", "none"):
        found = (*found, Loss(names.get("tool_choice", "tool_choice"), "dropped"))
    parts = {
        type(part).__name__.removesuffix("Part").lower()
        for message in request.messages
        for part in message.parts
        if not isinstance(part, TextPart)
    }
    where = names.get("messages", "messages")
    return (*found, *(Loss(where, "dropped", f"{kind} parts") for kind in sorted(parts)))


# --- requests -----------------------------------------------------------------------------------


def generate(
    request: GenerateRequest, job: int, timeout: float, *, templates: bool
) -> spec.Generate:
    """The engine's order for this request."""
    n = request.n or 1
    logprobs = request.logprobs
    return spec.Generate(
        job,
        _input(request, templates=templates),
        _picking(request),
        _ending(request),
        n,
        max(n, request.best_of or n),
        None if logprobs is None else logprobs.top,
        None if logprobs is None else _prompt_logprobs(request),
        request.want.token_ids,
        bool(request.echo) and bool(request.prompts),
        128 if request.priority is None else request.priority,
        timeout,
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
        prompts=request.prompts,
        wrap=how.mode == "server",
        template=how.template if templates else None,
        arguments=msgspec.json.encode(how.arguments or {}),
        continue_final=bool(how.continue_final),
        generation_prompt=how.add_generation_prompt is not False,
        special_tokens=how.add_special_tokens is not False,
        keep=keep,
    )


def _turn(message: Message) -> spec.Turn:
    return spec.Turn(_ROLES.get(message.role, message.role), message.text, message.name)


def _picking(request: GenerateRequest) -> spec.Picking:
    given = request.sampling
    return spec.Picking(
        temperature=0.0 if given.do_sample is False else given.temperature,
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
