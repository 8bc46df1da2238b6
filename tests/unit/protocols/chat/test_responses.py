"""Answers, byte for byte: cases W1 to W77 from the events on."""

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


def streamed(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return msgspec.structs.replace(request, stream=True, **changes)


def written(encoder: ResponseEncoder, events: Sequence[Event]) -> list[str]:
    """The data of each event, written one by one as they come."""
    body = b"".join(encoder.encode_events([event]) for event in events).decode()
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def whole(encoder: ResponseEncoder, events: Sequence[Event]) -> Any:
    fold = ResponseAccumulator()
    fold.add(events)
    reply = encoder.encode_unary(fold.result())
    assert reply.status == 200
    return json.loads(reply.body)


def chunk(delta: str, finish: str = "null", more: str = "", index: int = 0) -> str:
    return (
        '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
        f'"choices":[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]'
        f"{more}}}"
    )


OPEN = '{"role":"assistant","content":""}'
USAGE = '{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}'


def test_a_whole_chat(about: ResponseContext) -> None:
    fold = ResponseAccumulator()
    fold.add(HELLO)
    encoder = ChatEncoder(ResponseStyle(), CHAT, about)
    reply = encoder.encode_unary(fold.result())
    assert reply.body.decode() == (
        '{"id":"chatcmpl-r1","object":"chat.completion","created":1700000000,"model":"mock",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"Hello world!",'
        f'"refusal":null}},"logprobs":null,"finish_reason":"stop"}}],"usage":{USAGE}}}'
    )
    assert ("x-served-model", "v1") in encoder.headers()


def test_a_streamed_chat(about: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), streamed(CHAT, response_options=QUIET), about)
    assert written(encoder, HELLO) == [
        chunk(OPEN),
        chunk('{"content":"Hello"}'),
        chunk('{"content":" world"}'),
        chunk('{"content":"!"}'),
        chunk("{}", '"stop"'),
        "[DONE]",
    ]
    assert encoder.content_type == "text/event-stream; charset=utf-8"


def test_usage_comes_last_and_only_if_asked(about: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), streamed(CHAT), about)
    none = ',"usage":null'
    assert written(encoder, HELLO) == [
        chunk(OPEN, more=none),
        chunk('{"content":"Hello"}', more=none),
        chunk('{"content":" world"}', more=none),
        chunk('{"content":"!"}', more=none),
        chunk("{}", '"stop"', none),
        (
            '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,'
            f'"model":"mock","choices":[],"usage":{USAGE}}}'
        ),
        "[DONE]",
    ]


def test_running_usage_is_in_every_chunk(about: ResponseContext) -> None:
    encoder = ChatEncoder(
        ResponseStyle(), streamed(CHAT, response_options=ResponseOptions(usage="each")), about
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
    chunks = [json.loads(line) for line in written(encoder, events)[:-1]]
    counts = [found["usage"]["completion_tokens"] for found in chunks]
    assert counts == [1, 1, 2, 2, 2]
    assert chunks[-1]["choices"] == []


def test_two_choices_interleave(about: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), streamed(CHAT, response_options=QUIET, n=2), about)
    events: list[Event] = [
        TextDelta("a", 1),
        TextDelta("b", 0),
        ChoiceEnd("eos", 0),
        ChoiceEnd("length", 1),
        StreamEnd(),
    ]
    assert written(encoder, events) == [
        chunk(OPEN, index=1),
        chunk('{"content":"a"}', index=1),
        chunk(OPEN),
        chunk('{"content":"b"}'),
        chunk("{}", '"stop"'),
        chunk("{}", '"length"', index=1),
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


def test_streamed_tool_calls(about: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), streamed(CHAT, response_options=QUIET), about)
    opening = '"type":"function","function":{"name":'
    assert written(encoder, CALLS) == [
        chunk('{"role":"assistant","content":null}'),
        chunk(f'{{"tool_calls":[{{"index":0,"id":"call_1",{opening}"f","arguments":""}}}}]}}'),
        chunk('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\""}}]}'),
        chunk('{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}'),
        chunk(f'{{"tool_calls":[{{"index":1,"id":"call_2",{opening}"g","arguments":""}}}}]}}'),
        chunk("{}", '"tool_calls"'),
        "[DONE]",
    ]


def test_whole_tool_calls(about: ResponseContext) -> None:
    choice = whole(ChatEncoder(ResponseStyle(), CHAT, about), CALLS)["choices"][0]
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


def test_calls_of_custom_tools_keep_their_type(about: ResponseContext) -> None:
    events: list[Event] = [
        ToolCallStart(0, 0, "call_1", "f", "custom"),
        ToolCallDelta(0, 0, "go"),
        ToolCallStart(0, 1, "call_2", "g"),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    choice = whole(ChatEncoder(ResponseStyle(), CHAT, about), events)["choices"][0]
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "custom", "custom": {"name": "f", "input": "go"}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    stream = ChatEncoder(ResponseStyle(), streamed(CHAT, response_options=QUIET), about)
    start = '"index":0,"id":"call_1","type":"custom","custom":{"name":"f","input":""}'
    assert written(stream, events)[1:3] == [
        chunk(f'{{"tool_calls":[{{{start}}}]}}'),
        chunk('{"tool_calls":[{"index":0,"custom":{"input":"go"}}]}'),
    ]


def test_functions_are_answered_as_functions(about: ResponseContext) -> None:
    request = msgspec.structs.replace(CHAT, legacy_functions=True)
    events: list[Event] = [*CALLS[:3], ChoiceEnd("tool_calls"), StreamEnd()]
    choice = whole(ChatEncoder(ResponseStyle(), request, about), events)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x":1}'}
    assert "tool_calls" not in choice["message"]
    stream = ChatEncoder(ResponseStyle(), streamed(request, response_options=QUIET), about)
    assert written(stream, events)[1:5] == [
        chunk('{"function_call":{"name":"f","arguments":""}}'),
        chunk('{"function_call":{"arguments":"{\\"x\\""}}'),
        chunk('{"function_call":{"arguments":":1}"}}'),
        chunk("{}", '"function_call"'),
    ]


def test_thoughts_and_refusals(about: ResponseContext) -> None:
    events: list[Event] = [
        ReasoningDelta("hm"),
        RefusalDelta("no"),
        ChoiceEnd("content_filter"),
        StreamEnd(),
    ]
    message = whole(ChatEncoder(ResponseStyle(), CHAT, about), events)["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "reasoning_content": "hm",
    }
    stream = ChatEncoder(ResponseStyle(), streamed(CHAT, response_options=QUIET), about)
    assert written(stream, events)[1:4] == [
        chunk('{"reasoning_content":"hm"}'),
        chunk('{"refusal":"no"}'),
        chunk("{}", '"content_filter"'),
    ]


TOP = (TopLogprob("Hi", -0.5), TopLogprob("alt1", -1.5))
HI = TokenLogprob("Hi", -0.5, TOP)


def test_chat_logprobs(about: ResponseContext) -> None:
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
    answer = whole(ChatEncoder(ResponseStyle(), CHAT, about), events)
    assert answer["choices"][0]["logprobs"] == expected
    lines = written(
        ChatEncoder(ResponseStyle(), streamed(CHAT, response_options=QUIET), about), events
    )
    assert json.loads(lines[1])["choices"][0] == {
        "index": 0,
        "delta": {"content": "Hi"},
        "logprobs": expected,
        "finish_reason": None,
    }


def test_a_token_that_is_no_text_keeps_its_bytes(about: ResponseContext) -> None:
    token = TokenLogprob("\ufffd", float("-inf"), data=b"\xe4")
    events: list[Event] = [TextDelta("", logprobs=(token,)), ChoiceEnd("eos"), StreamEnd()]
    answer = whole(ChatEncoder(ResponseStyle(), CHAT, about), events)
    found = answer["choices"][0]["logprobs"]["content"][0]
    assert (found["bytes"], found["logprob"]) == ([0xE4], -9999.0)
    columns = whole(CompletionEncoder(ResponseStyle(), TEXT, about), events)["choices"][0][
        "logprobs"
    ]
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
def test_finish_reasons(about: ResponseContext, reason: FinishReason, wire: str) -> None:
    answer = whole(
        ChatEncoder(ResponseStyle(), CHAT, about), [TextDelta("a"), ChoiceEnd(reason), StreamEnd()]
    )
    assert answer["choices"][0]["finish_reason"] == wire


def test_an_error_in_the_stream_is_an_event(about: ResponseContext) -> None:
    encoder = ChatEncoder(ResponseStyle(), streamed(CHAT), about)
    assert encoder.encode_error_event(StreamBroken("it stopped")) == (
        b'data: {"error":{"message":"it stopped","type":"server_error","param":null,'
        b'"code":"bad_gateway"}}\n\n'
    )


def test_a_whole_completion(about: ResponseContext) -> None:
    fold = ResponseAccumulator()
    fold.add(HELLO)
    reply = CompletionEncoder(ResponseStyle(), TEXT, about).encode_unary(fold.result())
    assert reply.body.decode() == (
        '{"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"mock",'
        '"choices":[{"text":"Hello world!","index":0,"logprobs":null,"finish_reason":"stop"}],'
        f'"usage":{USAGE}}}'
    )


def test_a_streamed_completion(about: ResponseContext) -> None:
    encoder = CompletionEncoder(ResponseStyle(), streamed(TEXT), about)
    head = '{"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"mock",'
    shape = head + '"choices":[{"text":"%s","index":0,"logprobs":null,"finish_reason":%s}],'
    shape += '"usage":null}'
    assert written(encoder, HELLO) == [
        shape % ("Hello", "null"),
        shape % (" world", "null"),
        shape % ("!", "null"),
        shape % ("", '"stop"'),
        f'{head}"choices":[],"usage":{USAGE}}}',
        "[DONE]",
    ]


def test_texts_count_for_where_a_token_stands(about: ResponseContext) -> None:
    stream = CompletionEncoder(ResponseStyle(), streamed(TEXT), about)
    stream.encode_events([TextDelta("Hi "), TextDelta("there ")])

    assert b'"text_offset":[9]' in stream.encode_events([TextDelta("Hi", logprobs=(HI,))])


def test_completion_logprobs_are_columns(about: ResponseContext) -> None:
    events: list[Event] = [
        PromptEcho(0, "a", (TokenLogprob("a", None),)),
        TextDelta("Hi", logprobs=(HI,)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]
    top = {"Hi": -0.5, "alt1": -1.5}
    choice = whole(CompletionEncoder(ResponseStyle(), TEXT, about), events)["choices"][0]
    assert choice["text"] == "aHi"
    assert choice["logprobs"] == {
        "tokens": ["a", "Hi"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, top],
        "text_offset": [0, 1],
    }
    lines = written(
        CompletionEncoder(ResponseStyle(), streamed(TEXT, response_options=QUIET), about), events
    )
    pieces = [json.loads(line)["choices"][0]["logprobs"] for line in lines[:2]]
    assert [piece["text_offset"] for piece in pieces] == [[0], [1]]
    assert [piece["top_logprobs"] for piece in pieces] == [None, [top]]


def test_what_the_worker_tells_of_itself_is_passed_on(about: ResponseContext) -> None:
    events: list[Event] = [
        ResponseMetadata(fingerprint="fp_1"),
        TextDelta("a", token_ids=(7,)),
        ChoiceEnd("stop", matched_stop="x"),
        StreamEnd(),
    ]
    request = streamed(CHAT, response_options=ResponseOptions(usage="none", token_ids=True))
    lines = written(ChatEncoder(ResponseStyle(), request, about), events)
    first, second = (json.loads(line) for line in lines[:2])
    assert first["system_fingerprint"] == second["system_fingerprint"] == "fp_1"
    assert second["choices"][0]["token_ids"] == [7]
    assert "stop_reason" not in second["choices"][0]
