"""Responses for clients, byte for byte: cases W1 to W77."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import ClientRequest, ResponseContext, ResponseEncoder
from protocols.core.request import GenerationRequest, ResponseOptions

MakeCall = Callable[..., ClientRequest]
CHAT = GenerationRequest(model="m", kind="chat")
TEXT = GenerationRequest(model="m", kind="completion", prompts=("a b",))
QUIET = ResponseOptions(usage="none")
HELLO: tuple[Event, ...] = (
    TextDelta("Hello"),
    TextDelta(" world"),
    TextDelta("!"),
    ChoiceEnd("eos"),
    Usage(2, 3),
    StreamEnd(),
)


def build_streaming_request(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return msgspec.structs.replace(request, stream=True, **changes)


def encode_stream_lines(encoder: ResponseEncoder, events: Sequence[Event]) -> list[str]:
    """Encode the events one by one, and return their data."""
    body = b"".join(encoder.encode_events([event]) for event in events).decode()
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def encode_unary_body(encoder: ResponseEncoder, events: Sequence[Event]) -> Any:
    fold = ResponseAccumulator()
    fold.add(events)
    reply = encoder.encode_unary(fold.result())
    assert reply.status == 200
    return json.loads(reply.body)


def format_chunk(delta: str, finish: str = "null", extra_json: str = "", index: int = 0) -> str:
    return (
        '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
        f'"choices":[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]'
        f"{extra_json}}}"
    )


OPEN = '{"role":"assistant","content":""}'
USAGE = '{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}'


def test_unary_chat_response(response_context: ResponseContext) -> None:
    fold = ResponseAccumulator()
    fold.add(HELLO)
    encoder = ChatEncoder(ResponseStyle(), CHAT, response_context)

    reply = encoder.encode_unary(fold.result())

    assert reply.body.decode() == (
        '{"id":"chatcmpl-r1","object":"chat.completion","created":1700000000,"model":"mock",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"Hello world!",'
        f'"refusal":null}},"logprobs":null,"finish_reason":"stop"}}],"usage":{USAGE}}}'
    )
    assert ("x-served-model", "v1") in encoder.headers()


def test_chat_stream(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(
        ResponseStyle(), build_streaming_request(CHAT, response_options=QUIET), response_context
    )
    assert encode_stream_lines(encoder, HELLO) == [
        format_chunk(OPEN),
        format_chunk('{"content":"Hello"}'),
        format_chunk('{"content":" world"}'),
        format_chunk('{"content":"!"}'),
        format_chunk("{}", '"stop"'),
        "[DONE]",
    ]
    assert encoder.content_type == "text/event-stream; charset=utf-8"


def test_usage_is_the_last_chunk_if_requested(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), build_streaming_request(CHAT), response_context)
    none = ',"usage":null'

    assert encode_stream_lines(encoder, HELLO) == [
        format_chunk(OPEN, extra_json=none),
        format_chunk('{"content":"Hello"}', extra_json=none),
        format_chunk('{"content":" world"}', extra_json=none),
        format_chunk('{"content":"!"}', extra_json=none),
        format_chunk("{}", '"stop"', none),
        (
            '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,'
            f'"model":"mock","choices":[],"usage":{USAGE}}}'
        ),
        "[DONE]",
    ]


def test_continuous_usage_is_in_every_chunk(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(
        ResponseStyle(),
        build_streaming_request(CHAT, response_options=ResponseOptions(usage="each")),
        response_context,
    )
    events: list[Event] = [
        Usage(2, 1),
        TextDelta("a"),
        Usage(2, 2),
        TextDelta("b"),
        ChoiceEnd("length"),
        Usage(2, 2),
        StreamEnd(),
    ]
    chunks = [json.loads(line) for line in encode_stream_lines(encoder, events)[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert counts == [1, 1, 2, 2, 2]
    assert chunks[-1]["choices"] == []


def test_chunks_of_two_choices_interleave(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(
        ResponseStyle(),
        build_streaming_request(CHAT, response_options=QUIET, n=2),
        response_context,
    )
    events: list[Event] = [
        TextDelta("a", 1),
        TextDelta("b", 0),
        ChoiceEnd("eos", 0),
        ChoiceEnd("length", 1),
        StreamEnd(),
    ]

    assert encode_stream_lines(encoder, events) == [
        format_chunk(OPEN, index=1),
        format_chunk('{"content":"a"}', index=1),
        format_chunk(OPEN),
        format_chunk('{"content":"b"}'),
        format_chunk("{}", '"stop"'),
        format_chunk("{}", '"length"', index=1),
        "[DONE]",
    ]


CALLS: tuple[Event, ...] = (
    ToolCallStart(0, 0, "call_1", "f"),
    ToolCallDelta(0, 0, '{"x"'),
    ToolCallDelta(0, 0, ":1}"),
    ToolCallStart(0, 1, "call_2", "g"),
    ChoiceEnd("eos"),
    StreamEnd(),
)


def test_chat_stream_with_tool_calls(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(
        ResponseStyle(), build_streaming_request(CHAT, response_options=QUIET), response_context
    )
    opening = '"type":"function","function":{"name":'

    assert encode_stream_lines(encoder, CALLS) == [
        format_chunk('{"role":"assistant","content":null}'),
        format_chunk(
            f'{{"tool_calls":[{{"index":0,"id":"call_1",{opening}"f","arguments":""}}}}]}}'
        ),
        format_chunk('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\""}}]}'),
        format_chunk('{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}'),
        format_chunk(
            f'{{"tool_calls":[{{"index":1,"id":"call_2",{opening}"g","arguments":""}}}}]}}'
        ),
        format_chunk("{}", '"tool_calls"'),
        "[DONE]",
    ]


def test_unary_response_with_tool_calls(response_context: ResponseContext) -> None:
    choice = encode_unary_body(ChatEncoder(ResponseStyle(), CHAT, response_context), CALLS)[
        "choices"
    ][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }


def test_calls_of_custom_tools_keep_their_type(response_context: ResponseContext) -> None:
    events: list[Event] = [
        ToolCallStart(0, 0, "call_1", "f", "custom"),
        ToolCallDelta(0, 0, "go"),
        ToolCallStart(0, 1, "call_2", "g"),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    choice = encode_unary_body(ChatEncoder(ResponseStyle(), CHAT, response_context), events)[
        "choices"
    ][0]
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "custom", "custom": {"name": "f", "input": "go"}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]

    stream = ChatEncoder(
        ResponseStyle(), build_streaming_request(CHAT, response_options=QUIET), response_context
    )
    start = '"index":0,"id":"call_1","type":"custom","custom":{"name":"f","input":""}'
    assert encode_stream_lines(stream, events)[1:3] == [
        format_chunk(f'{{"tool_calls":[{{{start}}}]}}'),
        format_chunk('{"tool_calls":[{"index":0,"custom":{"input":"go"}}]}'),
    ]


def test_legacy_functions_return_function_call(response_context: ResponseContext) -> None:
    request = msgspec.structs.replace(CHAT, legacy_functions=True)
    events: list[Event] = [*CALLS[:3], ChoiceEnd("tool_calls"), StreamEnd()]
    choice = encode_unary_body(ChatEncoder(ResponseStyle(), request, response_context), events)[
        "choices"
    ][0]

    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x":1}'}
    assert "tool_calls" not in choice["message"]

    stream = ChatEncoder(
        ResponseStyle(), build_streaming_request(request, response_options=QUIET), response_context
    )
    assert encode_stream_lines(stream, events)[1:5] == [
        format_chunk('{"function_call":{"name":"f","arguments":""}}'),
        format_chunk('{"function_call":{"arguments":"{\\"x\\""}}'),
        format_chunk('{"function_call":{"arguments":":1}"}}'),
        format_chunk("{}", '"function_call"'),
    ]


def test_reasoning_and_refusal_in_chat_responses(response_context: ResponseContext) -> None:
    events: list[Event] = [
        ReasoningDelta("hm"),
        RefusalDelta("no"),
        ChoiceEnd("content_filter"),
        StreamEnd(),
    ]
    message = encode_unary_body(ChatEncoder(ResponseStyle(), CHAT, response_context), events)[
        "choices"
    ][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "reasoning_content": "hm",
    }

    stream = ChatEncoder(
        ResponseStyle(), build_streaming_request(CHAT, response_options=QUIET), response_context
    )
    assert encode_stream_lines(stream, events)[1:4] == [
        format_chunk('{"reasoning_content":"hm"}'),
        format_chunk('{"refusal":"no"}'),
        format_chunk("{}", '"content_filter"'),
    ]


TOP = (TopLogprob("Hi", -0.5), TopLogprob("alt1", -1.5))
HI = TokenLogprob("Hi", -0.5, TOP)


def test_chat_logprobs(response_context: ResponseContext) -> None:
    events: list[Event] = [TextDelta("Hi", logprobs=(HI,)), ChoiceEnd("eos"), StreamEnd()]
    expected = {
        "content": [
            {
                "token": "Hi",
                "logprob": -0.5,
                "bytes": [72, 105],
                "top_logprobs": [
                    {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
                    {"token": "alt1", "logprob": -1.5, "bytes": [97, 108, 116, 49]},
                ],
            }
        ],
        "refusal": None,
    }
    response = encode_unary_body(ChatEncoder(ResponseStyle(), CHAT, response_context), events)

    assert response["choices"][0]["logprobs"] == expected

    lines = encode_stream_lines(
        ChatEncoder(
            ResponseStyle(), build_streaming_request(CHAT, response_options=QUIET), response_context
        ),
        events,
    )
    assert json.loads(lines[1])["choices"][0] == {
        "index": 0,
        "delta": {"content": "Hi"},
        "logprobs": expected,
        "finish_reason": None,
    }


def test_logprobs_of_a_non_utf8_token_keep_its_bytes(response_context: ResponseContext) -> None:
    token = TokenLogprob("\ufffd", float("-inf"), data=b"\xe4")
    events: list[Event] = [TextDelta("", logprobs=(token,)), ChoiceEnd("eos"), StreamEnd()]
    response = encode_unary_body(ChatEncoder(ResponseStyle(), CHAT, response_context), events)
    entry = response["choices"][0]["logprobs"]["content"][0]

    assert (entry["bytes"], entry["logprob"]) == ([0xE4], -9999.0)

    columns = encode_unary_body(CompletionEncoder(ResponseStyle(), TEXT, response_context), events)[
        "choices"
    ][0]["logprobs"]
    assert columns["tokens"] == ["bytes:\\xe4"]


@pytest.mark.parametrize(
    ("reason", "wire"),
    [
        ("eos", "stop"),
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "tool_calls"),
        ("content_filter", "content_filter"),
        ("unknown", "stop"),
    ],
)
def test_finish_reason_names(
    response_context: ResponseContext, reason: FinishReason, wire: str
) -> None:
    response = encode_unary_body(
        ChatEncoder(ResponseStyle(), CHAT, response_context),
        [TextDelta("a"), ChoiceEnd(reason), StreamEnd()],
    )
    assert response["choices"][0]["finish_reason"] == wire


def test_unknown_finish_reason_is_shown_as_the_worker_wrote_it(
    response_context: ResponseContext,
) -> None:
    called = (ToolCallStart(0, 0, "c1", "f"), ToolCallDelta(0, 0, "{}"))
    end = ChoiceEnd("unknown", own_word="later")

    response = encode_unary_body(
        ChatEncoder(ResponseStyle(), CHAT, response_context), [*called, end, StreamEnd()]
    )

    assert response["choices"][0]["finish_reason"] == "later"


def test_stream_error_is_an_sse_event(response_context: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), build_streaming_request(CHAT), response_context)
    assert encoder.encode_error_event(StreamBroken("it stopped")) == (
        b'data: {"error":{"message":"it stopped","type":"server_error","param":null,'
        b'"code":"bad_gateway"}}\n\n'
    )


def test_unary_completion_response(response_context: ResponseContext) -> None:
    fold = ResponseAccumulator()
    fold.add(HELLO)

    reply = CompletionEncoder(ResponseStyle(), TEXT, response_context).encode_unary(fold.result())

    assert reply.body.decode() == (
        '{"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"mock",'
        '"choices":[{"text":"Hello world!","index":0,"logprobs":null,"finish_reason":"stop"}],'
        f'"usage":{USAGE}}}'
    )


def test_completion_stream(response_context: ResponseContext) -> None:
    encoder = CompletionEncoder(ResponseStyle(), build_streaming_request(TEXT), response_context)
    head = '{"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"mock",'
    shape = head + '"choices":[{"text":"%s","index":0,"logprobs":null,"finish_reason":%s}],'
    shape += '"usage":null}'

    assert encode_stream_lines(encoder, HELLO) == [
        shape % ("Hello", "null"),
        shape % (" world", "null"),
        shape % ("!", "null"),
        shape % ("", '"stop"'),
        f'{head}"choices":[],"usage":{USAGE}}}',
        "[DONE]",
    ]


def test_completion_stream_text_offset_counts_earlier_text(
    response_context: ResponseContext,
) -> None:
    stream = CompletionEncoder(ResponseStyle(), build_streaming_request(TEXT), response_context)
    stream.encode_events([TextDelta("Hi "), TextDelta("there ")])

    assert b'"text_offset":[9]' in stream.encode_events([TextDelta("Hi", logprobs=(HI,))])


def test_completion_logprobs_are_columns(response_context: ResponseContext) -> None:
    events: list[Event] = [
        PromptEcho(0, "a", (TokenLogprob("a", None),)),
        TextDelta("Hi", logprobs=(HI,)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    top = {"Hi": -0.5, "alt1": -1.5}
    choice = encode_unary_body(CompletionEncoder(ResponseStyle(), TEXT, response_context), events)[
        "choices"
    ][0]

    assert choice["text"] == "aHi"
    assert choice["logprobs"] == {
        "tokens": ["a", "Hi"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, top],
        "text_offset": [0, 1],
    }

    lines = encode_stream_lines(
        CompletionEncoder(
            ResponseStyle(), build_streaming_request(TEXT, response_options=QUIET), response_context
        ),
        events,
    )
    pieces = [json.loads(line)["choices"][0]["logprobs"] for line in lines[:2]]
    assert [piece["text_offset"] for piece in pieces] == [[0], [1]]
    assert [piece["top_logprobs"] for piece in pieces] == [None, [top]]


def test_fingerprint_and_token_ids_are_in_stream_chunks(response_context: ResponseContext) -> None:
    events: list[Event] = [
        ResponseMetadata(fingerprint="fp_1"),
        TextDelta("a", token_ids=(7,)),
        ChoiceEnd("stop", matched_stop="x"),
        StreamEnd(),
    ]
    request = build_streaming_request(
        CHAT, response_options=ResponseOptions(usage="none", token_ids=True)
    )
    lines = encode_stream_lines(ChatEncoder(ResponseStyle(), request, response_context), events)

    first, second = (json.loads(line) for line in lines[:2])

    assert first["system_fingerprint"] == second["system_fingerprint"] == "fp_1"
    assert second["choices"][0]["token_ids"] == [7]
    assert "stop_reason" not in second["choices"][0]


def test_second_call_for_a_client_of_functions_is_left_out_and_reported(
    response_context: ResponseContext,
) -> None:
    request = build_streaming_request(CHAT, legacy_functions=True)
    encoder = ChatEncoder(ResponseStyle(), request, response_context)
    calls: list[Event] = [
        ToolCallStart(0, 0, "a", "f"),
        ToolCallStart(0, 1, "b", "g"),
        ToolCallDelta(0, 1, "{"),
    ]

    wire = encoder.encode_events(calls)

    assert b'"name":"f"' in wire
    assert b'"name":"g"' not in wire
    assert [loss.field for loss in encoder.losses] == ["response.choices[0].message.tool_calls[1]"]
