"""Workers' answers, byte for byte, and the events that they are."""

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

WARM = SamplingParams(temperature=1.0)


def text(*, stream: bool = True, **fields: Any) -> GenerationRequest:
    fields = {"prompts": ("x",), "templating": PromptOptions(mode="raw"), **fields}
    return GenerationRequest(model="m", kind="completion", stream=stream, **fields)


def chat(*, stream: bool = True, **fields: Any) -> GenerationRequest:
    said = (Message("user", (TextPart("x"),)),)
    return GenerationRequest(model="m", kind="chat", messages=said, stream=stream, **fields)


def read(
    request: GenerationRequest, data: bytes, profile: str = "2x", *, size: int = 1 << 20
) -> list[Event]:
    """The events, fed in pieces of ``size``; what comes before an error is lost with it."""
    reader = MindIE(profile).create_decoder(request)
    events: list[Event] = []
    for i in range(0, len(data), size):
        events += reader.feed(data[i : i + size])
    return [*events, *reader.close()]


def both(request: GenerationRequest, data: bytes, profile: str = "2x") -> list[Event]:
    """The events, which must not depend on how the bytes fall."""
    events = read(request, data, profile)
    for size in (1, 2, 7):
        assert read(request, data, profile, size=size) == events
    return events


def event(said: str, more: str = "") -> str:
    return (
        '{"id":"a1","model_name":"m7","model_version":null,"text_output":' + f'"{said}"{more}' + "}"
    )


def details(tokens: int, reason: str = "", batch: str = "1", queue: str = "10") -> str:
    ended = f'"finish_reason":"{reason}",' if reason else ""
    return (
        ',"details":{' + ended + f'"generated_tokens":{tokens},"first_token_cost":null,'
        f'"decode_cost":null,"batch_size":{batch},"queue_wait_time":{queue}' + "}"
    )


def times(prefill: str, decode: str) -> str:
    return f',"prefill_time":{prefill},"decode_time":{decode}'


def framed(*events: str) -> bytes:
    return "".join(f"data:{one}\n\n" for one in events).encode()


STREAM = framed(
    event("é a", details(1) + times("42", "null")),
    event("", details(2) + times("null", "7")),
    event("m", details(4, "eos_token", "3", "20") + times("null", "8.5")),
)
SERVED = ResponseMetadata("m7", id="a1")
SAID = [
    SERVED,
    TextDelta("é a"),
    TextDelta(""),
    TextDelta("m", tokens=2),
    ChoiceEnd("eos"),
    StreamEnd(),
]


def test_a_stream() -> None:
    assert both(text(), STREAM) == SAID


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
        STREAM + framed(event("more")) + b"Failed to get engine response",
        STREAM.replace(b'"details":{"finish_reason":"eos_token"',
                       b'"finish_reason":"eos_token","details":{"x":1'),
    ],
    ids=["crlf", "blank", "bom", "comment", "fields", "one newline", "none", "half", "done",
         "beyond", "above"],
)  # fmt: skip
def test_a_stream_in_other_clothes(data: bytes) -> None:
    assert both(text(), data) == SAID


def test_times_are_told_to_who_wants_them() -> None:
    events = both(text(response_options=ResponseOptions(timing=True)), STREAM)

    assert [one for one in events if isinstance(one, Timing)] == [
        Timing(queue=1e-5, prefill=0.042, batch_size=1),
        Timing(queue=1e-5, decode=0.007, batch_size=1),
        Timing(queue=2e-5, decode=0.0085, batch_size=3),
    ]
    assert events[1:3] == [Timing(queue=1e-5, prefill=0.042, batch_size=1), TextDelta("é a")]


def test_the_seeds_stream_ends_in_the_token_that_ended_it() -> None:
    data = framed(
        event("am", details(1)),
        event(" passion", details(2)),
        event("</s>", details(424, "eos_token", "1", "5067")),
    )

    assert both(text(), data, "rc1") == [
        *(
            SERVED,
            TextDelta("am"),
            TextDelta(" passion"),
            TextDelta("", tokens=422),
            ChoiceEnd("eos"),
            StreamEnd(),
        ),
    ]
    later = both(text(), data, "2x")
    assert later[-3] == TextDelta("</s>", tokens=422)


@pytest.mark.parametrize(
    ("said", "reason"), [("</s>", "length"), ("a</s>", "eos_token"), ("<b>", "eos_token")]
)
def test_what_is_no_such_token_stays(said: str, reason: str) -> None:
    events = both(text(), framed(event(said, details(1, reason))), "rc1")

    assert events[1] == TextDelta(said)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ("eos_token", "eos"),
        ("length", "length"),
        ("invalid finishReason", "unknown"),
        ("invalid flag", "unknown"),
    ],
)
def test_why_it_ended(wire: str, reason: str) -> None:
    for request in (text(), text(stream=False)):
        body = event("a", details(1, wire))
        data = framed(body) if request.stream else body.encode()
        assert both(request, data)[-2:] == [ChoiceEnd(reason), StreamEnd()]  # type: ignore[arg-type]


def test_tokens_that_are_not_counted_are_one_each() -> None:
    data = framed(event("a"), event("b", ',"details":{"finish_reason":"length"}'))

    assert both(text(), data) == [
        SERVED,
        TextDelta("a"),
        TextDelta("b"),
        ChoiceEnd("length"),
        StreamEnd(),
    ]


def test_a_count_that_goes_back_counts_nothing() -> None:
    data = framed(event("a", details(3)), event("b", details(1)), event("c", details(4, "length")))

    assert [e.tokens for e in both(text(), data) if isinstance(e, TextDelta)] == [3, 0, 1]


# --- in one piece ---------------------------------------------------------------------------------

WHOLE = event("a b", details(3, "length", "[1,4]", "[10,5,6]"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", ["", "\ufeff", " \n", "\ufeff\r\n"])
def test_one_piece(before: str, *, stream: bool) -> None:
    data = (before + WHOLE + "\n").encode()

    assert both(text(stream=stream), data) == [
        *(SERVED, TextDelta("a b", tokens=3), ChoiceEnd("length"), StreamEnd()),
    ]


def test_a_stream_may_answer_who_asked_for_one_piece() -> None:
    assert both(text(stream=False), STREAM) == SAID


def test_one_piece_tells_the_times_of_every_step() -> None:
    events = both(text(stream=False, response_options=ResponseOptions(timing=True)), WHOLE.encode())

    assert events[1:4] == [
        *(Timing(queue=1e-5, batch_size=1), Timing(queue=5e-6, batch_size=4), Timing(queue=6e-6)),
    ]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ('"perf_stat":[["A",90.5],[7,10]]',
         [Timing(prefill=0.0905), Timing(decode=0.01)]),
        ('"batch_size":2,"queue_wait_time":10', [Timing(queue=1e-5, batch_size=2)]),
        ('"batch_size":true,"queue_wait_time":-1,"perf_stat":[3,["x"],["y","z"]]', []),
        ('"batch_size":1e300,"queue_wait_time":"1","perf_stat":5', []),
        ('"generated_tokens":null', []),
    ],
)  # fmt: skip
def test_other_figures(told: str, found: list[Timing]) -> None:
    data = event("a", ',"details":{' + told + "}").encode()
    events = both(text(stream=False, response_options=ResponseOptions(timing=True)), data)

    assert [one for one in events if isinstance(one, Timing)] == found
    assert TextDelta("a") in events


def test_an_answer_without_details_has_an_unknown_end() -> None:
    assert both(text(stream=False), b'{"text_output":"a","id":5,"model_name":[]}') == [
        *(ResponseMetadata(), TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()),
    ]


# --- what goes wrong ------------------------------------------------------------------------------

BEGUN = framed(event("a", details(1)))


@pytest.mark.parametrize(
    "ending",
    [
        b"Engine callback timeout: client timeout",
        b"Engine callback timeout: server tokenTimeout",
        b"Engine callback timeout: server e2eTimeout\n",
        b"Failed to get engine response",
        b"Server internal error\n\n",
        b"<html>",
        framed(event("", details(2, "stop_sequence"))),
        framed('{"text_output":5}'),
        framed('{"x":1}'),
        b"data:{\n\n",
        b"data:\xff\n\n",
        b"data:" + b'{"x":' + b"[" * 5000 + b"\n\n",
    ],
)
def test_a_stream_that_breaks_off(ending: bytes) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(WorkerFailed):
            read(text(), BEGUN + ending, size=size)


def test_what_the_worker_said_is_noted_and_not_passed_on() -> None:
    with pytest.raises(WorkerFailed) as caught:
        read(text(), BEGUN + b"Engine callback timeout: client timeout")

    assert caught.value.message == "The worker broke off its answer."
    assert caught.value.__notes__ == ["the worker said: Engine callback timeout: client timeout"]


def test_what_came_before_an_error_is_told_first() -> None:
    reader = MindIE().create_decoder(text())

    assert reader.feed(BEGUN + b"Failed to get engine response\n") == [SERVED, TextDelta("a")]
    with pytest.raises(WorkerFailed):
        reader.feed(b"data:x")
    with pytest.raises(WorkerFailed):
        reader.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xef", b" \n", BEGUN, BEGUN + b"data:", STREAM[:-8], BEGUN + b'data:{"text', b": x\n"],
)  # fmt: skip
def test_a_stream_that_just_stops(data: bytes) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(StreamBroken):
            read(text(), data, size=size)


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
def test_an_error_under_200(body: str, error: type[GatewayError]) -> None:
    for data in (body.encode(), framed(event("a", details(1)), body), BEGUN + body.encode()):
        with pytest.raises(error if data != framed(event("a", details(1)), "{") else WorkerFailed):
            read(text(), data)


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 20)
    reader = MindIE().create_decoder(text())

    with pytest.raises(WorkerFailed, match="larger than"):
        reader.feed(b'{"text_output":"' + b"a" * 20)


@pytest.mark.parametrize("profile", MindIE.profiles)
@given(data=st.binary(max_size=80) | st.builds(lambda b: b"data:" + b, st.binary(max_size=60)))
def test_no_bytes_are_more_than_an_error(profile: str, data: bytes) -> None:
    for request in (
        text(),
        text(stream=False, response_options=ResponseOptions(timing=True)),
        chat(),
    ):
        try:
            events = read(request, data, profile, size=5)
        except GatewayError:
            continue
        assert isinstance(events[-1], StreamEnd)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)  # fmt: skip
_fields = ("text_output", "details", "finish_reason", "prefill_time", "error", "id", "choices")
_inner = ("finish_reason", "generated_tokens", "batch_size", "queue_wait_time", "perf_stat")


@given(
    st.dictionaries(
        st.sampled_from(_fields),
        _anything | st.dictionaries(st.sampled_from(_inner), _anything),
    )
)
def test_no_json_is_more_than_an_error(body: dict[str, Any]) -> None:
    for data in (msgspec.json.encode(body), b"data:" + msgspec.json.encode(body) + b"\n\n"):
        try:
            events = read(text(response_options=ResponseOptions(timing=True)), data)
        except GatewayError:
            continue
        assert isinstance(events[-1], StreamEnd)


# --- our own server's answers ---------------------------------------------------------------------


@pytest.mark.parametrize("profile", MindIE.profiles)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_said_to_clients_is_read_from_workers(
    desk: Any, profile: str, *, stream: bool
) -> None:
    one = desk(profile)
    path = "/v2/models/m/generate_stream" if stream else "/v2/models/m/generate"
    request = text(stream=stream, response_options=ResponseOptions(timing=True), client_id="r")
    encoder = one.encoder(path, one.dialect.encode_request(request).body)
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

    found = both(request, data, profile)

    fold = ResponseAccumulator()
    fold.add(found)
    answer = fold.result()
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "length")
    assert answer.choices[0].tokens == 2
    assert (answer.timings[0].queue, answer.timings[0].batch_size) == (0.5, 4)
    assert answer.metadata == ResponseMetadata("llama_65b", id="r")


# --- conversations --------------------------------------------------------------------------------


def chunk(delta: str, reason: str = "null", more: str = "", index: int = 0) -> str:
    return (
        'data: {"id":"endpoint_common_8","object":"chat.completion.chunk","created":5,"model":"m7",'
        f'{more}"choices":[' + "{" + f'"index":{index},"delta":{delta},"logprobs":null,'
        f'"finish_reason":{reason}' + "}]}\n\n"
    )


def role(content: str, key: str = "content") -> str:
    return '{"role":"assistant",' + f'"{key}":"{content}"' + "}"


def usage(prompt: int, made: int, more: str = "") -> str:
    return (
        '"usage":{' + f'"prompt_tokens":{prompt},"completion_tokens":{made},{more}'
        f'"total_tokens":{prompt + made}' + "},"
    )


DONE = "data: [DONE]\n\n"
TALKED = ResponseMetadata("m7", None, "endpoint_common_8", 5)


def test_a_conversations_stream() -> None:
    data = (
        chunk(role(""))
        + chunk(role("hm", "reasoning_content"))
        + chunk(role("a"))
        + chunk(role("b"), '"length"', usage(9, 3))
        + DONE
    ).encode()

    for want in (ResponseOptions(), ResponseOptions(usage="none")):
        assert both(chat(response_options=want), data) == [
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


def test_each_choice_tells_its_own_usage() -> None:
    cached = '"prompt_tokens_details":{"cached_tokens":4},'
    thought = '"completion_tokens_details":{"reasoning_tokens":2},'
    data = (
        chunk(role(""))
        + chunk(role(""), index=1)
        + chunk(role("a"))
        + chunk(role("b"), index=1)
        + chunk(role("c"), '"stop"', usage(9, 3, cached))
        + chunk(role(""), '"stop"', usage(9, 5, cached + thought), 1)
        + DONE
    ).encode()
    said = [
        TALKED,
        TextDelta("a"),
        TextDelta("b", 1),
        TextDelta("c"),
        ChoiceEnd("eos"),
        ChoiceEnd("eos", 1),
    ]
    total = Usage(9, 8, 4, 2)

    assert both(chat(n=2, sampling=WARM), data) == [*said, total, StreamEnd()]
    running = both(chat(n=2, sampling=WARM, response_options=ResponseOptions(usage="each")), data)
    assert running == [*said[:5], Usage(9, 3, 4), said[5], total, StreamEnd()]


def test_answers_that_were_not_asked_for_are_not_waited_for() -> None:
    data = (chunk(role("a"), '"stop"') + DONE).encode()

    assert both(chat(n=2), data) == [TALKED, TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]


def test_calls_of_tools() -> None:
    begun = (
        '{"role":"assistant","tool_calls":[{"index":0,"id":"c","type":"function",'
        '"function":{"name":"f","arguments":""}}]}'
    )
    more = '{"role":"assistant","tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}'
    data = (
        chunk(begun) + chunk(more) + chunk(role(""), '"tool_calls"', usage(1, 2)) + DONE
    ).encode()

    assert both(chat(), data)[1:] == [
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
def test_a_first_releases_stream(wire: str, reason: Any) -> None:
    assert both(chat(), RC1.replace("REASON", wire).encode(), "rc1") == [
        *(
            ResponseMetadata("baichuan", None, "1", 1707275960),
            TextDelta("am"),
            ChoiceEnd(reason),
            StreamEnd(),
        ),
    ]


@pytest.mark.parametrize("wire", ["stop_sequence", "invalid flag"])
def test_a_first_release_that_breaks_off_says_so(wire: str) -> None:
    data = RC1.replace("REASON", wire).encode()
    for size in (1, 150, len(data) - 5, 1 << 20):
        reader = MindIE("rc1").create_decoder(chat())
        seen: list[Event] = []
        with pytest.raises(WorkerFailed):  # noqa: PT012 - where it is told depends on the reads
            for i in range(0, len(data), size):
                seen += reader.feed(data[i : i + size])
            reader.close()
        assert TextDelta("am") in seen
        assert not any(isinstance(one, ChoiceEnd | StreamEnd) for one in seen)


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


def test_a_whole_conversation() -> None:
    assert both(chat(stream=False), SEED.encode(), "rc1") == [
        ResponseMetadata("gpt-3.5-turbo-0613", None, "chatcmpl-123", 1677652288),
        TextDelta("\n\nHello there, how may I assist you today?", tokens=12),
        ChoiceEnd("eos"),
        Usage(9, 12),
        StreamEnd(),
    ]
    broken = SEED.replace("eos_token", "stop_sequence").encode()
    reader = MindIE("rc1").create_decoder(chat(stream=False))
    reader.feed(broken)
    assert not any(isinstance(one, ChoiceEnd | StreamEnd) for one in reader.close())
    with pytest.raises(WorkerFailed):
        reader.close()


def test_a_completion_is_read_as_openais() -> None:
    data = (
        b'{"id":"c","object":"text_completion","created":5,"model":"m","choices":[{"index":0,'
        b'"text":"a","logprobs":{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["a"],'
        b'"top_logprobs":[{"a":-0.5}]},"stop_reason":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
    )

    events = both(text(stream=False, logprobs=LogprobsOptions(1)), data)

    [said] = [one for one in events if isinstance(one, TextDelta)]
    assert (said.text, said.logprobs[0].logprob) == ("a", -0.5)
    assert events[-3:] == [ChoiceEnd("eos"), Usage(1, 1), StreamEnd()]


@pytest.mark.parametrize(
    "ending", ["Engine callback timeout: server e2eTimeout", "Failed to get engine response\n"]
)
def test_a_conversation_that_breaks_off_says_so(ending: str) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(WorkerFailed, match="broke off"):
            read(chat(), (chunk(role("a")) + ending).encode(), size=size)


def test_a_conversation_that_just_stops() -> None:
    with pytest.raises(StreamBroken):
        read(chat(), chunk(role("a")).encode())


def test_an_error_in_a_conversation() -> None:
    data = b'{"error":"Got model m, but not found in server","error_type":"Input Validation Error"}'

    for framing in (b"%b", b"data: %b\n\n"):
        with pytest.raises(WorkerFailed, match="does not know the model"):
            read(chat(), framing % data)
