"""Each kind of message part is decoded and encoded."""

from typing import Any

import pytest
from msgspec import Raw

from protocols.chat.content_parts import read_part, write_part
from protocols.chat.messages import (
    USER_PART_TYPES,
    MessageRules,
    MessageStyle,
    read_messages,
    write_messages,
)
from protocols.core.errors import InvalidParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    ImagePart,
    Message,
    ReasoningPart,
    RefusalPart,
    TextPart,
    ToolCall,
    VideoPart,
)

EVERY = (*USER_PART_TYPES, "refusal", "reasoning")
KINDS: list[tuple[dict[str, Any], ContentPart]] = [
    ({"type": "text", "text": "a"}, TextPart("a")),
    ({"type": "image_url", "image_url": {"url": "u"}}, ImagePart("u")),
    ({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, ImagePart("u", "low")),
    ({"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}}, AudioPart("d", "wav")),
    ({"type": "audio_url", "audio_url": {"url": "u"}}, AudioPart("u")),
    ({"type": "video_url", "video_url": {"url": "u"}}, VideoPart("u")),
    (
        {"type": "file", "file": {"file_data": "d", "filename": "n"}},
        FilePart(file_data="d", filename="n"),
    ),
]


@pytest.mark.parametrize(("wire", "part"), KINDS)
def test_content_parts_round_trip(wire: dict[str, Any], part: ContentPart) -> None:
    assert read_part(wire, "at", EVERY) == (part,)
    assert write_part(part) == wire


def test_reasoning_parts_are_read_from_a_summary() -> None:
    item = {"type": "summary_text", "text": "a", "signature": "s"}
    wire = {"type": "reasoning", "summary": [item, {"text": "b"}]}

    assert read_part(wire, "at", EVERY) == (ReasoningPart("a", "s"), ReasoningPart("b"))
    assert read_part({"type": "refusal", "refusal": "no"}, "at", EVERY) == (RefusalPart("no"),)


@pytest.mark.parametrize(
    ("wire", "param", "problem"),
    [
        ("x", "at", "type"),
        ({}, "at.type", "missing"),
        ({"type": "text", "text": 1}, "at.text", "type"),
        ({"type": "image_url", "image_url": "u"}, "at.image_url", "type"),
        (
            {"type": "image_url", "image_url": {"url": "u", "detail": "x"}},
            "at.image_url.detail",
            "value",
        ),
        ({"type": "input_audio"}, "at.input_audio", "missing"),
        ({"type": "file", "file": {}}, "at.file.file_id", "missing"),
        ({"type": "reasoning"}, "at.summary", "type"),
        ({"type": "reasoning", "summary": [1]}, "at.summary[0]", "type"),
    ],
)
def test_invalid_content_part_is_rejected(wire: Any, param: str, problem: str) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_part(wire, "at", EVERY)
    assert (excinfo.value.param, excinfo.value.problem) == (param, problem)


def read_json_messages(*messages: str, rules: MessageRules) -> tuple[Message, ...]:
    return read_messages(Raw(f"[{','.join(messages)}]".encode()), rules)


CALL = '{"role":"assistant","tool_calls":[{"id":"a","type":"%s","%s":{"name":"f","%s":%s}}]}'


def test_message_rules_are_configurable() -> None:
    rules = MessageRules(
        roles=("user", "assistant"),
        requires_tool_results=False,
        accepts_argument_objects=True,
    )
    messages = read_json_messages(
        CALL % ("function", "function", "arguments", '{"x":1}'), rules=rules
    )
    assert messages[0].tool_calls == (ToolCall("a", "f", '{"x":1}'),)

    messages = read_json_messages(CALL % ("custom", "custom", "input", '"go"'), rules=rules)
    assert messages[0].tool_calls == (ToolCall("a", "f", "go", "custom"),)
    with pytest.raises(InvalidParameter):
        read_json_messages('{"role":"system","content":"x"}', rules=rules)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (CALL % ("magic", "magic", "x", "1"), "messages[0].tool_calls[0].type"),
        (
            CALL % ("function", "function", "arguments", "{}"),
            "messages[0].tool_calls[0].function.arguments",
        ),
        ('{"role":"assistant","tool_calls":{}}', "messages[0].tool_calls"),
        ('{"role":"assistant","tool_calls":[1]}', "messages[0].tool_calls[0]"),
        (
            '{"role":"assistant","function_call":{"name":"f"}}',
            "messages[0].function_call.arguments",
        ),
    ],
)
def test_invalid_tool_call_is_rejected(call: str, param: str) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_json_messages(call, rules=MessageRules())
    assert excinfo.value.param == param


def test_message_style_is_configurable() -> None:
    messages = (
        Message("developer", (TextPart("a"), TextPart("b"))),
        Message("assistant", (ReasoningPart("hm"), RefusalPart("no"))),
    )
    writing = MessageStyle(
        part_format="joined",
        empty_content="",
        includes_reasoning=True,
        role_mapping=(("developer", "system"),),
    )

    first, second = write_messages(messages, writing)

    assert (first.role, first.content) == ("system", "ab")
    assert (second.content, second.reasoning_content, second.refusal) == ("", "hm", "no")


def test_images_of_tool_results_follow_in_a_users_message() -> None:
    """In this format a tool message contains only text."""
    image, file = ImagePart("u"), FilePart(file_data="d")
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))
    called = Message("assistant", tool_calls=calls)
    results = (
        Message("tool", (TextPart("x"), image, image), tool_call_id="a"),
        Message("tool", (file,), tool_call_id="b"),
        Message("tool", (TextPart("y"),), tool_call_id="c"),
    )
    user, assistant = Message("user", (TextPart("z"),)), Message("assistant", (TextPart("w"),))

    for after in ((), (user,), (assistant,)):
        _, first, second, third, follower, *rest = write_messages(
            (called, *results, *after), MessageStyle()
        )

        assert first.content == "x\n[image 1 of call a follows]\n[image 2 of call a follows]"
        assert (second.content, third.content) == ("[file 1 of call b follows]", "y")
        assert follower.role == "user"
        assert isinstance(follower.content, list)
        labels = [part["text"] for part in follower.content if part["type"] == "text"]
        notes = ["[image 1 of call a]", "[image 2 of call a]", "[file 1 of call b]"]
        assert labels == [*notes, "z"] if after == (user,) else labels == notes
        assert [one.role for one in rest] == (["assistant"] if after == (assistant,) else [])
