"""Output formats and tools of requests are encoded in commands."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from backends.torch import commands, ipc
from protocols.core.request import (
    AllowedTools,
    ChoiceFormat,
    GenerationRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    OutputFormat,
    RegexFormat,
    TextPart,
    Tool,
    ToolCall,
)

CHAT = GenerationRequest(model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),))
TOOLS = (Tool("f", "does f", Raw(b'{"type":"object"}'), strict=True), Tool("g"))


def build_command(**fields: Any) -> ipc.GenerateCommand:
    request = replace(CHAT, **fields)
    assert commands.find_unsupported_params(request, {}, templates=False) == ()
    return commands.build_generate_command(request, 1, 9.0, templates=False)


@pytest.mark.parametrize(
    ("output", "form"),
    [
        (None, None),
        (JsonObjectFormat(), ipc.OutputRule("json", '{"type":"object"}')),
        (JsonSchemaFormat(Raw(b'{"a": 1}')), ipc.OutputRule("json", '{"a": 1}')),
        (JsonSchemaFormat(Raw(b"{}"), strict=True), ipc.OutputRule("json", "{}")),
        (
            JsonSchemaFormat(Raw(b"{}"), strict=False),
            ipc.OutputRule("json", "{}", lenient=True),
        ),
        (RegexFormat("a+"), ipc.OutputRule("regex", "a+")),
        (ChoiceFormat(("a", "\u00e9")), ipc.OutputRule("choice", '["a","\u00e9"]')),
        (GrammarFormat('root ::= "a"'), ipc.OutputRule("grammar", 'root ::= "a"')),
    ],
)
def test_output_formats_are_mapped(
    output: OutputFormat | None, form: ipc.OutputRule | None
) -> None:
    assert build_command(output=output).output_format == form


def test_output_format_keeps_the_parameter_name_of_the_client() -> None:
    form = build_command(
        output=RegexFormat("a"), provided_fields=frozenset({"model", "guided_regex"})
    ).output_format
    assert form is not None
    assert form.param == "guided_regex"


@pytest.mark.parametrize(
    ("fields", "calling"),
    [
        ({}, ipc.FunctionChoice(("f", "g"))),
        ({"tool_choice": "auto", "parallel_tools": True}, ipc.FunctionChoice(("f", "g"))),
        ({"tool_choice": "required"}, ipc.FunctionChoice(("f", "g"), required=True)),
        ({"parallel_tools": False}, ipc.FunctionChoice(("f", "g"), parallel=False)),
        (
            {"tool_choice": NamedTool("g")},
            ipc.FunctionChoice(("g",), required=True, parallel=False),
        ),
        ({"tool_choice": AllowedTools("auto", ("g",))}, ipc.FunctionChoice(("g",))),
        (
            {"tool_choice": AllowedTools("required", ("f",))},
            ipc.FunctionChoice(("f",), required=True),
        ),
    ],
)
def test_tool_choice_is_mapped_to_callable_functions(
    fields: dict[str, Any], calling: ipc.FunctionChoice
) -> None:
    command = build_command(tools=TOOLS, **fields)
    assert command.function_choice == calling
    assert command.input.functions == (
        ipc.FunctionDefinition("f", "does f", b'{"type":"object"}', strict=True),
        ipc.FunctionDefinition("g"),
    )


def test_tool_choice_none_sends_no_functions() -> None:
    command = build_command(tools=TOOLS, tool_choice="none")
    assert (command.function_choice, command.input.functions) == (None, ())


def test_tool_calls_and_results_are_mapped_to_turns() -> None:
    call = ToolCall("c1", "f", '{"a":1}')
    command = build_command(
        messages=(
            Message("assistant", (), tool_calls=(call,)),
            Message("tool", (TextPart("done"),), tool_call_id="c1"),
        )
    )

    assert command.input.turns == (
        ipc.ChatTurn("assistant", "", calls=(ipc.FunctionCall("c1", "f", '{"a":1}'),)),
        ipc.ChatTurn("tool", "done", call_id="c1"),
    )
    assert ipc.decode_commands(ipc.encode_frame([command])[4:]) == [command]
