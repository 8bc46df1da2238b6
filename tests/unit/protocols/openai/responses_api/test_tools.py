"""Tools of the Responses API are translated for workers, and their calls back."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.core.errors import ClientError, InvalidParameter, UnsupportedFeature
from protocols.core.request import AllowedTools, NamedTool
from protocols.openai.responses_api import tools as module
from protocols.openai.responses_api.tools import (
    OPTIONAL_HOSTED_TOOLS,
    REQUIRED_HOSTED_TOOLS,
    ToolCatalog,
    ToolIdentity,
    list_tool_objects,
)

F = {"type": "function", "name": "f", "parameters": {"type": "object"}}
P = {"type": "custom", "name": "p", "description": "d"}


def encode(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def read(*tools: Any, allows_hosted: bool = False) -> ToolCatalog:
    catalog = ToolCatalog(allows_hosted=allows_hosted)
    catalog.read_tools(encode(tools), "tools")
    return catalog


def names(catalog: ToolCatalog) -> list[str]:
    return [tool.name for tool in catalog.tools]


def test_function_keeps_its_schema_and_may_be_nested_as_in_chat() -> None:
    nested = {"type": "function", "function": {"name": "g", "strict": True}}

    first, second = read(F, nested).tools

    assert (first.name, msgspec.json.decode(first.parameters or b"")) == ("f", {"type": "object"})
    assert (second.name, second.strict) == ("g", True)


def test_custom_tool_has_its_format_as_in_chat_completions() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: A"}
    nested = {"type": "custom", "custom": {"name": "q", "format": grammar}}
    plain = P | {"format": {"type": "text"}}

    catalog = read(plain, nested, P | {"name": "r"})

    first, second, third = catalog.tools
    assert (first.kind, first.description, first.at) == ("custom", "d", "tools[0]")
    assert msgspec.json.decode(first.parameters or b"") == {"type": "text"}
    assert msgspec.json.decode(second.parameters or b"") == {
        "type": "grammar",
        "grammar": {"syntax": "lark", "definition": "start: A"},
    }
    assert (second.at, third.parameters) == ("tools[1].custom", None)
    assert catalog.identify("p") == ToolIdentity("custom", "p")
    assert catalog.identify("unknown") == ToolIdentity("function", "unknown")


def test_members_of_a_namespace_get_a_flat_name() -> None:
    space = {"type": "namespace", "name": "n", "description": "About n.", "tools": [F, P]}

    catalog = read(space, F)

    assert names(catalog) == ["n__f", "n__p", "f"]
    assert catalog.tools[0].description == "About n."
    assert catalog.tools[1].description == "About n.\n\nd"
    assert catalog.identify("n__f") == ToolIdentity("function", "f", "n")
    assert catalog.flatten_name("n", "f") == "n__f"
    assert catalog.flatten_name("m", "f") == "m__f"
    assert catalog.flatten_name(None, "f") == "f"


def test_long_and_colliding_flat_names_are_shortened() -> None:
    long = {"type": "namespace", "name": "n" * 40, "tools": [F | {"name": "f" * 40}]}
    space = {"type": "namespace", "name": "n", "tools": [F]}

    catalog = read(F | {"name": "n__f"}, space, long)

    flat = names(catalog)
    assert flat[0] == "n__f"
    assert flat[1] != "n__f"
    assert flat[1].startswith("n__f_")
    assert len(flat[2]) == 64
    assert catalog.identify(flat[1]) == ToolIdentity("function", "f", "n")


def test_client_side_tool_search_is_a_function() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "d"}

    catalog = read(search)

    assert names(catalog) == ["tool_search"]
    assert catalog.identify("tool_search").kind == "tool_search"


def test_optional_hosted_tools_are_dropped_by_name() -> None:
    catalog = read({"type": "web_search"}, {"type": "tool_search"})

    assert list(catalog.dropped_tools) == ["tools.web_search", "tools.tool_search"]
    assert not catalog.tools


@pytest.mark.parametrize("kind", sorted(REQUIRED_HOSTED_TOOLS))
def test_other_hosted_tools_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedFeature, match=kind) as excinfo:
        read(F, {"type": kind})

    assert excinfo.value.param == "tools[1].type"
    assert not read({"type": kind}, allows_hosted=True).tools


def test_later_tools_replace_those_of_the_same_name() -> None:
    catalog = read(F)

    catalog.read_tools(encode([F | {"description": "new"}]), "input.tools", replaces=True)

    assert [tool.description for tool in catalog.tools] == ["new"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([5], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "nope"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "custom", "name": ""}], "tools[0].name"),
        ([P | {"format": {"type": "regex"}}], "tools[0].format.type"),
        ([P | {"format": {"type": "grammar", "syntax": "lark"}}], "tools[0].format.definition"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}],
         "tools[0].tools[0].type"),
        ([{"type": "tool_search", "execution": "client", "parameters": 5}], "tools[0].parameters"),
        ([F, F], "tools[1].name"),
    ],
)  # fmt: skip
def test_invalid_tools_name_the_field(tools: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read(*tools)

    assert excinfo.value.param == param


def test_number_of_tools_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOOLS", 2)
    members = [F | {"name": f"f{i}"} for i in range(3)]

    with pytest.raises(InvalidParameter):
        read(*members)
    with pytest.raises(InvalidParameter, match="more than 2 tools"):
        read({"type": "namespace", "name": "n", "tools": members[:2]}, members[2])


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, NamedTool("f")),
        ({"type": "function", "function": {"name": "f"}}, NamedTool("f")),
        ({"type": "custom", "name": "p"}, NamedTool("p")),
        ({"type": "function", "name": "g"}, NamedTool("n__g")),
        ({"type": "function", "name": "n__g"}, NamedTool("n__g")),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, F]},
            AllowedTools("auto", ("f",)),
        ),
    ],
)
def test_tool_choice(choice: Any, wanted: Any) -> None:
    space = {"type": "namespace", "name": "n", "tools": [F | {"name": "g"}]}

    assert read(F, P, space).read_choice(encode(choice)) == wanted


def test_choice_without_tools_is_none() -> None:
    assert ToolCatalog().read_choice(None) is None
    assert ToolCatalog().read_choice(encode("auto")) is None


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("maybe", "tool_choice"),
        (5, "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": {}}, "tool_choice.type"),
        ({"type": "nope"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "x"}, "tool_choice"),
        ({"type": "function", "name": "twice"}, "tool_choice"),
        ({"type": "mcp"}, "tool_choice.type"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "x"}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [5]}, "tool_choice.tools[0]"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "later", "name": "f"}]},
            "tool_choice.tools[0].type",
        ),
    ],
)
def test_invalid_tool_choice_names_the_field(choice: Any, param: str) -> None:
    spaces = [
        {"type": "namespace", "name": name, "tools": [F | {"name": "twice"}]} for name in "ab"
    ]

    with pytest.raises(ClientError) as excinfo:
        read(F, *spaces).read_choice(encode(choice))

    assert excinfo.value.param == param


@pytest.mark.parametrize(
    "choice", ["required", {"type": "allowed_tools", "mode": "auto", "tools": []}]
)
def test_choice_needs_tools(choice: Any) -> None:
    with pytest.raises(InvalidParameter, match="only allowed when 'tools'"):
        ToolCatalog().read_choice(encode(choice))


def test_hosted_choice_is_left_to_a_worker_that_has_the_tool() -> None:
    kind = next(iter(OPTIONAL_HOSTED_TOOLS))

    assert read({"type": kind}, allows_hosted=True).read_choice(encode({"type": kind})) is None
    assert read({"type": "mcp"}, allows_hosted=True).tools == ()


def test_response_repeats_the_tools() -> None:
    assert list_tool_objects(None) == ()
    assert [bytes(one) for one in list_tool_objects(Raw(b'[{"a":1}]'))] == [b'{"a":1}']


def test_unknown_keys_of_tools_and_their_formats_are_lost_by_other_workers() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "d", "x": 1}
    member = {"type": "function", "name": "h", "parameters": {}}
    catalog = read(
        {"type": "custom", "name": "f", "format": {"type": "text", "x": 1, "y": None}},
        {"type": "custom", "custom": {"name": "g", "format": grammar}},
        {"type": "namespace", "name": "n", "tools": [member], "x": 1, "y": None},
    )

    assert [*catalog.dropped_tools] == [
        "tools[0].format.x",
        "tools[1].custom.format.x",
        "tools[2].x",
    ]
