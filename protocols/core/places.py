"""Where the messages of a request and what is in them stand in the client's body.

A decoder notes the path of each object whose place differs from its number in the internal request.
The others stand where clients of most protocols have them.
"""

from protocols.core.request import Message, ReasoningPart, RefusalPart, Tool

_NAMES_ASIDE = {ReasoningPart: "reasoning_content", RefusalPart: "refusal"}
"""Parts that are no items of the content."""


def locate_message(message: Message, i: int) -> str:
    """The path of message number ``i``."""
    return message.at or f"messages[{i}]"


def locate_part(message: Message, i: int, k: int) -> str:
    """The path of its part number ``k``."""
    part = message.parts[k]
    if part.at:
        return part.at
    name = _NAMES_ASIDE.get(type(part), f"content[{k}]")
    return f"{locate_message(message, i)}.{name}"


def locate_call(message: Message, i: int, k: int) -> str:
    """The path of its tool call number ``k``: of the object with the name and the arguments."""
    call = message.tool_calls[k]
    return call.at or f"{locate_message(message, i)}.tool_calls[{k}].{call.kind}"


def locate_tool(tool: Tool, i: int) -> str:
    """The path of tool number ``i``: of the object with the name."""
    return tool.at or f"tools[{i}].{tool.kind}"
