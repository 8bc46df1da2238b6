"""Forms and functions, from core requests to what the engine is told."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from backends.torch import mapping, spec
from gateway.core.loss import Loss
from gateway.core.types import (
    AllowedTools,
    Choice,
    GenerateRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    OutputFormat,
    Regex,
    TextPart,
    Tool,
    ToolCall,
)

CHAT = GenerateRequest(model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),))
TOOLS = (Tool("f", "does f", Raw(b'{"type":"object"}'), strict=True), Tool("g"))


def order(**fields: Any) -> spec.Generate:
    request = replace(CHAT, **fields)
    assert mapping.lost(request, {}, templates=False) == ()
    return mapping.generate(request, 1, 9.0, templates=False)


@pytest.mark.parametrize(
    ("output", "form"),
    [
        (None, None),
        (JsonObject(), spec.Form("json", '{"type":"object"}')),
        (JsonSchema(Raw(b'{"a": 1}')), spec.Form("json", '{"a": 1}')),
        (JsonSchema(Raw(b"{}"), strict=True), spec.Form("json", "{}")),
        (JsonSchema(Raw(b"{}"), strict=False), spec.Form("json", "{}", lenient=True)),
        (Regex("a+"), spec.Form("regex", "a+")),
        (Choice(("a", "\u00e9")), spec.Form("choice", '["a","\u00e9"]')),
        (Grammar('root ::= "a"'), spec.Form("grammar", 'root ::= "a"')),
    ],
)
def test_forms(output: OutputFormat | None, form: spec.Form | None) -> None:
    assert order(output=output).output_format == form


def test_a_form_is_blamed_under_the_clients_name_for_it() -> None:
    form = order(output=Regex("a"), given=frozenset({"model", "guided_regex"})).output_format
    assert form is not None
    assert form.param == "guided_regex"


@pytest.mark.parametrize(
    ("fields", "calling"),
    [
        ({}, spec.Calling(("f", "g"))),
        ({"tool_choice": "auto", "parallel_tools": True}, spec.Calling(("f", "g"))),
        ({"tool_choice": "required"}, spec.Calling(("f", "g"), required=True)),
        ({"parallel_tools": False}, spec.Calling(("f", "g"), parallel=False)),
        ({"tool_choice": NamedTool("g")}, spec.Calling(("g",), required=True, parallel=False)),
        ({"tool_choice": AllowedTools("auto", ("g",))}, spec.Calling(("g",))),
        ({"tool_choice": AllowedTools("required", ("f",))}, spec.Calling(("f",), required=True)),
    ],
)
def test_what_may_be_called(fields: dict[str, Any], calling: spec.Calling) -> None:
    got = order(tools=TOOLS, **fields)
    assert got.function_choice == calling
    assert got.input.functions == (
        spec.Function("f", "does f", b'{"type":"object"}', strict=True),
        spec.Function("g"),
    )


def test_none_is_told_of_none() -> None:
    got = order(tools=TOOLS, tool_choice="none")
    assert (got.function_choice, got.input.functions) == (None, ())


def test_custom_tools_are_lost() -> None:
    request = replace(CHAT, tools=(Tool("c", kind="custom"),), tool_choice=NamedTool("c"))
    assert mapping.lost(request, {}, templates=False) == (
        Loss("tools", "dropped", "custom tools", "tools"),
        Loss("tool_choice", "dropped", "a custom tool", "tool_choice"),
    )
    got = mapping.generate(request, 1, 9.0, templates=False)
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
        spec.Turn("assistant", "", calls=(spec.Call("c1", "f", '{"a":1}'),)),
        spec.Turn("tool", "done", call_id="c1"),
    )
    assert spec.read_orders(spec.frame([got])[4:]) == [got]
