"""Who may speak when.

Source: the reference of the Foundation Model REST API. After an optional system message, user and
assistant alternate, and the user has the last word; newer editions of the page no longer say so.
Hence two rules: what contradicts itself is always refused, and the order only where it is asked
for. Answers of tools belong to the assistant's turn, and a conversation may end with one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from protocols.core.errors import InvalidParameter
from protocols.core.request import Message, TextPart

RoleRules = Literal["strict", "lenient"]

_NEXT_ROLES: Mapping[str, tuple[str, ...]] = {
    "": ("user",),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calling": ("tool",),
    "tool": ("tool", "assistant", "user"),
}
"""Which roles may follow; ``calling`` is an assistant that calls tools, "" the beginning."""


def normalize_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The conversation with ``developer`` as ``system``, and blank text beside calls left out."""
    return tuple(_normalize_message(message) for message in messages)


def _normalize_message(message: Message) -> Message:
    if message.role == "developer":
        return replace(message, role="system")
    if message.tool_calls and not message.text.strip():
        kept = tuple(part for part in message.parts if not isinstance(part, TextPart))
        return replace(message, parts=kept)
    return message


def check_tool_call_ids(wire: Sequence[Any]) -> None:
    """``tool_call_id`` is for tools; ``wire`` is the conversation as it was sent."""
    for i, message in enumerate(wire):
        if message.get("role") != "tool" and message.get("tool_call_id"):
            at = f"messages[{i}].tool_call_id"
            raise _build_role_error(at, f"{at} must be empty unless the role is tool")


def check_role_order(messages: Sequence[Message]) -> None:
    """The strict rules. Raises InvalidParameter."""
    before = ""
    for i, message in enumerate(messages):
        at = f"messages[{i}].role"
        role = message.role
        if role == "system":
            if i > 0:
                raise _build_role_error(
                    at, "the system role can be used once only, as the first message"
                )
        elif role not in _NEXT_ROLES[before]:
            allowed = " or ".join(_NEXT_ROLES[before])
            raise _build_role_error(at, f"{at} must be {allowed}, got {role}")
        if message.tool_calls and message.text.strip():
            where = f"messages[{i}].content"
            raise _build_role_error(where, f"{where} must not be set beside tool_calls")
        before = "calling" if message.tool_calls else role
    if before not in ("user", "tool"):
        raise _build_role_error("messages", "messages must end with a message of the role user")


def _build_role_error(param: str, text: str) -> InvalidParameter:
    return InvalidParameter(text, param=param, problem="conflict")
