"""Responses of Cohere's workers become events."""

from typing import Any

import pytest
from msgspec.structs import replace

from protocols.cohere.decoder import ChatDecoder
from protocols.core.errors import (
    StreamBroken,
    UnknownFinishReason,
    UnsupportedFeature,
    WorkerError,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    ReasoningDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from tests.unit.protocols.cohere.conftest import (
    REQUEST,
    decode_body,
    decode_stream,
    format_stream,
    make_end,
    make_event,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COUNTS = {"input_tokens": 5, "output_tokens": 2}
START = {"id": "a", **make_event("message-start", role="assistant")}


def test_stream_of_text_and_a_call() -> None:
    events = decode_stream(
        START,
        make_event("content-start", 0, content={"type": "thinking", "thinking": ""}),
        make_event("content-delta", 0, content={"thinking": "hm"}),
        {"type": "content-end", "index": 0},
        make_event("tool-plan-delta", tool_plan="I ask."),
        make_event("tool-call-start", 0, tool_calls={**CALL, "function": {"name": "f"}}),
        make_event("tool-call-delta", 0, tool_calls={"function": {"arguments": "{}"}}),
        {"type": "tool-call-end", "index": 0},
        make_end("TOOL_CALL", usage={"tokens": COUNTS, "cached_tokens": 3}),
    )

    assert events == [
        ResponseMetadata(id="a", source="cohere"),
        ReasoningDelta("hm"),
        TextDelta("I ask."),
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, "{}"),
        ChoiceEnd("tool_calls"),
        Usage(5, 2, 3),
        StreamEnd(),
    ]


def test_body_may_end_after_the_end_of_the_message() -> None:
    assert decode_stream(START, make_end(), end=b"")[-2:] == [ChoiceEnd("eos"), StreamEnd()]


def test_nothing_counts_after_the_end_of_the_message() -> None:
    late = make_event("content-delta", 0, content={"text": "late"})

    events = decode_stream(make_end(), late, end=b"data: [DONE]\n\ndata: {}\n\n")

    assert events == [ChoiceEnd("eos"), StreamEnd()]


def test_comments_and_text_between_events_are_ignored() -> None:
    decoder = ChatDecoder(REQUEST)

    assert decoder.feed(b"data: ping\n\n: wait\n\n" + format_stream(make_end())) == [
        ChoiceEnd("eos")
    ]


@pytest.mark.parametrize("reason", ["ERROR", "TIMEOUT"])
def test_failed_generation_is_an_error(reason: str) -> None:
    decoder = ChatDecoder(REQUEST)
    text = make_event("content-delta", 0, content={"text": "so"})

    assert decoder.feed(format_stream(text, make_end(reason, error="CUDA"))) == [TextDelta("so")]

    with pytest.raises(WorkerFailed) as caught:
        decoder.close()
    assert caught.value.worker_text == "CUDA"

    with pytest.raises(WorkerFailed, match=reason):
        decode_stream(make_end(reason))


def test_unknown_reason_is_an_error_for_other_clients() -> None:
    with pytest.raises(UnknownFinishReason):
        decode_stream(make_end("ERROR_TOXIC"))

    own = replace(REQUEST, source="cohere")
    assert decode_stream(make_end("ERROR_TOXIC"), request=own)[0] == ChoiceEnd(
        "unknown", own_word="ERROR_TOXIC"
    )


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (format_stream(START), StreamBroken),
        (b'data: {"message": "no such thing"}\n\n', WorkerError),
        (b'{"message": "no such thing"}', WorkerError),
        (b'{"id": "x"}', WorkerFailed),
        (b"{", WorkerFailed),
        (b"data: {\n\n", WorkerFailed),
        (b"oops\n", StreamBroken),
        (format_stream(make_event("tool-call-start", 0, tool_calls={})), StreamBroken),
        (format_stream(make_event("tool-call-delta", 0, tool_calls={})), StreamBroken),
    ],
)
def test_broken_response_is_an_error(broken: bytes, error: type[Exception]) -> None:
    decoder = ChatDecoder(REQUEST)

    with pytest.raises(error):
        [*decoder.feed(broken), *decoder.close()]


def test_error_on_a_line_of_its_own_is_read() -> None:
    decoder = ChatDecoder(REQUEST)
    decoder.feed(format_stream(START) + b'{"message": "x", "code": 400}\n')

    with pytest.raises(UnsupportedFeature):
        decoder.close()


def test_unary_response_has_its_tokens_at_its_first_text() -> None:
    events = decode_body(
        {
            "id": "a",
            "message": {
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "x"},
                    {"type": "text", "text": "y"},
                ],
                "tool_plan": "I ask.",
                "tool_calls": [CALL],
            },
            "finish_reason": "COMPLETE",
            "usage": {"billed_units": {"input_tokens": 5.0, "output_tokens": 2}},
            "logprobs": [{"text": "xy", "token_ids": [1, 2], "logprobs": [-1, -2.5]}, 7],
        }
    )

    logprobs = (TokenLogprob("xy", -1.0, id=1), TokenLogprob("", -2.5, id=2))
    assert events == [
        ResponseMetadata(id="a", source="cohere"),
        ReasoningDelta("hm"),
        TextDelta("x", tokens=2, logprobs=logprobs),
        TextDelta("y", tokens=0),
        TextDelta("I ask.", tokens=0),
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, "{}"),
        ChoiceEnd("tool_calls"),
        Usage(5, 2),
        StreamEnd(),
    ]


def test_content_may_be_a_string_and_usage_be_missing() -> None:
    assert decode_body({"message": {"content": "x"}, "finish_reason": "COMPLETE"}) == [
        ResponseMetadata(source="cohere"),
        TextDelta("x"),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    empty = decode_body({"message": {"content": ""}, "finish_reason": "COMPLETE"})
    assert empty[1:] == [ChoiceEnd("eos"), StreamEnd()]


def test_message_without_finish_reason_is_an_error() -> None:
    end = make_end()
    del end["delta"]["finish_reason"]

    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_body({"message": {"content": "x"}})
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_stream(end)


@pytest.mark.parametrize("usage", [7, {"tokens": {"input_tokens": -1, "output_tokens": 2}}])
def test_implausible_usage_is_ignored(usage: Any) -> None:
    assert decode_stream(make_end(usage=usage))[-1] == StreamEnd(has_ignored_usage=True)


def test_citations_and_unknown_keys_are_reported() -> None:
    citation = {"start": 0, "end": 2, "text": "so"}

    events = decode_stream(
        make_event("citation-start", 0, citations=citation),
        {"type": "citation-end", "index": 0, "mood": "x"},
        {"type": "debug", "prompt": "p"},
        {"type": 5},
        make_event("content-start", 0, content={"text": 5}),
        make_end(),
    )
    whole = decode_body(
        {"message": {"citations": [citation], "tool_calls": 7}, "finish_reason": "COMPLETE"}
    )

    assert [one for one in events if isinstance(one, ResponseExtra)] == [
        ResponseExtra("cohere", "response", ((("message", "citations"), citation),)),
        ResponseExtra("cohere", "response", ((("mood",), "x"),)),
        ResponseExtra("cohere", "response", ((("debug",), {"type": "debug", "prompt": "p"}),)),
        ResponseExtra("cohere", "response", ((("type",), {"type": 5}),)),
        ResponseExtra("cohere", "response", ((("message", "text"), 5),)),
    ]
    assert [one for one in whole if isinstance(one, ResponseExtra)] == [
        ResponseExtra("cohere", "response", ((("message", "tool_calls"), 7),)),
        ResponseExtra("cohere", "response", ((("message", "citations"), [citation]),)),
    ]


@pytest.mark.parametrize(
    "content",
    ["hi", {"text": "hi"}, [{"type": "text", "text": "hi"}], ["h", {"text": "i"}]],
    ids=str,
)
def test_text_in_another_form_is_kept(content: Any) -> None:
    events = decode_stream(make_event("content-delta", 0, content=content), make_end())
    whole = decode_body({"message": {"content": content}, "finish_reason": "COMPLETE"})

    for decoded in (events, whole):
        assert "".join(one.text for one in decoded if isinstance(one, TextDelta)) == "hi"


@pytest.mark.parametrize("content", [5, [5], {"text": 5}, [{"text": ["hi"]}]], ids=str)
def test_text_of_another_type_is_an_error(content: Any) -> None:
    """The answer would be another one without it."""
    with pytest.raises(WorkerFailed):
        decode_stream(make_event("content-delta", 0, content=content), make_end())
    with pytest.raises(WorkerFailed):
        decode_body({"message": {"content": content}, "finish_reason": "COMPLETE"})


@pytest.mark.parametrize("delta", ["hi", {"message": "hi"}], ids=str)
def test_text_in_a_delta_that_is_no_object_is_an_error(delta: Any) -> None:
    with pytest.raises(WorkerFailed, match="no object"):
        decode_stream({"type": "content-delta", "index": 0, "delta": delta}, make_end())


def test_delta_without_text_that_is_no_object_is_reported() -> None:
    events = decode_stream({"type": "tool-plan-delta", "index": 0, "delta": 5}, make_end())

    assert ResponseExtra("cohere", "response", ((("tool-plan-delta", "delta"), 5),)) in events


def test_arguments_that_are_no_text_are_written_as_json() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}

    events = decode_body({"message": {"tool_calls": [call]}, "finish_reason": "TOOL_CALL"})

    assert ToolCallDelta(0, 0, '{"a":1}') in events


@pytest.mark.parametrize(
    ("logprobs", "read"),
    [
        ({"text": 5, "token_ids": [1, 2], "logprobs": [-1.0]}, (TokenLogprob("", -1.0),)),
        ({"text": "a", "logprobs": ["x"]}, ()),
        ("x", ()),
    ],
)
def test_odd_probabilities_cost_themselves(logprobs: Any, read: Any) -> None:
    delta = {**make_event("content-delta", 0, content={"text": "a"}), "logprobs": logprobs}

    assert decode_stream(delta, make_end())[0] == TextDelta("a", logprobs=read)


def test_calls_without_an_index_or_an_id_have_ids_of_their_own() -> None:
    nameless = {"function": {"name": "f"}}

    events = decode_stream(
        make_event("tool-call-start", tool_calls=nameless),
        make_event("tool-call-start", tool_calls=nameless),
        make_event("tool-call-delta", tool_calls={"function": {"arguments": "{}"}}),
        make_end("TOOL_CALL"),
    )

    assert events[:3] == [
        ToolCallStart(0, 0, "call_0_0", "f"),
        ToolCallStart(0, 1, "call_0_1", "f"),
        ToolCallDelta(0, 1, "{}"),
    ]
