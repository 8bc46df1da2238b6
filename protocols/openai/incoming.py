"""What workers send, read as generously as real workers need it: any key may be missing or null."""

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from msgspec import Struct

from protocols.core.errors import WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    TokenLogprob,
    TopLogprob,
    Usage,
)


class WireTokensDetails(Struct, gc=False):
    """Of prompt or completion tokens."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class WireUsage(Struct, gc=False):
    """Usage, wherever it stands."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: WireTokensDetails | None = None
    completion_tokens_details: WireTokensDetails | None = None
    reasoning_tokens: int | None = None


class WireFunction(Struct, gc=False):
    """A call's function, or a piece of it; arguments may come as an object."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class WireToolCall(Struct, gc=False):
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
    tool_calls: list[WireToolCall] | None = None
    function_call: WireFunction | None = None


class WireTokenLogprob(Struct, gc=False):
    """A token of a conversation's answer."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list["WireTokenLogprob"] | None = None


class WireLogprobs(Struct, gc=False):
    """Both forms: of conversations (``content``), and of completions (columns)."""

    content: list[WireTokenLogprob] | None = None
    refusal: list[WireTokenLogprob] | None = None
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


class WireResponse(Struct, gc=False):
    """An answer, or a chunk of one."""

    id: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    choices: list[WireChoice] | None = None
    usage: WireUsage | None = None
    error: Any = None


class WireEmbedding(Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    embedding: list[float] | str
    index: int | None = None


class WireEmbeddingResponse(Struct):
    """An answer to a request for embeddings."""

    data: list[WireEmbedding]
    model: Any = None
    id: Any = None
    created: Any = None
    usage: WireUsage | None = None


decode_response = msgspec.json.Decoder(WireResponse).decode
decode_embedding_response = msgspec.json.Decoder(WireEmbeddingResponse).decode


def read_text(got: Any) -> str | None:
    """This, if it is a text."""
    return got if isinstance(got, str) else None


def read_metadata(wire: WireResponse) -> ResponseMetadata:
    """What the worker calls itself and its answer."""
    return ResponseMetadata(
        read_text(wire.model),
        read_text(wire.system_fingerprint),
        read_text(wire.id),
        wire.created if isinstance(wire.created, int) else None,
    )


def read_usage(usage: WireUsage, *, embeds: bool = False) -> Usage | None:
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


def split_token_count(choices: Sequence[WireChoice], tokens: int) -> list[int]:
    """How many tokens each choice of a whole answer has: usage tells only their sum.

    Each has its part of it by the length of its text.
    """
    if len(choices) == 1:
        return [tokens]
    sizes = [len(_read_choice_text(choice)) or 1 for choice in choices]
    size = sum(sizes)
    ends = [tokens * end // size for end in accumulate(sizes, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def _read_choice_text(choice: WireChoice) -> str:
    content = choice.text if choice.message is None else choice.message.content
    return content if isinstance(content, str) else ""


def read_choice_end(
    wire: WireChoice, reason: FinishReason, index: int, stops: Sequence[int]
) -> ChoiceEnd:
    """The end of a choice; ``stops`` are the ids of tokens that it may stop at."""
    stop = wire.stop_reason if wire.stop_reason is not None else wire.matched_stop
    if reason != "eos":
        return ChoiceEnd(reason, index, stop if isinstance(stop, str) else None)
    if isinstance(stop, str) or (isinstance(stop, int) and stop in stops):
        return ChoiceEnd("stop", index, stop)
    return ChoiceEnd("eos", index)


def read_logprobs(logprobs: WireLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Either form, as ours."""
    if logprobs is None:
        return ()
    if logprobs.content or logprobs.refusal:
        return tuple(
            _read_token_logprob(token) for token in (logprobs.content or logprobs.refusal or ())
        )
    if not logprobs.tokens:
        return ()
    return tuple(_read_completion_logprobs(logprobs.tokens, logprobs))


def _read_token_logprob(wire: WireTokenLogprob) -> TokenLogprob:
    top = tuple(
        TopLogprob(
            one.token, _read_logprob(one.logprob), data=_read_token_bytes(one.token, one.bytes)
        )
        for one in wire.top_logprobs or ()
    )
    return TokenLogprob(
        wire.token, wire.logprob, top, data=_read_token_bytes(wire.token, wire.bytes)
    )


def _read_completion_logprobs(
    tokens: Sequence[str], logprobs: WireLogprobs
) -> Iterable[TokenLogprob]:
    values = logprobs.token_logprobs or [None] * len(tokens)
    tops = logprobs.top_logprobs or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise WorkerFailed("The worker's log probabilities do not fit together.")
    for token, logprob, top in zip(tokens, values, tops, strict=True):
        alternatives = tuple(
            TopLogprob(t, _read_logprob(value)) for t, value in (top or {}).items()
        )
        yield TokenLogprob(token, logprob, alternatives)


def count_echoed_tokens(prompt: str, logprobs: Sequence[TokenLogprob]) -> int:
    """How many of the first tokens are the prompt's."""
    at, count = 0, 0
    while count < len(logprobs) and at < len(prompt):
        at += len(logprobs[count].token)
        count += 1
    return count


def _read_logprob(logprob: float | None) -> float:
    return float("-inf") if logprob is None else logprob


def _read_token_bytes(token: str, data: list[int] | None) -> bytes | None:
    """A token's bytes, where its text does not say them."""
    if data is None or any(not 0 <= byte <= 255 for byte in data):  # noqa: PLR2004 - a byte
        return None
    found = bytes(data)
    return None if found == token.encode() else found


def read_content_parts(
    content: Sequence[Mapping[str, Any]], index: int, events: list[Event]
) -> str:
    """The text of a content that is a list; its thoughts become events."""
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "output_text", "text": str() as text}:
                texts.append(text)
            case {"type": "thinking", "thinking": str() as text}:
                events.append(ReasoningDelta(text, index))
            case {"type": "reasoning", "summary": list() as items}:
                events += [_read_reasoning_item(item, index) for item in items]
            case {"type": "refusal", "refusal": str() as text}:
                events.append(RefusalDelta(text, index))
            case _:
                pass
    return "".join(texts)


def _read_reasoning_item(item: Any, index: int) -> ReasoningDelta:
    """One item of a reasoning part's summary."""
    fields = item if isinstance(item, dict) else {}
    text, signature = fields.get("text"), fields.get("signature")
    return ReasoningDelta(
        text if isinstance(text, str) else "",
        index,
        signature if isinstance(signature, str) else None,
    )


def decode_embedding(wire: list[float] | str) -> tuple[float, ...]:
    """The numbers of an embedding."""
    if not isinstance(wire, str):
        return tuple(wire)
    try:
        data = base64.b64decode(wire, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (binascii.Error, struct.error) as e:
        raise WorkerFailed("The worker's vector can't be read.") from e
