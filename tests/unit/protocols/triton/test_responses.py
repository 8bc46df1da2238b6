"""Responses of generate and generate_stream, byte for byte."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import ClientRequest, ResponseContext, ResponseEncoder
from protocols.triton import formats
from protocols.triton.endpoints import Triton

ADAPTER = Triton()
NAMED = b'"model_name":"vllm_like","model_version":"1"'


@pytest.fixture
def encoder_factory(
    client_of: Callable[..., Any], describe: Callable[..., Any]
) -> Callable[..., ResponseEncoder]:
    """Creates the encoder of the response to a body."""

    def make(body: Any, variant: str = "generate", profile: str = "vllm") -> ResponseEncoder:
        client = client_of(profile)
        call = client.call(f"/v2/models/vllm_like/{variant}", body, method="POST")
        encoder: ResponseEncoder = client.adapter.create_encoder(
            call, client.adapter.decode_request(call), describe("vllm_like")
        )
        return encoder

    return make


def encode_unary_body(of: ResponseEncoder, events: Sequence[Event]) -> bytes:
    fold = ResponseAccumulator()
    fold.add(events)
    return of.encode_unary(fold.result()).body


STREAMING = {"text_input": "a", "stream": True}
EXTRAS = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def test_stream_event_counts_its_own_tokens_and_last_has_finish_reason(
    encoder_factory: Any,
) -> None:
    of = encoder_factory({**STREAMING, **EXTRAS}, "generate_stream")
    assert of.encode_events([StreamStart(7)]) == b""
    assert of.encode_events([TextDelta("Hel", tokens=2)]) == (
        b'data: {"finish_reason":"None",' + NAMED + b',"num_input_tokens":7,"num_output_tokens":2,'
        b'"text_output":"Hel"}\n\n'
    )
    assert of.encode_events([TextDelta("lo"), ChoiceEnd("length"), Usage(7, 3), StreamEnd()]) == (
        b'data: {"finish_reason":"length",' + NAMED + b',"num_input_tokens":7,'
        b'"num_output_tokens":1,"text_output":"lo"}\n\n'
    )


def test_finish_reason_without_text_is_sent_only_on_request(encoder_factory: Any) -> None:
    with_reason = encoder_factory({**STREAMING, "return_finish_reason": True}, "generate_stream")
    with_reason.encode_events([TextDelta("x")])

    assert with_reason.encode_events([ChoiceEnd("stop")]) == (
        b'data: {"finish_reason":"stop",' + NAMED + b',"text_output":""}\n\n'
    )

    for parameters in ({}, {"return_num_output_tokens": True}):
        silent = encoder_factory({**STREAMING, **parameters}, "generate_stream")
        silent.encode_events([TextDelta("x")])
        assert silent.encode_events([ChoiceEnd("stop"), Usage(1, 1), StreamEnd()]) == b""


def test_choices_share_one_event_with_lists(encoder_factory: Any) -> None:
    of = encoder_factory({**STREAMING, "n": 2, "return_finish_reason": True}, "generate_stream")
    assert of.encode_events(
        [TextDelta("a", 0), TextDelta("b", 1), TextDelta("c", 1), ChoiceEnd("eos", 1)]
    ) == (b'data: {"finish_reason":["None","stop"],' + NAMED + b',"text_output":["a","bc"]}\n\n')
    assert of.encode_events([TextDelta("d", 0)]) == (
        b'data: {"finish_reason":["None","None"],' + NAMED + b',"text_output":["d",""]}\n\n'
    )


def test_reasoning_and_tool_calls_are_omitted_from_streams(encoder_factory: Any) -> None:
    of = encoder_factory(STREAMING, "generate_stream")
    assert (
        of.encode_events([PromptEcho(0, "a"), ReasoningDelta("hm"), ToolCallStart(0, 0, "c", "f")])
        == b""
    )
    assert (
        of.encode_events([RefusalDelta("no")]) == b"data: {" + NAMED + b',"text_output":"no"}\n\n'
    )

    several = encoder_factory({**STREAMING, "return_finish_reason": True}, "generate_stream")
    assert (
        several.encode_events(
            [PromptEcho(0, "a"), ReasoningDelta("hm"), ToolCallStart(0, 0, "c", "f")]
        )
        == b""
    )
    assert b'"text_output":"no"' in several.encode_events([RefusalDelta("no")])


def test_stream_error_is_an_sse_event(encoder_factory: Any) -> None:
    of = encoder_factory(STREAMING, "generate_stream")
    assert of.encode_error_event(StreamBroken("the answer stopped")) == (
        b'data: {"error":"the answer stopped"}\n\n'
    )
    assert of.content_type == "text/event-stream; charset=utf-8"


REASONS = [
    ("eos", "stop"),
    ("stop", "stop"),
    ("length", "length"),
    ("tool_calls", "stop"),
    ("content_filter", "stop"),
    ("unknown", "None"),
]


@pytest.mark.parametrize(("reason", "printed"), REASONS)
def test_finish_reason_names(encoder_factory: Any, reason: Any, printed: str) -> None:
    of = encoder_factory({"text_input": "a", "return_finish_reason": True})
    events: list[Event] = [TextDelta("x"), ChoiceEnd(reason), StreamEnd()]

    body = encode_unary_body(of, events)

    assert msgspec.json.decode(body)["finish_reason"] == printed


def test_token_counts_are_those_of_the_worker(encoder_factory: Any) -> None:
    body = {"text_input": "a", "return_num_output_tokens": True, "return_num_input_tokens": True}
    assert encode_unary_body(
        encoder_factory(body), [TextDelta("x"), ChoiceEnd("eos"), Usage(4, 9), StreamEnd()]
    ) == (b"{" + NAMED + b',"num_input_tokens":4,"num_output_tokens":9,"text_output":"x"}')
    assert encode_unary_body(
        encoder_factory(body), [TextDelta("x", tokens=2), ChoiceEnd("eos"), StreamEnd()]
    ) == (b"{" + NAMED + b',"num_output_tokens":2,"text_output":"x"}')


def test_model_without_numeric_version_reports_version_1(
    client: Any, describe: Callable[..., Any]
) -> None:
    response = client.post("/v2/models/named/generate", {"text_input": "a", "max_tokens": 1})
    assert response.body == b'{"model_name":"named","model_version":"1","text_output":"a w0"}'
    assert formats.get_version_number(describe("named", "12")) == "12"


# --- log probabilities ------------------------------------------------------------------------

TENTH = TokenLogprob("a", -0.1, id=5, top=(TopLogprob("a", -0.1, 5), TopLogprob("b", -3.0, 6)))
HALF = TokenLogprob("b", -0.5)


def test_cumulative_logprob_is_summed_over_the_stream(encoder_factory: Any) -> None:
    of = encoder_factory({**STREAMING, "return_cumulative_logprob": True}, "generate_stream")
    first = of.encode_events([TextDelta("a", logprobs=(TENTH,))])
    assert first.startswith(b'data: {"cumulative_logprob":-0.10000000149011612,')

    second = of.encode_events([TextDelta("b", logprobs=(HALF,)), ChoiceEnd("eos")])
    assert second.startswith(b'data: {"cumulative_logprob":-0.6000000238418579,')
    assert b"cumulative_logprob" not in encoder_factory(
        {**STREAMING, "return_cumulative_logprob": True}, "generate_stream"
    ).encode_events([TextDelta("x")])


def test_trtllm_reports_cumulative_and_per_token_log_probs(encoder_factory: Any) -> None:
    body = {"text_input": "a", "max_tokens": 2, "return_log_probs": True}
    events: list[Event] = [
        TextDelta("a", logprobs=(TENTH,)),
        TextDelta("b", logprobs=(HALF,)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]

    assert encode_unary_body(encoder_factory(body, profile="trtllm"), events) == (
        b'{"cum_log_probs":-0.6000000238418579,' + NAMED + b","
        b'"output_log_probs":[-0.10000000149011612,-0.5],"text_output":"ab"}'
    )


def test_cumulative_logprob_excludes_the_prompt(encoder_factory: Any) -> None:
    of = encoder_factory(
        {"text_input": "p", "return_cumulative_logprob": True, "prompt_logprobs": 0}
    )
    echo = PromptEcho(0, "p", (TokenLogprob("p", -9.0),))

    body = encode_unary_body(
        of, [echo, TextDelta("b", logprobs=(HALF,)), ChoiceEnd("eos"), StreamEnd()]
    )

    assert body == b'{"cumulative_logprob":-0.5,' + NAMED + b',"text_output":"pb"}'


def test_logprobs_output_is_a_json_string(encoder_factory: Any) -> None:
    of = encoder_factory({"text_input": "a", "return_logprobs": True})
    body = encode_unary_body(
        of, [TextDelta("ab", logprobs=(TENTH, HALF), tokens=2), ChoiceEnd("eos"), StreamEnd()]
    )

    assert msgspec.json.decode(msgspec.json.decode(body)["logprobs"]) == [
        {
            "5": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
            "6": {"logprob": -3.0, "rank": 2, "decoded_token": "b"},
        },
        {"b": {"logprob": -0.5, "rank": None, "decoded_token": "b"}},
    ]


def test_llmapi_reports_the_stop_reason(encoder_factory: Any) -> None:
    body = {"text_input": "a", "return_stop_reason": True}
    for stop, printed in (("END", b'"END"'), (7, b'"7"'), (None, b'"None"')):
        of = encoder_factory(body, profile="llmapi")
        response = encode_unary_body(
            of, [TextDelta("x"), ChoiceEnd("stop", matched_stop=stop), StreamEnd()]
        )
        assert b'"stop_reason":' + printed in response


PRINTED = [
    (0.1, b"0.10000000149011612"),
    (1, b"1.0"),
    (0, b"0.0"),
    (-0.5, b"-0.5"),
    (-1e-7, b"-1.0000000116860974e-7"),
    (1e-8, b"9.99999993922529e-9"),
    (-5e-6, b"-0.000004999999873689376"),
    (123456789, b"123456792.0"),
    (float("-inf"), b"null"),
    (None, b"null"),
]


@pytest.mark.parametrize(("value", "printed"), PRINTED)
def test_fp32_values_are_printed_as_doubles(value: Any, printed: bytes) -> None:
    assert formats.encode_json(formats.round_to_fp32(value)) == printed


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_fp32_values_round_trip_through_json(value: float) -> None:
    read = msgspec.json.decode(formats.encode_json(formats.round_to_fp32(value)), type=float)
    assert struct.pack("f", read) == struct.pack("f", value)


# --- text -------------------------------------------------------------------------------------


def test_control_characters_are_escaped_in_uppercase_hex() -> None:
    assert formats.encode_json("\x1b\\u001b\x00/\x7f\n\u2028é") == (
        b'"\\u001B\\\\u001b\\u0000/\x7f\\n\xe2\x80\xa8\xc3\xa9"'
    )


@given(st.lists(st.text(), max_size=6), st.text(max_size=5), st.booleans())
def test_stream_text_equals_the_event_text(texts: list[str], name: str, ends: bool) -> None:
    body = {"text_input": "a", "stream": True, "id": name, "return_finish_reason": ends}
    row = next(e for e in ADAPTER.endpoints if e.operation == "generate_stream")
    call = ClientRequest(row, {"model": "m"}, {}, "", msgspec.json.encode(body), row.path)
    context = RequestContext("r1", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)
    of = ADAPTER.create_encoder(
        call, ADAPTER.decode_request(call), ResponseContext("r1", 0, "m", "1", "m", context.clock)
    )
    wire_bytes = b"".join(of.encode_events([TextDelta(text)]) for text in texts)
    wire_bytes += of.encode_events([ChoiceEnd("eos"), Usage(1, 1), StreamEnd()])
    events = [e.removeprefix(b"data: ") for e in wire_bytes.split(b"\n\n")[:-1]]

    read = [msgspec.json.decode(event) for event in events]

    assert [event["text_output"] for event in read] == texts + [""] * ends
    assert all(event.get("id", "") == name.partition("\0")[0] for event in read)
    assert all(list(event) == sorted(event) for event in read)
