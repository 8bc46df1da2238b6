"""Tools, choices, and outputs: what is read, what is refused, what is written."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.chat.response_format import read_structured_outputs, write_structured_outputs
from protocols.chat.tools import (
    read_functions,
    read_response_format,
    read_tool_choice,
    read_tools,
    restrict_tools,
    write_tool_choice,
    write_tools,
)
from protocols.core.errors import InvalidParameter
from protocols.core.request import (
    AllowedTools,
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    OutputFormat,
    RegexFormat,
    Tool,
    ToolChoice,
)
from protocols.json_body import read_object

FUNCTION = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
CUSTOM = {"type": "custom", "custom": {"name": "c", "description": "d", "format": {"type": "text"}}}
TOOLS = (Tool("f"), Tool("c", kind="custom"))


def fields(**values: Any) -> dict[str, Raw]:
    return read_object(json.dumps(values).encode())


def test_tools_survive_both_ways() -> None:
    tools = read_tools(fields(tools=[FUNCTION, CUSTOM]))
    assert json.loads(msgspec.json.encode(write_tools(tools))) == [FUNCTION, CUSTOM]
    assert read_tools(fields(tools=None)) == ()


ALLOWED = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "c"}}]}


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, NamedTool("f")),
        ({"type": "custom", "custom": {"name": "c"}}, NamedTool("c")),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, AllowedTools("auto", ("c",))),
    ],
)
def test_choices_survive_both_ways(wire: Any, choice: ToolChoice) -> None:
    found = read_tool_choice(fields(tool_choice=wire), TOOLS)
    assert found == choice
    assert found is not None
    assert write_tool_choice(found, TOOLS) == wire


def test_no_tool_may_always_be_chosen() -> None:
    assert read_tool_choice(fields(tool_choice="none"), ()) == "none"


def test_allowed_tools_become_all_there_are() -> None:
    assert restrict_tools(AllowedTools("required", ("f",)), TOOLS) == ("required", TOOLS[:1])
    assert restrict_tools("auto", TOOLS) == ("auto", TOOLS)


@pytest.mark.parametrize(
    ("choice", "param", "problem"),
    [
        (5, "tool_choice", "type"),
        ({"type": "magic"}, "tool_choice.type", "value"),
        ({"type": "function"}, "tool_choice.function", "missing"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "missing"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "any"}},
            "tool_choice.allowed_tools.mode",
            "value",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
            "tool_choice.allowed_tools.tools",
            "missing",
        ),
    ],
)
def test_choices_that_are_wrong(choice: Any, param: str, problem: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_tool_choice(fields(tool_choice=choice), TOOLS)
    assert (caught.value.param, caught.value.problem) == (param, problem)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}] * 129}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        (
            {"functions": [{"name": "f", "parameters": []}]},
            "functions[0].parameters",
        ),
    ],
)
def test_functions_that_are_wrong(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_functions(fields(**body))
    assert caught.value.param == param


def test_functions_without_a_call() -> None:
    assert read_functions(fields(functions=[{"name": "f"}])) == ((Tool("f"),), None)
    assert read_functions(fields(functions=[{"name": "f"}], function_call="none"))[1] == "none"


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": True}}, JsonObjectFormat()),
        ({"structured_outputs": {"json": {"a": 1}}}, JsonSchemaFormat(Raw(b'{"a": 1}'))),
        ({"structured_outputs": {"json": '{"a":1}'}}, JsonSchemaFormat(Raw(b'{"a":1}'))),
        ({"guided_json": {"a": 1}}, JsonSchemaFormat(Raw(b'{"a": 1}'))),
        ({"structured_outputs": {"regex": "a"}}, RegexFormat("a")),
        ({"structured_outputs": {"grammar": "g"}}, GrammarFormat("g")),
        ({"structured_outputs": {"choice": ["a"]}}, ChoiceFormat(("a",))),
    ],
)
def test_structured_outputs(body: dict[str, Any], output: OutputFormat | None) -> None:
    assert read_structured_outputs(fields(**body)) == output


@pytest.mark.parametrize("wrong", [{"regex": 1}, {"choice": []}, {"choice": [1]}, {"json": 5}])
def test_structured_outputs_that_are_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_structured_outputs(fields(structured_outputs=wrong))
    assert caught.value.param == f"structured_outputs.{next(iter(wrong))}"


def test_a_schema_given_as_text_must_be_json() -> None:
    for wrong in ("{not json", "[]", "{} {}"):
        with pytest.raises(InvalidParameter) as caught:
            read_structured_outputs(fields(guided_json=wrong))
        assert caught.value.param == "guided_json"


def test_a_schema_may_be_left_out() -> None:
    wire = {"type": "json_schema", "json_schema": {"name": "any"}}

    assert read_response_format(fields(response_format=wire)) == JsonSchemaFormat(Raw(b"{}"), "any")


def test_only_what_response_format_can_not_say_is_written() -> None:
    assert write_structured_outputs(RegexFormat("a")) == {"regex": "a"}
    assert write_structured_outputs(JsonObjectFormat()) is None
