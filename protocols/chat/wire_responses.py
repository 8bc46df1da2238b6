"""Responses of the OpenAI-like workers, as they write them, and what their fields mean.

Most unary responses hold one text (``read_text_response``); a type that accepts nothing else reads
them in one step. Whatever it refuses is read by the types that accept all that real servers send.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from protocols.chat.extra_keys import EXTRA_KEY, ObjectName, separate_unknown_keys
from protocols.core.errors import WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FieldValues,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from protocols.core.extra import has_content
from protocols.core.fieldwise import convert_by_field
from protocols.core.finish_reasons import FinishWord
from protocols.core.json_text import JsonDecoder
from protocols.core.token_counts import MAX_TIMESTAMP, UsageReader, read_integer
from protocols.json_body import JSON_ERRORS

# Real workers vary, so any key may be missing or null.


class WireTokensDetails(Struct, gc=False):
    """Details of prompt or completion tokens."""

    cached_tokens: Any = None
    reasoning_tokens: Any = None
    cache_write_tokens: Any = None


NoObject = str | float | bool | list[Any] | None
"""Any JSON but an object: a worker's usage never makes its response invalid."""


class WireUsage(Struct, gc=False):
    """The usage object."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: WireTokensDetails | NoObject = None
    completion_tokens_details: WireTokensDetails | NoObject = None
    reasoning_tokens: Any = None
    prompt_cache_hit_tokens: Any = None
    cached_tokens: Any = None
    cache_read_input_tokens: Any = None
    """The cached tokens by other names: of DeepSeek, of Moonshot, and of Claude at Databricks."""


class WireFunction(Struct, gc=False):
    """The function of a tool call, or a delta of it; arguments may be any JSON."""

    name: str | None = None
    arguments: Any = None


class WireToolCall(Struct, gc=False):
    """A tool call, or a delta of one."""

    index: int | None = None
    id: str | None = None
    function: WireFunction | None = None
    custom: dict[str, Any] | None = None
    type: Any = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


class WireDelta(Struct, gc=False):
    """A message, or a delta of one. See ``read_required_text`` of its content."""

    content: Any = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[WireToolCall] | WireToolCall | None = None
    """Some releases of TGI send the only call itself."""
    function_call: WireFunction | None = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


class WireTokenLogprob(Struct, gc=False):
    """The log probability of a token in a chat response."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list["WireTokenLogprob"] | None = None


class WireLogprobs(Struct, gc=False):
    """Log probabilities in both forms: of chat (``content``) and of completions (columns)."""

    content: list[WireTokenLogprob] | None = None
    refusal: list[WireTokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class WireChoice(Struct, gc=False):
    """A choice, complete or as a delta."""

    index: int | None = None
    delta: WireDelta | None = None
    message: WireDelta | None = None
    text: Any = None
    logprobs: WireLogprobs | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    matched_stop: Any = None
    token_ids: list[int] | None = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


class WireResponse(Struct, gc=False):
    """A unary response, or a chunk of a stream."""

    id: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    choices: list[WireChoice] | None = None
    usage: WireUsage | NoObject = None
    error: Any = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)
    lost: FieldValues = field(default=(), name="(lost)")
    """Elements of lists that are no objects."""


# The same, without unknown keys. Keys of type None are those that servers send without a value.


class _KnownFunction(WireFunction, gc=False, forbid_unknown_fields=True):
    pass


class _KnownToolCall(WireToolCall, gc=False, forbid_unknown_fields=True):
    function: _KnownFunction | None = None
    type: Literal["function", "custom"] | None = None


class _KnownDelta(WireDelta, gc=False, forbid_unknown_fields=True):
    tool_calls: list[_KnownToolCall] | _KnownToolCall | None = None  # type: ignore[assignment]
    function_call: _KnownFunction | None = None
    role: Literal["assistant", ""] | None = None
    audio: None = None
    annotations: None = None


class _KnownTopLogprob(Struct, gc=False, forbid_unknown_fields=True):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: None = None


class _KnownTokenLogprob(_KnownTopLogprob, gc=False, forbid_unknown_fields=True):
    top_logprobs: list[_KnownTopLogprob] | None = None  # type: ignore[assignment]


class _KnownLogprobs(WireLogprobs, gc=False, forbid_unknown_fields=True):
    content: list[_KnownTokenLogprob] | None = None  # type: ignore[assignment]
    refusal: list[_KnownTokenLogprob] | None = None  # type: ignore[assignment]
    text_offset: Any = None


class _KnownChoice(WireChoice, gc=False, forbid_unknown_fields=True):
    delta: _KnownDelta | None = None
    message: _KnownDelta | None = None
    logprobs: _KnownLogprobs | None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None
    routed_experts: None = None


class _KnownPromptDetails(WireTokensDetails, gc=False, forbid_unknown_fields=True):
    reasoning_tokens: None = None


class _KnownCompletionDetails(WireTokensDetails, gc=False, forbid_unknown_fields=True):
    cached_tokens: None = None
    cache_write_tokens: None = None


class KnownUsage(WireUsage, gc=False, forbid_unknown_fields=True):
    """A usage object without unknown keys."""

    prompt_tokens_details: _KnownPromptDetails | NoObject = None
    completion_tokens_details: _KnownCompletionDetails | NoObject = None
    total_tokens: Any = None
    prompt_cache_hit_tokens: None = None
    cached_tokens: None = None
    cache_read_input_tokens: None = None


class _KnownResponse(WireResponse, gc=False, forbid_unknown_fields=True):
    choices: list[_KnownChoice] | None = None  # type: ignore[assignment]
    usage: KnownUsage | NoObject = None
    object: ObjectName | None = None
    service_tier: None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None
    prompt_text: None = None
    kv_transfer_params: None = None


class _ChoiceWithoutLogprobs(WireChoice, gc=False):
    """A choice whose log probabilities are not decoded: the field has a name that none sends."""

    logprobs: WireLogprobs | None = field(default=None, name="(skipped)")


class _ResponseWithoutLogprobs(WireResponse, gc=False):
    choices: list[_ChoiceWithoutLogprobs] | None = None  # type: ignore[assignment]


# A unary response with one text, as most are. Its decoder accepts no other: it checks all.


class _TextMessage(WireDelta, gc=False):
    content: str | None = None
    reasoning_content: Literal[""] | None = None
    reasoning: Literal[""] | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: None = None


class _TextChoice(_ChoiceWithoutLogprobs, gc=False, kw_only=True):
    index: Literal[0] | None = None
    delta: None = None
    message: _TextMessage | None = None
    text: str | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: None = None
    matched_stop: None = None
    token_ids: None = None


class _TextResponse(WireResponse, gc=False, kw_only=True):
    id: str | None = None
    created: Annotated[int, Meta(ge=0, le=MAX_TIMESTAMP)] | None = None
    model: str | None = None
    system_fingerprint: str | None = None
    choices: tuple[_TextChoice]  # type: ignore[assignment]
    usage: WireUsage
    error: None = None


class _KnownTextMessage(_TextMessage, gc=False, forbid_unknown_fields=True):
    role: Literal["assistant", ""] | None = None
    audio: None = None
    annotations: None = None


class _KnownTextChoice(_TextChoice, gc=False, forbid_unknown_fields=True):
    message: _KnownTextMessage | None = None
    logprobs: None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None
    routed_experts: None = None


class _KnownTextResponse(_TextResponse, gc=False, kw_only=True, forbid_unknown_fields=True):
    choices: tuple[_KnownTextChoice]
    usage: KnownUsage
    object: ObjectName | None = None
    service_tier: None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None
    prompt_text: None = None
    kv_transfer_params: None = None


_decode_known_response = JsonDecoder(_KnownResponse).decode
_decode_text_response = JsonDecoder(_TextResponse).decode
decode_known_text_response = JsonDecoder(_KnownTextResponse).decode
_decode_without_logprobs = JsonDecoder(_ResponseWithoutLogprobs).decode


def read_text_response(
    body: bytes | bytearray,
    usage_reader: UsageReader,
    source: str = "",
    decode: Callable[[bytes | bytearray], _TextResponse] = _decode_text_response,
) -> tuple[WireResponse, list[Event]] | None:
    """A unary response with one text and its usage, and its events.

    None of any other response. ``source`` is the worker's protocol. By default, log probabilities
    and unknown keys are left out.
    """
    try:
        wire = decode(body)
    except JSON_ERRORS:
        return None
    usage = read_usage(wire.usage, usage_reader)
    if usage is None:
        return None
    [choice] = wire.choices
    events: list[Event] = []
    if wire.id is not None or wire.model is not None:
        events.append(
            ResponseMetadata(wire.model, wire.system_fingerprint, wire.id, wire.created, source)
        )
    if text := choice.text if choice.message is None else choice.message.content:
        events.append(TextDelta(text, 0, usage.completion_tokens))
    reason: FinishReason = "eos" if choice.finish_reason == "stop" else "length"
    events += (ChoiceEnd(reason), usage, StreamEnd())
    return wire, events


def decode_response(body: bytes | bytearray) -> WireResponse:
    """A response with the unknown keys of its objects, and those whose value has another type.

    Raises one of JSON_ERRORS.
    """
    try:
        return _decode_known_response(body)
    except msgspec.ValidationError:
        response = separate_unknown_keys(body)
        wire, lost = convert_by_field(response, WireResponse, EXTRA_KEY)
        wire.lost = lost
        return wire


def decode_response_without_logprobs(body: bytes | bytearray) -> WireResponse:
    """The same without log probabilities and unknown keys. Raises one of JSON_ERRORS."""
    try:
        return _decode_without_logprobs(body)
    except msgspec.ValidationError:
        return decode_response(body)


def read_text(value: Any) -> str | None:
    """The value, if it is a string."""
    return value if type(value) is str else None


def read_required_text(value: Any) -> str:
    """The text of an answer, "" for null. Raises WorkerFailed for any other type.

    Unlike a side field, it can't be left out: the answer would be another one.
    """
    if type(value) is str:
        return value
    if value is not None:
        raise WorkerFailed("The worker's answer has a text that is no string.")
    return ""


def read_metadata(wire: WireResponse, source: str) -> ResponseMetadata:
    """The metadata of a response of a worker with the protocol ``source``."""
    return ResponseMetadata(
        read_text(wire.model),
        read_text(wire.system_fingerprint),
        read_text(wire.id),
        read_integer(wire.created, MAX_TIMESTAMP),
        source,
    )


def read_usage(
    usage: WireUsage | NoObject, reader: UsageReader, *, embeds: bool = False
) -> Usage | None:
    """The usage reported by the worker, or None."""
    if not isinstance(usage, WireUsage):
        reader.has_ignored = reader.has_ignored or usage is not None
        return None
    prompt_details, completion_details = (
        usage.prompt_tokens_details,
        usage.completion_tokens_details,
    )
    completion, reasoning = usage.completion_tokens, usage.reasoning_tokens
    if isinstance(completion_details, WireTokensDetails):
        reasoning = completion_details.reasoning_tokens
    cached = written = None
    if isinstance(prompt_details, WireTokensDetails):
        cached, written = prompt_details.cached_tokens, prompt_details.cache_write_tokens
    if cached is None:
        cached = usage.prompt_cache_hit_tokens or usage.cached_tokens
        cached = cached or usage.cache_read_input_tokens or None
    counts = reader.read_usage(
        usage.prompt_tokens,
        0 if embeds and completion is None else completion,
        cached,
        reasoning or None,
    )
    if counts is None or written is None:
        return counts
    return msgspec.structs.replace(counts, cache_write_tokens=reader.read_prompt_tokens(written))


def split_token_count(choices: Sequence[WireChoice], tokens: int) -> list[int]:
    """Tokens of each choice of a unary response; usage reports only their sum.

    The sum is divided in proportion to the lengths of the texts.
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
    wire: WireChoice, finish: FinishWord, index: int, stops: Sequence[int]
) -> ChoiceEnd:
    """The end of a choice; ``stops`` are the ids of the request's stop tokens."""
    stop = wire.stop_reason if wire.stop_reason is not None else wire.matched_stop
    if finish.reason != "eos":
        return finish.build_end(index, stop if isinstance(stop, str) else None)
    if isinstance(stop, str) or (isinstance(stop, int) and stop in stops):
        return ChoiceEnd("stop", index, stop)
    return ChoiceEnd("eos", index)


def list_unwritten_fields(wire: WireChoice, *, has_token_ids: bool) -> FieldValues:
    """The fields of a choice that encoders do not write; token ids only if they were asked for."""
    fields = {
        "stop_reason": wire.stop_reason,
        "matched_stop": wire.matched_stop,
        "token_ids": None if has_token_ids else wire.token_ids,
    }
    return tuple(((name,), value) for name, value in fields.items() if value is not None)


def read_logprobs(logprobs: WireLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Internal log probabilities of either form."""
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
        return
    for token, logprob, top in zip(tokens, values, tops, strict=True):
        alternatives = tuple(
            TopLogprob(t, _read_logprob(value)) for t, value in (top or {}).items()
        )
        yield TokenLogprob(token, logprob, alternatives)


def count_echoed_tokens(prompt: str, logprobs: Sequence[TokenLogprob]) -> int:
    """The number of leading tokens that belong to the prompt."""
    at, count = 0, 0
    while count < len(logprobs) and at < len(prompt):
        at += len(logprobs[count].token)
        count += 1
    return count


def _read_logprob(logprob: float | None) -> float:
    return float("-inf") if logprob is None else logprob


def _read_token_bytes(token: str, data: list[int] | None) -> bytes | None:
    """A token's bytes, if its text does not represent them."""
    if data is None or any(not 0 <= byte <= 255 for byte in data):  # noqa: PLR2004 - a byte
        return None
    token_bytes = bytes(data)
    return None if token_bytes == token.encode() else token_bytes


def read_content_parts(content: Sequence[Any], index: int, events: list[Event]) -> str:
    """The text of a content list; its reasoning parts become events, and the rest is reported.

    Raises WorkerFailed for a part that is no object, or a text that is no string.
    """
    texts = []
    values: list[tuple[tuple[str, ...], Any]] = []
    for place, part in enumerate(content):
        lost: dict[Any, Any] = {}
        match part:
            case {"type": "text" | "output_text", **rest}:
                texts.append(read_required_text(rest.pop("text", None)))
                lost = rest
            case {"type": "thinking", "thinking": str() as text, **lost}:
                events.append(ReasoningDelta(text, index))
            case {"type": "reasoning", "summary": [*items], **lost} | {
                "type": "thinking",
                "thinking": [*items],
                **lost,
            }:
                key = "summary" if part["type"] == "reasoning" else "thinking"
                path = f"response.choices[{index}].message.content[{place}].{key}"
                events += [
                    _read_reasoning_item(item, index, f"{path}[{i}]")
                    for i, item in enumerate(items)
                ]
            case {"type": "refusal", "refusal": str() as text, **lost}:
                events.append(RefusalDelta(text, index))
            case {}:
                lost = {"": part}
            case _:
                raise WorkerFailed(
                    "The worker's answer has a part of its content that is no object."
                )
        at: tuple[str, ...] = (f"content[{place}]",)
        values += [
            ((*at, str(key)) if key else at, one) for key, one in lost.items() if has_content(one)
        ]
    if values:
        events.append(ResponseExtra("", "message", tuple(values), index))
    return "".join(texts)


def _read_reasoning_item(item: Any, index: int, at: str) -> ReasoningDelta:
    """One item of a reasoning part's summary, which stands ``at`` this path."""
    fields = item if isinstance(item, dict) else {"text": item}
    text, signature = fields.get("text"), fields.get("signature")
    return ReasoningDelta(
        text if isinstance(text, str) else "",
        index,
        signature if isinstance(signature, str) else None,
        at=f"{at}.signature" if isinstance(signature, str) else "",
    )
