"""Tools, tool choices and output formats are decoded, rejected and encoded."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.chat.response_format import read_structured_outputs, write_structured_outputs
from protocols.chat.tools import (
    is_valid_chat,
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


def build_fields(**values: Any) -> dict[str, Raw]:
    return read_object(json.dumps(values).encode())


def test_tools_round_trip() -> None:
    tools = read_tools(build_fields(tools=[FUNCTION, CUSTOM]))
    assert json.loads(msgspec.json.encode(write_tools(tools))) == [FUNCTION, CUSTOM]
    assert read_tools(build_fields(tools=None)) == ()


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
def test_tool_choice_round_trips(wire: Any, choice: ToolChoice) -> None:
    tool_choice = read_tool_choice(build_fields(tool_choice=wire), TOOLS)
    assert tool_choice == choice
    assert tool_choice is not None
    assert write_tool_choice(tool_choice, TOOLS) == wire


def test_tool_choice_none_is_accepted_without_tools() -> None:
    assert read_tool_choice(build_fields(tool_choice="none"), ()) == "none"


def test_allowed_tools_restrict_the_tool_list() -> None:
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
def test_invalid_tool_choice_is_rejected(choice: Any, param: str, problem: str) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_tool_choice(build_fields(tool_choice=choice), TOOLS)
    assert (excinfo.value.param, excinfo.value.problem) == (param, problem)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        (
            {"functions": [{"name": "f", "parameters": []}]},
            "functions[0].parameters",
        ),
    ],
)
def test_invalid_legacy_functions_are_rejected(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_functions(build_fields(**body))
    assert excinfo.value.param == param


def test_legacy_functions_without_a_named_function_call() -> None:
    assert read_functions(build_fields(functions=[{"name": "f"}])) == ((Tool("f"),), None)
    assert (
        read_functions(build_fields(functions=[{"name": "f"}], function_call="none"))[1] == "none"
    )


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
def test_structured_outputs_are_decoded(body: dict[str, Any], output: OutputFormat | None) -> None:
    assert read_structured_outputs(build_fields(**body)) == output


@pytest.mark.parametrize("wrong", [{"regex": 1}, {"choice": []}, {"choice": [1]}, {"json": 5}])
def test_invalid_structured_outputs_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_structured_outputs(build_fields(structured_outputs=wrong))
    assert excinfo.value.param == f"structured_outputs.{next(iter(wrong))}"


def test_guided_json_string_must_be_a_json_object() -> None:
    for wrong in ("{not json", "[]", "{} {}"):
        with pytest.raises(InvalidParameter) as excinfo:
            read_structured_outputs(build_fields(guided_json=wrong))
        assert excinfo.value.param == "guided_json"


def test_json_schema_format_without_schema_is_accepted() -> None:
    wire = {"type": "json_schema", "json_schema": {"name": "any"}}

    assert read_response_format(build_fields(response_format=wire)) == JsonSchemaFormat(
        Raw(b"{}"), "any"
    )


def test_structured_outputs_exclude_formats_of_response_format() -> None:
    assert write_structured_outputs(RegexFormat("a")) == {"regex": "a"}
    assert write_structured_outputs(JsonObjectFormat()) is None


def test_parameters_of_a_function_are_an_object_or_null() -> None:
    tool: dict[str, Any] = {
        "type": "function",
        "function": {"name": "f", "parameters": None, "strict": False},
    }
    assert read_tools(build_fields(tools=[tool])) == (Tool("f", strict=False),)

    tool["function"] = {"name": "f", "parameters": [1]}
    with pytest.raises(InvalidParameter) as excinfo:
        read_tools(build_fields(tools=[tool]))
    assert excinfo.value.param == "tools[0].function.parameters"


def test_rules_between_fields_hold_where_a_worker_has_no_tool_choice() -> None:
    """Such as Ollama's: the body that is decoded has no such field."""
    body = SimpleNamespace(logprobs=True, tools=[])

    assert is_valid_chat(body, {"top_logprobs", "tools"})
    assert not is_valid_chat(SimpleNamespace(logprobs=None, tools=[]), {"top_logprobs", "tools"})
