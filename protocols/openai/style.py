"""How a family of this dialect writes its answers. See ``protocols.openai.answers``."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final, Literal

from msgspec import Struct, field

from protocols.core import sse
from protocols.core.errors import GatewayError
from protocols.core.events import FinishReason
from protocols.core.interfaces import Headers
from protocols.openai import errors
from protocols.openai.pieces import MappingFactory, create_mapping_factory, encode_json

FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "unknown": "stop",
}
_DEFAULT_VALUES: Final = {"refusal": b"null", "logprobs": b"null"}


class ResponseFactories(Struct, frozen=True):
    """The objects of a whole answer."""

    response: MappingFactory
    choice: MappingFactory
    message: MappingFactory


class ResponseStyle(Struct, frozen=True, kw_only=True, dict=True):
    """How one family writes its answers. Key tuples say which keys there are, and in what order."""

    unary_keys: tuple[str, ...] = (
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "system_fingerprint",
    )
    chat_choice_keys: tuple[str, ...] = (
        "index",
        "message",
        "logprobs",
        "finish_reason",
        "token_ids",
    )
    message_keys: tuple[str, ...] = (
        "role",
        "content",
        "refusal",
        "reasoning_content",
        "tool_calls",
        "function_call",
    )
    text_choice_keys: tuple[str, ...] = ("text", "index", "logprobs", "finish_reason", "token_ids")
    chunk_keys: tuple[str, ...] = (
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    )
    chat_chunk_keys: tuple[str, ...] = ("index", "delta", "logprobs", "finish_reason", "token_ids")
    text_chunk_keys: tuple[str, ...] = ("text", "index", "logprobs", "finish_reason", "token_ids")
    index_scope: Literal["choice", "prompt"] = "choice"
    """What an index counts: the choices, or the prompts, whose choices then share one."""
    default_values: Mapping[str, bytes] = field(default_factory=lambda: _DEFAULT_VALUES)
    """What a key of a choice, message or piece holds without a value; others are left out."""
    chat_object: str = "chat.completion"
    chat_chunk_object: str = "chat.completion.chunk"
    text_object: str = "text_completion"
    text_chunk_object: str = "text_completion"
    chat_prefix: str = "chatcmpl-"
    text_prefix: str = "cmpl-"
    first_delta: bytes = b'{"role":"assistant","content":""}'
    """The delta of each choice's first chunk."""
    first_tool_call_delta: bytes = b'{"role":"assistant","content":null}'
    """The same where the first to come is a tool call."""
    last_delta: bytes = b"{}"
    """The delta of the chunk that holds the finish reason."""
    usage_position: Literal["separate", "finish"] = "separate"
    """Where a stream tells usage, if the request wants it: in a chunk without choices, or in the
    last finish chunk. A request may want the running figure, which is in every chunk."""
    empty_content: bytes = b"null"
    """The content of a whole message that only calls tools or refuses."""
    finish_reasons: Mapping[FinishReason, str] = field(default_factory=lambda: FINISH_REASONS)
    content_type: str = "text/event-stream; charset=utf-8"
    event_prefix: bytes = b"data: "
    stream_end: bytes = sse.DONE_EVENT
    encode_error_event: Callable[[GatewayError], bytes] = errors.format_error_event
    headers: Headers = ()
    """On every answer, whole or streamed."""
    elapsed_header: str | None = None
    """Tells in how many milliseconds the answer came about, or began if it is a stream."""
    version_header: str | None = "x-served-model"
    """Names the version that answered."""

    @cached_property
    def chat_factories(self) -> ResponseFactories:
        """A whole answer to a conversation."""
        return self._build_factories(self.chat_object, self.chat_choice_keys)

    @cached_property
    def text_factories(self) -> ResponseFactories:
        """A whole answer to a completion."""
        return self._build_factories(self.text_object, self.text_choice_keys)

    def _build_factories(self, name: str, choice: tuple[str, ...]) -> ResponseFactories:
        absent = tuple(self.default_values.items())
        whole = (self.unary_keys, ("object", encode_json(name)))
        choices = (choice, *absent)
        message = (self.message_keys, *absent, ("role", encode_json("assistant")))
        return ResponseFactories(
            create_mapping_factory(*whole),
            create_mapping_factory(*choices),
            create_mapping_factory(*message),
        )
