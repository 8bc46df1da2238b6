"""Forms and functions, from core requests to what the engine is told."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from backends.torch import mapping, spec, wishes
from protocols.core.loss import UnsupportedParameter
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


def order(**fields: Any) -> spec.GenerateCommand:
    request = replace(CHAT, **fields)
    assert mapping.find_unsupported_params(request, {}, templates=False) == ()
    return mapping.build_generate_command(request, 1, 9.0, templates=False)


@pytest.mark.parametrize(
    ("output", "form"),
    [
        (None, None),
        (JsonObjectFormat(), wishes.OutputFormat("json", '{"type":"object"}')),
        (JsonSchemaFormat(Raw(b'{"a": 1}')), wishes.OutputFormat("json", '{"a": 1}')),
        (JsonSchemaFormat(Raw(b"{}"), strict=True), wishes.OutputFormat("json", "{}")),
        (
            JsonSchemaFormat(Raw(b"{}"), strict=False),
            wishes.OutputFormat("json", "{}", lenient=True),
        ),
        (RegexFormat("a+"), wishes.OutputFormat("regex", "a+")),
        (ChoiceFormat(("a", "\u00e9")), wishes.OutputFormat("choice", '["a","\u00e9"]')),
        (GrammarFormat('root ::= "a"'), wishes.OutputFormat("grammar", 'root ::= "a"')),
    ],
)
def test_forms(output: OutputFormat | None, form: wishes.OutputFormat | None) -> None:
    assert order(output=output).output_format == form


def test_a_form_is_blamed_under_the_clients_name_for_it() -> None:
    form = order(output=RegexFormat("a"), given=frozenset({"model", "guided_regex"})).output_format
    assert form is not None
    assert form.param == "guided_regex"


@pytest.mark.parametrize(
    ("fields", "calling"),
    [
        ({}, wishes.FunctionChoice(("f", "g"))),
        ({"tool_choice": "auto", "parallel_tools": True}, wishes.FunctionChoice(("f", "g"))),
        ({"tool_choice": "required"}, wishes.FunctionChoice(("f", "g"), required=True)),
        ({"parallel_tools": False}, wishes.FunctionChoice(("f", "g"), parallel=False)),
        (
            {"tool_choice": NamedTool("g")},
            wishes.FunctionChoice(("g",), required=True, parallel=False),
        ),
        ({"tool_choice": AllowedTools("auto", ("g",))}, wishes.FunctionChoice(("g",))),
        (
            {"tool_choice": AllowedTools("required", ("f",))},
            wishes.FunctionChoice(("f",), required=True),
        ),
    ],
)
def test_what_may_be_called(fields: dict[str, Any], calling: wishes.FunctionChoice) -> None:
    got = order(tools=TOOLS, **fields)
    assert got.function_choice == calling
    assert got.input.functions == (
        wishes.FunctionDefinition("f", "does f", b'{"type":"object"}', strict=True),
        wishes.FunctionDefinition("g"),
    )


def test_none_is_told_of_none() -> None:
    got = order(tools=TOOLS, tool_choice="none")
    assert (got.function_choice, got.input.functions) == (None, ())


def test_custom_tools_are_lost() -> None:
    request = replace(CHAT, tools=(Tool("c", kind="custom"),), tool_choice=NamedTool("c"))
    assert mapping.find_unsupported_params(request, {}, templates=False) == (
        UnsupportedParameter("tools", "dropped", "custom tools", "tools"),
        UnsupportedParameter("tool_choice", "dropped", "a custom tool", "tool_choice"),
    )
    got = mapping.build_generate_command(request, 1, 9.0, templates=False)
    assert (got.function_choice, got.input.functions) == (None, ())


def test_calls_and_results_in_a_conversation() -> None:
    call = ToolCall("c1", "f", '{"a":1}')
    got = order(
        messages=(
            Message("assistant", (), tool_calls=(call,)),
            Message("tool", (TextPart("done"),), tool_call_id="c1"),
        )
    )
    assert got.input.turns == (
        wishes.ChatTurn("assistant", "", calls=(wishes.FunctionCall("c1", "f", '{"a":1}'),)),
        wishes.ChatTurn("tool", "done", call_id="c1"),
    )
    assert spec.decode_commands(spec.encode_frame([got])[4:]) == [got]
