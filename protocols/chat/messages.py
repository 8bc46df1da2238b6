"""Messages with their tool calls, decoded from clients and encoded for workers.

Each protocol has its own ``MessageRules`` and ``MessageStyle``::

    RULES = MessageRules(roles=("system", "user", "assistant", "tool"))
    messages = read_messages(fields.get("messages"), RULES)

It writes error texts from the error's ``param`` (``messages[0].role``), ``problem`` and ``value``.
Tools, tool_choice and response_format are in ``protocols.chat.tools``.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from protocols.chat.content_parts import (
    build_tree,
    build_typed_tree,
    read_object_field,
    read_optional_string,
    read_part,
    read_string,
    write_part,
)
from protocols.chat.field_types import ANY_MESSAGES, convert_messages
from protocols.chat.params import (
    conflict_error,
    empty_value_error,
    invalid_type_error,
    invalid_value_error,
    missing_error,
)
from protocols.core.errors import InvalidParameter, UnsupportedFeature
from protocols.core.extra import KeyTree, read_extra_fields, write_extra
from protocols.core.json_text import JsonDecoder
from protocols.core.request import (
    ContentPart,
    ImagePart,
    Message,
    ReasoningPart,
    RefusalPart,
    TextPart,
    ToolCall,
)
from protocols.json_body import JSON_ERRORS, decode_value

_FUNCTION_KEYS: Final = build_tree("name", "arguments")
CALL_KEYS: Final[Mapping[str, KeyTree]] = {
    "function": build_typed_tree("function", "id", function=_FUNCTION_KEYS),
    "custom": build_typed_tree("custom", "id", custom=build_tree("name", "input")),
}
MESSAGE_KEYS: Final = build_tree("role", "content", "name")
_ASSISTANT_KEYS: Final = build_tree(
    "role", "content", "name", "refusal", "audio", "tool_calls", "function_call",
    "reasoning_content", "reasoning",
)  # fmt: skip
_REASONING_KEYS: Final = ("reasoning_content", "reasoning")
"""The two names of earlier reasoning; the first that is set counts."""
_TOOL_MESSAGE_KEYS: Final = build_tree("role", "content", "name", "tool_call_id")
ROLE_KEYS: Final[Mapping[str, KeyTree]] = {
    "assistant": _ASSISTANT_KEYS,
    "tool": _TOOL_MESSAGE_KEYS,
}


_encode = msgspec.json.Encoder().encode

USER_PART_TYPES = ("text", "image_url", "input_audio", "file", "audio_url", "video_url")
"""The part types of a user's message: those of OpenAI, and two that vLLM adds."""


class MessageRules(Struct, frozen=True, kw_only=True, dict=True):
    """How strictly messages are read."""

    roles: tuple[str, ...] = ("system", "assistant", "user", "function", "tool", "developer")
    user_parts: tuple[str, ...] = USER_PART_TYPES
    assistant_parts: tuple[str, ...] = ("text", "refusal")
    """``reasoning`` is known, too, for protocols that allow it."""
    requires_tool_results: bool = True
    """Each tool call needs a tool message, and each tool message a call."""
    accepts_argument_objects: bool = False
    """The arguments of a call may be an object instead of its JSON text."""

    @cached_property
    def allow_common_messages(self) -> bool:
        """Whether the roles and parts of ``field_types.ANY_MESSAGES`` are all allowed."""
        return (
            {"system", "developer", "user", "assistant", "tool"}.issubset(self.roles)
            and {"text", "image_url", "input_audio"}.issubset(self.user_parts)
            and "text" in self.assistant_parts
        )


DEFAULT_MESSAGE_RULES = MessageRules()
_decode_messages = JsonDecoder(ANY_MESSAGES).decode


# --- reading --------------------------------------------------------------------------------------


def read_messages(
    raw: Raw | None, rules: MessageRules = DEFAULT_MESSAGE_RULES
) -> tuple[Message, ...]:
    """The messages of a request. Raises InvalidParameter or UnsupportedFeature."""
    if raw is None:
        raise missing_error("messages")
    messages = _read_common_messages(raw) if rules.allow_common_messages else None
    is_common = messages is not None
    if messages is None:
        messages = _read_messages(decode_value(raw), rules)
    if rules.requires_tool_results:
        check_tool_results(messages)
    if not is_common:
        _convert_function_calls(messages)
    return tuple(messages)


def _read_common_messages(raw: Raw) -> list[Message] | None:
    """Messages decoded at once; None if one of them has another form, or is invalid."""
    try:
        return convert_messages(_decode_messages(raw))
    except JSON_ERRORS:
        return None


def _read_messages(values: Any, rules: MessageRules) -> list[Message]:
    """Messages of any form, item by item."""
    if values is None:
        raise missing_error("messages")
    if not isinstance(values, list):
        raise invalid_type_error("messages", "an array of objects", values)
    if not values:
        raise empty_value_error("messages", values)
    return [_read_message(value, f"messages[{i}]", rules) for i, value in enumerate(values)]


_get_role: Final = attrgetter("role")
_get_tool_calls: Final = attrgetter("tool_calls")


def check_tool_results(messages: Sequence[Message]) -> None:
    """Check that tool calls and tool messages match. Raises InvalidParameter, as a conflict.

    Calls of the older functions have no id and need no tool message.
    """
    if "tool" not in map(_get_role, messages) and not any(map(_get_tool_calls, messages)):
        return
    waiting: list[str] = []
    open_calls: set[str] = set()
    for i, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise conflict_error(
                    f"messages.[{i}].role",
                    "Invalid parameter: messages with role 'tool' must be a response to a "
                    "preceding message with 'tool_calls'.",
                )
            if message.tool_call_id in waiting:
                waiting.remove(message.tool_call_id)
            continue
        if waiting:
            raise _missing_results_error(waiting, i)
        if message.tool_calls or open_calls:
            waiting = [call.id for call in message.tool_calls if call.id]
            open_calls = set(waiting)
    if waiting:
        raise _missing_results_error(waiting, len(messages) - 1)


def _missing_results_error(waiting: Iterable[str], place: int) -> InvalidParameter:
    ids = ", ".join(waiting)
    return conflict_error(
        f"messages.[{place}].role",
        "An assistant message with 'tool_calls' must be followed by tool messages responding to "
        "each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        f"{ids[:300]}",
    )


def _read_message(value: Any, at: str, rules: MessageRules) -> Message:
    if not isinstance(value, dict):
        raise invalid_type_error(at, "an object", value)
    role = read_string(value, "role", at)
    if role not in rules.roles:
        raise invalid_value_error(f"{at}.role", role, rules.roles)
    calls = _read_any_calls(value, at, rules) if role == "assistant" else ()
    aside = _read_reasoning_and_refusal(value, at) if role == "assistant" else ()
    refused = bool(aside) and isinstance(aside[-1], RefusalPart)
    nullable = role == "function" and "content" in value
    optional = bool(calls) or refused or nullable
    parts = aside[:-1] if refused else aside
    read_item = partial(read_part, allowed=_list_allowed_parts(role, rules))
    parts += read_content(value, at, read_item, optional=optional)
    if refused:
        parts += aside[-1:]
    tool_call_id = read_string(value, "tool_call_id", at) if role == "tool" else None
    name = (
        read_string(value, "name", at)
        if role == "function"
        else read_optional_string(value, "name", at)
    )
    known = ROLE_KEYS.get(role, MESSAGE_KEYS)
    if value.get("tool_calls") is not None:  # which are newer than a call of the older functions
        known = {key: inner for key, inner in known.items() if key != "function_call"}
    first, second = map(value.get, _REASONING_KEYS)
    if first and second and first != second:
        known = {key: inner for key, inner in known.items() if key != _REASONING_KEYS[1]}
    extra = read_extra_fields(value, at, known)
    return Message(role, parts, name, calls, tool_call_id, extra=extra)  # type: ignore[arg-type]


def _read_reasoning_and_refusal(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    """The reasoning and the refusal of an assistant message."""
    if value.get("audio") is not None:
        raise UnsupportedFeature("Earlier audio answers can't be referred to.", param=f"{at}.audio")
    parts: list[ContentPart] = []
    for name in _REASONING_KEYS:
        if thought := read_optional_string(value, name, at):
            parts.append(ReasoningPart(thought, at=f"{at}.{name}"))
            break
    if refusal := read_optional_string(value, "refusal", at):
        parts.append(RefusalPart(refusal, at=f"{at}.refusal"))
    return tuple(parts)


def read_content(
    value: Mapping[str, Any],
    at: str,
    read_item: Callable[[Any, str], tuple[ContentPart, ...]],
    *,
    optional: bool = False,
) -> tuple[ContentPart, ...]:
    """The parts of a message at this path. ``read_item`` reads an item of an array of parts.

    Raises InvalidParameter.
    """
    content = value.get("content")
    path = f"{at}.content"
    match content:
        case str():
            return (TextPart(content, at=path),)
        case None if optional:
            return ()
        case None:
            raise missing_error(path)
        case []:
            raise empty_value_error(path, content)
        case list():
            parts: list[ContentPart] = []
            for k, part in enumerate(content):
                parts += read_item(part, f"{path}[{k}]")
            return tuple(parts)
        case _:
            raise invalid_type_error(path, "one of a string or array of objects", content)


def _list_allowed_parts(role: str, rules: MessageRules) -> tuple[str, ...]:
    return {"user": rules.user_parts, "assistant": rules.assistant_parts}.get(role, ("text",))


def _read_any_calls(value: Mapping[str, Any], at: str, rules: MessageRules) -> tuple[ToolCall, ...]:
    """The calls of a message, or the one of the older functions."""
    if value.get("tool_calls") is None and (legacy := value.get("function_call")) is not None:
        return (
            _read_tool_call(
                {"id": "", "function": legacy}, f"{at}.function_call", rules, legacy=True
            ),
        )
    return read_tool_calls(value, at, rules)


def read_tool_calls(
    value: Mapping[str, Any], at: str, rules: MessageRules = DEFAULT_MESSAGE_RULES
) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message at this path. Raises InvalidParameter."""
    calls = value.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise invalid_type_error(f"{at}.tool_calls", "an array of objects", calls)
    return tuple(
        _read_tool_call(call, f"{at}.tool_calls[{k}]", rules) for k, call in enumerate(calls)
    )


def _read_tool_call(value: Any, at: str, rules: MessageRules, *, legacy: bool = False) -> ToolCall:
    if not isinstance(value, dict):
        raise invalid_type_error(at, "an object", value)
    name = "" if legacy else read_string(value, "id", at)
    kind = value.get("type", "function")
    if kind not in ("function", "custom"):
        raise invalid_value_error(f"{at}.type", kind, ("function", "custom"))
    body, path = read_object_field(value, kind, at), at if legacy else f"{at}.{kind}"
    key = "arguments" if kind == "function" else "input"
    arguments = body.get(key)
    if rules.accepts_argument_objects and isinstance(arguments, dict):
        arguments = _encode(arguments).decode()
    elif arguments is None or not isinstance(arguments, str):
        arguments = read_string(body, key, path)
    if legacy:
        extra = read_extra_fields(body, at, _FUNCTION_KEYS)
        extra = extra and msgspec.structs.replace(extra, inside=("function",))
    else:
        extra = read_extra_fields(value, at, CALL_KEYS[kind])
    return ToolCall(name, read_string(body, "name", path), arguments, kind, extra, at=path)


def _convert_function_calls(messages: list[Message]) -> None:
    """Give function calls an id, and turn function messages into tool messages."""
    waiting: dict[str, str] = {}
    for i, message in enumerate(messages):
        if message.tool_calls and any(not call.id for call in message.tool_calls):
            call = message.tool_calls[0]
            waiting[call.name] = f"call_{i}"
            calls = (msgspec.structs.replace(call, id=f"call_{i}"),)
            messages[i] = msgspec.structs.replace(message, tool_calls=calls)
        elif message.role == "function" and (call_id := waiting.pop(message.name or "", None)):
            messages[i] = msgspec.structs.replace(message, role="tool", tool_call_id=call_id)


# --- writing --------------------------------------------------------------------------------------


class MessageStyle(Struct, frozen=True, kw_only=True):
    """The message format that a worker accepts."""

    part_format: Literal["list", "joined"] = "list"
    """Several text parts as a list, or joined as one string."""
    empty_content: str | None = None
    """The content of a message without content."""
    includes_reasoning: bool = True
    """Send earlier reasoning, under ``reasoning_key``."""
    reasoning_key: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    write_call_id: Callable[[str], str] = str
    """Writes the id of a tool call, in the call and in its result."""
    role_mapping: tuple[tuple[str, str], ...] = ()
    """Roles that are replaced, such as ``("developer", "system")``."""


class WireMessage(Struct):
    """A message for a worker."""

    role: str
    content: str | list[dict[str, Any]] | None
    name: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


def write_messages(messages: Iterable[Message], style: MessageStyle) -> list[Any]:
    """The messages for a worker, to be encoded as JSON."""
    return [_write_message(message, style) for message in _move_result_media(messages)]


def _move_result_media(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages with the images and files of tools' results in the user message that follows.

    In this format the content of a tool message is text.
    """
    moved: list[ContentPart] = []
    for message in messages:
        if message.role == "tool" and any(type(part) is not TextPart for part in message.parts):
            yield _label_media(message, moved)
        elif moved and message.role == "user":
            yield msgspec.structs.replace(message, parts=(*moved, *message.parts))
            moved = []
        elif moved and message.role != "tool":
            yield Message("user", tuple(moved))
            moved = []
            yield message
        else:
            yield message
    if moved:
        yield Message("user", tuple(moved))


def _label_media(message: Message, moved: list[ContentPart]) -> Message:
    """The tool message with a label in the place of each part that is added to ``moved``."""
    texts: list[TextPart] = []
    count = 0
    for part in message.parts:
        if isinstance(part, TextPart):
            texts.append(part)
        else:
            count += 1
            kind = "image" if isinstance(part, ImagePart) else "file"
            label = f"{kind} {count} of call {message.tool_call_id}"
            texts.append(TextPart(f"[{label} follows]"))
            moved += (TextPart(f"[{label}]"), part)
    if all(one.extra is None for one in texts):
        texts = [TextPart("\n".join(one.text for one in texts))]
    return msgspec.structs.replace(message, parts=tuple(texts))


def _write_message(message: Message, style: MessageStyle) -> WireMessage | dict[str, Any]:
    wire = _write_known_message(message, style)
    if message.extra is None:
        return wire
    fields = {
        name: value for name, value in msgspec.structs.asdict(wire).items() if value is not UNSET
    }
    write_extra(fields, message.extra)
    return fields


def _write_known_message(message: Message, style: MessageStyle) -> WireMessage:
    aside = [p for p in message.parts if isinstance(p, RefusalPart) and p.extra is None]
    parts = [p for p in message.parts if p not in aside and not isinstance(p, ReasoningPart)]
    thought = "".join(p.text for p in message.parts if isinstance(p, ReasoningPart))
    refusal = "".join(p.text for p in aside)
    sends_reasoning = thought and style.includes_reasoning
    wire = WireMessage(
        role=dict(style.role_mapping).get(message.role, message.role),
        content=_write_content(parts, style),
        name=message.name or UNSET,
        refusal=refusal or UNSET,
        tool_calls=_write_tool_calls(message.tool_calls, style) or UNSET,
        tool_call_id=style.write_call_id(message.tool_call_id) if message.tool_call_id else UNSET,
    )
    if sends_reasoning:
        setattr(wire, style.reasoning_key, thought)
    return wire


def _write_tool_calls(calls: Iterable[ToolCall], style: MessageStyle) -> list[dict[str, Any]]:
    return [write_tool_call(call, style.write_call_id) for call in calls]


def _write_content(
    parts: Sequence[ContentPart], style: MessageStyle
) -> str | list[dict[str, Any]] | None:
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if not parts:
        return style.empty_content
    is_text = len(texts) == len(parts) and (len(parts) == 1 or style.part_format == "joined")
    if is_text and all(part.extra is None for part in parts):
        return "".join(texts)
    return [write_part(part) for part in parts]


def shorten_call_id(call_id: str) -> str:
    """An id of nine letters and digits, as Mistral requires; one that is valid stays as it is."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def write_tool_call(call: ToolCall, write_id: Callable[[str], str] = str) -> dict[str, Any]:
    """A tool call in a message for a worker."""
    key = "arguments" if call.kind == "function" else "input"
    written = {
        "id": write_id(call.id),
        "type": call.kind,
        call.kind: {"name": call.name, key: call.arguments},
    }
    if call.extra is not None:
        write_extra(written, call.extra)
    return written
