"""Events become Cohere's responses and streams."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from protocols.cohere.decoder import SOURCE
from protocols.cohere.responses import ChatEncoder
from protocols.core.aggregate import UnaryResponse, aggregate
from protocols.core.errors import DeadlineExceeded, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import ResponseContext
from protocols.core.request import GenerationRequest, ResponseOptions

CHAT = GenerationRequest(model="m", kind="chat")
HIDDEN = GenerationRequest(
    model="m", kind="chat", response_options=ResponseOptions(hides_reasoning=True)
)
END = (ChoiceEnd("eos"), StreamEnd())


def encode(context: ResponseContext, *events: Event, request: GenerationRequest = CHAT) -> Any:
    """Return the data of the events after the start of the stream, and check their names."""
    encoder = ChatEncoder(request, context)
    data = b"".join(encoder.encode_events([event]) for event in events).decode()
    decoded = []
    for block in data.removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n"):
        name, _, text = block.partition("\ndata: ")
        decoded.append(json.loads(text))
        assert name == f"event: {decoded[-1]['type']}"
    assert decoded[0]["type"] == "message-start"
    assert data.endswith("data: [DONE]\n\n") == any(isinstance(one, StreamEnd) for one in events)
    return decoded[1:]


def encode_whole(context: ResponseContext, *events: Event) -> Any:
    response = aggregate(events)
    return json.loads(ChatEncoder(CHAT, context).encode_unary(response).body)


def test_text_after_reasoning_is_another_block(response_context: ResponseContext) -> None:
    events = encode(response_context, ReasoningDelta("hm"), RefusalDelta("no"), *END)

    assert [(one["type"], one.get("index")) for one in events] == [
        ("content-start", 0),
        ("content-delta", 0),
        ("content-end", 0),
        ("content-start", 1),
        ("content-delta", 1),
        ("content-end", 1),
        ("message-end", None),
    ]


def test_calls_whose_arguments_come_in_turns_end_together(
    response_context: ResponseContext,
) -> None:
    events = encode(
        response_context,
        TextDelta("I ask."),
        ToolCallStart(0, 0, "a", "f"),
        ToolCallStart(0, 1, "b", "g"),
        ToolCallDelta(0, 1, "{}"),
        ToolCallDelta(0, 0, "{}"),
        ToolCallDelta(0, 0, ""),
        ChoiceEnd("stop"),
        StreamEnd(),
    )

    assert [(one["type"], one.get("index")) for one in events[2:]] == [
        ("content-end", 0),
        ("tool-call-start", 0),
        ("tool-call-start", 1),
        ("tool-call-delta", 1),
        ("tool-call-delta", 0),
        ("tool-call-end", 0),
        ("tool-call-end", 1),
        ("message-end", None),
    ]
    assert events[-1]["delta"] == {"finish_reason": "TOOL_CALL"}


def test_hidden_reasoning_and_empty_pieces_are_not_sent(response_context: ResponseContext) -> None:
    hidden = (StreamStart(), ReasoningDelta("hm"), TextDelta(""))

    assert encode(response_context, *hidden, *END, request=HIDDEN) == [
        {"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}
    ]


def test_custom_tool_call_is_one_of_a_function(response_context: ResponseContext) -> None:
    called = (
        ToolCallStart(0, 0, "a", "f", "custom"),
        ToolCallDelta(0, 0, "g"),
        ToolCallDelta(0, 0, "o"),
        *END,
    )

    streamed = encode(response_context, *called)
    whole = encode_whole(response_context, *called)

    [call] = whole["message"]["tool_calls"]
    pieces = [one["delta"] for one in streamed if one["type"] == "tool-call-delta"]
    assert pieces == [{"message": {"tool_calls": {"function": {"arguments": '{"input":"go"}'}}}}]
    assert call["function"] == {"name": "f", "arguments": '{"input":"go"}'}


def test_probabilities_stand_beside_their_text(response_context: ResponseContext) -> None:
    token = TokenLogprob("a", -0.5, id=7)

    [_, delta, *_] = encode(response_context, TextDelta("a", logprobs=(token,)), *END)

    assert delta["logprobs"] == {"text": "a", "token_ids": [7], "logprobs": [-0.5]}


def test_usage_has_the_tokens_twice_and_those_of_the_cache(
    response_context: ResponseContext,
) -> None:
    [end] = encode(response_context, ChoiceEnd("length"), Usage(5, 2, 3), StreamEnd())

    counts = {"input_tokens": 5, "output_tokens": 2}
    assert end["delta"] == {
        "finish_reason": "MAX_TOKENS",
        "usage": {"billed_units": counts, "tokens": counts, "cached_tokens": 3},
    }


@pytest.mark.parametrize(
    ("error", "reason"), [(WorkerFailed("x"), "ERROR"), (DeadlineExceeded("x"), "TIMEOUT")]
)
def test_failed_stream_ends_with_the_reason(
    response_context: ResponseContext, error: Any, reason: str
) -> None:
    data = ChatEncoder(CHAT, response_context).encode_error_event(error).decode()

    name, _, text = data.rstrip("\n").partition("\ndata: ")
    assert name == "event: message-end"
    assert json.loads(text)["delta"] == {"error": "x", "finish_reason": reason}


def test_unary_response(response_context: ResponseContext) -> None:
    body = encode_whole(
        response_context,
        ReasoningDelta("hm"),
        TextDelta("a", logprobs=(TokenLogprob("a", None),)),
        ToolCallStart(0, 0, "c", "f"),
        ToolCallDelta(0, 0, "{}"),
        ChoiceEnd("eos"),
        Usage(5, 2),
        StreamEnd(),
    )

    counts = {"input_tokens": 5, "output_tokens": 2}
    assert body == {
        "id": "7f",
        "finish_reason": "TOOL_CALL",
        "message": {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        "usage": {"billed_units": counts, "tokens": counts},
        "logprobs": [{"text": "a", "token_ids": [], "logprobs": [0.0]}],
    }


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((), {"content": [{"type": "text", "text": ""}]}),
        (
            (ToolCallStart(0, 0, "c", "f"),),
            {
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
                ]
            },
        ),
    ],
)
def test_message_without_text(
    response_context: ResponseContext, events: Sequence[Event], message: Any
) -> None:
    body = encode_whole(response_context, *events, ChoiceEnd("unknown"), StreamEnd())

    assert body["message"] == {"role": "assistant", **message}


def test_response_without_choices_is_empty(response_context: ResponseContext) -> None:
    answer = ChatEncoder(CHAT, response_context).encode_unary(UnaryResponse())

    assert json.loads(answer.body)["finish_reason"] == "COMPLETE"


def test_unknown_word_of_the_worker_is_passed_on(response_context: ResponseContext) -> None:
    end = ChoiceEnd("unknown", own_word="ERROR_TOXIC")

    assert encode_whole(response_context, end, StreamEnd())["finish_reason"] == "ERROR_TOXIC"


def test_headers_name_the_version(response_context: ResponseContext) -> None:
    assert ChatEncoder(CHAT, response_context).headers() == (("x-served-model", "v1"),)


def test_keys_of_a_cohere_worker_are_written_where_they_have_a_place(
    response_context: ResponseContext,
) -> None:
    message = ResponseExtra(SOURCE, "response", ((("message", "new"), 1),))
    block = ResponseExtra(SOURCE, "response", ((("message", "content[0]", "new"), 2),))

    body = encode_whole(response_context, message, block, TextDelta("hi"), *END)

    assert body["message"]["new"] == 1
    assert "new" not in body["message"]["content"][0]
