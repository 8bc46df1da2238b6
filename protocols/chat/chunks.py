"""The chunks of a stream that hold one piece of content, as nearly all do.

Each has a type that accepts no other chunk, so that its decoder tells in one step that nothing else
has to be looked at. Whatever it refuses is read by ``protocols.chat.decoder``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from msgspec import Meta, Raw, Struct

from protocols.chat.extra_keys import ObjectName
from protocols.core.events import (
    Event,
    ReasoningDelta,
    ResponseExtra,
    TextDelta,
    ToolCallDelta,
)
from protocols.core.json_text import JsonDecoder

T = TypeVar("T")


class OnlyItem(Struct, Generic[T], array_like=True, forbid_unknown_fields=True, gc=False):
    """A list with one item; unlike that of a tuple, its path has a name for ``attrgetter``."""

    item: T


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

    tool_calls: OnlyItem[ArgumentsDelta]
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

    choices: OnlyItem[ArgumentsChunkChoice]
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
    object: ObjectName | None = None
    created: float | None = None
    system_fingerprint: str | None = None
    service_tier: None = None
    prompt_token_ids: None = None
    kv_transfer_params: None = None


bare_text_chunk_decoder: Final = JsonDecoder(_BareTextChunk, skims=True)


class _TextRunDelta(TextChunkDelta, gc=False):
    reasoning_content: Literal[""] | None = None


class _TextRunChoice(TextChunkChoice, gc=False, kw_only=True):
    delta: _TextRunDelta
    text: None = None


class _TextRunChunk(TextChunk, gc=False):
    choices: OnlyItem[_TextRunChoice]  # type: ignore[assignment]


class _ReasoningRunDelta(TextChunkDelta, gc=False):
    content: Literal[""] | None = None


class _ReasoningRunChoice(TextChunkChoice, gc=False, kw_only=True):
    delta: _ReasoningRunDelta
    text: None = None


class _ReasoningRunChunk(TextChunk, gc=False):
    choices: OnlyItem[_ReasoningRunChoice]  # type: ignore[assignment]


class _CompletionRunChoice(TextChunkChoice, gc=False):
    delta: None = None


class _CompletionRunChunk(TextChunk, gc=False):
    choices: OnlyItem[_CompletionRunChoice]  # type: ignore[assignment]


class ChunkRun(Struct, frozen=True):
    """A kind of chunks, of which a run differs in one piece of content only.

    ``get_identity`` returns what all of a run have in common, ``get_piece`` the piece of one. No
    function of Python is called for a chunk: a stream has thousands.
    """

    decoder: JsonDecoder[Any]
    get_identity: Callable[[Any], object]
    get_piece: Callable[[Any], str | None]


_get_name: Final = attrgetter("id", "model")
_text_run: Final = ChunkRun(
    JsonDecoder(_TextRunChunk, skims=True),
    _get_name,
    attrgetter("choices.item.delta.content"),
)
_completion_run: Final = ChunkRun(
    JsonDecoder(_CompletionRunChunk, skims=True),
    _get_name,
    attrgetter("choices.item.text"),
)
_reasoning_run: Final = ChunkRun(
    JsonDecoder(_ReasoningRunChunk, skims=True),
    _get_name,
    attrgetter("choices.item.delta.reasoning_content"),
)
_arguments_run: Final = ChunkRun(
    JsonDecoder(ArgumentsChunk, skims=True),
    attrgetter("id", "model", "choices.item.delta.tool_calls.item.index"),
    attrgetter("choices.item.delta.tool_calls.item.function.arguments"),
)
CHUNK_RUNS: Final[Mapping[type[Event], Sequence[ChunkRun]]] = {
    TextDelta: (_text_run, _completion_run),
    ReasoningDelta: (_reasoning_run,),
    ToolCallDelta: (_arguments_run,),
}
"""The kinds of chunks of which each event may be the piece of content."""


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
