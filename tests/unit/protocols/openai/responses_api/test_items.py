"""Input items become messages."""

from typing import Any

import pytest

from protocols.core.errors import ClientError, InvalidParameter, UnsupportedFeature
from protocols.core.request import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    ReasoningPart,
    RefusalPart,
    TextPart,
    ToolCall,
)
from protocols.openai.responses_api.items import (
    ConversationReader,
    open_reasoning,
    seal_reasoning,
)
from protocols.openai.responses_api.tools import ToolCatalog

USER = {"role": "user", "content": "hi"}
STORED = {"msg_1": {"type": "message", "role": "assistant", "content": "stored"}}


def call(call_id: str, **extra_fields: Any) -> dict[str, Any]:
    fields = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}
    return fields | extra_fields


def output(call_id: str, value: Any = "42") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def assistant(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, "status": "completed"}


def make_reasoning(text: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content} | fields


def read(*items: Any) -> tuple[Message, ...]:
    reader = ConversationReader(ToolCatalog(), STORED.__getitem__)
    reader.read_items(items)
    return reader.build_messages()


def describe(messages: tuple[Message, ...]) -> list[tuple[str, str, list[str], str | None]]:
    return [(m.role, m.text, [one.id for one in m.tool_calls], m.tool_call_id) for m in messages]


def test_roles_and_parts() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "https://x/y.png", "detail": "original"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
        {"type": "input_file", "file_data": "AA", "filename": "a.txt"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]

    developer, user, empty = read(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        {"role": "user", "content": []},
    )

    assert developer == Message("system", (TextPart("d"),))
    assert user.parts == (
        TextPart("a"),
        ImagePart("https://x/y.png", "high"),
        ImagePart("data:x", "low"),
        FilePart(file_data="AA", filename="a.txt"),
        AudioPart("AA", "wav"),
    )
    assert empty.parts == ()


def test_items_of_the_assistant_are_one_message() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}

    [_, message, first, second] = read(
        USER, make_reasoning("hm"), assistant("a"), assistant("b"), refusal, call("1"), call("2"),
        output("2"), output("1", "43"),
    )  # fmt: skip

    assert message.parts == (ReasoningPart("hm"), TextPart("a\nb"), RefusalPart("no"))
    assert message.tool_calls == (ToolCall("1", "f", "{}"), ToolCall("2", "f", "{}"))
    assert (first.tool_call_id, first.text) == ("2", "42")
    assert (second.tool_call_id, second.text) == ("1", "43")


def test_text_between_a_call_and_its_output_precedes_the_output() -> None:
    messages = read(USER, call("1"), assistant("a"), output("1"), assistant("b"))

    assert describe(messages) == [
        ("user", "hi", [], None),
        ("assistant", "a", ["1"], None),
        ("tool", "42", [], "1"),
        ("assistant", "b", [], None),
    ]


def test_call_without_output_gets_a_placeholder_output() -> None:
    messages = read(call("1"), call("2"), output("2"), USER)

    assert describe(messages)[1:3] == [("tool", "42", [], "2"), ("tool", "[no output]", [], "1")]


def test_call_ids_may_repeat_in_a_later_turn() -> None:
    messages = read(call("1"), output("1"), call("1"), output("1"))

    assert [one.role for one in messages] == ["assistant", "tool"] * 2


def test_images_in_an_output_follow_in_a_message_of_the_user() -> None:
    image = {"type": "input_image", "image_url": "data:x"}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}, image]

    _, tool, user = read(call("1"), output("1", parts))

    assert tool.text == "ab[image follows]"
    assert user == Message("user", (ImagePart("data:x"),))


def test_custom_and_search_calls() -> None:
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "p", "input": "a"}
    spaced = call("2", namespace="n")
    search = {"type": "tool_search_call", "call_id": "3", "arguments": {"query": "q"}}
    written = {"type": "tool_search_call", "call_id": "4", "arguments": "{}"}
    results = {"type": "tool_search_output", "call_id": "3", "tools": [{}, {}]}

    message, *outputs = read(
        custom, spaced, search, written,
        {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}, results,
        {"type": "tool_search_output", "call_id": "4"},
    )  # fmt: skip

    assert [(one.name, one.arguments, one.kind) for one in message.tool_calls] == [
        ("p", "a", "custom"),
        ("n__f", "{}", "function"),
        ("tool_search", '{"query":"q"}', "function"),
        ("tool_search", "{}", "function"),
    ]

    texts = [one.text for one in outputs]
    assert texts == ["ok", "2 tools added", "0 tools added", "[no output]"]


def test_reasoning_is_read_from_its_summary_or_its_sealed_content() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    sealed = make_reasoning("", encrypted_content=seal_reasoning("sealed", "sig"))
    foreign = make_reasoning("clear", encrypted_content="gAAAA")

    [message] = read(summary, sealed, foreign, {"type": "reasoning"}, assistant("a"))

    assert message.parts[:3] == (
        ReasoningPart("s"),
        ReasoningPart("sealed", "sig"),
        ReasoningPart("clear"),
    )


def test_parts_of_a_summary_stay_apart() -> None:
    parts = [{"type": "summary_text", "text": text} for text in ("**A**", "**B**")]

    [message] = read({"type": "reasoning", "summary": parts}, assistant("a"))

    assert message.parts[0] == ReasoningPart("**A**\n\n**B**")


@pytest.mark.parametrize("sealed", ["x", "gw1:", "gw1:%%%", "gw1:AAAA", "gw1:eJwDAAAAAAE="])
def test_foreign_sealed_content_is_ignored(sealed: str) -> None:
    assert open_reasoning(sealed) is None


def test_reasoning_alone_is_no_message() -> None:
    assert read(USER, make_reasoning("hm")) == read(USER)


def test_references_are_resolved() -> None:
    reader = ConversationReader(ToolCatalog(), STORED.__getitem__)

    resolved = reader.read_items([{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])

    assert resolved == [STORED["msg_1"]] * 2
    assert describe(reader.build_messages()) == [("assistant", "stored\nstored", [], None)]


def test_items_of_hosted_tools_and_tool_lists_add_no_message() -> None:
    hosted = {"type": "web_search_call", "id": "ws_1"}
    items = [{"type": "additional_tools", "tools": []}, hosted, USER]
    reader = ConversationReader(ToolCatalog(), STORED.__getitem__)

    reader.read_items(items)

    assert reader.build_messages() == read(USER)
    assert list(reader.unknown) == ["input[1]"]


def test_detail_that_chat_completions_lack_is_reported() -> None:
    reader = ConversationReader(ToolCatalog(), dict[str, Any]().__getitem__)
    images = [
        {"type": "input_image", "image_url": "data:x", "detail": one} for one in ("original", "low")
    ]

    reader.read_items([{"role": "user", "content": images}])

    assert list(reader.unknown) == ["input[0].content[0].detail"]
    [message] = reader.build_messages()
    assert [one.detail for one in message.parts if isinstance(one, ImagePart)] == ["high", "low"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[0]"),
        ({}, "input[0]"),
        ({"type": "nope"}, "input[0].type"),
        ({"type": 5}, "input[0].type"),
        ({"type": "compaction_trigger"}, "input[0].type"),
        ({"role": "bot", "content": ""}, "input[0].role"),
        ({"role": 5, "content": ""}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [5]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "x"}]}, "input[0].content[0].type"),
        ({"role": "system", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": 5}]},
         "input[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "y"}]},
         "input[0].content[0].detail"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
         "input[0].content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_file", "file_url": "f"}]},
         "input[0].content[0].file_url"),
        (call("1") | {"call_id": None}, "input[0].call_id"),
        (output("1"), "input"),
        (make_reasoning("") | {"content": 5}, "input[0].content"),
        (make_reasoning("") | {"content": [5]}, "input[0].content[0]"),
    ],
)  # fmt: skip
def test_invalid_items_name_the_field(item: Any, param: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        read(item)

    assert excinfo.value.param == param
    assert isinstance(excinfo.value, InvalidParameter | UnsupportedFeature)


def test_open_call_ids_are_unique() -> None:
    with pytest.raises(InvalidParameter, match="Duplicate call_id"):
        read(call("1"), call("1"))


@pytest.mark.parametrize(
    "item",
    [
        call("c", content=["x"]),
        call("c", output=[1]),
        {"type": "reasoning", "summary": [], "content": [{"type": ["a"], "text": "x"}]},
    ],
)
def test_unread_parts_are_no_failure(item: Any) -> None:
    read(item)
