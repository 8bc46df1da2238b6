"""Reasoning has two names: a client of the worker's protocol gets each that the worker sends."""

import json
from typing import Any, cast

import msgspec
import pytest
from msgspec import Raw

from protocols.chat.messages import MessageStyle, read_messages, write_messages
from protocols.core.events import ReasoningDelta, ResponseExtra
from tests.unit.protocols.chat.test_decoder import CHAT as CHAT_REQUEST
from tests.unit.protocols.chat.test_decoder import FULL, decode, make_chunk, make_sse
from tests.unit.protocols.test_passthrough import (
    CHAT,
    STREAM_REQUEST,
    format_chunk,
    join_output,
    require_passthrough,
)

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

    assert list_reasoning(events) == [SECOND, ReasoningDelta("a")]


CHOICE: dict[str, Any] = cast("Any", FULL)["choices"][0]


def test_unary_message_keeps_a_second_reasoning_that_differs() -> None:
    events = decode(json.dumps(FULL | {"choices": [CHOICE | {"message": BOTH}]}))

    assert list_reasoning(events) == [SECOND, ReasoningDelta("a")]


def test_reasoning_that_is_no_text_is_a_key_of_its_own() -> None:
    message = {"content": "x", "reasoning": {"steps": 1}}

    events = decode(json.dumps(FULL | {"choices": [CHOICE | {"message": message}]}))

    values = ((("reasoning",), {"steps": 1}),)
    assert list_reasoning(events) == [ResponseExtra("openai", "message", values)]


def test_unary_message_keeps_the_name_of_the_worker() -> None:
    """The worker answers with ``reasoning``; encoders write ``reasoning_content``, too."""
    reader = require_passthrough("chat", CHAT).create_reader()

    reader.feed([json.dumps(FULL).encode()])
    body, events = reader.close()

    assert body is None  # so that the encoder writes the response
    own = ResponseExtra("openai", "message", ((("reasoning",), "hm"),))
    assert list_reasoning(events) == [own, ReasoningDelta("hm")]


@pytest.mark.parametrize("first", ["reasoning", "content"])
def test_delta_has_both_names_of_reasoning(first: str) -> None:
    """In one delta, so that a client that reads either name gets the text once."""
    reader = require_passthrough("chat", STREAM_REQUEST).create_reader()
    pieces = [
        format_chunk("X").replace(b'"content":"X"', f'"{key}":"{text}"'.encode())
        for key, text in ((first, "a"), ("reasoning", "b"), ("reasoning", "c"))
    ]

    written = join_output([reader.feed([piece])[0] for piece in pieces])

    deltas = [
        msgspec.json.decode(line[6:])["choices"][0]["delta"]
        for line in written.splitlines()
        if line
    ]
    thoughts = [one for one in deltas if "reasoning" in one or "reasoning_content" in one]
    texts = ["a", "b", "c"] if first == "reasoning" else ["b", "c"]
    assert thoughts == [{"reasoning_content": text, "reasoning": text} for text in texts]


def test_reasoning_reaches_a_client_of_another_protocol_once() -> None:
    chunks = [make_chunk(reasoning="a"), make_chunk("stop")]
    request = msgspec.structs.replace(CHAT_REQUEST, source="anthropic", stream=True)

    events = decode(make_sse(*chunks) + "data: [DONE]\n\n", request)

    assert list_reasoning(events) == [ReasoningDelta("a")]


def test_streamed_reasoning_of_a_unary_response_has_one_name() -> None:
    """The pieces of a worker that streams although it was not asked to are one text."""
    chunks = [make_chunk(reasoning="a"), make_chunk(reasoning="b"), make_chunk("stop")]
    request = msgspec.structs.replace(CHAT_REQUEST, stream=False)

    events = decode(make_sse(*chunks) + "data: [DONE]\n\n", request)

    assert list_reasoning(events) == [ReasoningDelta("a"), ReasoningDelta("b")]
