"""Responses of generate, generate_stream and infer, byte for byte."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import DeadlineExceeded, StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    Usage,
)

PATH = "/v2/models/m/generate"
STREAM = "/v2/models/m/generate_stream"
INFER = "/v2/models/m/infer"
BODY = {"id": "a123", "text_input": "hi"}
DETAILED = BODY | {"parameters": {"details": True, "max_new_tokens": 3}}
HEAD = b'{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":'
HELLO = (TextDelta("Hello"), TextDelta(" world"), TextDelta("!"))


def test_generate_stream_without_details_has_four_keys_and_no_finish_reason(bench: Any) -> None:
    one = bench()
    sent = one.stream(
        one.encoder(STREAM, BODY),
        StreamStart(1),
        *HELLO,
        ChoiceEnd("eos"),
        Usage(1, 3),
        StreamEnd(),
    )

    assert sent == (
        b"data:" + HEAD + b'"Hello"}\n\n'
        b"data:" + HEAD + b'" world"}\n\n'
        b"data:" + HEAD + b'"!"}\n\n'
    )  # fmt: skip


def test_generate_stream_with_details_has_token_counts_and_times(bench: Any) -> None:
    """Each token is an event with its number and its time; only the last has a finish reason."""
    one = bench()
    encoder = one.encoder(STREAM, DETAILED)
    events = (
        0.12,
        HELLO[0],
        0.03,
        HELLO[1],
        0.0304,
        HELLO[2],
        ChoiceEnd("length"),
        Usage(1, 3),
        StreamEnd(),
    )
    nulls = b'"first_token_cost":null,"decode_cost":null,"batch_size":1,"queue_wait_time":0}'

    assert one.stream(encoder, *events) == (
        b"data:" + HEAD + b'"Hello","details":{"generated_tokens":1,' + nulls
        + b',"prefill_time":120,"decode_time":null}\n\n'
        b"data:" + HEAD + b'" world","details":{"generated_tokens":2,' + nulls
        + b',"prefill_time":null,"decode_time":30}\n\n'
        b"data:" + HEAD + b'"!","details":{"finish_reason":"length","generated_tokens":3,' + nulls
        + b',"prefill_time":null,"decode_time":30}\n\n'
    )  # fmt: skip


def test_backend_timing_overrides_measured_times(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(STREAM, DETAILED)
    sent = one.stream(
        encoder,
        Timing(queue=0.000010, prefill=0.2, batch_size=7),
        TextDelta("a"),
        Timing(decode=0.05),
        TextDelta("b"),
        Timing(queue=0.5),
        9.0,
        TextDelta("c"),
        ChoiceEnd("eos"),
        StreamEnd(),
    )

    events = [msgspec.json.decode(event[5:]) for event in sent.split(b"\n\n")[:-1]]

    assert [(t["prefill_time"], t["decode_time"]) for t in events] == [
        (200, None),
        (None, 50),
        (None, 9000),
    ]
    assert [t["details"]["batch_size"] for t in events] == [7, 7, 7]
    assert [t["details"]["queue_wait_time"] for t in events] == [10, 10, 500000]


def test_rc1_stream_has_no_prefill_and_decode_times(bench: Any) -> None:
    one = bench("rc1")
    sent = one.stream(
        one.encoder(STREAM, DETAILED), TextDelta("a"), TextDelta("b"), ChoiceEnd("eos"), StreamEnd()
    )

    assert b"prefill_time" not in sent
    assert b"decode_time" not in sent


def test_stream_delays_an_event_only_if_details_are_requested(bench: Any) -> None:
    one = bench()
    assert [len(w) > 0 for w in one.writes(one.encoder(STREAM, BODY), *HELLO, StreamEnd())] == [
        *(True, True, True, False)
    ]
    assert [len(w) > 0 for w in one.writes(one.encoder(STREAM, DETAILED), *HELLO, StreamEnd())] == [
        *(False, True, True, True)
    ]


def test_text_delta_without_text_is_sent(bench: Any) -> None:
    """Half of a character is a token without text."""
    one = bench()
    sent = one.stream(
        one.encoder(STREAM, BODY), TextDelta(""), TextDelta("\u4f60"), ChoiceEnd("eos"), StreamEnd()
    )
    assert sent.decode() == f'data:{HEAD.decode()}""}}\n\ndata:{HEAD.decode()}"你"}}\n\n'


@pytest.mark.parametrize("body", [BODY, DETAILED])
def test_response_without_text_is_one_event(bench: Any, body: Any) -> None:
    one = bench()
    sent = one.stream(
        one.encoder(STREAM, body), StreamStart(1), ChoiceEnd("eos"), Usage(1, 0), StreamEnd()
    )

    assert sent.startswith(b"data:" + HEAD + b'""')
    assert sent.count(b"data:") == 1
    assert (b'"finish_reason":"eos_token","generated_tokens":0' in sent) is (body is DETAILED)


def test_reasoning_and_refusal_are_part_of_text_output(bench: Any) -> None:
    one = bench()
    events = (ReasoningDelta("hm "), TextDelta("yes"), RefusalDelta("!"))
    sent = one.stream(one.encoder(STREAM, BODY), *events, ChoiceEnd("eos"), StreamEnd())

    assert [msgspec.json.decode(e[5:])["text_output"] for e in sent.split(b"\n\n")[:-1]] == [
        *("hm ", "yes", "!")
    ]

    reply = one.whole(one.encoder(PATH, BODY), *events, ChoiceEnd("eos"), StreamEnd())
    assert reply.body == HEAD + b'"hm yes!"}'


@pytest.mark.parametrize(
    ("reason", "later", "early"),
    [
        ("eos", "eos_token", "eos_token"),
        ("stop", "eos_token", "eos_token"),
        ("tool_calls", "eos_token", "eos_token"),
        ("length", "length", "length"),
        ("content_filter", "stop_sequence", "stop_sequence"),
        ("unknown", "invalid finishReason", "invalid flag"),
    ],
)
def test_finish_reason_names_by_profile(
    bench: Any, reason: FinishReason, later: str, early: str
) -> None:
    for profile, name in (("2x", later), ("1x", later), ("rc1", early)):
        one = bench(profile)
        reply = one.whole(
            one.encoder(PATH, DETAILED), TextDelta("a"), ChoiceEnd(reason), StreamEnd()
        )
        assert msgspec.json.decode(reply.body)["details"]["finish_reason"] == name


# --- unary responses ------------------------------------------------------------------------------


def test_unary_generate_response(bench: Any) -> None:
    one = bench()
    reply = one.whole(one.encoder(PATH, BODY), *HELLO, ChoiceEnd("eos"), Usage(1, 3), StreamEnd())

    assert (reply.status, reply.body) == (200, HEAD + b'"Hello world!"}')
    assert reply.headers == (("Content-Type", "application/json"), ("Connection", "close"))


def test_unary_generate_response_with_details(bench: Any) -> None:
    """The details of a stream's events are lists in a unary response."""
    one = bench()
    encoder = one.encoder(PATH, DETAILED)

    reply = one.whole(encoder, *HELLO, ChoiceEnd("length"), Usage(1, 3), StreamEnd())

    assert reply.body == (
        HEAD + b'"Hello world!","details":{"finish_reason":"length","generated_tokens":3,'
        b'"first_token_cost":null,"decode_cost":null,"batch_size":[1,1,1],'
        b'"queue_wait_time":[0,0,0]}}'
    )


def test_unary_response_lists_backend_timing_per_token(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(PATH, DETAILED)
    times = (Timing(queue=0.00001, batch_size=4), Timing())
    reply = one.whole(
        encoder, *times, TextDelta("a"), TextDelta("b"), ChoiceEnd("eos"), StreamEnd()
    )

    details = msgspec.json.decode(reply.body)["details"]

    assert details["batch_size"] == [4, 1]
    assert details["queue_wait_time"] == [10, 0]
    assert details["generated_tokens"] == 2


def test_unary_response_with_one_timing_for_all_tokens(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(PATH, DETAILED)
    events = (TextDelta("a"), TextDelta("b"), ChoiceEnd("eos"), Usage(1, 2))
    reply = one.whole(encoder, *events, Timing(queue=0.00001, batch_size=4), StreamEnd())

    details = msgspec.json.decode(reply.body)["details"]

    assert details["batch_size"] == [4, 4]
    assert details["queue_wait_time"] == [10, 0]


# --- failed streams -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "timeout", "message"),
    [
        (DeadlineExceeded(""), 3, "Engine callback timeout: client timeout"),
        (DeadlineExceeded(""), None, "Engine callback timeout: server e2eTimeout"),
        (DeadlineExceeded("", which="idle"), 3, "Engine callback timeout: server tokenTimeout"),
        (StreamBroken("the worker at 10.0.0.1"), None, "Failed to get engine response"),
    ],
)
def test_stream_error_is_plain_text(bench: Any, error: Any, timeout: Any, message: str) -> None:
    one = bench()
    encoder = one.encoder(STREAM, BODY | {"parameters": {"timeout": timeout}})

    one.stream(encoder, TextDelta("a"))

    assert encoder.encode_error_event(error) == message.encode()


def test_delayed_event_is_sent_before_the_error(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(STREAM, DETAILED)
    assert one.stream(encoder, TextDelta("a"), ChoiceEnd("eos")) == b""

    sent = encoder.encode_error_event(StreamBroken("cut"))
    assert sent.startswith(b"data:" + HEAD + b'"a"')
    assert sent.endswith(b"}\n\nFailed to get engine response")
    assert b"finish_reason" not in sent


# --- token ids ------------------------------------------------------------------------------------

TENSOR = {"name": "input0", "shape": [1, 1], "datatype": "UINT32", "data": [396]}
INFERENCE = {"id": "a123", "inputs": [TENSOR], "outputs": [{"name": ""}]}


def test_infer_response_returns_token_ids(bench: Any) -> None:
    one = bench()
    encoder = one.encoder(INFER, INFERENCE)
    events = (TextDelta("a", token_ids=(1, 2), tokens=2), TextDelta("b", token_ids=(3,)))

    assert one.stream(encoder, *events, ChoiceEnd("eos"), StreamEnd()) == b""

    reply = one.whole(encoder, *events, ChoiceEnd("eos"), StreamEnd())
    assert reply.body == (
        b'{"id":"a123","outputs":[{"name":"output0","shape":[1,3],"datatype":"UINT32",'
        b'"data":[1,2,3]}]}'
    )
    assert encoder.headers()[0] == ("RequestUUID", "r1")
    assert encoder.encode_error_event(StreamBroken("cut")) == b"Failed to get engine response"


def test_infer_without_token_ids_from_backend_returns_500(bench: Any) -> None:
    one = bench()
    reply = one.whole(one.encoder(INFER, INFERENCE), TextDelta("a"), ChoiceEnd("eos"), StreamEnd())

    assert reply.status == 500
    assert msgspec.json.decode(reply.body) == {
        "error": "Failed to get engine response.",
        "error_type": "Incomplete Generation",
    }
