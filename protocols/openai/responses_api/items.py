"""Input items of the Responses API, as messages of the internal request.

Consecutive items of the assistant (reasoning, text, calls) are one message; the outputs of its
calls follow it directly, wherever they stand in the input.
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.chat.content_parts import read_object_field, read_optional_string, read_string
from protocols.chat.params import (
    conflict_error,
    invalid_type_error,
    invalid_value_error,
    missing_error,
)
from protocols.core.errors import InvalidParameter, UnsupportedFeature
from protocols.core.events import PART_SEPARATOR
from protocols.core.extra import KeyTree, add_unknown_keys
from protocols.core.json_text import decode_json
from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    ImagePart,
    Message,
    ReasoningPart,
    RefusalPart,
    Role,
    TextPart,
    ToolCall,
)
from protocols.openai.responses_api.tools import ToolCatalog

_encode = msgspec.json.Encoder().encode

Item = Mapping[str, Any]
"""An input item, decoded."""

_ROLES: Final[Mapping[str, Role]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",  # chat templates of open models do not know developers
}
_NO_OUTPUT: Final = "[no output]"
_IMAGES_FOLLOW: Final = "[image follows]"
_LOST: Final = Raw(b"true")
"""The value of a key of which only the loss is reported."""

# --- reasoning that a client keeps ----------------------------------------------------------------

_SEAL_PREFIX: Final = "gw1:"
_MAX_SEALED_BYTES: Final = 1 << 22


class _SealedReasoning(Struct):
    text: str
    signature: str | None = None


def seal_reasoning(text: str, signature: str | None) -> str:
    """The value of ``encrypted_content``: reasoning in a form that clients send back unchanged.

    It is packed and not encrypted: the client gets the same text in clear, and could write any as
    an earlier message. What a worker encrypted is passed on as it is.
    """
    data = zlib.compress(msgspec.json.encode(_SealedReasoning(text, signature)))
    return _SEAL_PREFIX + base64.urlsafe_b64encode(data).decode()


def open_reasoning(sealed: str) -> ReasoningPart | None:
    """The reasoning in ``encrypted_content``; None if it is not from a gateway like this one."""
    if not sealed.startswith(_SEAL_PREFIX):
        return None
    try:
        data = base64.urlsafe_b64decode(sealed.removeprefix(_SEAL_PREFIX))
        stream = zlib.decompressobj()
        reasoning = decode_json(stream.decompress(data, _MAX_SEALED_BYTES), kind=_SealedReasoning)
    except (binascii.Error, ValueError, zlib.error, msgspec.DecodeError):
        return None
    return ReasoningPart(reasoning.text, reasoning.signature)


# --- content parts --------------------------------------------------------------------------------


def _read_text(part: Item, at: str) -> ContentPart:
    return TextPart(read_string(part, "text", at))


def _read_refusal(part: Item, at: str) -> ContentPart:
    return RefusalPart(read_string(part, "refusal", at))


_DETAILS: Final = ("auto", "low", "high", "original")


def _read_image(part: Item, at: str) -> ContentPart:
    """An image, in this API's form or in that of chat completions."""
    source = part.get("image_url")
    fields = part
    if isinstance(source, dict):
        fields, source = source, read_string(source, "url", f"{at}.image_url")
    if source is None and part.get("file_id") is not None:
        text = "Files are not stored here: send the image as a URL."
        raise UnsupportedFeature(text, param=f"{at}.file_id")
    if source is None:
        raise missing_error(f"{at}.image_url")
    if not isinstance(source, str):
        raise invalid_type_error(f"{at}.image_url", "a string", source)
    detail = read_optional_string(fields, "detail", at)
    if detail is not None and detail not in _DETAILS:
        raise invalid_value_error(f"{at}.detail", detail, _DETAILS)
    return ImagePart(source, "high" if detail == "original" else detail)


def _read_file(part: Item, at: str) -> ContentPart:
    for name in ("file_id", "file_url"):
        if part.get(name) is not None:
            text = "Files are not stored here: send the file's data as 'file_data'."
            raise UnsupportedFeature(text, param=f"{at}.{name}")
    return FilePart(
        file_data=read_string(part, "file_data", at),
        filename=read_optional_string(part, "filename", at),
    )


def _read_audio(part: Item, at: str) -> ContentPart:
    audio, path = read_object_field(part, "input_audio", at), f"{at}.input_audio"
    return AudioPart(read_string(audio, "data", path), read_string(audio, "format", path))


_PART_READERS: Final[Mapping[str, Callable[[Item, str], ContentPart]]] = {
    "input_text": _read_text,
    "output_text": _read_text,
    "text": _read_text,
    "input_image": _read_image,
    "image_url": _read_image,
    "input_file": _read_file,
    "input_audio": _read_audio,
    "refusal": _read_refusal,
}
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_ALLOWED_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "user": tuple(name for name in _PART_READERS if name != "refusal"),
    "assistant": (*_TEXT_PARTS, "refusal"),
    "system": _TEXT_PARTS,
    "tool": (*_TEXT_PARTS, "input_image", "input_file"),
}


def _read_content(content: Any, role: str, at: str) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if content is None:
        raise missing_error(at)
    if not isinstance(content, list):
        raise invalid_type_error(at, "one of a string or array of objects", content)
    parts = []
    for k, part in enumerate(content):
        path = f"{at}[{k}]"
        if not isinstance(part, dict):
            raise invalid_type_error(path, "an object", part)
        kind, allowed = read_string(part, "type", path), _ALLOWED_PARTS[role]
        if kind not in allowed:
            raise invalid_value_error(f"{path}.type", kind, allowed)
        parts.append(replace(_PART_READERS[kind](part, path), at=path))
    return tuple(parts)


# --- the conversation -----------------------------------------------------------------------------


class _AssistantTurn(Struct):
    """What the assistant did between two messages of others, and the outputs of its calls."""

    reasoning: list[ReasoningPart] = []
    reasoning_places: list[str] = []
    """The paths of the items with the reasoning."""
    texts: list[str] = []
    text_place: str = ""
    """The path of the first text."""
    refusals: list[RefusalPart] = []
    calls: list[ToolCall] = []
    outputs: list[Message] = []
    images: list[ContentPart] = []
    """Images and files in outputs, which most workers accept from users only."""
    open_calls: dict[str, None] = {}
    """The calls without an output."""

    @property
    def has_only_reasoning(self) -> bool:
        """Whether no message can hold the turn."""
        return not (self.texts or self.refusals or self.calls)

    def build_messages(self) -> list[Message]:
        """The turn's messages. A call without output gets one that says so."""
        if self.has_only_reasoning:
            return []
        parts: list[ContentPart] = [*self.reasoning]
        if self.texts:
            parts.append(TextPart("\n".join(self.texts), at=self.text_place))
        parts += self.refusals
        missing = [
            Message("tool", (TextPart(_NO_OUTPUT),), tool_call_id=one) for one in self.open_calls
        ]
        place = next(one.at for one in (*parts, *self.calls))
        messages = [Message("assistant", tuple(parts), tool_calls=tuple(self.calls), at=place)]
        messages += self.outputs + missing
        if self.images:
            messages.append(Message("user", tuple(self.images)))
        return messages


def read_reference(item: Item) -> str | None:
    """The id of the stored item that an item refers to; None if it is an item itself."""
    kind, name = item.get("type"), item.get("id")
    is_reference = kind == "item_reference" or (kind is None and item.get("role") is None)
    return name if is_reference and isinstance(name, str) else None


class ConversationReader:
    """Reads items into messages.

    ``find_item`` returns the stored item of a reference; it raises StoredObjectNotFound.
    """

    def __init__(self, tools: ToolCatalog, find_item: Callable[[str], Item]) -> None:
        self._tools = tools
        self._find_item = find_item
        self.unknown: dict[str, Raw] = {}
        """The keys that no message has, by their path."""
        self._messages: list[Message] = []
        self._turn = _AssistantTurn()

    def read_items(self, items: Sequence[Any], at: str = "input") -> list[Item]:
        """Add items; returns them with references resolved. Raises ClientError."""
        return [self._read_item(item, f"{at}[{i}]") for i, item in enumerate(items)]

    def add_message(self, message: Message) -> None:
        """Add a message of the user or the system."""
        self._end_turn()
        self._messages.append(message)

    def build_messages(self) -> tuple[Message, ...]:
        """All messages, after the last item."""
        self._end_turn()
        return tuple(self._messages)

    def _end_turn(self) -> None:
        if self._turn.has_only_reasoning:
            self.unknown |= dict.fromkeys(self._turn.reasoning_places, _LOST)
        self._messages += self._turn.build_messages()
        self._turn = _AssistantTurn()

    def _begin_output(self) -> _AssistantTurn:
        """The turn that an item of the assistant belongs to."""
        if self._turn.outputs and not self._turn.open_calls:
            self._end_turn()
        return self._turn

    def _read_item(self, item: Any, at: str) -> Item:
        if not isinstance(item, dict):
            raise invalid_type_error(at, "an object", item)
        if (reference := read_reference(item)) is not None:
            return self._read_item(self._find_item(reference), at)
        kind = item.get("type")
        if kind is None:
            if item.get("role") is None:
                text = f"Invalid '{at}': an item needs a 'type' or a 'role'."
                raise InvalidParameter(text, param=at, problem="value", got=item)
            kind = "message"
        if kind == "item_reference":
            read_string(item, "id", at)
        reader = _ITEM_READERS.get(kind) if isinstance(kind, str) else None
        if reader is not None:
            reader(self, item, at)
            self._add_unknown_keys(item, kind, at)
        elif kind == "compaction_trigger":
            raise UnsupportedFeature("Compaction is not supported.", param=f"{at}.type")
        elif kind not in _SKIPPED_ITEMS:
            raise invalid_value_error(f"{at}.type", kind, (*_ITEM_READERS, *_SKIPPED_ITEMS))
        else:
            self.unknown[at] = _LOST
        return item

    def _add_unknown_keys(self, item: Item, kind: str, at: str) -> None:
        """Note the keys of an item and of its parts that no message has."""
        add_unknown_keys(self.unknown, item, at, _ITEM_KEYS[kind])
        for name in ("content", "output", "summary"):
            parts = item.get(name)
            for k, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict):
                    name_of_part = part.get("type")
                    is_known = isinstance(name_of_part, str) and name_of_part in _PART_KEYS
                    known = _PART_KEYS[name_of_part] if is_known else _ANY_PART_KEYS
                    if kind == "reasoning":
                        known = _REASONING_PART_KEYS
                    add_unknown_keys(self.unknown, part, f"{at}.{name}[{k}]", known)

    # --- by type ----------------------------------------------------------------------------------

    def _read_message(self, item: Item, at: str) -> None:
        name = read_string(item, "role", at)
        role = _ROLES.get(name)
        if role is None:
            raise invalid_value_error(f"{at}.role", name, tuple(_ROLES))
        parts = _read_content(item.get("content"), role, f"{at}.content")
        if role != "assistant":
            self.add_message(Message(role, parts, at=at))
            return
        turn = self._begin_output()
        if texts := [part.text for part in parts if isinstance(part, TextPart)]:
            turn.texts.append("".join(texts))
            turn.text_place = turn.text_place or f"{at}.content"
        turn.refusals += [part for part in parts if isinstance(part, RefusalPart)]

    def _read_reasoning(self, item: Item, at: str) -> None:
        sealed = read_optional_string(item, "encrypted_content", at)
        part = None if sealed is None else open_reasoning(sealed)
        if sealed and part is None:  # only the server that wrote it can read it
            self.unknown[f"{at}.encrypted_content"] = _LOST
        texts = {name: _read_reasoning_text(item, name, at) for name in ("content", "summary")}
        if part is None:
            part = ReasoningPart(texts["content"] or texts["summary"])
        for name, text in texts.items():
            if text not in ("", part.text):
                self.unknown[f"{at}.{name}"] = _LOST
        if part.text or part.signature:
            turn = self._begin_output()
            turn.reasoning.append(replace(part, at=_locate_reasoning(at, part, texts)))
            turn.reasoning_places.append(at)

    def _read_function_call(self, item: Item, at: str) -> None:
        name = self._read_tool_name(item, at)
        self._add_call(item, at, name, read_string(item, "arguments", at))

    def _read_custom_call(self, item: Item, at: str) -> None:
        text = read_string(item, "input", at)
        self._add_call(item, at, self._read_tool_name(item, at), text, kind="custom")

    def _read_search_call(self, item: Item, at: str) -> None:
        arguments = item.get("arguments")
        text = arguments if isinstance(arguments, str) else _encode(arguments).decode()
        self._add_call(item, at, "tool_search", text)

    def _read_tool_name(self, item: Item, at: str) -> str:
        namespace = read_optional_string(item, "namespace", at)
        return self._tools.flatten_name(namespace, read_string(item, "name", at))

    def _add_call(
        self, item: Item, at: str, name: str, arguments: str, *, kind: str = "function"
    ) -> None:
        call_id = read_string(item, "call_id", at)
        turn = self._begin_output()
        if call_id in turn.open_calls:
            text = f"Duplicate call_id: '{call_id[:64]}'."
            raise InvalidParameter(text, param=f"{at}.call_id", problem="value", got=call_id)
        turn.calls.append(ToolCall(call_id, name, arguments, kind, at=at))
        turn.open_calls[call_id] = None

    def _read_call_output(self, item: Item, at: str) -> None:
        parts = _read_content(item.get("output"), "tool", f"{at}.output")
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if images := [part for part in parts if not isinstance(part, TextPart)]:
            texts.append(_IMAGES_FOLLOW)
        self._add_output(item, at, "".join(texts))
        self._turn.images += images

    def _read_search_output(self, item: Item, at: str) -> None:
        tools = _as_objects(item.get("tools"), f"{at}.tools")
        self._add_output(item, at, f"{len(tools)} tools added")

    def _add_output(self, item: Item, at: str, text: str) -> None:
        call_id = read_string(item, "call_id", at)
        turn = self._turn
        if call_id not in turn.open_calls:
            shown = f"No tool call found for the output of the call '{call_id[:64]}'."
            raise conflict_error("input", shown)
        del turn.open_calls[call_id]
        turn.outputs.append(Message("tool", (TextPart(text),), tool_call_id=call_id, at=at))

    def _read_tool_list(self, item: Item, at: str) -> None:
        """Its tools were read before: see ``requests.read_tools``."""


_ITEM_READERS: Final[Mapping[str, Callable[[ConversationReader, Item, str], None]]] = {
    "message": ConversationReader._read_message,  # noqa: SLF001 - its own table
    "reasoning": ConversationReader._read_reasoning,  # noqa: SLF001
    "function_call": ConversationReader._read_function_call,  # noqa: SLF001
    "function_call_output": ConversationReader._read_call_output,  # noqa: SLF001
    "custom_tool_call": ConversationReader._read_custom_call,  # noqa: SLF001
    "custom_tool_call_output": ConversationReader._read_call_output,  # noqa: SLF001
    "tool_search_call": ConversationReader._read_search_call,  # noqa: SLF001
    "tool_search_output": ConversationReader._read_search_output,  # noqa: SLF001
    "additional_tools": ConversationReader._read_tool_list,  # noqa: SLF001
}
_COMMON_KEYS: Final = ("id", "type", "status", "created_by")
_CALL_KEYS: Final = dict.fromkeys(
    (*_COMMON_KEYS, "call_id", "name", "namespace", "arguments", "input", "execution")
)
_OUTPUT_KEYS: Final = dict.fromkeys((*_COMMON_KEYS, "call_id", "output", "tools", "execution"))
_ITEM_KEYS: Final[Mapping[str, KeyTree]] = {
    "message": dict.fromkeys((*_COMMON_KEYS, "role", "content")),
    "reasoning": dict.fromkeys((*_COMMON_KEYS, "summary", "content", "encrypted_content")),
    **dict.fromkeys(("function_call", "custom_tool_call", "tool_search_call"), _CALL_KEYS),
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output", "tool_search_output"), _OUTPUT_KEYS
    ),
    "additional_tools": dict.fromkeys((*_COMMON_KEYS, "role", "tools")),
}
"""The keys of items that messages represent."""
_ANY_PART_KEYS: Final[KeyTree] = {
    **dict.fromkeys(
        ("type", "text", "refusal", "annotations", "logprobs", "image_url", "file_id", "file_url",
         "file_data", "filename", "input_audio")
    ),
    "detail": frozenset(_DETAILS) - {"original"},
}  # fmt: skip
_PART_KEYS: Final[Mapping[Any, KeyTree]] = {
    "image_url": {**_ANY_PART_KEYS, "image_url": dict.fromkeys(("url", "detail"))},
    "input_audio": {**_ANY_PART_KEYS, "input_audio": dict.fromkeys(("data", "format"))},
}
_REASONING_PART_KEYS: Final[KeyTree] = {
    "type": frozenset({"summary_text", "reasoning_text", "text"}),
    "text": None,
}
_SKIPPED_ITEMS: Final = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "compaction",
        "program",
        "program_output",
    }
)
"""Items of hosted tools. Only the server that ran the tool can read them."""


def _locate_reasoning(at: str, part: ReasoningPart, texts: Mapping[str, str]) -> str:
    """The path of the field of an item in which the reasoning stands."""
    name = next((name for name, text in texts.items() if text == part.text), "encrypted_content")
    return f"{at}.{name}"


def _read_reasoning_text(item: Item, name: str, at: str) -> str:
    """The text of the parts of a reasoning item in this field."""
    parts = _as_objects(item.get(name), f"{at}.{name}")
    return PART_SEPARATOR.join(
        read_string(one, "text", f"{at}.{name}[{k}]") for k, one in enumerate(parts)
    )


def _as_objects(value: Any, at: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid_type_error(at, "an array of objects", value)
    for k, one in enumerate(value):
        if not isinstance(one, dict):
            raise invalid_type_error(f"{at}[{k}]", "an object", one)
    return value
