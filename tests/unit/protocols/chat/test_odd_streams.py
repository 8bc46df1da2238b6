"""Streams of servers that number their chunks, or send a finish reason with each of them."""

from typing import Any

import pytest

from protocols.chat.decoder import GenerationDecoder
from protocols.core.errors import StreamBroken, UnknownFinishReason, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ResponseExtra,
    StreamEnd,
    TextDelta,
    ToolCallStart,
)
from protocols.core.request import GenerationRequest
from tests.unit.protocols.chat.streams import build_chunk, format_event

REQUEST = GenerationRequest(model="w", kind="chat", stream=True, source="anthropic")
DONE = b"data: [DONE]\n\n"


def piece(text: str, index: int = 0, reason: str | None = None) -> dict[str, Any]:
    chunk: dict[str, Any] = build_chunk({"content": text}, index=index)
    chunk["choices"][0]["finish_reason"] = reason
    return chunk


def decode(*chunks: dict[str, Any], at_once: bool = False) -> list[Event]:
    """The events of a stream, without the metadata."""
    decoder = GenerationDecoder(REQUEST, source="openai")
    blocks = [*map(format_event, chunks), DONE]
    events: list[Event] = []
    for data in [b"".join(blocks)] if at_once else blocks:
        events += decoder.feed(data)
    return [*events, *decoder.close()][1:]


def join(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_index_that_counts_the_chunks_is_the_only_choice_s(
    count: int, first: int, *, at_once: bool
) -> None:
    """Foundry Local (issue 263) counts from 0, TGI 1.4 (issue 1648) from 1."""
    numbers = range(first, first + count - 1)
    chunks = [piece(f"{i} ", i) for i in numbers]

    events = decode(*chunks, piece("", first + count - 1, "length"), at_once=at_once)

    assert join(events) == "".join(f"{i} " for i in numbers)
    assert events[-2:] == [ChoiceEnd("length"), StreamEnd()]
    assert any(isinstance(event, ResponseExtra) for event in events)


@pytest.mark.parametrize("at_once", [False, True])
def test_surplus_choices_are_left_out_and_reported(*, at_once: bool) -> None:
    chunks = [piece(text, i % 2) for i, text in enumerate("axbycz")]

    events = decode(*chunks, piece("", 0, "stop"), piece("", 1, "stop"), at_once=at_once)

    assert join(events) == "abc"
    lost = {event.values[0][0] for event in events if isinstance(event, ResponseExtra)}
    assert lost == {("choices[1]",)}


def test_second_choice_of_two_chunks_is_no_continuation_of_one_that_ended() -> None:
    events = decode(piece("a", 0, "stop"), piece("x", 1, "stop"))

    assert join(events) == "a"
    assert events[-2:] == [ChoiceEnd("eos"), StreamEnd()]


@pytest.mark.parametrize("at_once", [False, True])
def test_text_after_a_finish_reason_in_each_chunk_is_kept_and_the_last_reason_counts(
    *, at_once: bool
) -> None:
    """So do one-api and gcli2api (issue 403)."""
    events = decode(
        piece("a", 0, "stop"), piece("b", 0, "stop"), piece("c", 0, "length"), at_once=at_once
    )

    assert join(events) == "abc"
    assert [event for event in events if isinstance(event, ChoiceEnd)] == [ChoiceEnd("length")]


def test_finish_reason_of_an_empty_first_chunk_ends_nothing() -> None:
    """So did Open WebUI (issue 23921)."""
    events = decode(piece("", 0, "stop"), piece("a"), piece("", 0, "length"))

    assert events == [TextDelta("a"), ChoiceEnd("length"), StreamEnd()]


def test_tool_call_after_a_finish_reason_with_another_one_is_kept() -> None:
    """So does LiteLLM for Gemini (pull request 31634)."""
    function = {"name": "f", "arguments": ""}
    calls = [
        build_chunk({"tool_calls": [{"index": i, "id": f"c{i}", "function": function}]})
        for i in range(2)
    ]
    for call in calls:
        call["choices"][0]["finish_reason"] = "tool_calls"

    events = decode(*calls)

    assert [event.id for event in events if isinstance(event, ToolCallStart)] == ["c0", "c1"]
    assert events[-2:] == [ChoiceEnd("tool_calls"), StreamEnd()]


def test_finish_reason_sent_with_text_is_reported_before_the_usage() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    decoder = GenerationDecoder(REQUEST, source="openai")
    decoder.feed(format_event(piece("a", 0, "stop")))

    assert list(decoder.feed(format_event(usage))) == [ChoiceEnd("eos")]


@pytest.mark.parametrize(("word", "error"), [("abort", WorkerFailed), ("x", UnknownFinishReason)])
def test_failure_sent_with_text_is_reported_at_once(word: str, error: type[WorkerFailed]) -> None:
    decoder = GenerationDecoder(REQUEST, source="openai")
    decoder.feed(format_event(piece("a")))

    assert [*decoder.feed(format_event(piece("b", 0, word)))] == [TextDelta("b")]
    with pytest.raises(error):
        decoder.feed(b"")


def test_text_after_an_end_without_a_piece_breaks_the_stream() -> None:
    with pytest.raises(StreamBroken, match="went on"):
        decode(piece("a"), piece("", 0, "stop"), piece("b"))
