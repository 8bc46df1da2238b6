"""A message with two different texts of reasoning keeps both, or the second is reported."""

import json
from typing import Any, cast

import msgspec
import pytest
from msgspec import Raw

from protocols.chat.messages import MessageStyle, read_messages, write_messages
from protocols.core.events import ReasoningDelta, ResponseExtra
from tests.unit.protocols.chat.test_decoder import FULL, decode, make_chunk, make_sse
from tests.unit.protocols.test_passthrough import CHAT, require_passthrough

BOTH = {"reasoning_content": "a", "reasoning": "b"}
SECOND = ResponseExtra("openai", "message", ((("reasoning",), "b"),))


def list_reasoning(events: Any) -> list[Any]:
    return [one for one in events if type(one) in {ReasoningDelta, ResponseExtra}]


@pytest.mark.parametrize(
    ("second", "expected"), [("b", BOTH), ("a", {"reasoning_content": "a"})], ids=["other", "copy"]
)
def test_message_keeps_a_second_reasoning_that_differs(
    second: str, expected: dict[str, str]
) -> None:
    message = {"role": "assistant", "content": "x", **BOTH, "reasoning": second}

    messages = read_messages(Raw(json.dumps([message]).encode()))

    [written] = json.loads(msgspec.json.encode(write_messages(messages, MessageStyle())))
    assert written == {"role": "assistant", "content": "x", **expected}
    assert messages[0].extra is None or second == "b"


@pytest.mark.parametrize("before", [[], [make_chunk(content="x")]], ids=["first", "later"])
def test_delta_keeps_a_second_reasoning_that_differs(before: list[Any]) -> None:
    chunks = [*before, make_chunk(**cast("Any", BOTH)), make_chunk("stop")]
    for chunk in chunks:
        chunk |= {"id": "c", "model": "m"}

    events = decode(make_sse(*chunks) + "data: [DONE]\n\n")

    assert list_reasoning(events) == [ReasoningDelta("a"), SECOND]


CHOICE: dict[str, Any] = cast("Any", FULL)["choices"][0]


def test_unary_message_keeps_a_second_reasoning_that_differs() -> None:
    events = decode(json.dumps(FULL | {"choices": [CHOICE | {"message": BOTH}]}))

    assert list_reasoning(events) == [ReasoningDelta("a"), SECOND]


def test_reasoning_that_is_no_text_is_a_key_of_its_own() -> None:
    message = {"content": "x", "reasoning": {"steps": 1}}

    events = decode(json.dumps(FULL | {"choices": [CHOICE | {"message": message}]}))

    values = ((("reasoning",), {"steps": 1}),)
    assert list_reasoning(events) == [ResponseExtra("openai", "message", values)]


def test_reasoning_has_one_name_in_a_unary_response() -> None:
    """The worker answers with ``reasoning``; streams write ``reasoning_content``."""
    reader = require_passthrough("chat", CHAT).create_reader()

    reader.feed([json.dumps(FULL).encode()])
    body, events = reader.close()

    assert body is None  # so that the encoder writes the response
    assert list_reasoning(events) == [ReasoningDelta("hm")]
