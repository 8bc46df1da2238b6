"""Types of request fields that accept only what is certainly valid, for pass-through.

Every worker accepts such a field unchanged. They decode no more than the gateway needs.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from protocols.chat.messages import check_tool_results
from protocols.chat.tools import read_response_format
from protocols.core.errors import InvalidParameter
from protocols.core.request import AudioPart, ContentPart, ImagePart, Message, TextPart, ToolCall

NONEMPTY_STRING = Annotated[str, Meta(min_length=1)]
_Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
_OptionalText = str | UnsetType | None
_Absent = UnsetType | None


class _Valid(Struct, forbid_unknown_fields=True):
    """An object without unknown fields."""


class _TextPart(_Valid, tag="text"):
    text: str

    def to_part(self) -> ContentPart:
        return TextPart(self.text)


class _ImageUrl(_Valid):
    url: str
    detail: Literal["auto", "low", "high"] | UnsetType | None = UNSET


class _ImagePart(_Valid, tag="image_url"):
    image_url: _ImageUrl

    def to_part(self) -> ContentPart:
        return ImagePart(self.image_url.url, self.image_url.detail or None)


class _Audio(_Valid):
    data: str
    format: str


class _AudioPart(_Valid, tag="input_audio"):
    input_audio: _Audio

    def to_part(self) -> ContentPart:
        return AudioPart(self.input_audio.data, self.input_audio.format)


_TextParts = Annotated[list[_TextPart], Meta(min_length=1)]
_UserParts = Annotated[list[_TextPart | _ImagePart | _AudioPart], Meta(min_length=1)]


class _FunctionCall(_Valid):
    name: NONEMPTY_STRING
    arguments: str


class _ToolCall(_Valid):
    id: NONEMPTY_STRING
    type: Literal["function"]
    function: _FunctionCall


class _Message(_Valid, tag_field="role"):
    """A message that every worker accepts unchanged."""


class _SystemMessage(_Message, tag="system"):
    content: str | _TextParts


class _UserMessage(_Message, tag="user"):
    content: str | _UserParts
    name: NONEMPTY_STRING | UnsetType = UNSET


class _AssistantMessage(_Message, tag="assistant"):
    content: str | _TextParts | UnsetType | None = UNSET
    tool_calls: Annotated[list[_ToolCall], Meta(min_length=1)] | UnsetType = UNSET
    refusal: _Absent = UNSET
    audio: _Absent = UNSET
    function_call: _Absent = UNSET


class _ToolMessage(_Message, tag="tool"):
    content: str | _TextParts
    tool_call_id: str


class _PlainMessage(_Valid):
    """A message without content parts and tools."""

    role: Literal["system", "user", "assistant"]
    content: NONEMPTY_STRING


class _TextMessage(_Valid):
    """A message without tools and without content parts that are no text."""

    role: Literal["system", "user", "assistant"]
    content: str | _TextParts


class _StreamOptions(_Valid):
    include_usage: bool = False


class _Function(_Valid):
    name: _Name
    description: _OptionalText = UNSET
    parameters: dict[str, Raw] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class _Tool(_Valid):
    type: Literal["function"]
    function: _Function


class _FunctionName(_Valid):
    name: str


class _NamedTool(_Valid):
    type: Literal["function"]
    function: _FunctionName


def build_count_type(most: int) -> Any:
    """The type of an optional count."""
    return Annotated[int, Meta(ge=0, le=most)] | UnsetType


OPTIONAL_BOOL: Final[Any] = bool | UnsetType
OPTIONAL_STRING: Final[Any] = str | UnsetType
MESSAGES: Final[Any] = Annotated[
    list[_SystemMessage | _UserMessage | _AssistantMessage | _ToolMessage], Meta(min_length=1)
]
TEXT_MESSAGES: Final[Any] = Annotated[list[_TextMessage], Meta(min_length=1)]
PLAIN_MESSAGES: Final[Any] = Annotated[list[_PlainMessage], Meta(min_length=1)]
PROMPTS: Final[Any] = str | Annotated[list[NONEMPTY_STRING], Meta(min_length=1, max_length=2048)]
INPUTS: Final[Any] = (
    NONEMPTY_STRING | Annotated[list[NONEMPTY_STRING], Meta(min_length=1, max_length=2048)]
)
STREAM_OPTIONS: Final[Any] = _StreamOptions | UnsetType
ENCODINGS: Final[Any] = Literal["float", "base64"] | UnsetType
RESPONSE_FORMAT: Final[Any] = Raw | UnsetType
"""``is_valid_chat`` checks it."""
LOGIT_BIAS: Final[Any] = (
    dict[Annotated[str, Meta(pattern=r"^[0-9]+\Z")], Annotated[float, Meta(ge=-100, le=100)]]
    | UnsetType
)
METADATA: Final[Any] = (
    Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
        Meta(max_length=16),
    ]
    | UnsetType
)
TOOL_FIELDS: Final[Mapping[str, Any]] = {
    "tools": Annotated[list[_Tool], Meta(min_length=1, max_length=128)] | UnsetType,
    "tool_choice": Literal["auto", "none", "required"] | _NamedTool | UnsetType,
}

# --- checks ---------------------------------------------------------------------------------------

_TOOL_DEPENDENT_FIELDS: Final = frozenset({"tool_choice", "parallel_tool_calls"})
_CHECKED_FIELDS: Final = _TOOL_DEPENDENT_FIELDS | {
    "top_logprobs",
    "max_completion_tokens",
    "response_format",
}


def is_valid_chat(body: Any, fields: AbstractSet[str]) -> bool:
    """OpenAI's rules between the fields of a chat request, each valid.

    Raises InvalidParameter for an invalid ``response_format``.
    """
    if _CHECKED_FIELDS.isdisjoint(fields):
        return True
    if "top_logprobs" in fields and body.logprobs is not True:
        return False
    if "max_tokens" in fields and "max_completion_tokens" in fields:
        return False  # the gateway decides which of the two counts
    if "response_format" in fields:
        read_response_format({"response_format": body.response_format})
    if "tools" not in fields:
        return _TOOL_DEPENDENT_FIELDS.isdisjoint(fields)
    choice = body.tool_choice
    return not isinstance(choice, _NamedTool) or any(
        tool.function.name == choice.function.name for tool in body.tools
    )


def read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """The messages of a valid body. Raises InvalidParameter if tool calls lack their results."""
    has_tools, converted = False, []
    for message in messages:
        content = message.content
        if isinstance(content, str):
            parts: tuple[ContentPart, ...] = (TextPart(content),)
        else:
            parts = tuple([part.to_part() for part in content]) if content else ()
        if type(message) is _AssistantMessage or type(message) is _ToolMessage:
            converted.append(_read_tool_turn(message, parts))
            has_tools = has_tools or bool(converted[-1].tool_calls) or converted[-1].role == "tool"
        else:
            role = message.role if hasattr(message, "role") else _ROLES[type(message)]
            converted.append(Message(role, parts))
    if has_tools:
        check_tool_results(converted)
    return tuple(converted)


_ROLES: Final[Mapping[type, Literal["system", "user"]]] = {
    _SystemMessage: "system",
    _UserMessage: "user",
}


def _read_tool_turn(
    message: _AssistantMessage | _ToolMessage, parts: tuple[ContentPart, ...]
) -> Message:
    if isinstance(message, _ToolMessage):
        return Message("tool", parts, tool_call_id=message.tool_call_id)
    if message.tool_calls is UNSET:
        if not parts:
            raise InvalidParameter("a message without content", param="messages")
        return Message("assistant", parts)
    calls = [ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
    return Message("assistant", parts, tool_calls=tuple(calls))
