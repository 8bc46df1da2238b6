"""Types of request fields that accept only what is certainly valid.

Requests whose fields have these types may be passed through, since every worker accepts such a
field unchanged. The readers of ``messages`` and ``tools`` try these types first: what has another
form is read, or gets its error, item by item. They decode no more than the gateway needs.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError

from protocols.chat.params import null_to_none
from protocols.core.request import (
    AudioPart,
    ContentPart,
    ImagePart,
    Message,
    TextPart,
    Tool,
    ToolCall,
)
from protocols.params import NONEMPTY_STRING

_Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
_OptionalText = str | UnsetType | None
_Absent = UnsetType | None
_OPENING_BRACE: Final = ord("{")


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

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class _Message(_Valid, tag_field="role"):
    """A message that every worker accepts unchanged."""


class _SystemMessage(_Message, tag="system"):
    content: str | _TextParts


class _DeveloperMessage(_Message, tag="developer"):
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


class _DescribedFunction(_Function, kw_only=True):
    description: str


class _DescribedTool(_Valid):
    type: Literal["function"]
    function: _DescribedFunction


class _RawFunction(_Valid):
    """A function with the schema as the client wrote it."""

    name: _Name
    description: _OptionalText = UNSET
    parameters: Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class _RawTool(_Valid):
    type: Literal["function"]
    function: _RawFunction

    def to_tool(self) -> Tool:
        """The internal tool. Raises ValidationError if the parameters are no object."""
        body = self.function
        description, strict = body.description, body.strict
        schema = None if body.parameters is UNSET else null_to_none(body.parameters)
        if schema is not None and memoryview(schema)[0] != _OPENING_BRACE:
            raise ValidationError
        return Tool(
            body.name,
            None if description is UNSET else description,
            schema,
            None if strict is UNSET else strict,
        )


class _FunctionName(_Valid):
    name: str


class NamedFunctionChoice(_Valid):
    """A ``tool_choice`` that names a function."""

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
ANY_MESSAGES: Final[Any] = Annotated[
    list[_SystemMessage | _DeveloperMessage | _UserMessage | _AssistantMessage | _ToolMessage],
    Meta(min_length=1),
]
"""With the developer's, which not every worker accepts."""
TEXT_MESSAGES: Final[Any] = Annotated[list[_TextMessage], Meta(min_length=1)]
PLAIN_MESSAGES: Final[Any] = Annotated[list[_PlainMessage], Meta(min_length=1)]
PROMPTS: Final[Any] = str | Annotated[list[NONEMPTY_STRING], Meta(min_length=1, max_length=2048)]
INPUTS: Final[Any] = (
    NONEMPTY_STRING | Annotated[list[NONEMPTY_STRING], Meta(min_length=1, max_length=2048)]
)
STREAM_OPTIONS: Final[Any] = _StreamOptions | UnsetType
ENCODINGS: Final[Any] = Literal["float", "base64"] | UnsetType
RESPONSE_FORMAT: Final[Any] = Raw | UnsetType
"""``protocols.chat.tools.is_valid_chat`` checks it."""
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
TOOLS: Final[Any] = list[_RawTool]
DESCRIBED_TOOLS: Final[Any] = Annotated[list[_DescribedTool], Meta(min_length=1)] | UnsetType
"""Tools that all have a description."""
TOOL_FIELDS: Final[Mapping[str, Any]] = {
    "tools": Annotated[list[_Tool], Meta(min_length=1)] | UnsetType,
    "tool_choice": Literal["auto", "none", "required"] | NamedFunctionChoice | UnsetType,
}


def convert_messages(messages: Sequence[Any]) -> list[Message] | None:
    """The internal messages; None if one of an assistant has neither text nor tool calls."""
    converted = []
    for message in messages:
        kind, content = type(message), message.content
        if type(content) is str:
            parts: tuple[ContentPart, ...] = (TextPart(content),)
        else:
            parts = tuple([part.to_part() for part in content]) if content else ()
        if kind is _UserMessage:
            converted.append(Message("user", parts, message.name or None))
        elif kind is _ToolMessage:
            converted.append(Message("tool", parts, tool_call_id=message.tool_call_id))
        elif kind is not _AssistantMessage:
            converted.append(Message(_ROLES.get(kind) or message.role, parts))
        elif message.tool_calls:
            calls = tuple([call.to_call() for call in message.tool_calls])
            converted.append(Message("assistant", parts, tool_calls=calls))
        elif parts:
            converted.append(Message("assistant", parts))
        else:
            return None
    return converted


_ROLES: Final[Mapping[type, Literal["system", "developer"]]] = {
    _SystemMessage: "system",
    _DeveloperMessage: "developer",
}
