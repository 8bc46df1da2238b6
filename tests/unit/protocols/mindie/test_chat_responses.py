"""Chat and completion responses, byte for byte."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import ModelNotFound, StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "a b"}
STREAM = {"stream": True}
HELLO = (StreamStart(2), TextDelta("Hello"), TextDelta("!"))
CALLED = (ToolCallStart(0, 0, "c1", "f"), ToolCallDelta(0, 0, '{"x"'), ToolCallDelta(0, 0, ":1}"))
CHUNK = (
    'data: {"id":"endpoint_common_0","object":"chat.completion.chunk","created":1707275960,'
    '"model":"m",'
)
PIECE = (
    CHUNK + '"choices":[{"index":%d,"delta":{"role":"assistant",%s},"logprobs":null,'
    '"finish_reason":null}]}\n\n'
)
DONE = "data: [DONE]\n\n"


def format_last_chunk(reason: str, usage: str, index: int = 0) -> str:
    usage_json = f'"usage":{usage},' if usage else ""
    delta = '{"role":"assistant","content":""}'
    return (
        f'{CHUNK}{usage_json}"choices":[{{"index":{index},"delta":{delta},"logprobs":null,'
        f'"finish_reason":"{reason}"}}]}}\n\n'
    )


def format_usage(prompt: int, completion: int) -> str:
    total = prompt + completion
    return f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total}}}'


# --- streams --------------------------------------------------------------------------------------


def test_chat_stream_bytes_and_headers(bench: Any) -> None:
    """The first event is empty, each has the role, and the last has finish reason and usage."""
    one = bench()
    encoder = one.encoder(CHAT, HI | STREAM, model="m")

    sent = one.stream(encoder, *HELLO, Timing(), ChoiceEnd("eos"), Usage(2, 2), StreamEnd())

    assert sent.decode() == (
        PIECE % (0, '"content":""')
        + PIECE % (0, '"content":"Hello"')
        + PIECE % (0, '"content":"!"')
        + format_last_chunk("stop", format_usage(2, 2))
        + DONE
    )
    assert encoder.content_type == "text/event-stream"
    assert encoder.headers() == (("RequestUUID", "r1"), ("startTime", "1707275960000000000"))


def test_chat_stream_sends_each_text_delta_at_once(bench: Any) -> None:
    one = bench()
    writes = one.writes(one.encoder(CHAT, HI | STREAM), *HELLO[1:], ChoiceEnd("eos"), StreamEnd())
    assert [len(w) > 0 for w in writes] == [True, True, False, True]


@pytest.mark.parametrize(
    ("reason", "later", "early"),
    [
        ("eos", "stop", "eos_token"),
        ("stop", "stop", "eos_token"),
        ("length", "length", "length"),
        ("tool_calls", "tool_calls", "eos_token"),
        ("content_filter", "stop", "stop_sequence"),
        ("unknown", "stop", "invalid flag"),
    ],
)
def test_finish_reason_names_by_profile(
    bench: Any, reason: FinishReason, later: str, early: str
) -> None:
    for profile, name in (("2x", later), ("1x", later), ("rc1", early)):
        one = bench(profile)
        reply = one.whole(one.encoder(CHAT, HI), TextDelta("a"), ChoiceEnd(reason), StreamEnd())
        assert msgspec.json.decode(reply.body)["choices"][0]["finish_reason"] == name
        sent = one.stream(
            one.encoder(CHAT, HI | STREAM), TextDelta("a"), ChoiceEnd(reason), StreamEnd()
        )
        assert sent.count(f'"finish_reason":"{name}"'.encode()) == 1


@pytest.mark.parametrize("profile", ["2x", "rc1"])
def test_unknown_finish_reason_is_shown_as_the_worker_wrote_it(bench: Any, profile: str) -> None:
    one = bench(profile)
    end = ChoiceEnd("unknown", own_word="later")

    reply = one.whole(one.encoder(CHAT, HI), TextDelta("a"), end, StreamEnd())

    assert msgspec.json.decode(reply.body)["choices"][0]["finish_reason"] == "later"


def test_unknown_usage_is_omitted_from_the_last_chunk(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(CHAT, HI | STREAM, model="m")

    sent = one.stream(encoder, TextDelta("a"), ChoiceEnd("length"), StreamEnd()).decode()

    assert sent.endswith(format_last_chunk("length", "") + DONE)
    assert "usage" not in sent


def test_stream_of_two_choices_reports_usage_per_choice(bench: Any) -> None:
    """Each choice has the tokens of its own."""
    one = bench()
    encoder = one.encoder(CHAT, HI | STREAM | {"n": 2, "temperature": 1}, model="m")

    sent = one.stream(
        encoder,
        StreamStart(3),
        TextDelta("a", 1),
        TextDelta("b", 0, tokens=2),
        ChoiceEnd("eos", 1),
        ChoiceEnd("length", 0),
        StreamEnd(),
    )

    assert sent.decode() == (
        PIECE % (0, '"content":""')
        + PIECE % (1, '"content":""')
        + PIECE % (1, '"content":"a"')
        + PIECE % (0, '"content":"b"')
        + format_last_chunk("stop", format_usage(3, 1), 1)
        + format_last_chunk("length", format_usage(3, 2), 0)
        + DONE
    )


def test_chat_stream_of_reasoning_and_tool_calls(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(CHAT, HI | STREAM, model="m")
    events = (
        ReasoningDelta("hm"),
        TextDelta(""),
        *CALLED,
        ChoiceEnd("tool_calls"),
        Usage(2, 9),
        StreamEnd(),
    )
    first = '{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":""}}'

    assert one.stream(encoder, *events).decode() == (
        PIECE % (0, '"content":""')
        + PIECE % (0, '"reasoning_content":"hm"')
        + PIECE % (0, f'"tool_calls":[{first}]')
        + PIECE % (0, r'"tool_calls":[{"index":0,"function":{"arguments":"{\"x\""}}]')
        + PIECE % (0, '"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]')
        + format_last_chunk("tool_calls", format_usage(2, 9))
        + DONE
    )


def test_eos_after_a_tool_call_has_finish_reason_tool_calls(bench: Any) -> None:
    one = bench()
    sent = one.stream(one.encoder(CHAT, HI | STREAM), *CALLED, ChoiceEnd("eos"), StreamEnd())
    assert b'"finish_reason":"tool_calls"' in sent


LOGPROB = TokenLogprob("é", -0.5, (TopLogprob("é", -0.5), TopLogprob("?", -1.5, data=b"\xff")))


def test_logprobs_in_streaming_and_unary_chat_responses(bench: Any) -> None:
    one = bench()
    body = HI | {"logprobs": True, "top_logprobs": 2}
    logprobs_json = (
        '{"content":[{"token":"é","logprob":-0.5,"bytes":[195,169],"top_logprobs":['
        '{"token":"é","logprob":-0.5,"bytes":[195,169]},'
        '{"token":"?","logprob":-1.5,"bytes":[255]}]}]}'
    )
    events = (TextDelta("é", logprobs=(LOGPROB,)), ChoiceEnd("eos"), Usage(1, 1), StreamEnd())
    sent = one.stream(one.encoder(CHAT, body | STREAM), *events).decode()

    assert f'"content":"é"}},"logprobs":{logprobs_json},"finish_reason":null' in sent

    reply = one.whole(one.encoder(CHAT, body), *events)
    assert f'"logprobs":{logprobs_json},"finish_reason":"stop"' in reply.body.decode()


def test_stream_error_is_plain_text(bench: Any) -> None:
    one = bench()
    for path, body in ((CHAT, HI), (TEXT, PROMPT)):
        encoder = one.encoder(path, body | STREAM)
        one.stream(encoder, TextDelta("a"))
        assert encoder.encode_error_event(StreamBroken("cut")) == b"Failed to get engine response"


# --- unary responses ------------------------------------------------------------------------------


def test_unary_chat_response(bench: Any) -> None:
    one = bench()
    reply = one.whole(
        one.encoder(CHAT, HI, model="m"), *HELLO, ChoiceEnd("eos"), Usage(2, 2), StreamEnd()
    )

    assert reply.body.decode() == (
        '{"id":"endpoint_common_0","object":"chat.completion","created":1707275960,"model":"m",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"Hello!","tool_calls":[]},'
        '"logprobs":null,"finish_reason":"stop"}],"usage":' + format_usage(2, 2) + "}"
    )
    assert reply.headers == (("Content-Type", "application/json"), ("Connection", "close"))


def test_connection_is_kept_after_unary_responses_only_if_configured(bench: Any) -> None:
    events = (*HELLO, ChoiceEnd("eos"), Usage(2, 2), StreamEnd())
    close = ("Connection", "close")
    for keep_alive in (False, True):
        one = bench(keep_alive=keep_alive)
        call = one.call(CHAT, HI)
        replies = [
            one.whole(one.encoder(CHAT, HI), *events),
            one.adapter.encode_error(ModelNotFound("none", model="x"), call),
            one.adapter.encode_error(ModelNotFound("none", model="x"), None),
        ]
        assert [close in reply.headers for reply in replies] == [not keep_alive] * 3
        assert all(("Content-Type", "application/json") in reply.headers for reply in replies)
        assert replies[0].body == bench().whole(bench().encoder(CHAT, HI), *events).body


def test_unary_chat_response_with_reasoning_and_tool_calls(bench: Any) -> None:
    one = bench()
    events = (ReasoningDelta("hm"), *CALLED, ChoiceEnd("eos"), Usage(2, 9, 1, 4), StreamEnd())
    reply = one.whole(one.encoder(CHAT, HI), *events)

    text = reply.body.decode()

    assert (
        '"message":{"role":"assistant","content":"","reasoning_content":"hm","tool_calls":['
        r'{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},'
        '"logprobs":null,"finish_reason":"tool_calls"'
    ) in text
    assert text.endswith(
        '"usage":{"prompt_tokens":2,"prompt_tokens_details":{"cached_tokens":1},'
        '"completion_tokens":9,"completion_tokens_details":{"reasoning_tokens":4},'
        '"total_tokens":11}}'
    )


def test_rc1_merges_reasoning_and_refusal_into_content(bench: Any) -> None:
    one = bench("rc1")
    events = (
        ReasoningDelta("hm "),
        TextDelta("no"),
        RefusalDelta("!"),
        ChoiceEnd("eos"),
        StreamEnd(),
    )
    reply = one.whole(one.encoder(CHAT, HI), *events)
    message = msgspec.json.decode(reply.body)["choices"][0]["message"]

    assert message == {"role": "assistant", "content": "hm no!"}

    sent = one.stream(one.encoder(CHAT, HI | STREAM), *events)
    assert b'"delta":{"role":"assistant","content":"hm "}' in sent
    assert b"usage" not in reply.body + sent


# --- completions ----------------------------------------------------------------------------------


def test_unary_completion_response(bench: Any) -> None:
    one = bench()
    reply = one.whole(
        one.encoder(TEXT, PROMPT, model="m"), *HELLO, ChoiceEnd("length"), Usage(2, 2), StreamEnd()
    )

    assert reply.body.decode() == (
        '{"id":"endpoint_common_0","object":"text_completion","created":1707275960,"model":"m",'
        '"choices":[{"index":0,"text":"Hello!","logprobs":null,"stop_reason":null,'
        '"finish_reason":"length"}],"usage":' + format_usage(2, 2) + "}"
    )


def test_completion_stream(bench: Any) -> None:
    one = bench()
    chunk = (
        'data: {"id":"endpoint_common_0","object":"text_completion","created":1707275960,'
        '"model":"m","choices":[{"index":0,"text":%s,"logprobs":null,"stop_reason":null,'
        '"finish_reason":%s}]%s}\n\n'
    )
    encoder = one.encoder(TEXT, PROMPT | STREAM, model="m")

    sent = one.stream(
        encoder, *HELLO, ChoiceEnd("stop", matched_stop="x"), Usage(2, 2), StreamEnd()
    )

    assert sent.decode() == (
        chunk % ('"Hello"', "null", "")
        + chunk % ('"!"', "null", "")
        + chunk % ('""', '"stop"', ',"usage":' + format_usage(2, 2))
        + DONE
    )


def test_completion_logprobs_use_columns_and_byte_offsets(bench: Any) -> None:
    """The sampled token precedes its alternatives; offsets count bytes."""
    one = bench()
    body = PROMPT | {"logprobs": 2}
    events = (
        TextDelta("é", logprobs=(LOGPROB,)),
        TextDelta("é", logprobs=(LOGPROB,)),
        ChoiceEnd("eos"),
        StreamEnd(),
    )
    first = (
        '{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["é"],'
        '"top_logprobs":[{"é":-0.5,"?":-1.5}]}'
    )

    sent = one.stream(one.encoder(TEXT, body | STREAM), *events).decode()

    assert f'"text":"é","logprobs":{first},' in sent
    assert '"text_offset":[2]' in sent
    assert '"text_offset":[0,2]' in one.whole(one.encoder(TEXT, body), *events).body.decode()


def test_completion_stream_has_no_tool_calls(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(TEXT, PROMPT | STREAM, model="m")

    sent = one.stream(encoder, *HELLO, *CALLED, ChoiceEnd("eos"), Usage(2, 2), StreamEnd())

    assert b'"name"' not in sent
    assert b'"arguments"' not in sent
