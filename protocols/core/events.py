"""The events of a response. A unary response is the fold of the same events.

Every stream ends in exactly one StreamEnd or an exception. Each choice has one ChoiceEnd. Usage
comes at most once, unless the client requested running usage: then the last one counts.
"""

from collections.abc import Container
from typing import Any, Final, Literal

from msgspec import Raw, Struct

FinishReason = Literal["eos", "stop", "length", "tool_calls", "content_filter", "unknown"]
"""``eos``: the model ended; ``stop``: a stop string or token; ``unknown``: the worker gave no
reason, or one that the gateway does not know (``ChoiceEnd.own_word``). A cancelled or failed
choice has no ChoiceEnd: the stream ends in an exception.
"""
INCOMPLETE_REASONS: Final[frozenset[FinishReason]] = frozenset({"length", "content_filter"})
"""Those of an answer that is not complete."""


class TopLogprob(Struct, frozen=True, gc=False):
    """An alternative to a token."""

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
    """The backend has started. Optional; at most one, as the first event."""

    prompt_tokens: int | None = None


class PromptEcho(Struct, frozen=True, tag=True):
    """The prompt of a choice, before its first TextDelta, if the client requested ``echo``."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of a choice's text, made of ``tokens`` tokens."""

    text: str
    index: int = 0
    tokens: int = 1
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


PART_SEPARATOR: Final = "\n\n"
"""What stands between the parts of reasoning where they are one text."""


class ReasoningDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of reasoning, its signature, or encrypted reasoning (``redacted``).

    ``id`` is the worker's name of the item that the piece belongs to, if it has one. With
    ``is_new_part``, it begins a further part of that item, and its text with ``PART_SEPARATOR``.
    ``is_summary`` says whether the worker wrote a summary of it, if its protocol has both. ``at``
    is the path of the signature or of the encrypted reasoning in the worker's answer, if there is
    one.
    """

    text: str
    index: int = 0
    signature: str | None = None
    redacted: str | None = None
    id: str | None = None
    is_new_part: bool = False
    at: str = ""
    is_summary: bool | None = None


class RefusalDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of a refusal."""

    text: str
    index: int = 0


class ToolCallStart(Struct, frozen=True, gc=False, tag=True):
    """The model calls a tool; ``call_index`` counts the calls of the choice from 0."""

    index: int
    call_index: int
    id: str
    name: str
    kind: str = "function"
    """That of the tool: ``custom`` if its arguments are text instead of JSON."""


class ToolCallDelta(Struct, frozen=True, gc=False, tag=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    call_index: int
    text: str


class HostedToolCall(Struct, frozen=True, gc=False, tag=True):
    """A tool that the worker ran itself, such as a web search, as an item of its own protocol.

    Only an encoder of the same protocol can write it; see ``SupportsHostedTools``.
    """

    kind: str
    item: Raw
    index: int = 0
    place: int = 0
    """That of the item in the worker's output."""
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    """The type and the fields of the worker's events about it, between its first and its last."""


FieldValues = tuple[tuple[tuple[str, ...], Any], ...]
"""Values, each with its key after those of the objects around it."""


class ResponseExtra(Struct, frozen=True, gc=False, tag=True):
    """Keys of one object of a response that no other event represents, as the worker sent them.

    They come before the events of the same object, except for items. Only an encoder of the
    protocol ``source`` can write them.
    """

    source: str
    scope: Literal[
        "response",
        "choice",
        "message",
        "tool_call",
        "unknown_call",
        "item",
        "part",
        "block",
        "score",
        "data",
        "event",
    ]
    """``item``: one of a list of output items, after whose events it comes; ``index`` is its place,
    ``call_index`` that of a call, else -1. ``part``: one of such an item, which ends. ``block``:
    one of Anthropic's content blocks. ``score``: that of the document ``index``. ``data``: the
    vector or the class of the input ``index``.
    ``event``: of the next event of the type that is the first key; or, with no further key, of
    one of its own, whose place is that of the open item where it is None.
    ``unknown_call``: all of a tool call of a type that nobody knows."""
    values: FieldValues
    index: int = 0
    call_index: int = 0

    @property
    def path(self) -> str:
        """The path of the object."""
        choice = f"response.choices[{self.index}]"
        match self.scope:
            case "response":
                return self.scope
            case "item":
                return f"response.output[{self.index}]"
            case "block":
                return f"response.content[{self.index}]"
            case "score":
                return f"response.results[{self.index}]"
            case "data":
                return f"response.data[{self.index}]"
            case "event":
                return "response.events"
            case "choice":
                return choice
            case "message":
                return f"{choice}.message"
            case _:
                return f"{choice}.message.tool_calls[{self.call_index}]"


class ChoiceEnd(Struct, frozen=True, gc=False, tag=True):
    """A choice is complete; ``matched_stop`` is the stop string or token id, if known.

    ``own_word`` is the worker's own word, if the gateway does not know it or the reason says less:
    only encoders of the worker's protocol get it. ``lost_word`` is such a word that the client does
    not get, and which is reported. See ``protocols.core.finish_reasons``.
    """

    finish_reason: FinishReason
    index: int = 0
    matched_stop: str | int | None = None
    own_word: str | None = None
    lost_word: str | None = None


class Embedding(Struct, frozen=True, gc=False, tag=True):
    """The embedding of one input."""

    index: int
    values: tuple[float, ...]


class RelevanceScore(Struct, frozen=True, gc=False, tag=True):
    """The relevance of one document to its query: higher is better, in the model's own range."""

    index: int
    score: float


class Classification(Struct, frozen=True, gc=False, tag=True):
    """The class of one input: its name, if the model has names, and a number for each class."""

    index: int
    label: str | None
    probabilities: tuple[float, ...]
    """In the order of the model's classes; logits if the client asked for them."""


class TokenList(Struct, frozen=True, gc=False, tag=True):
    """The tokens of a text; their texts, if requested, are "" for all but the last of a character.

    ``context_length`` is the model's, if known.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()
    context_length: int | None = None


class DetokenizedText(Struct, frozen=True, gc=False, tag=True):
    """The text of the tokens of a request."""

    text: str


class Usage(Struct, frozen=True, gc=False, tag=True):
    """Token counts, and their source. Those of the prompt include what a cache held or stores.

    ``worker``: reported by the worker; ``counted``: counted by the gateway from the worker's
    events; ``estimated``: an estimate.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    source: Literal["worker", "counted", "estimated"] = "worker"
    cache_write_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def has_details(self) -> bool:
        """Whether it has a count, not 0, that is a part of another."""
        return bool(self.cached_tokens or self.reasoning_tokens or self.cache_write_tokens)


class Timing(Struct, frozen=True, gc=False, tag=True):
    """Durations in seconds and the batch size, as measured by the backend."""

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    batch_size: int | None = None


class ResponseMetadata(Struct, frozen=True, gc=False, tag=True):
    """The worker's own metadata of the response; ``source`` is its protocol."""

    model: str | None = None
    fingerprint: str | None = None
    id: str | None = None
    created: int | None = None
    source: str = ""

    def get_identity(self, source: str) -> dict[str, Any]:
        """The id and the time (``created``) for clients of the protocol ``source``.

        It is empty if the worker's is another: they get the gateway's. So they do in the place of
        an empty id and the time 0.
        """
        fields: dict[str, Any] = {}
        if source and source == self.source:
            if self.id:
                fields["id"] = self.id
            if self.created:
                fields["created"] = self.created
        return fields

    def list_unwritten(self, source: str, keys: Container[str]) -> "tuple[ResponseExtra, ...]":
        """What an encoder of the protocol ``source`` with these keys does not write of it."""
        if not source or source != self.source:
            return ()
        fields = self.get_identity(source)
        if self.fingerprint is not None:
            fields["system_fingerprint"] = self.fingerprint
        values = tuple([((key,), one) for key, one in fields.items() if key not in keys])
        return (ResponseExtra(source, "response", values),) if values else ()


class StreamEnd(Struct, frozen=True, gc=False, tag=True):
    """The response is complete."""

    has_ignored_usage: bool = False
    """Whether the worker reported implausible token counts, which were ignored."""


Event = (
    StreamStart
    | PromptEcho
    | TextDelta
    | ReasoningDelta
    | RefusalDelta
    | ToolCallStart
    | ToolCallDelta
    | HostedToolCall
    | ResponseExtra
    | ChoiceEnd
    | Embedding
    | RelevanceScore
    | Classification
    | TokenList
    | DetokenizedText
    | Usage
    | Timing
    | ResponseMetadata
    | StreamEnd
)
