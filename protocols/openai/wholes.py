"""Answers in one piece that are as nearly all are: one choice with a text, and nothing unusual.

They are read far faster than whatever an answer may be. Any other is for ``AnswerDecoder``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, final

import msgspec
from msgspec import Meta, Struct

from gateway.core.types import Done, End, Event, FinishReason, Served, Text
from protocols.body import WRONG
from protocols.openai.incoming import WireUsage, usage_in

_Empty = Annotated[list[Any], Meta(max_length=0)]
_Text = Annotated[str, Meta(min_length=1)]
Reason = Literal["stop", "length"]

REASONS: Final[dict[str, FinishReason]] = {"stop": "eos", "length": "length"}
_ENDS: Final = {reason: End(meant, 0) for reason, meant in REASONS.items()}
_DONE: Final = Done()


class Plain(Struct):
    """A message, or a piece of one, that says nothing beside its text."""

    reasoning_content: None = None
    reasoning: None = None
    refusal: None = None
    tool_calls: _Empty | None = None
    function_call: None = None


class OnlyChoice(Struct):
    """A choice, or a piece of one, of which nothing unusual is told."""

    index: Literal[0] = 0
    logprobs: None = None
    stop_reason: None = None
    matched_stop: None = None
    token_ids: None = None


class Heading(Struct):
    """What is told beside the choices."""

    model: str
    id: str | None = None
    created: int | None = None
    system_fingerprint: str | None = None
    error: None = None


class _Message(Plain, kw_only=True):
    content: _Text


class _Choice(OnlyChoice, kw_only=True):
    finish_reason: Reason
    delta: None = None


@final
class _Said(_Choice, kw_only=True):
    message: _Message


class _Written(_Choice, kw_only=True):
    text: _Text
    message: None = None


class _Answer(Heading, kw_only=True):
    usage: WireUsage


class _Chat(_Answer, kw_only=True):
    choices: tuple[_Said]


class _Completion(_Answer, kw_only=True):
    choices: tuple[_Written]


_read_chat = msgspec.json.Decoder(_Chat).decode
_read_completion = msgspec.json.Decoder(_Completion).decode


def _events(read: Callable[[bytes], _Chat | _Completion], body: bytes) -> Sequence[Event] | None:
    try:
        wire = read(body)
    except WRONG:
        return None
    choice, usage = wire.choices[0], usage_in(wire.usage)
    if usage is None:
        return None
    return (
        Served(wire.model, wire.system_fingerprint, wire.id, wire.created),
        Text(
            choice.message.content if type(choice) is _Said else choice.text,
            0,
            usage.completion_tokens,
        ),
        _ENDS[choice.finish_reason],
        usage,
        _DONE,
    )


chat = partial(_events, _read_chat)
"""The events of an answer to a conversation, the same as ``AnswerDecoder`` gives."""
completion = partial(_events, _read_completion)
"""The same of an answer to a prompt."""
