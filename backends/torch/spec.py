"""The messages between the gateway's process and the engine's, and their frames.

A frame is four bytes of length (big-endian) and a msgpack array of messages. The gateway sends
Generate, Embed, Tokenize, Cancel and Credit; the engine sends the others. A job is named by a
number that the gateway gives; each job ends in exactly one Finished, Tokens or Failed, unless it
was cancelled.

``None`` means: the model's own default.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from backends.torch.wishes import (
    BeamSearchParams,
    ChatTurn,
    EngineSamplingParams,
    FunctionCall,
    FunctionChoice,
    FunctionDefinition,
    OutputFormat,
    PromptInput,
    StopParams,
    WatermarkSettings,
)

__all__ = [
    "BeamSearchParams",
    "ChatTurn",
    "EngineSamplingParams",
    "FunctionCall",
    "FunctionChoice",
    "FunctionDefinition",
    "OutputFormat",
    "PromptInput",
    "StopParams",
    "WatermarkSettings",
]
"""Those that stand elsewhere; what follows needs no list."""

IPC_VERSION = 3
MAX_FRAME_BYTES = 256 * 1024 * 1024

FailureKind = Literal["invalid", "unsupported", "too_long", "overloaded", "deadline", "failed"]


class GenerateCommand(Struct, frozen=True, omit_defaults=True, tag="generate"):
    """Make ``n`` choices for each prompt, the likeliest of ``best_of`` where that is more.

    With ``beams`` they are the best that the search finds, told at its end, and ``best_of`` is not
    looked at.
    """

    request_id: int
    input: PromptInput
    sampling: EngineSamplingParams = EngineSamplingParams()
    stopping: StopParams = StopParams()
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    """How many alternatives beside each token; -1 is all; None is no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, told in Echo."""
    token_ids: bool = False
    echo: bool = False
    priority: int = 128
    timeout: float | None = None
    initial_credit: int = 512
    """So many tokens may be on their way; Credit adds to it."""
    tenant: str | None = None
    """Who asks: waiting requests take turns between tenants."""
    beams: BeamSearchParams | None = None
    output_format: OutputFormat | None = None
    function_choice: FunctionChoice | None = None


class EmbedCommand(Struct, frozen=True, omit_defaults=True, tag="embed"):
    """One vector for each input."""

    request_id: int
    inputs: tuple[str | tuple[int, ...], ...]
    instruction: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    """So many of the first tokens stay (-1: as many as fit); without it too long a text fails."""
    timeout: float | None = None


class TokenizeCommand(Struct, frozen=True, tag="tokenize"):
    """The tokens of a text."""

    request_id: int
    text: str


class CancelCommand(Struct, frozen=True, tag="cancel"):
    """Nobody waits for this job any more."""

    request_id: int


class CreditCommand(Struct, frozen=True, tag="credit"):
    """So many tokens of the job were taken."""

    request_id: int
    tokens: int


class ReadyEvent(Struct, frozen=True, tag="ready"):
    """The model is loaded. ``context`` is its longest prompt and answer together, in tokens."""

    task: Literal["generate", "embed"]
    ipc_version: int
    context_length: int
    device: str
    dimensions: int | None = None
    cache_bytes: int = 0
    """Bytes that keys and values may take."""


class ProgressEvent(Struct, frozen=True, tag="progress"):
    """What the process is at, for the log."""

    text: str


class LoadFailedEvent(Struct, frozen=True, tag="broken"):
    """The model can't be served, and a restart would not help."""

    text: str


class EngineStats(Struct, frozen=True, gc=False, array_like=True):
    """What the engine holds, and what it has done since it began. Times are in seconds."""

    blocks: int = 0
    """Blocks of keys and values."""
    used_blocks: int = 0
    """Those that rows hold."""
    preemptions: int = 0
    """How often a row or prompt gave its blocks up, to be read again later."""
    steps: int = 0
    seconds: float = 0.0
    """In steps."""
    batched_sequences: int = 0
    """Rows and prompts in the last step."""
    prompt_tokens: int = 0
    """Prompt tokens that went through the model."""
    completion_tokens: int = 0
    """Tokens that were given to rows."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were known, so that they were not read."""
    queue_seconds: float = 0.0
    """Of all finished requests: how long they waited, were read, and were answered."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class HeartbeatEvent(Struct, frozen=True, omit_defaults=True, tag="heartbeat"):
    """The process lives. ``busy`` is how many seconds the present step has taken so far."""

    active: int
    waiting: int
    step_seconds: float = 0.0
    stats: EngineStats = EngineStats()


class PrefillDoneEvent(Struct, frozen=True, tag="started"):
    """The first prompt is read; no piece came before. The count is of all prompts."""

    request_id: int
    prompt_tokens: int


class TokenAlternative(Struct, frozen=True, gc=False, array_like=True):
    """A token the model might have taken."""

    id: int
    data: bytes
    logprob: float


class EngineToken(Struct, frozen=True, gc=False, array_like=True):
    """A token, its bytes and its log probability in the model's own distribution.

    A prompt's first token has none.
    """

    id: int
    data: bytes
    logprob: float | None
    top: tuple[TokenAlternative, ...] = ()


class PromptEchoEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="prompt"):
    """The prompt of a choice; with its logprobs where asked for."""

    request_id: int
    choice: int
    text: str
    tokens: tuple[EngineToken, ...] = ()


class TextEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="piece"):
    """Text of a choice, and how many tokens it took; ids and logprobs where asked for."""

    request_id: int
    choice: int
    text: str
    token_count: int
    ids: tuple[int, ...] = ()
    tokens: tuple[EngineToken, ...] = ()


class ToolCallEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="called"):
    """The model calls a function: its ``call``-th in this choice."""

    request_id: int
    choice: int
    call: int
    id: str
    name: str
    token_count: int = 0
    """How many tokens it took."""


class ToolArgumentsEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="argued"):
    """A piece of a call's arguments, which are JSON text, and how many tokens it took."""

    request_id: int
    choice: int
    call: int
    text: str
    token_count: int = 0


class ReasoningEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="thinking"):
    """A piece of what the model thinks before it answers, and how many tokens it took."""

    request_id: int
    choice: int
    text: str
    token_count: int = 0


class ChoiceEndEvent(Struct, frozen=True, gc=False, tag="ended"):
    """A choice is complete; ``stop`` is the string or token id that ended it."""

    request_id: int
    choice: int
    reason: Literal["eos", "stop", "length", "tool_calls"]
    stop: str | int | None = None


class EmbeddingsEvent(Struct, frozen=True, gc=False, tag="vectors"):
    """Vectors from input ``first`` on: little-endian float32, ``dimensions`` each."""

    request_id: int
    first_index: int
    dimensions: int
    data: bytes


class TokensEvent(Struct, frozen=True, gc=False, tag="tokens"):
    """All tokens of a text, and the text that each completes."""

    request_id: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]


class RequestFinishedEvent(Struct, frozen=True, gc=False, tag="finished"):
    """The job is done: what it took, in tokens and in seconds."""

    request_id: int
    prompt_tokens: int
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    max_batch: int = 1
    """The most rows that were computed together with it."""
    cached_tokens: int = 0
    """So many of the prompt tokens were known, and not read again."""


class RequestFailedEvent(Struct, frozen=True, gc=False, tag="failed"):
    """The job came to nothing, or broke off."""

    request_id: int
    kind: FailureKind
    message: str
    param: str | None = None
    """The name of the field to blame."""
    tokens: int | None = None
    limit: int | None = None


EngineCommand = GenerateCommand | EmbedCommand | TokenizeCommand | CancelCommand | CreditCommand
EngineEvent = (
    ReadyEvent
    | ProgressEvent
    | LoadFailedEvent
    | HeartbeatEvent
    | PrefillDoneEvent
    | PromptEchoEvent
    | TextEvent
    | ToolCallEvent
    | ToolArgumentsEvent
    | ReasoningEvent
    | ChoiceEndEvent
    | EmbeddingsEvent
    | TokensEvent
    | RequestFinishedEvent
    | RequestFailedEvent
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[EngineCommand])
_event_decoder = msgspec.msgpack.Decoder(list[EngineEvent])


def encode_frame(messages: Sequence[EngineCommand] | Sequence[EngineEvent]) -> bytes:
    """One frame of these messages."""
    body = _encoder.encode(messages)
    return len(body).to_bytes(4, "big") + body


def read_body_length(header: bytes) -> int:
    """The length that a frame's first four bytes announce."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def decode_commands(body: bytes) -> list[EngineCommand]:
    """What the gateway sent."""
    return _command_decoder.decode(body)


def decode_events(body: bytes) -> list[EngineEvent]:
    """What the engine sent."""
    return _event_decoder.decode(body)
