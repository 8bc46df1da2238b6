"""How families of models write the calls of functions, found out by their chat templates.

Where a template knows nothing of functions, they are told in the system's message, and calls and
their results are written as text, in the way of Hermes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from backends.torch.wishes import ChatTurn, FunctionCall, FunctionDefinition


class ToolCallFormat(Struct, frozen=True):
    """One way to write calls: ``opens`` NAME ``middle`` ARGUMENTS ``closes``.

    ``before`` stands before the first, ``between`` two of them, and ``after`` the last. A text
    goes over to calls where it comes upon ``mark``, with which a call or ``before`` begins; without
    a mark only the whole text may be calls.
    """

    template_sign: str
    """What its chat templates hold, and no earlier family's."""
    call_prefix: str
    name_separator: str
    call_suffix: str
    call_separator: str
    trigger: str = ""
    section_prefix: str = ""
    section_suffix: str = ""
    id_length: int | None = None
    """Letters and digits that its templates insist on in the id of a call."""

    def format_calls(self, calls: Sequence[FunctionCall]) -> str:
        """These calls as text."""
        each = (
            f"{self.call_prefix}{c.name}{self.name_separator}{c.arguments}{self.call_suffix}"
            for c in calls
        )
        return f"{self.section_prefix}{self.call_separator.join(each)}{self.section_suffix}"


HERMES_FORMAT: Final = ToolCallFormat(
    template_sign="<tool_call>",
    trigger="<tool_call>",
    call_prefix='<tool_call>\n{"name": "',
    name_separator='", "arguments": ',
    call_suffix="}\n</tool_call>",
    call_separator="\n",
)
TOOL_CALL_FORMATS: Final = (
    ToolCallFormat(
        template_sign="[ARGS]",
        trigger="[TOOL_CALLS]",
        call_prefix="[TOOL_CALLS]",
        name_separator="[ARGS]",
        call_suffix="",
        call_separator="",
        id_length=9,
    ),
    ToolCallFormat(
        template_sign="[TOOL_CALLS] [",
        trigger="[TOOL_CALLS]",
        section_prefix="[TOOL_CALLS] [",
        call_prefix='{"name": "',
        name_separator='", "arguments": ',
        call_suffix="}",
        call_separator=", ",
        section_suffix="]",
        id_length=9,
    ),
    ToolCallFormat(
        template_sign="[TOOL_CALLS]",
        trigger="[TOOL_CALLS]",
        section_prefix="[TOOL_CALLS][",
        call_prefix='{"name": "',
        name_separator='", "arguments": ',
        call_suffix="}",
        call_separator=", ",
        section_suffix="]",
        id_length=9,
    ),
    ToolCallFormat(
        template_sign='"parameters": dictionary',
        call_prefix='{"name": "',
        name_separator='", "parameters": ',
        call_suffix="}",
        call_separator="; ",
    ),
    HERMES_FORMAT,
)
"""Mistral (three ages), Llama 3, Hermes and Qwen; the templates on their model cards."""


def detect_tool_call_format(template: str) -> ToolCallFormat:
    """The family of a chat template; Hermes where it has no sign of any."""
    return next((one for one in TOOL_CALL_FORMATS if one.template_sign in template), HERMES_FORMAT)


def supports_functions(template: str) -> bool:
    """Whether a chat template has a place for functions."""
    return "tools" in template


# --- conversations ------------------------------------------------------------------------------


def build_function_schema(function: FunctionDefinition) -> dict[str, Any]:
    """A function as chat templates want it."""
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    return {**found, "parameters": msgspec.json.decode(function.parameters)}


def build_messages(turns: Sequence[ChatTurn], family: ToolCallFormat) -> Iterator[dict[str, Any]]:
    """A conversation for a template that knows functions."""
    for turn in turns:
        message = _build_message(turn)
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": _make_call_id(call.id, family),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
                }
                for call in turn.calls
            ]
        if turn.call_id is not None:
            message["tool_call_id"] = _make_call_id(turn.call_id, family)
        yield message


def build_plain_messages(
    turns: Sequence[ChatTurn], functions: Sequence[FunctionDefinition], family: ToolCallFormat
) -> Iterator[dict[str, Any]]:
    """A conversation for a template that knows no functions."""
    rest = list(turns)
    if functions:
        offer = _describe_functions(functions, family)
        first = rest.pop(0).content + "\n\n" if rest and rest[0].role == "system" else ""
        yield {"role": "system", "content": first + offer}
    for turn in rest:
        if turn.role == "tool":
            said = f"<tool_response>\n{turn.content}\n</tool_response>"
            yield {"role": "user", "content": said}
        elif turn.calls:
            written = family.format_calls(turn.calls)
            yield {
                **_build_message(turn),
                "content": "\n".join(filter(None, (turn.content, written))),
            }
        else:
            yield _build_message(turn)


def _describe_functions(functions: Sequence[FunctionDefinition], family: ToolCallFormat) -> str:
    each = "\n".join(msgspec.json.encode(build_function_schema(one)).decode() for one in functions)
    form = family.format_calls([FunctionCall("", "NAME", "{ARGUMENTS}")])
    return f"You can call these functions:\n{each}\nTo call one, write:\n{form}"


def _build_message(turn: ChatTurn) -> dict[str, Any]:
    message = {"role": turn.role, "content": turn.content}
    return message if turn.name is None else {**message, "name": turn.name}


def _parse_arguments(text: str) -> Any:
    """As an object, which templates write out themselves; as it is where it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _make_call_id(given: str, family: ToolCallFormat) -> str:
    """An id that the family's templates take, the same for a call and its result."""
    if family.id_length is None:
        return given
    plain_id = "".join(letter for letter in given if letter.isascii() and letter.isalnum())
    return plain_id[-family.id_length :].rjust(family.id_length, "0")
