"""The chunks of a stream that hold one piece of content, as nearly all do.

Each has a type that accepts no other chunk, so that its decoder tells in one step that nothing else
has to be looked at. Whatever it refuses is read by ``protocols.chat.decoder``.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw, Struct

from protocols.core.events import (
    Event,
    ReasoningDelta,
    ResponseExtra,
    TextDelta,
    ToolCallDelta,
)
from protocols.core.json_text import JsonDecoder


class TextChunkDelta(Struct, gc=False):
    """The delta of a text chunk; reasoning has the name that encoders write."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Literal[""] | None = None
    refusal: None = None
    tool_calls: Annotated[list[Raw], Meta(max_length=0)] | None = None
    function_call: None = None


class TextChunkChoice(Struct, gc=False):
    """The choice of a text chunk."""

    index: Literal[0] | None = 0
    delta: TextChunkDelta | None = None
    text: str | None = None
    finish_reason: None = None
    message: None = None


class TextChunk(Struct, gc=False):
    """A chunk of the first choice with a piece of text, as most are; log probabilities are skipped.

    Its decoder accepts no other chunk, so that nothing else has to be looked at.
    """

    choices: tuple[TextChunkChoice]
    id: str | None = None
    model: str | None = None
    usage: None = None
    error: None = None


class _ArgumentsFunction(Struct, gc=False, forbid_unknown_fields=True):
    arguments: str


class ArgumentsDelta(Struct, gc=False, forbid_unknown_fields=True):
    """A piece of the arguments of a tool call that has begun."""

    index: int
    function: _ArgumentsFunction
    type: Literal["function"] = "function"


class ArgumentsChunkDelta(Struct, gc=False):
    """The delta of an arguments chunk."""

    tool_calls: Annotated[list[ArgumentsDelta], Meta(min_length=1, max_length=1)]
    content: Literal[""] | None = None
    reasoning_content: Literal[""] | None = None
    reasoning: Literal[""] | None = None
    refusal: None = None
    function_call: None = None


class ArgumentsChunkChoice(Struct, gc=False):
    """The choice of an arguments chunk."""

    delta: ArgumentsChunkDelta
    index: Literal[0] | None = 0
    text: None = None
    finish_reason: None = None
    message: None = None


class ArgumentsChunk(Struct, gc=False):
    """A chunk of the first choice with a piece of the arguments of one tool call.

    As for ``TextChunk``, its decoder accepts no other chunk.
    """

    choices: tuple[ArgumentsChunkChoice]
    id: str | None = None
    model: str | None = None
    usage: None = None
    error: None = None


class _BareTextChunkDelta(TextChunkDelta, gc=False, forbid_unknown_fields=True):
    reasoning: str | None = None  # type: ignore[assignment]
    role: Literal["assistant", ""] | None = None
    audio: None = None
    annotations: None = None


class _BareTextChunkChoice(TextChunkChoice, gc=False, forbid_unknown_fields=True):
    delta: _BareTextChunkDelta | None = None
    logprobs: None = None
    token_ids: None = None
    stop_reason: None = None
    matched_stop: None = None
    prompt_token_ids: None = None
    routed_experts: None = None


class _BareTextChunk(TextChunk, gc=False, forbid_unknown_fields=True):
    """A text chunk without log probabilities and unknown keys."""

    choices: tuple[_BareTextChunkChoice]
    object: str | None = None
    created: float | None = None
    system_fingerprint: str | None = None
    service_tier: None = None
    prompt_token_ids: None = None
    kv_transfer_params: None = None


text_chunk_decoder: Final = JsonDecoder(TextChunk, skims=True)
bare_text_chunk_decoder: Final = JsonDecoder(_BareTextChunk, skims=True)
arguments_chunk_decoder: Final = JsonDecoder(ArgumentsChunk, skims=True)


def read_reasoning(
    delta: Any, index: int, source: str, events: list[Event], *, keeps_name: bool = False
) -> None:
    """Add the reasoning of a delta or message; a second one that differs is a key of its own.

    ``keeps_name``: so is one that the worker calls ``reasoning``, for clients that read that name.
    """
    text = delta.reasoning_content or delta.reasoning or None
    if delta.reasoning and (
        keeps_name or delta.reasoning != text or not isinstance(text, str)
    ):  # before the text, so that both are in one delta
        values = ((("reasoning",), delta.reasoning),)
        events.append(ResponseExtra(source, "message", values, index))
    if isinstance(text, str):
        events.append(ReasoningDelta(text, index))


def read_text_chunks(
    chunks: Iterable[TextChunk], events: list[Event], source: str, *, keeps_name: bool = False
) -> None:
    """Add the events of text chunks of a worker with the protocol ``source``.

    ``keeps_name``: see ``read_reasoning``.
    """
    for chunk in chunks:
        choice = chunk.choices[0]
        delta = choice.delta
        if delta is None:
            text = choice.text
        else:
            text = delta.content
            if delta.reasoning_content or delta.reasoning:
                read_reasoning(delta, 0, source, events, keeps_name=keeps_name)
        if text:
            events.append(TextDelta(text))


def join_text_chunks(chunks: Sequence[TextChunk], events: list[Event]) -> None:
    """Add the text of chunks that are written as they are: one event for all of it."""
    text, tokens = "", 0
    for chunk in chunks:
        choice = chunk.choices[0]
        delta = choice.delta
        if delta is None:
            piece = choice.text
        elif delta.reasoning_content or delta.reasoning:
            read_text_chunks(chunks, events, "")
            return
        else:
            piece = delta.content
        if piece:
            text += piece
            tokens += 1
    if tokens:
        events.append(TextDelta(text, tokens=tokens))


def join_argument_chunks(chunks: Sequence[ArgumentsChunk], events: list[Event]) -> str:
    """Add the arguments of chunks of one call, as ``join_text_chunks`` does; returns them."""
    arguments = ""
    for chunk in chunks:
        arguments += chunk.choices[0].delta.tool_calls[0].function.arguments
    if arguments:
        events.append(ToolCallDelta(0, chunks[0].choices[0].delta.tool_calls[0].index, arguments))
    return arguments
