"""How a family of this dialect writes its answers. See ``protocols.openai.answers``."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final, Literal

from msgspec import Struct, field

from gateway.core import sse
from gateway.core.errors import GatewayError
from gateway.core.ports import Headers
from gateway.core.types import FinishReason
from protocols.openai import errors
from protocols.openai.pieces import Shape, encode, shape

REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "unknown": "stop",
}
_ABSENT: Final = {"refusal": b"null", "logprobs": b"null"}


class Shapes(Struct, frozen=True):
    """The objects of a whole answer."""

    answer: Shape
    choice: Shape
    message: Shape


class Style(Struct, frozen=True, kw_only=True, dict=True):
    """How one family writes its answers. Key tuples say which keys there are, and in what order."""

    answer: tuple[str, ...] = (
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "system_fingerprint",
    )
    chat_choice: tuple[str, ...] = ("index", "message", "logprobs", "finish_reason", "token_ids")
    message: tuple[str, ...] = (
        "role",
        "content",
        "refusal",
        "reasoning_content",
        "tool_calls",
        "function_call",
    )
    text_choice: tuple[str, ...] = ("text", "index", "logprobs", "finish_reason", "token_ids")
    chunk: tuple[str, ...] = (
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    )
    chat_piece: tuple[str, ...] = ("index", "delta", "logprobs", "finish_reason", "token_ids")
    text_piece: tuple[str, ...] = ("text", "index", "logprobs", "finish_reason", "token_ids")
    index: Literal["choice", "prompt"] = "choice"
    """What an index counts: the choices, or the prompts, whose choices then share one."""
    absent: Mapping[str, bytes] = field(default_factory=lambda: _ABSENT)
    """What a key of a choice, message or piece holds without a value; others are left out."""
    chat_object: str = "chat.completion"
    chat_chunk_object: str = "chat.completion.chunk"
    text_object: str = "text_completion"
    text_chunk_object: str = "text_completion"
    chat_prefix: str = "chatcmpl-"
    text_prefix: str = "cmpl-"
    opening: bytes = b'{"role":"assistant","content":""}'
    """The delta of each choice's first chunk."""
    call_opening: bytes = b'{"role":"assistant","content":null}'
    """The same where the first to come is a tool call."""
    closing: bytes = b"{}"
    """The delta of the chunk that holds the finish reason."""
    usage: Literal["separate", "finish"] = "separate"
    """Where a stream tells usage, if the request wants it: in a chunk without choices, or in the
    last finish chunk. A request may want the running figure, which is in every chunk."""
    silent: bytes = b"null"
    """The content of a whole message that only calls tools or refuses."""
    reasons: Mapping[FinishReason, str] = field(default_factory=lambda: REASONS)
    content_type: str = "text/event-stream; charset=utf-8"
    prefix: bytes = b"data: "
    done: bytes = sse.DONE
    error_event: Callable[[GatewayError], bytes] = errors.event
    headers: Headers = ()
    """On every answer, whole or streamed."""
    elapsed_header: str | None = None
    """Tells in how many milliseconds the answer came about, or began if it is a stream."""
    served_header: str | None = "x-served-model"
    """Names the version that answered."""

    @cached_property
    def chat_shapes(self) -> Shapes:
        """A whole answer to a conversation."""
        return self._shapes(self.chat_object, self.chat_choice)

    @cached_property
    def text_shapes(self) -> Shapes:
        """A whole answer to a completion."""
        return self._shapes(self.text_object, self.text_choice)

    def _shapes(self, name: str, choice: tuple[str, ...]) -> Shapes:
        absent = tuple(self.absent.items())
        whole = (self.answer, ("object", encode(name)))
        choices = (choice, *absent)
        message = (self.message, *absent, ("role", encode("assistant")))
        return Shapes(shape(*whole), shape(*choices), shape(*message))
