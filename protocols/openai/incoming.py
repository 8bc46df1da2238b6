"""What workers send, read as generously as real workers need it: any key may be missing or null."""

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from msgspec import Struct

from gateway.core.errors import WorkerFailed
from gateway.core.types import (
    End,
    Event,
    FinishReason,
    Refusal,
    Served,
    Thought,
    TokenLogprob,
    TopLogprob,
    Usage,
)


class Details(Struct, gc=False):
    """Of prompt or completion tokens."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class WireUsage(Struct, gc=False):
    """Usage, wherever it stands."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None
    reasoning_tokens: int | None = None


class WireFunction(Struct, gc=False):
    """A call's function, or a piece of it; arguments may come as an object."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class WireCall(Struct, gc=False):
    """A tool call, or a piece of one."""

    index: int | None = None
    id: str | None = None
    function: WireFunction | None = None
    custom: dict[str, Any] | None = None


class WireDelta(Struct, gc=False):
    """A message, or a piece of one."""

    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[WireCall] | None = None
    function_call: WireFunction | None = None


class WireToken(Struct, gc=False):
    """A token of a conversation's answer."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list["WireToken"] | None = None


class WireLogprobs(Struct, gc=False):
    """Both forms: of conversations (``content``), and of completions (columns)."""

    content: list[WireToken] | None = None
    refusal: list[WireToken] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class WireChoice(Struct, gc=False):
    """A choice, whole or in pieces."""

    index: int | None = None
    delta: WireDelta | None = None
    message: WireDelta | None = None
    text: str | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    token_ids: list[int] | None = None


class WireAnswer(Struct, gc=False):
    """An answer, or a chunk of one."""

    id: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    choices: list[WireChoice] | None = None
    usage: WireUsage | None = None
    error: Any = None


class WireVector(Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    embedding: list[float] | str
    index: int | None = None


class WireVectors(Struct):
    """An answer to a request for embeddings."""

    data: list[WireVector]
    model: Any = None
    id: Any = None
    created: Any = None
    usage: WireUsage | None = None


read_answer = msgspec.json.Decoder(WireAnswer).decode
read_vectors = msgspec.json.Decoder(WireVectors).decode


def text_in(got: Any) -> str | None:
    """This, if it is a text."""
    return got if isinstance(got, str) else None


def served_in(wire: WireAnswer) -> Served:
    """What the worker calls itself and its answer."""
    return Served(
        text_in(wire.model),
        text_in(wire.system_fingerprint),
        text_in(wire.id),
        wire.created if isinstance(wire.created, int) else None,
    )


def usage_in(usage: WireUsage, *, embeds: bool = False) -> Usage | None:
    """What the worker counted, or None where it did not."""
    if usage.prompt_tokens is None or (usage.completion_tokens is None and not embeds):
        return None
    prompt, answer = usage.prompt_tokens_details, usage.completion_tokens_details
    thought = answer.reasoning_tokens if answer else usage.reasoning_tokens
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens or 0,
        prompt.cached_tokens if prompt else None,
        thought or None,
    )


def shares(choices: Sequence[WireChoice], tokens: int) -> list[int]:
    """How many tokens each choice of a whole answer has: usage tells only their sum.

    Each has its part of it by the length of its text.
    """
    if len(choices) == 1:
        return [tokens]
    sizes = [len(_said(choice)) or 1 for choice in choices]
    size = sum(sizes)
    ends = [tokens * end // size for end in accumulate(sizes, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def _said(choice: WireChoice) -> str:
    content = choice.text if choice.message is None else choice.message.content
    return content if isinstance(content, str) else ""


def end_in(wire: WireChoice, reason: FinishReason, index: int, stops: Sequence[int]) -> End:
    """The end of a choice; ``stops`` are the ids of tokens that it may stop at."""
    stop = wire.stop_reason if wire.stop_reason is not None else wire.matched_stop
    if reason != "eos":
        return End(reason, index, stop if isinstance(stop, str) else None)
    if isinstance(stop, str) or (isinstance(stop, int) and stop in stops):
        return End("stop", index, stop)
    return End("eos", index)


def logprobs_in(logprobs: WireLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Either form, as ours."""
    if logprobs is None:
        return ()
    if logprobs.content or logprobs.refusal:
        return tuple(_token(token) for token in (logprobs.content or logprobs.refusal or ()))
    if not logprobs.tokens:
        return ()
    return tuple(_columns(logprobs.tokens, logprobs))


def _token(wire: WireToken) -> TokenLogprob:
    top = tuple(
        TopLogprob(one.token, _number(one.logprob), data=_data(one.token, one.bytes))
        for one in wire.top_logprobs or ()
    )
    return TokenLogprob(wire.token, wire.logprob, top, data=_data(wire.token, wire.bytes))


def _columns(tokens: Sequence[str], logprobs: WireLogprobs) -> Iterable[TokenLogprob]:
    values = logprobs.token_logprobs or [None] * len(tokens)
    tops = logprobs.top_logprobs or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise WorkerFailed("The worker's log probabilities do not fit together.")
    for token, logprob, top in zip(tokens, values, tops, strict=True):
        alternatives = tuple(TopLogprob(t, _number(value)) for t, value in (top or {}).items())
        yield TokenLogprob(token, logprob, alternatives)


def covering(prompt: str, logprobs: Sequence[TokenLogprob]) -> int:
    """How many of the first tokens are the prompt's."""
    at, count = 0, 0
    while count < len(logprobs) and at < len(prompt):
        at += len(logprobs[count].token)
        count += 1
    return count


def _number(logprob: float | None) -> float:
    return float("-inf") if logprob is None else logprob


def _data(token: str, data: list[int] | None) -> bytes | None:
    """A token's bytes, where its text does not say them."""
    if data is None or any(not 0 <= byte <= 255 for byte in data):  # noqa: PLR2004 - a byte
        return None
    found = bytes(data)
    return None if found == token.encode() else found


def parts_in(content: Sequence[Mapping[str, Any]], index: int, events: list[Event]) -> str:
    """The text of a content that is a list; its thoughts become events."""
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "output_text", "text": str() as text}:
                texts.append(text)
            case {"type": "thinking", "thinking": str() as text}:
                events.append(Thought(text, index))
            case {"type": "reasoning", "summary": list() as items}:
                events += [_thought(item, index) for item in items]
            case {"type": "refusal", "refusal": str() as text}:
                events.append(Refusal(text, index))
            case _:
                pass
    return "".join(texts)


def _thought(item: Any, index: int) -> Thought:
    """One item of a reasoning part's summary."""
    fields = item if isinstance(item, dict) else {}
    text, signature = fields.get("text"), fields.get("signature")
    return Thought(
        text if isinstance(text, str) else "",
        index,
        signature if isinstance(signature, str) else None,
    )


def vector_in(wire: list[float] | str) -> tuple[float, ...]:
    """The numbers of an embedding."""
    if not isinstance(wire, str):
        return tuple(wire)
    try:
        data = base64.b64decode(wire, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (binascii.Error, struct.error) as e:
        raise WorkerFailed("The worker's vector can't be read.") from e
