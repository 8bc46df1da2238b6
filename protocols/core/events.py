"""What is answered: the events of a stream, of which a whole answer is the fold.

Every stream of events ends in exactly one of Done or an exception. Each choice has one End, and
usage comes at most once (unless running usage was asked for; then the last one counts).
"""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["eos", "stop", "length", "tool_calls", "content_filter", "unknown"]
"""``eos``: the model ended; ``stop``: a stop string or token; ``unknown``: the worker named a
reason that we do not know. A cancelled or failed choice has no End: it ends in an exception.
"""


class TopLogprob(Struct, frozen=True, gc=False):
    """An alternative that the model had."""

    token: str
    logprob: float
    id: int | None = None
    data: bytes | None = None


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token and its natural-log probability (None for a first prompt token).

    ``data`` is the token's bytes where they are not the UTF-8 of ``token``.
    """

    token: str
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()
    id: int | None = None
    data: bytes | None = None


class StreamStart(Struct, frozen=True, gc=False, tag=True):
    """The backend has begun. Comes once, first, if it comes at all."""

    prompt_tokens: int | None = None


class PromptEcho(Struct, frozen=True, tag=True):
    """The prompt of a choice, before its first Text, where ``echo`` was asked for."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of a choice's text. ``tokens`` is how many tokens it stands for."""

    text: str
    index: int = 0
    tokens: int = 1
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of reasoning."""

    text: str
    index: int = 0
    signature: str | None = None


class RefusalDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of a refusal."""

    text: str
    index: int = 0


class ToolCallStart(Struct, frozen=True, gc=False, tag=True):
    """The model calls a tool: its ``call``-th in this choice."""

    index: int
    call_index: int
    id: str
    name: str


class ToolCallDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    call_index: int
    text: str


class ChoiceEnd(Struct, frozen=True, gc=False, tag=True):
    """A choice is complete. ``stop`` is the string or token id that ended it, where known."""

    finish_reason: FinishReason
    index: int = 0
    matched_stop: str | int | None = None


class Embedding(Struct, frozen=True, gc=False, tag=True):
    """The embedding of one input."""

    index: int
    values: tuple[float, ...]


class Usage(Struct, frozen=True, gc=False, tag=True):
    """Tokens spent, and who says so.

    ``worker``: the worker's own figures; ``counted``: counted by us from what it sent;
    ``estimated``: a guess.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    source: Literal["worker", "counted", "estimated"] = "worker"

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Timing(Struct, frozen=True, gc=False, tag=True):
    """What the backend measured: seconds, and the batch it computed in."""

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    batch_size: int | None = None


class ResponseMetadata(Struct, frozen=True, gc=False, tag=True):
    """Who answers, in the worker's words."""

    model: str | None = None
    fingerprint: str | None = None
    id: str | None = None
    created: int | None = None


class StreamEnd(Struct, frozen=True, gc=False, tag=True):
    """Everything has been said."""


Event = (
    StreamStart
    | PromptEcho
    | TextDelta
    | ReasoningDelta
    | RefusalDelta
    | ToolCallStart
    | ToolCallDelta
    | ChoiceEnd
    | Embedding
    | Usage
    | Timing
    | ResponseMetadata
    | StreamEnd
)
