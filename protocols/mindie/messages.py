"""Chat messages and their media parts to the internal request.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp. For 1.0.RC1 (roles, no
empty content) the published page.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from protocols.chat.messages import CALL_KEYS
from protocols.core.extra import KeyTree, read_extra_fields
from protocols.core.request import (
    AudioPart,
    ContentPart,
    ExtraFields,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    VideoPart,
)
from protocols.mindie.params import build_param_error, check_value

Fields = Mapping[str, Any]


class PromptPartKeys(ExtraFields, frozen=True):
    """Unknown keys of a text of a prompt, which has these ``texts``, one after the other."""

    texts: tuple[str, ...] = ()


_FUNCTION_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_\u4e00-\u9fa5-]{1,64}")
_MAX_MEDIA_PARTS = 20
_MEDIA_KEYS = ("image_url", "audio_url", "video_url")
_PART_KEYS: Mapping[str, KeyTree] = {
    **{key: {"type": frozenset({key}), key: {"url": None}} for key in _MEDIA_KEYS},
    "text": {"type": frozenset({"text"}), "text": None},
}
"""The known keys of a part by the key with its content; the server does not read the type."""
_NO_PART_ERROR = "Request param content item must have text, image_url, video_url or audio_url"
_WRONG_TYPE_ERROR = "The type of inputs is abnormal"
_MISSING_CONTENT_ERROR = "Request param contains not content or content null"


def has_media(items: Sequence[Any]) -> bool:
    """Whether a list of parts holds more than text."""
    return any(isinstance(item, dict) and any(key in item for key in _MEDIA_KEYS) for item in items)


def check_media(items: Sequence[Any]) -> None:
    """Check a list of parts. Raises InvalidParameter for parts that the server rejects."""
    media_count = 0
    for item in items:
        if not isinstance(item, dict):
            continue
        if not isinstance(item.get("text", ""), str):
            raise build_param_error("Request param text must be string", "text", "type")
        media = [key for key in _MEDIA_KEYS if key in item]
        for key in media:
            if item[key] is None:
                raise build_param_error(f"Request param {key} null", key, "missing")
        media_count += bool(media)
        if media_count > _MAX_MEDIA_PARTS:
            text = f"The number of multimodal url should be no more than {_MAX_MEDIA_PARTS}"
            raise build_param_error(text, media[0], "too_long")


def read_parts(items: Sequence[Any], at: str) -> tuple[ContentPart, ...]:
    """Convert the parts that ``check_media`` accepted. Raises InvalidParameter for other items."""
    return tuple([_read_part(item, f"{at}[{k}]") for k, item in enumerate(items)])


def _read_part(item: Any, at: str) -> ContentPart:
    part: ContentPart
    match item:
        case {"image_url": url}:
            key, part = "image_url", ImagePart(_read_media_url(url))
        case {"video_url": url}:
            key, part = "video_url", VideoPart(_read_media_url(url))
        case {"audio_url": url}:
            key, part = "audio_url", AudioPart(_read_media_url(url))
        case {"text": str(text)}:
            key, part = "text", TextPart(text)
        case _:
            raise build_param_error(_NO_PART_ERROR, at)
    extra = read_extra_fields(item, at, _PART_KEYS[key])
    return part if extra is None else msgspec.structs.replace(part, extra=extra)


def _read_media_url(value: Any) -> str:
    match value:
        case str(url) | {"url": str(url)}:
            return url
        case _:
            raise build_param_error(_WRONG_TYPE_ERROR, "inputs", "type")


def read_messages(messages: Any, *, full: bool, tools: bool) -> tuple[Message, ...]:
    """Read the messages. Raises InvalidParameter.

    ``full``: content must not be empty. ``tools``: the request has tools, for which the server has
    another error text if the messages are not a list.
    """
    if messages is None:
        text = "messages is null" if tools else "contains not messages or messages null"
        raise build_param_error(f"Request param {text}", "messages", "missing")
    if not isinstance(messages, list) or not messages:
        text = f"Request param messages {'is ' if tools else ''}not arr or arr is empty"
        raise build_param_error(text, "messages", "empty" if messages == [] else "type")
    return tuple(
        _read_message_with_extra(
            message if isinstance(message, dict) else {}, f"messages[{i}]", full=full
        )
        for i, message in enumerate(messages)
    )


def check_function_name(name: str, at: str) -> None:
    """Check a function name. Raises InvalidParameter."""
    if not _FUNCTION_NAME_PATTERN.fullmatch(name):
        raise build_param_error(
            "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores "
            f"and dashe within max length of 64, unexpected function name: {name[:300]}",
            at,
        )


_MESSAGE_KEYS: Mapping[str, KeyTree] = {
    **dict.fromkeys(("system", "user"), dict.fromkeys(("role", "content", "name"))),
    "assistant": dict.fromkeys(("role", "content", "tool_calls")),
    "tool": dict.fromkeys(("role", "content", "tool_call_id")),
}
"""The keys that are read, by the message's role."""


def _read_message_with_extra(fields: Fields, at: str, *, full: bool) -> Message:
    message = _read_message(fields, at, full=full)
    extra = read_extra_fields(fields, at, _MESSAGE_KEYS[message.role])
    return message if extra is None else msgspec.structs.replace(message, extra=extra)


def _read_message(fields: Fields, at: str, *, full: bool) -> Message:
    role = fields.get("role")
    if role is None:
        text = "Request param contains not role or role null"
        raise build_param_error(text, f"{at}.role", "missing")
    match role:
        case "tool":
            call_id = check_value(
                fields.get("tool_call_id"),
                str,
                f"{at}.tool_call_id",
                "The type of tool_call_id is abnormal",
                missing=(
                    "Request param contains not tool_call_id or tool_call_id null while role is "
                    "tool"
                ),
                empty="Request param tool_call_id len should not be 0 while role is tool",
            )
            return Message("tool", _read_content(fields, at, full=False), tool_call_id=call_id)
        case "assistant":
            return _read_assistant_message(fields, at)
        case "system" | "user":
            name = fields.get("name")
            parts = _read_content(fields, at, full=full)
            return Message(role, parts, name if isinstance(name, str) else None)
        case _:
            text = "Request param contains role must be system, assistant, user or tool"
            raise build_param_error(text, f"{at}.role")


def _read_content(fields: Fields, at: str, *, full: bool) -> tuple[ContentPart, ...]:
    at = f"{at}.content"
    match fields.get("content"):
        case None:
            raise build_param_error(_MISSING_CONTENT_ERROR, at, "missing")
        case "" if full:
            raise build_param_error("Request param content len should not be 0", at, "empty")
        case str(text):
            return (TextPart(text),)
        case list(items):
            check_media(items)
            return read_parts(items, at) or (TextPart(""),)
        case _:
            raise build_param_error(_WRONG_TYPE_ERROR, at, "type")


def _read_assistant_message(fields: Fields, at: str) -> Message:
    """Read an assistant message: content is optional next to tool calls, but may not be empty."""
    calls, content = fields.get("tool_calls"), fields.get("content")
    if calls is not None:
        items = calls if isinstance(calls, list) else [calls]
        tool_calls = tuple(
            _read_tool_call(item if isinstance(item, dict) else {}, f"{at}.tool_calls[{i}]")
            for i, item in enumerate(items)
        )
        parts = _read_content_with_calls(content, f"{at}.content")
        return Message("assistant", parts, tool_calls=tool_calls)
    if isinstance(content, list) and not has_media(content):
        message = Message("assistant", read_parts(content, f"{at}.content"))
        if message.text:
            return message
        content = ""
    text = check_value(
        content,
        str,
        f"{at}.content",
        'Request param "content" arguments expected to be a string',
        missing=_MISSING_CONTENT_ERROR,
        empty='Request param "content" should not be empty',
    )
    return Message("assistant", (TextPart(text),))


def _read_content_with_calls(content: Any, at: str) -> tuple[ContentPart, ...]:
    match content:
        case str(text) if text:
            return (TextPart(text),)
        case list(items):
            return read_parts(items, at)
        case _:
            return ()


def _read_tool_call(fields: Fields, at: str) -> ToolCall:
    call_id = check_value(
        fields.get("id"),
        str,
        f"{at}.id",
        'Tool call param "id" arguments expected to be a string',
        missing="Tool call param contains no id.",
    )
    if fields.get("type") != "function":
        text = "The type of the tool. Currently, only function is supported."
        raise build_param_error(text, f"{at}.type")
    at = f"{at}.function"
    function = fields.get("function")
    if not isinstance(function, dict):
        text = "Tool call param contains no function that the model called."
        raise build_param_error(text, at, "missing")
    name = _read_function_text(function, "name", at)
    check_function_name(name, f"{at}.name")
    arguments = _read_function_text(function, "arguments", at)
    extra = read_extra_fields(fields, at.removesuffix(".function"), CALL_KEYS["function"])
    return ToolCall(call_id, name, arguments, extra=extra)


def _read_function_text(function: Fields, name: str, at: str) -> str:
    text: str = check_value(
        function.get(name),
        str,
        f"{at}.{name}",
        f"Tool call param function {name} expected to be a string",
        missing=f"Tool call param contains no function {name}",
    )
    return text
