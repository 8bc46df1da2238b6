"""Custom tools become functions for targets without them, and their calls custom calls again."""

from typing import Any

import pytest
from msgspec import Raw

from gateway.runtime.build import build_adapter
from protocols.core.custom_tools import (
    TEXT_PARAMETERS,
    CustomCallReader,
    CustomInputReader,
    has_custom_tools,
    replace_custom_tools,
)
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import ChoiceEnd, Event, ResponseExtra, ToolCallDelta, ToolCallStart
from protocols.core.interfaces import build_custom_tools_check, build_kept_keys_reader
from protocols.core.request import (
    EmbeddingRequest,
    ExtraFields,
    GenerationRequest,
    Message,
    TextPart,
    Tool,
    ToolCall,
)

FUNCTION = Tool("g", parameters=Raw(b"{}"))
CALL = ToolCall("c1", "f", "go", "custom", ExtraFields("messages[1].tool_calls[0]", {("x",): 1}))
FUNCTION_CALL = ToolCall("c2", "g", "{}", extra=ExtraFields("here", {("x",): 1}))


def ask(*tools: Tool, calls: tuple[ToolCall, ...] = ()) -> GenerationRequest:
    messages = (Message("user", (TextPart("hi"),)), Message("assistant", tool_calls=calls))
    return GenerationRequest(model="m", kind="chat", messages=messages, tools=tools)


@pytest.mark.parametrize(
    ("form", "description", "lost"),
    [
        (None, "d", []),
        (b'{"type":"text"}', "d", []),
        (
            b'{"type":"grammar","grammar":{"syntax":"lark","definition":"s: X"}}',
            "d\n\nThe input must match this lark grammar:\ns: X",
            ["tools[1].custom.format"],
        ),
        (
            b'{"type":"grammar","syntax":"regex","definition":"a"}',
            "d\n\nThe input must match this regex grammar:\na",
            ["tools[1].custom.format"],
        ),
    ],
)
def test_a_custom_tool_becomes_a_function_with_one_text(
    form: bytes | None, description: str, lost: list[str]
) -> None:
    extra = ExtraFields("tools[1]", {("custom", "x"): 1})
    tool = Tool("f", "d", None if form is None else Raw(form), kind="custom", extra=extra)
    original = ask(FUNCTION, tool)
    request, losses = replace_custom_tools(original)

    assert has_custom_tools(original)
    assert request.tools == (FUNCTION, Tool("f", description, TEXT_PARAMETERS, wraps_text=True))
    assert [one.field for one in losses if one.reason == "emulated"] == ["tools[1].custom"]
    assert [one.field for one in losses if one.reason == "approximated"] == lost
    assert [one.field for one in losses if one.reason == "dropped"] == ["tools[1].custom.x"]


def test_unknown_keys_of_a_format_are_reported() -> None:
    form = Raw(b'{"type":"grammar","x":1,"grammar":{"syntax":"regex","definition":"a","y":2}}')

    _, losses = replace_custom_tools(ask(Tool("f", parameters=form, kind="custom", at="tools[3]")))

    assert [(one.field, one.reason) for one in losses] == [
        ("tools[3]", "emulated"),
        ("tools[3].format", "approximated"),
        ("tools[3].format.x", "dropped"),
        ("tools[3].format.grammar.y", "dropped"),
    ]


def test_a_call_of_a_custom_tool_becomes_one_of_a_function() -> None:
    original = ask(FUNCTION, calls=(FUNCTION_CALL, CALL))
    request, losses = replace_custom_tools(original)

    wanted = (FUNCTION_CALL, ToolCall("c1", "f", '{"input":"go"}'))
    assert has_custom_tools(original)
    assert request.messages[1].tool_calls == wanted
    assert [(one.field, one.reason) for one in losses] == [
        ("messages[1].tool_calls[1].custom", "emulated"),
        ("messages[1].tool_calls[0].x", "dropped"),
    ]


def test_a_tool_and_a_call_without_unknown_keys_lose_nothing() -> None:
    call = ToolCall("c1", "f", "go", "custom")
    _, losses = replace_custom_tools(ask(Tool("f", kind="custom"), calls=(call,)))

    assert {one.reason for one in losses} == {"emulated"}


@pytest.mark.parametrize(
    ("protocol", "profile", "options", "wanted"),
    [
        ("openai", "openai", {}, True),
        ("openai", "azure", {}, False),
        ("openai", "azure", {"api_version": "v1"}, True),
        ("openai", "vllm", {}, False),
        ("openai", "vllm", {"worker_api": "responses"}, True),
        ("anthropic", None, {}, False),
    ],
)
def test_workers_with_custom_tools_keep_them(
    protocol: str, profile: str | None, options: dict[str, str], wanted: bool
) -> None:
    adapter: Any = build_adapter(protocol, profile, options)

    assert build_custom_tools_check(adapter)(ask(Tool("f", kind="custom"))) is wanted


@pytest.mark.parametrize(
    "request_", [ask(FUNCTION, calls=(FUNCTION_CALL,)), EmbeddingRequest(model="m", inputs=("a",))]
)
def test_other_requests_stay_as_they_are(request_: GenerationRequest | EmbeddingRequest) -> None:
    assert not has_custom_tools(request_)


def test_calls_of_text_functions_are_those_of_custom_tools() -> None:
    """Given calls in two choices, the rest of each input comes before the end of its choice."""
    reader = CustomCallReader([FUNCTION, Tool("f", wraps_text=True)])
    others: list[Event] = [
        ToolCallStart(0, 1, "c2", "g"),
        ToolCallDelta(0, 1, "{}"),
    ]
    events: list[Event] = [
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, '{"in'),
        ToolCallDelta(0, 0, 'put":"go'),
        ToolCallStart(1, 0, "c3", "f"),
        ToolCallDelta(1, 0, "text"),
        *others,
        ToolCallDelta(0, 0, '"}'),
        ChoiceEnd("tool_calls"),
        ChoiceEnd("tool_calls", 1),
    ]

    assert [*reader.apply(events[:3]), *reader.apply(events[3:])] == [
        ToolCallStart(0, 0, "c1", "f", "custom"),
        ToolCallDelta(0, 0, "go"),
        ToolCallStart(1, 0, "c3", "f", "custom"),
        *others,
        ChoiceEnd("tool_calls"),
        ToolCallDelta(1, 0, "text"),
        ChoiceEnd("tool_calls", 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ('{"input":"a","x":1}', ((("function", "arguments", "x"), 1),)),
        ('{"x":{},"input":"a"}', ((("function", "arguments", "x"), {}),)),
        ('{"input":"a"}', ()),
        ('{"input":5,"x":1}', ()),
        ('{"input":"a', ()),
    ],
)
def test_arguments_that_a_custom_tool_has_not_are_reported(arguments: str, values: Any) -> None:
    reader = CustomCallReader([Tool("f", wraps_text=True)])

    events = reader.apply(
        [
            ToolCallStart(0, 0, "c1", "f"),
            ToolCallDelta(0, 0, arguments),
            ChoiceEnd("tool_calls"),
        ]
    )

    extras = [one for one in events if isinstance(one, ResponseExtra)]
    assert extras == ([ResponseExtra("", "tool_call", values)] if values else [])


def read_input(*pieces: str) -> tuple[list[str], str]:
    reader = CustomInputReader()
    parts = [reader.feed(piece) for piece in pieces]
    return parts, "".join(parts) + reader.close()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"input":"a\\"b\\\\c\\u00e9\\ud83d\\ude00"}', 'a"b\\cé😀'),
        (' { "input" : "a", "more": 1}', "a"),
        ('{"input":"tab\there"}', "tab\there"),
        ('{"input":"cut', "cut"),
        ('{"input":"cut\\', "cut\ufffd"),
        ('{"input":"cut\\u12', "cut\ufffd"),
        ('{"input":"a\\ud83db"}', "a\ufffdb"),
        ('{"input":"a\\qb"}', "a\ufffdb"),
        ('{"more":1,"input":"late"}', "late"),
        ("plain text", "plain text"),
        ('{"input":5}', '{"input":5}'),
        ("", ""),
    ],
)
def test_input_is_the_same_for_any_pieces(text: str, wanted: str) -> None:
    assert read_input(text)[1] == wanted
    assert read_input(*text)[1] == wanted


def test_only_complete_characters_are_passed_on() -> None:
    parts, _ = read_input('{"input":"a\\', "nb\\ud83d", "\\ude00", '"}')

    assert parts == ["a", "\nb", "😀", ""]


def test_a_function_of_a_custom_tool_s_name_is_refused() -> None:
    """Otherwise the worker would get two functions of one name."""
    request = GenerationRequest(
        model="m",
        kind="chat",
        tools=(Tool("f"), Tool("g", kind="custom"), Tool("f", kind="custom")),
    )

    with pytest.raises(UnsupportedFeature, match="one is called 'f'") as excinfo:
        replace_custom_tools(request)

    assert excinfo.value.param == "tools[2].custom.name"


def test_adapters_that_say_nothing_of_unknown_keys_keep_none() -> None:
    read = build_kept_keys_reader(object())  # type: ignore[arg-type]

    assert read(GenerationRequest(model="m", kind="chat")) == {}
