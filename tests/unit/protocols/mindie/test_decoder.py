"""Responses of workers are decoded to events, byte for byte."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    Timing,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.request import (
    GenerationRequest,
    LogprobsOptions,
    Message,
    PromptOptions,
    ResponseOptions,
    SamplingParams,
    TextPart,
)
from protocols.mindie.endpoints import MindIE
from tests.support.examples import share_examples

WARM = SamplingParams(temperature=1.0)


def make_completion(*, stream: bool = True, **fields: Any) -> GenerationRequest:
    fields = {"prompts": ("x",), "templating": PromptOptions(mode="raw"), **fields}
    return GenerationRequest(model="m", kind="completion", stream=stream, **fields)


def make_chat(*, stream: bool = True, **fields: Any) -> GenerationRequest:
    messages = (Message("user", (TextPart("x"),)),)
    return GenerationRequest(model="m", kind="chat", messages=messages, stream=stream, **fields)


def decode_response(
    request: GenerationRequest, data: bytes, profile: str = "2x", *, size: int = 1 << 20
) -> list[Event]:
    """Decode a response in pieces of ``size``; an error discards earlier events."""
    reader = MindIE(profile).create_decoder(request)
    events: list[Event] = []
    for i in range(0, len(data), size):
        events += reader.feed(data[i : i + size])
    return [*events, *reader.close()]


def decode_in_chunks(request: GenerationRequest, data: bytes, profile: str = "2x") -> list[Event]:
    """Decode a response, and assert that the events do not depend on the split."""
    events = decode_response(request, data, profile)
    for size in (1, 2, 7):
        assert decode_response(request, data, profile, size=size) == events
    return events


def format_generate_event(text: str, rest: str = "") -> str:
    return (
        '{"id":"a1","model_name":"m7","model_version":null,"text_output":' + f'"{text}"{rest}' + "}"
    )


def format_details(tokens: int, reason: str = "", batch: str = "1", queue: str = "10") -> str:
    ended = f'"finish_reason":"{reason}",' if reason else ""
    return (
        ',"details":{' + ended + f'"generated_tokens":{tokens},"first_token_cost":null,'
        f'"decode_cost":null,"batch_size":{batch},"queue_wait_time":{queue}' + "}"
    )


def format_times(prefill: str, decode: str) -> str:
    return f',"prefill_time":{prefill},"decode_time":{decode}'


def make_sse(*events: str) -> bytes:
    return "".join(f"data:{one}\n\n" for one in events).encode()


STREAM = make_sse(
    format_generate_event("é a", format_details(1) + format_times("42", "null")),
    format_generate_event("", format_details(2) + format_times("null", "7")),
    format_generate_event(
        "m", format_details(4, "eos_token", "3", "20") + format_times("null", "8.5")
    ),
)
SERVED = ResponseMetadata("m7", id="a1")
HELLO_EVENTS = [
    SERVED,
    TextDelta("é a"),
    TextDelta(""),
    TextDelta("m", tokens=2),
    ChoiceEnd("eos"),
    StreamEnd(),
]


def test_generate_stream_is_decoded() -> None:
    assert decode_in_chunks(make_completion(), STREAM) == HELLO_EVENTS


@pytest.mark.parametrize(
    "data",
    [
        STREAM.replace(b"\n", b"\r\n"),
        STREAM.replace(b"data:", b"data: "),
        b"\xef\xbb\xbf" + STREAM,
        b"\n\n: ping\n\n" + STREAM,
        b"event: x\nid: 1\n" + STREAM,
        STREAM[:-1],
        STREAM[:-2],
        STREAM.removesuffix(b"\n\n") + b"\r\n",
        STREAM + b"data: [DONE]\n\n",
        STREAM + make_sse(format_generate_event("more")) + b"Failed to get engine response",
        STREAM.replace(b'"details":{"finish_reason":"eos_token"',
                       b'"finish_reason":"eos_token","details":{"batch_size":1'),
    ],
    ids=["crlf", "blank", "bom", "comment", "fields", "one newline", "none", "half", "done",
         "beyond", "above"],
)  # fmt: skip
def test_sse_framing_variants_decode_to_the_same_events(data: bytes) -> None:
    assert decode_in_chunks(make_completion(), data) == HELLO_EVENTS


def test_unknown_keys_of_events_are_reported() -> None:
    data = STREAM.replace(b'"details":{"finish', b'"later":2,"details":{"x":1,"finish')

    events = decode_in_chunks(make_completion(), data)

    lost = [one.values for one in events if isinstance(one, ResponseExtra)]
    assert [one for one in events if not isinstance(one, ResponseExtra)] == HELLO_EVENTS
    assert lost == [((("later",), 2), (("details", "x"), 1))]


def test_timing_events_are_emitted_when_requested() -> None:
    events = decode_in_chunks(
        make_completion(response_options=ResponseOptions(timing=True)), STREAM
    )

    assert [one for one in events if isinstance(one, Timing)] == [
        Timing(queue=1e-5, prefill=0.042, batch_size=1),
        Timing(queue=1e-5, decode=0.007, batch_size=1),
        Timing(queue=2e-5, decode=0.0085, batch_size=3),
    ]
    assert events[1:3] == [Timing(queue=1e-5, prefill=0.042, batch_size=1), TextDelta("é a")]


def test_rc1_stream_drops_the_text_of_the_final_eos_token() -> None:
    data = make_sse(
        format_generate_event("am", format_details(1)),
        format_generate_event(" passion", format_details(2)),
        format_generate_event("</s>", format_details(424, "eos_token", "1", "5067")),
    )

    assert decode_in_chunks(make_completion(), data, "rc1") == [
        *(
            SERVED,
            TextDelta("am"),
            TextDelta(" passion"),
            TextDelta("", tokens=422),
            ChoiceEnd("eos"),
            StreamEnd(),
        ),
    ]

    later = decode_in_chunks(make_completion(), data, "2x")
    assert later[-3] == TextDelta("</s>", tokens=422)


@pytest.mark.parametrize(
    ("text", "reason"), [("</s>", "length"), ("a</s>", "eos_token"), ("<b>", "eos_token")]
)
def test_rc1_keeps_final_text_that_is_not_an_eos_token(text: str, reason: str) -> None:
    events = decode_in_chunks(
        make_completion(), make_sse(format_generate_event(text, format_details(1, reason))), "rc1"
    )

    assert events[1] == TextDelta(text)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ("eos_token", "eos"),
        ("length", "length"),
        ("invalid finishReason", "unknown"),
        ("invalid flag", "unknown"),
    ],
)
def test_finish_reasons_are_decoded(wire: str, reason: str) -> None:
    for request in (make_completion(), make_completion(stream=False)):
        body = format_generate_event("a", format_details(1, wire))
        data = make_sse(body) if request.stream else body.encode()
        end = ChoiceEnd(reason, own_word=wire if reason == "unknown" else None)  # type: ignore[arg-type]
        assert decode_in_chunks(request, data)[-2:] == [end, StreamEnd()]


def test_event_without_token_count_counts_one_token() -> None:
    data = make_sse(
        format_generate_event("a"),
        format_generate_event("b", ',"details":{"finish_reason":"length"}'),
    )

    assert decode_in_chunks(make_completion(), data) == [
        SERVED,
        TextDelta("a"),
        TextDelta("b"),
        ChoiceEnd("length"),
        StreamEnd(),
    ]


def test_decreasing_token_count_adds_no_tokens() -> None:
    data = make_sse(
        format_generate_event("a", format_details(3)),
        format_generate_event("b", format_details(1)),
        format_generate_event("c", format_details(4, "length")),
    )

    assert [
        e.tokens for e in decode_in_chunks(make_completion(), data) if isinstance(e, TextDelta)
    ] == [3, 0, 1]


# --- unary responses ------------------------------------------------------------------------------

UNARY_RESPONSE = format_generate_event("a b", format_details(3, "length", "[1,4]", "[10,5,6]"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", ["", "\ufeff", " \n", "\ufeff\r\n"])
def test_unary_generate_response_is_decoded(before: str, *, stream: bool) -> None:
    data = (before + UNARY_RESPONSE + "\n").encode()

    assert decode_in_chunks(make_completion(stream=stream), data) == [
        *(SERVED, TextDelta("a b", tokens=3), ChoiceEnd("length"), StreamEnd()),
    ]


def test_stream_response_to_a_unary_request_is_decoded() -> None:
    assert decode_in_chunks(make_completion(stream=False), STREAM) == HELLO_EVENTS


def test_unary_response_emits_timing_of_every_decode_step() -> None:
    events = decode_in_chunks(
        make_completion(stream=False, response_options=ResponseOptions(timing=True)),
        UNARY_RESPONSE.encode(),
    )

    assert events[1:4] == [
        *(Timing(queue=1e-5, batch_size=1), Timing(queue=5e-6, batch_size=4), Timing(queue=6e-6)),
    ]


@pytest.mark.parametrize(
    ("fields", "timings"),
    [
        ('"perf_stat":[["A",90.5],[7,10]]',
         [Timing(prefill=0.0905), Timing(decode=0.01)]),
        ('"batch_size":2,"queue_wait_time":10', [Timing(queue=1e-5, batch_size=2)]),
        ('"batch_size":true,"queue_wait_time":-1,"perf_stat":[3,["x"],["y","z"]]', []),
        ('"batch_size":1e300,"queue_wait_time":"1","perf_stat":5', []),
        ('"generated_tokens":null', []),
    ],
)  # fmt: skip
def test_other_timing_fields_are_decoded_and_invalid_ones_ignored(
    fields: str, timings: list[Timing]
) -> None:
    details = ',"details":{"finish_reason":"length",' + fields + "}"
    data = format_generate_event("a", details).encode()
    events = decode_in_chunks(
        make_completion(stream=False, response_options=ResponseOptions(timing=True)), data
    )

    assert [one for one in events if isinstance(one, Timing)] == timings
    assert TextDelta("a") in events


def test_names_of_another_type_are_left_out() -> None:
    data = b'{"text_output":"a","id":5,"model_name":[],"details":{"finish_reason":"length"}}'

    assert decode_in_chunks(make_completion(stream=False), data) == [
        *(ResponseMetadata(), TextDelta("a"), ChoiceEnd("length"), StreamEnd()),
    ]


def test_response_without_details_has_no_finish_reason() -> None:
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_in_chunks(make_completion(stream=False, source="openai"), b'{"text_output":"a"}')
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_in_chunks(make_completion(stream=False), b'{"text_output":"a","details":{}}')


@pytest.mark.parametrize("source", ["", "mindie"])
def test_clients_of_the_protocol_need_no_details(source: str) -> None:
    request = make_completion(stream=False, source=source)

    assert decode_in_chunks(request, b'{"text_output":"a"}') == [
        *(ResponseMetadata(), TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()),
    ]


# --- errors ---------------------------------------------------------------------------------------

BEGUN = make_sse(format_generate_event("a", format_details(1)))


@pytest.mark.parametrize(
    "ending",
    [
        b"Engine callback timeout: client timeout",
        b"Engine callback timeout: server tokenTimeout",
        b"Engine callback timeout: server e2eTimeout\n",
        b"Failed to get engine response",
        b"Server internal error\n\n",
        b"<html>",
        make_sse(format_generate_event("", format_details(2, "stop_sequence"))),
        make_sse('{"text_output":5}'),
        make_sse('{"x":1}'),
        b"data:{\n\n",
        b"data:\xff\n\n",
        b"data:" + b'{"x":' + b"[" * 5000 + b"\n\n",
    ],
)
def test_error_text_in_a_stream_raises_worker_failed(ending: bytes) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(WorkerFailed):
            decode_response(make_completion(), BEGUN + ending, size=size)


def test_worker_error_text_is_an_exception_note_and_not_the_message() -> None:
    with pytest.raises(WorkerFailed) as excinfo:
        decode_response(make_completion(), BEGUN + b"Engine callback timeout: client timeout")

    assert excinfo.value.message == "The worker broke off its answer."
    assert excinfo.value.worker_text == "Engine callback timeout: client timeout"


def test_events_before_an_error_are_emitted_first() -> None:
    reader = MindIE().create_decoder(make_completion())

    assert reader.feed(BEGUN + b"Failed to get engine response\n") == [SERVED, TextDelta("a")]
    with pytest.raises(WorkerFailed):
        reader.feed(b"data:x")
    with pytest.raises(WorkerFailed):
        reader.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xef", b" \n", BEGUN, BEGUN + b"data:", STREAM[:-8], BEGUN + b'data:{"text', b": x\n"],
)  # fmt: skip
def test_truncated_stream_raises_stream_broken(data: bytes) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(StreamBroken):
            decode_response(make_completion(), data, size=size)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"error":"Failed to get engine response.","error_type":"Incomplete Generation"}',
         WorkerFailed),
        ('{"error":"Parameter top_k wrong.","error_type":"Input Validation Error"}',
         UnsupportedFeature),
        ('{"error":"The service has been stopped.","error_type":"Service Unavailable"}',
         Overloaded),
        ('{"error":"busy","error_type":"overloaded"}', RateLimitExceeded),
        ('{"error":{"message":"Memory limit exceeded","type":"server_error","code":429}}',
         RateLimitExceeded),
        ('{"error":"Model m not found.","error_type":"NotFoundError"}', WorkerFailed),
        ('{"text_output":"a","error":"text_input token length must be in (0, 9], but got 12"}',
         ContextTooLong),
        ('{"message":"Service is abnormal"}', WorkerFailed),
        ('{"text_output":null}', WorkerFailed),
        ('{"text_output":"a","error":7}', WorkerFailed),
        ("{}", WorkerFailed),
        ("{", WorkerFailed),
    ],
)  # fmt: skip
def test_error_body_with_status_200_raises_its_error(body: str, error: type[GatewayError]) -> None:
    for data in (
        body.encode(),
        make_sse(format_generate_event("a", format_details(1)), body),
        BEGUN + body.encode(),
    ):
        with pytest.raises(
            error
            if data != make_sse(format_generate_event("a", format_details(1)), "{")
            else WorkerFailed
        ):
            decode_response(make_completion(), data)


def test_oversized_response_raises_worker_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 20)
    reader = MindIE().create_decoder(make_completion())

    with pytest.raises(WorkerFailed, match="larger than"):
        reader.feed(b'{"text_output":"' + b"a" * 20)


@pytest.mark.parametrize("profile", MindIE.profiles)
@share_examples(len(MindIE.profiles))
@given(data=st.binary(max_size=80) | st.builds(lambda b: b"data:" + b, st.binary(max_size=60)))
def test_arbitrary_bytes_raise_only_gateway_errors(profile: str, data: bytes) -> None:
    for request in (
        make_completion(),
        make_completion(stream=False, response_options=ResponseOptions(timing=True)),
        make_chat(),
    ):
        try:
            events = decode_response(request, data, profile, size=5)
        except GatewayError:
            continue
        assert isinstance(events[-1], StreamEnd)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
_fields = ("text_output", "details", "finish_reason", "prefill_time", "error", "id", "choices")
_inner = ("finish_reason", "generated_tokens", "batch_size", "queue_wait_time", "perf_stat")


@given(
    st.dictionaries(
        st.sampled_from(_fields),
        _anything | st.dictionaries(st.sampled_from(_inner), _anything, max_size=3),
        max_size=4,
    )
)
def test_arbitrary_json_raises_only_gateway_errors(body: dict[str, Any]) -> None:
    for data in (msgspec.json.encode(body), b"data:" + msgspec.json.encode(body) + b"\n\n"):
        try:
            events = decode_response(
                make_completion(response_options=ResponseOptions(timing=True)), data
            )
        except GatewayError:
            continue
        assert isinstance(events[-1], StreamEnd)


# --- responses of our own server ------------------------------------------------------------------


@pytest.mark.parametrize("profile", MindIE.profiles)
@pytest.mark.parametrize("stream", [True, False])
def test_client_encoder_output_is_decoded_by_the_worker_decoder(
    bench: Any, profile: str, *, stream: bool
) -> None:
    one = bench(profile)
    path = "/v2/models/m/generate_stream" if stream else "/v2/models/m/generate"
    request = make_completion(
        stream=stream, response_options=ResponseOptions(timing=True), client_id="r"
    )
    encoder = one.encoder(path, one.adapter.encode_request(request).body)
    events: list[Event] = [
        *(
            Timing(queue=0.5, prefill=2.0, batch_size=4),
            TextDelta("a"),
            TextDelta("b"),
            ChoiceEnd("length"),
        ),
        StreamEnd(),
    ]
    if stream:
        data = encoder.encode_events(events)
    else:
        fold = ResponseAccumulator()
        fold.add(events)
        data = encoder.encode_unary(fold.result()).body

    decoded = decode_in_chunks(request, data, profile)

    fold = ResponseAccumulator()
    fold.add(decoded)

    response = fold.result()

    assert (response.choices[0].text, response.choices[0].finish_reason) == ("ab", "length")
    assert response.choices[0].tokens == 2
    assert (response.timings[0].queue, response.timings[0].batch_size) == (0.5, 4)
    assert response.metadata == ResponseMetadata("llama_65b", id="r")


# --- chat -----------------------------------------------------------------------------------------


def format_chat_chunk(delta: str, reason: str = "null", rest: str = "", index: int = 0) -> str:
    return (
        'data: {"id":"endpoint_common_8","object":"chat.completion.chunk","created":5,"model":"m7",'
        f'{rest}"choices":[' + "{" + f'"index":{index},"delta":{delta},"logprobs":null,'
        f'"finish_reason":{reason}' + "}]}\n\n"
    )


def format_delta(content: str, key: str = "content") -> str:
    return '{"role":"assistant",' + f'"{key}":"{content}"' + "}"


def format_usage(prompt: int, completion_tokens: int, rest: str = "") -> str:
    return (
        '"usage":{' + f'"prompt_tokens":{prompt},"completion_tokens":{completion_tokens},{rest}'
        f'"total_tokens":{prompt + completion_tokens}' + "},"
    )


DONE = "data: [DONE]\n\n"
TALKED = ResponseMetadata("m7", None, "endpoint_common_8", 5, "mindie")


def test_chat_stream_is_decoded() -> None:
    data = (
        format_chat_chunk(format_delta(""))
        + format_chat_chunk(format_delta("hm", "reasoning_content"))
        + format_chat_chunk(format_delta("a"))
        + format_chat_chunk(format_delta("b"), '"length"', format_usage(9, 3))
        + DONE
    ).encode()

    for want in (ResponseOptions(), ResponseOptions(usage="none")):
        assert decode_in_chunks(make_chat(response_options=want), data) == [
            *(
                TALKED,
                ReasoningDelta("hm"),
                TextDelta("a"),
                TextDelta("b"),
                ChoiceEnd("length"),
                Usage(9, 3),
                StreamEnd(),
            ),
        ]


def test_usage_of_all_choices_is_summed() -> None:
    cached = '"prompt_tokens_details":{"cached_tokens":4},'
    reasoning_details = '"completion_tokens_details":{"reasoning_tokens":2},'
    data = (
        format_chat_chunk(format_delta(""))
        + format_chat_chunk(format_delta(""), index=1)
        + format_chat_chunk(format_delta("a"))
        + format_chat_chunk(format_delta("b"), index=1)
        + format_chat_chunk(format_delta("c"), '"stop"', format_usage(9, 3, cached))
        + format_chat_chunk(
            format_delta(""), '"stop"', format_usage(9, 5, cached + reasoning_details), 1
        )
        + DONE
    ).encode()
    chunks = [
        TALKED,
        TextDelta("a"),
        TextDelta("b", 1),
        TextDelta("c"),
    ]
    last, first = ChoiceEnd("eos", 1), ChoiceEnd("eos")
    total = Usage(9, 8, 4, 2)

    whole = decode_in_chunks(make_chat(n=2, sampling=WARM), data)
    assert whole == [*chunks, last, first, total, StreamEnd()]

    running = decode_in_chunks(
        make_chat(n=2, sampling=WARM, response_options=ResponseOptions(usage="each")), data
    )
    assert running == [*chunks, Usage(9, 3, 4), last, total, first, StreamEnd()]


def test_stream_with_fewer_choices_than_n_still_ends() -> None:
    data = (format_chat_chunk(format_delta("a"), '"stop"') + DONE).encode()

    assert decode_in_chunks(make_chat(n=2), data) == [
        TALKED,
        TextDelta("a"),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]


def test_tool_calls_are_decoded() -> None:
    begun = (
        '{"role":"assistant","tool_calls":[{"index":0,"id":"c","type":"function",'
        '"function":{"name":"f","arguments":""}}]}'
    )
    next_delta = '{"role":"assistant","tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}'

    data = (
        format_chat_chunk(begun)
        + format_chat_chunk(next_delta)
        + format_chat_chunk(format_delta(""), '"tool_calls"', format_usage(1, 2))
        + DONE
    ).encode()

    assert decode_in_chunks(make_chat(), data)[1:] == [
        *(ToolCallStart(0, 0, "c", "f"), ToolCallDelta(0, 0, "{}"), ChoiceEnd("tool_calls")),
        *(Usage(1, 2), StreamEnd()),
    ]


RC1 = (
    'data: {"id":"1","object":"chat.completion.chunk","created":1707275960,"model":"baichuan",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":"am"},"finish_reason":null}]}\n\n'
    'data: {"id":"1","object":"chat.completion.chunk","created":1707275960,"model":"baichuan",'
    '"choices":[{"index":0,"delta":{},"finish_reason":"REASON"}]}\n\n'
    "data: [DONE]\n\n"
)


@pytest.mark.parametrize(("wire", "reason"), [("eos_token", "eos"), ("length", "length")])
def test_rc1_chat_stream_is_decoded(wire: str, reason: Any) -> None:
    assert decode_in_chunks(make_chat(), RC1.replace("REASON", wire).encode(), "rc1") == [
        *(
            ResponseMetadata("baichuan", None, "1", 1707275960, "mindie"),
            TextDelta("am"),
            ChoiceEnd(reason),
            StreamEnd(),
        ),
    ]


@pytest.mark.parametrize("wire", ["stop_sequence", "invalid flag"])
def test_rc1_stop_sequence_in_a_stream_raises_worker_failed(wire: str) -> None:
    data = RC1.replace("REASON", wire).encode()
    for size in (1, 150, len(data) - 5, 1 << 20):
        reader = MindIE("rc1").create_decoder(make_chat())
        events: list[Event] = []
        with pytest.raises(WorkerFailed):  # noqa: PT012 - where it is told depends on the reads
            for i in range(0, len(data), size):
                events += reader.feed(data[i : i + size])
            reader.close()
        assert TextDelta("am") in events
        assert not any(isinstance(one, ChoiceEnd | StreamEnd) for one in events)


SEED = """{
    "id": "chatcmpl-123",
    "object": "chat.completion",
    "created": 1677652288,
    "model": "gpt-3.5-turbo-0613",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "\\n\\nHello there, how may I assist you today?"
            },
            "finish_reason": "eos_token"
        }
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21
    }
}"""


def test_rc1_unary_chat_response_is_decoded() -> None:
    assert decode_in_chunks(make_chat(stream=False), SEED.encode(), "rc1") == [
        ResponseMetadata("gpt-3.5-turbo-0613", None, "chatcmpl-123", 1677652288, "mindie"),
        TextDelta("\n\nHello there, how may I assist you today?", tokens=12),
        ChoiceEnd("eos"),
        Usage(9, 12),
        StreamEnd(),
    ]

    broken = SEED.replace("eos_token", "stop_sequence").encode()
    reader = MindIE("rc1").create_decoder(make_chat(stream=False))
    reader.feed(broken)

    assert not any(isinstance(one, ChoiceEnd | StreamEnd) for one in reader.close())
    with pytest.raises(WorkerFailed):
        reader.close()


def test_unary_completion_is_decoded_as_in_openai() -> None:
    data = (
        b'{"id":"c","object":"text_completion","created":5,"model":"m","choices":[{"index":0,'
        b'"text":"a","logprobs":{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["a"],'
        b'"top_logprobs":[{"a":-0.5}]},"stop_reason":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
    )

    events = decode_in_chunks(make_completion(stream=False, logprobs=LogprobsOptions(1)), data)

    [delta] = [one for one in events if isinstance(one, TextDelta)]
    assert (delta.text, delta.logprobs[0].logprob) == ("a", -0.5)
    assert events[-3:] == [ChoiceEnd("eos"), Usage(1, 1), StreamEnd()]


@pytest.mark.parametrize(
    "ending", ["Engine callback timeout: server e2eTimeout", "Failed to get engine response\n"]
)
def test_error_text_in_a_chat_stream_raises_worker_failed(ending: str) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(WorkerFailed, match="broke off"):
            decode_response(
                make_chat(), (format_chat_chunk(format_delta("a")) + ending).encode(), size=size
            )


def test_truncated_chat_stream_raises_stream_broken() -> None:
    with pytest.raises(StreamBroken):
        decode_response(make_chat(), format_chat_chunk(format_delta("a")).encode())


def test_unknown_model_error_in_a_chat_response_raises_worker_failed() -> None:
    data = b'{"error":"Got model m, but not found in server","error_type":"Input Validation Error"}'

    for framing in (b"%b", b"data: %b\n\n"):
        with pytest.raises(WorkerFailed, match="does not know the model"):
            decode_response(make_chat(), framing % data)
