"""Conversations: what the server says of a wrong one, and the messages of a right one.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp. Roles, and that nothing may
be empty, in 1.0.RC1: the published page.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from protocols.core.request import ContentPart, Message, TextPart, ToolCall
from protocols.mindie.checks import build_param_error
from protocols.mindie.requests import check_media, has_media, read_parts

Role = Literal["system", "user", "assistant", "tool"]
Fields = Mapping[str, Any]

ROLES: Final = ("system", "user", "assistant", "tool")
_FUNCTION_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_\u4e00-\u9fa5-]{1,64}")
_MISSING_CONTENT_ERROR = "Request param contains not content or content null"


def read_messages(got: Any, *, full: bool, tools: bool) -> tuple[Message, ...]:
    """The conversation. Raises InvalidParameter.

    ``full``: no content may be an empty text. ``tools``: some are offered, and the server has other
    words for messages that are no list.
    """
    if got is None:
        text = "is null" if tools else "contains not messages or messages null"
        text = f"Request param {'messages ' if tools else ''}{text}"
        raise build_param_error(text, "messages", "missing")
    if not isinstance(got, list) or not got:
        text = f"Request param messages {'is ' if tools else ''}not arr or arr is empty"
        raise build_param_error(text, "messages", "empty" if got == [] else "type")
    return tuple(
        _read_message(one if isinstance(one, dict) else {}, f"messages[{i}]", full=full)
        for i, one in enumerate(got)
    )


def check_function_name(name: str, at: str) -> None:
    """Raises InvalidParameter for what no function may be called."""
    if not _FUNCTION_NAME_PATTERN.fullmatch(name):
        raise build_param_error(
            "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores "
            f"and dashe within max length of 64, unexpected function name: {name[:300]}",
            at,
        )


def _read_message(got: Fields, at: str, *, full: bool) -> Message:
    role = got.get("role")
    if role is None:
        raise build_param_error(
            "Request param contains not role or role null", f"{at}.role", "missing"
        )
    if role not in ROLES:
        text = "Request param contains role must be system, assistant, user or tool"
        raise build_param_error(text, f"{at}.role")
    match role:
        case "tool":
            call_id = _read_tool_call_id(got.get("tool_call_id"), f"{at}.tool_call_id")
            return Message("tool", _read_content(got, at, full=False), tool_call_id=call_id)
        case "assistant":
            return _read_assistant_message(got, at)
        case _:
            name = got.get("name")
            parts = _read_content(got, at, full=full)
            return Message(cast("Role", role), parts, name if isinstance(name, str) else None)


def _read_content(got: Fields, at: str, *, full: bool) -> tuple[ContentPart, ...]:
    at = f"{at}.content"
    match got.get("content"):
        case None:
            raise build_param_error(_MISSING_CONTENT_ERROR, at, "missing")
        case "" if full:
            raise build_param_error("Request param content len should not be 0", at, "empty")
        case str(text):
            return (TextPart(text),)
        case list(items):
            check_media(items)
            return read_parts(items) or (TextPart(""),)
        case _:
            raise build_param_error("The type of inputs is abnormal", at, "type")


def _read_assistant_message(got: Fields, at: str) -> Message:
    """Calls may come without content; text alone may not be empty."""
    calls = got.get("tool_calls")
    if calls is not None:
        found = calls if isinstance(calls, list) else [calls]
        made = tuple(_read_tool_call(one, f"{at}.tool_calls[{k}]") for k, one in enumerate(found))
        return Message("assistant", _read_content_with_calls(got.get("content")), tool_calls=made)
    content = got.get("content")
    if isinstance(content, list) and not has_media(content):
        content = "".join(part.text for part in read_parts(content) if isinstance(part, TextPart))
    at = f"{at}.content"
    if content is None:
        raise build_param_error(_MISSING_CONTENT_ERROR, at, "missing")
    if not isinstance(content, str):
        raise build_param_error(
            'Request param "content" arguments expected to be a string', at, "type"
        )
    if not content:
        raise build_param_error('Request param "content" should not be empty', at, "empty")
    return Message("assistant", (TextPart(content),))


def _read_content_with_calls(content: Any) -> tuple[ContentPart, ...]:
    match content:
        case str(text) if text:
            return (TextPart(text),)
        case list(items):
            return read_parts(items)
        case _:
            return ()


def _read_tool_call_id(got: Any, at: str) -> str:
    if got is None:
        text = "Request param contains not tool_call_id or tool_call_id null while role is tool"
        raise build_param_error(text, at, "missing")
    if not isinstance(got, str):
        raise build_param_error("The type of tool_call_id is abnormal", at, "type")
    if not got:
        text = "Request param tool_call_id len should not be 0 while role is tool"
        raise build_param_error(text, at, "empty")
    return got


def _read_tool_call(got: Any, at: str) -> ToolCall:
    fields: Fields = got if isinstance(got, dict) else {}
    call_id = _read_string(
        fields,
        "id",
        at,
        "Tool call param contains no id.",
        'Tool call param "id" arguments expected to be a string',
    )
    if fields.get("type") != "function":
        text = "The type of the tool. Currently, only function is supported."
        raise build_param_error(text, f"{at}.type")
    function = fields.get("function")
    if not isinstance(function, dict):
        text = "Tool call param contains no function that the model called."
        raise build_param_error(text, f"{at}.function", "missing")
    name = _read_string(
        function,
        "name",
        f"{at}.function",
        "Tool call param contains no function name",
        "Tool call param function name expected to be a string",
    )
    check_function_name(name, f"{at}.function.name")
    arguments = _read_string(
        function,
        "arguments",
        f"{at}.function",
        "Tool call param contains no function arguments",
        "Tool call param function arguments expected to be a string",
    )
    return ToolCall(call_id, name, arguments)


def _read_string(fields: Fields, name: str, at: str, absent: str, typed: str) -> str:
    got = fields.get(name)
    if got is None:
        raise build_param_error(absent, f"{at}.{name}", "missing")
    if not isinstance(got, str):
        raise build_param_error(typed, f"{at}.{name}", "type")
    return got
