"""Answers in one piece that are as nearly all are: one choice with a text, and nothing unusual.

They are read far faster than whatever an answer may be. Any other is for ``AnswerDecoder``.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.core.types import Done, End, Event, FinishReason, GenerateRequest, Served, Text
from protocols.openai.incoming import WireUsage, usage_in

_Empty = Annotated[list[Any], Meta(max_length=0)]

_REASONS: Final[dict[str, FinishReason]] = {"stop": "eos", "length": "length"}


class _Message(Struct):
    content: str
    reasoning_content: None = None
    reasoning: None = None
    refusal: None = None
    tool_calls: _Empty | None = None
    function_call: None = None


class _Choice(Struct):
    finish_reason: Literal["stop", "length"]
    index: Literal[0] = 0
    logprobs: None = None
    stop_reason: None = None
    matched_stop: None = None
    token_ids: None = None
    delta: None = None


class _Said(_Choice, kw_only=True):
    message: _Message


class _Written(_Choice, kw_only=True):
    text: str
    message: None = None


class _Answer(Struct):
    usage: WireUsage
    id: str | None = None
    model: str | None = None
    created: int | None = None
    system_fingerprint: str | None = None
    error: None = None


class _Chat(_Answer, kw_only=True):
    choices: tuple[_Said]


class _Completion(_Answer, kw_only=True):
    choices: tuple[_Written]


_read_chat = msgspec.json.Decoder(_Chat).decode
_read_completion = msgspec.json.Decoder(_Completion).decode


def whole(request: GenerateRequest, body: bytes) -> Sequence[Event] | None:
    """The events of an answer, the same as ``AnswerDecoder`` gives; None where it must be asked."""
    chat = request.kind == "chat"
    try:
        wire = _read_chat(body) if chat else _read_completion(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    usage, choice = usage_in(wire.usage), wire.choices[0]
    if usage is None or (wire.id is None and wire.model is None):
        return None
    text = choice.message.content if isinstance(choice, _Said) else choice.text
    if not text:
        return None
    return (
        Served(wire.model, wire.system_fingerprint, wire.id, wire.created),
        Text(text, 0, usage.completion_tokens),
        End(_REASONS[choice.finish_reason], 0),
        usage,
        Done(),
    )
