"""What an answer is asked to be, and what it may call: core requests to messages."""

from collections.abc import Mapping
from typing import Final

import msgspec

from backends.torch.spec import Calling, Form, Function
from gateway.core.loss import Loss
from gateway.core.types import (
    AllowedTools,
    Choice,
    GenerateRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    NamedTool,
    Regex,
    Tool,
)

_FORMS: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex",
                 "guided_choice", "guided_grammar", "guided_decoding", "guided_decoding_guide",
                 "grammar")  # fmt: skip
"""Where clients ask for a form."""


def form(request: GenerateRequest) -> Form | None:
    """The form of the answer."""
    param = next((name for name in _FORMS if name in request.given), _FORMS[0])
    match request.output:
        case None:
            return None
        case JsonObject():
            return Form("json", '{"type":"object"}', param=param)
        case JsonSchema(schema, strict=strict):
            return Form("json", bytes(schema).decode(), strict is False, param)
        case Regex(pattern):
            return Form("regex", pattern, param=param)
        case Choice(options):
            return Form("choice", msgspec.json.encode(options).decode(), param=param)
        case Grammar(text):
            return Form("grammar", text, param=param)


def functions(request: GenerateRequest) -> tuple[Function, ...]:
    """The functions that the model is told of: none where none may be called."""
    if request.tool_choice == "none":
        return ()
    return tuple(_function(tool) for tool in request.tools if tool.kind == "function")


def calling(request: GenerateRequest) -> Calling | None:
    """Which of them may be called, and whether one must be."""
    names = tuple(one.name for one in functions(request))
    several = request.parallel_tools is not False
    match request.tool_choice:
        case NamedTool(name):
            chosen = Calling((name,) if name in names else (), required=True, parallel=False)
        case AllowedTools(mode, allowed):
            kept = tuple(name for name in names if name in allowed)
            chosen = Calling(kept, mode == "required", several)
        case choice:
            chosen = Calling(names, choice == "required", several)
    return chosen if chosen.names else None


def lost(request: GenerateRequest, names: Mapping[str, str]) -> list[Loss]:
    """What can't be offered: tools that take free text instead of JSON."""
    custom = {tool.name for tool in request.tools if tool.kind == "custom"}
    found = []
    if custom:
        found.append(Loss(names.get("tools", "tools"), "dropped", "custom tools", "tools"))
    if isinstance(request.tool_choice, NamedTool) and request.tool_choice.name in custom:
        wire = names.get("tool_choice", "tool_choice")
        found.append(Loss(wire, "dropped", "a custom tool", "tool_choice"))
    return found


def _function(tool: Tool) -> Function:
    if tool.parameters is None:
        return Function(tool.name, tool.description, strict=tool.strict is True)
    return Function(tool.name, tool.description, bytes(tool.parameters), tool.strict is True)
