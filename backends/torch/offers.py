"""What an answer is asked to be, and what it may call: core requests to messages."""

from collections.abc import Mapping
from typing import Final

import msgspec

from backends.torch.wishes import FunctionChoice, FunctionDefinition, OutputFormat
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AllowedTools,
    ChoiceFormat,
    GenerationRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    RegexFormat,
    Tool,
)

_FORMAT_PARAMS: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex",
                 "guided_choice", "guided_grammar", "guided_decoding", "guided_decoding_guide",
                 "grammar")  # fmt: skip
"""Where clients ask for a form."""


def build_output_format(request: GenerationRequest) -> OutputFormat | None:
    """The form of the answer."""
    param = next((name for name in _FORMAT_PARAMS if name in request.given), _FORMAT_PARAMS[0])
    match request.output:
        case None:
            return None
        case JsonObjectFormat():
            return OutputFormat("json", '{"type":"object"}', param=param)
        case JsonSchemaFormat(schema, strict=strict):
            return OutputFormat("json", bytes(schema).decode(), strict is False, param)
        case RegexFormat(pattern):
            return OutputFormat("regex", pattern, param=param)
        case ChoiceFormat(options):
            return OutputFormat("choice", msgspec.json.encode(options).decode(), param=param)
        case GrammarFormat(text):
            return OutputFormat("grammar", text, param=param)


def build_functions(request: GenerationRequest) -> tuple[FunctionDefinition, ...]:
    """The functions that the model is told of: none where none may be called."""
    if request.tool_choice == "none":
        return ()
    return tuple(_build_function(tool) for tool in request.tools if tool.kind == "function")


def build_function_choice(request: GenerationRequest) -> FunctionChoice | None:
    """Which of them may be called, and whether one must be."""
    names = tuple(one.name for one in build_functions(request))
    several = request.parallel_tools is not False
    match request.tool_choice:
        case NamedTool(name):
            chosen = FunctionChoice((name,) if name in names else (), required=True, parallel=False)
        case AllowedTools(mode, allowed):
            kept = tuple(name for name in names if name in allowed)
            chosen = FunctionChoice(kept, mode == "required", several)
        case choice:
            chosen = FunctionChoice(names, choice == "required", several)
    return chosen if chosen.names else None


def find_unsupported_tools(
    request: GenerationRequest, names: Mapping[str, str]
) -> list[UnsupportedParameter]:
    """What can't be offered: tools that take free text instead of JSON."""
    custom = {tool.name for tool in request.tools if tool.kind == "custom"}
    found = []
    if custom:
        found.append(
            UnsupportedParameter(names.get("tools", "tools"), "dropped", "custom tools", "tools")
        )
    if isinstance(request.tool_choice, NamedTool) and request.tool_choice.name in custom:
        wire = names.get("tool_choice", "tool_choice")
        found.append(UnsupportedParameter(wire, "dropped", "a custom tool", "tool_choice"))
    return found


def _build_function(tool: Tool) -> FunctionDefinition:
    if tool.parameters is None:
        return FunctionDefinition(tool.name, tool.description, strict=tool.strict is True)
    return FunctionDefinition(
        tool.name, tool.description, bytes(tool.parameters), tool.strict is True
    )
