"""Responses of workers are decoded, byte for byte, however they are split."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerError,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.request import (
    GenerationRequest,
    LogprobsOptions,
    Message,
    ResponseOptions,
    StopConditions,
    TextPart,
)
from protocols.tgi import TGI


def make_completion(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "completion", "prompts": ("a b",), **fields})


def make_chat(**fields: Any) -> GenerationRequest:
    messages = (Message("user", (TextPart("hi"),)),)
    return GenerationRequest(model="m", kind="chat", messages=messages, **fields)


def decode_response(request: GenerationRequest, *reads: bytes) -> list[Event]:
    decoder = TGI().create_decoder(request)
    events = [event for one in reads for event in decoder.feed(one)]
    return [*events, *decoder.close()]


def split_into_bytes(data: bytes) -> Iterator[bytes]:
    return (data[i : i + 1] for i in range(len(data)))


STREAM = (
    b'data:{"index":1,"token":{"id":15043,"text":"Hello","logprob":-0.25,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
    b'data:{"index":2,"token":{"id":259,"text":" \xc3\xa9t\xc3\xa9","logprob":-1.5,'
    b'"special":false},"generated_text":null,"details":null}\n\n'
    b'data:{"index":3,"token":{"id":2,"text":"</s>","logprob":-0.5,"special":true},'
    b'"generated_text":"Hello \xc3\xa9t\xc3\xa9","details":{"finish_reason":"eos_token",'
    b'"generated_tokens":3,"seed":null,"input_length":7}}\n\n'
)
UNARY_RESPONSE = (
    b'{"generated_text":"Hello \xc3\xa9t\xc3\xa9","details":{"finish_reason":"length",'
    b'"generated_tokens":2,"seed":42,"prefill":[{"id":1,"text":"<s>","logprob":null},'
    b'{"id":5,"text":"a","logprob":-2.5},{"id":6,"text":" b","logprob":-3.5}],'
    b'"tokens":[{"id":15043,"text":"Hello","logprob":-0.25,"special":false},'
    b'{"id":259,"text":" \xc3\xa9t\xc3\xa9","logprob":-1.5,"special":false},'
    b'{"id":2,"text":"</s>","logprob":-0.5,"special":true}],'
    b'"top_tokens":[[{"id":15043,"text":"Hello","logprob":-0.25,"special":false}],'
    b'[{"id":8,"text":" you","logprob":null,"special":false}],[]]}}'
)
PLAIN = b'{"generated_text":"Hello","details":{"finish_reason":"length","generated_tokens":2}}'
HELLO = TokenLogprob("Hello", -0.25, (), 15043)
SUMMER = TokenLogprob(" été", -1.5, (), 259)
IDS = ResponseOptions(token_ids=True)
RAW = StopConditions(skip_special_tokens=False)
HELLO_EVENTS: list[Event] = [TextDelta("Hello"), TextDelta(" été")]
ENDED: list[Event] = [ChoiceEnd("eos"), Usage(7, 3), StreamEnd()]

ANSWERS: dict[str, tuple[GenerationRequest, bytes, list[Event]]] = {
    "a stream": (make_completion(stream=True), STREAM, [*HELLO_EVENTS, *ENDED]),
    "a stream for a unary response": (make_completion(), STREAM, [*HELLO_EVENTS, *ENDED]),
    "CRLF and a blank after the colon": (
        make_completion(),
        STREAM.replace(b"\n", b"\r\n").replace(b"data:", b"data: "),
        [*HELLO_EVENTS, *ENDED],
    ),
    "comments, names and a mark": (
        make_completion(),
        b"\xef\xbb\xbf:keep\n\nevent: message\nid: 1\n" + STREAM,
        [*HELLO_EVENTS, *ENDED],
    ),
    "no newline at the end": (make_completion(), STREAM.rstrip(), [*HELLO_EVENTS, *ENDED]),
    "something after the end": (
        make_completion(),
        STREAM + b"data: [DONE]\n\ndata: x\n\n",
        [*HELLO_EVENTS, *ENDED],
    ),
    "token ids": (
        make_completion(response_options=IDS),
        STREAM,
        [
            TextDelta("Hello", token_ids=(15043,)),
            TextDelta(" été", token_ids=(259,)),
            TextDelta("", token_ids=(2,)),
            *ENDED,
        ],
    ),
    "log probabilities": (
        make_completion(logprobs=LogprobsOptions()),
        STREAM,
        [TextDelta("Hello", logprobs=(HELLO,)), TextDelta(" été", logprobs=(SUMMER,)), *ENDED],
    ),
    "special tokens": (
        make_completion(stopping=RAW),
        STREAM,
        [*HELLO_EVENTS, TextDelta("</s>"), *ENDED],
    ),
    "the prompt before a stream": (
        make_completion(echo=True, logprobs=LogprobsOptions()),
        STREAM[: STREAM.index(b"data:", 5)] + STREAM[STREAM.rindex(b"data:") :],
        [
            PromptEcho(0, "a b"),
            TextDelta("Hello", logprobs=(HELLO,)),
            TextDelta(" été", tokens=0),
            *ENDED,
        ],
    ),
    "alternatives": (
        make_completion(logprobs=LogprobsOptions(1)),
        (
            b'data:{"token":{"id":3,"text":"a","logprob":-1},"top_tokens":[{"id":4,"text":"b"}],'
            b'"generated_text":"a","details":{"finish_reason":"stop_sequence"}}\n\n'
        ),
        [
            TextDelta(
                "a", logprobs=(TokenLogprob("a", -1.0, (TopLogprob("b", float("-inf"), 4),), 3),)
            ),
            ChoiceEnd("stop"),
            StreamEnd(),
        ],
    ),
    "text only at the end": (
        make_completion(),
        (
            b'data:{"token":null,"generated_text":"ab","details":{"finish_reason":"length",'
            b'"generated_tokens":2,"input_length":1}}\n\n'
        ),
        [TextDelta("ab", tokens=2), ChoiceEnd("length"), Usage(1, 2), StreamEnd()],
    ),
    "tokens that the whole text trims": (
        make_completion(),
        b'data:{"token":{"text":" a"}}\n\ndata:{"token":{"text":"b"},"generated_text":"ab"}\n\n',
        [TextDelta(" a"), TextDelta("b"), ChoiceEnd("unknown"), StreamEnd()],
    ),
    "several ids at a time, and none": (
        make_completion(response_options=IDS),
        (
            b'data:{"token":{"id":[3,4],"text":"a"}}\n\ndata:{"token":{"text":null}}\n\n'
            b'data:{"details":{"finish_reason":"new"}}\n\n'
        ),
        [TextDelta("a", token_ids=(3, 4)), ChoiceEnd("unknown", own_word="new"), StreamEnd()],
    ),
    "a unary response": (
        make_completion(),
        UNARY_RESPONSE,
        [TextDelta("Hello été", tokens=2), ChoiceEnd("length"), Usage(3, 2), StreamEnd()],
    ),
    "a unary response for a stream": (
        make_completion(stream=True),
        b"\n" + PLAIN + b"\n",
        [TextDelta("Hello", tokens=2), ChoiceEnd("length"), StreamEnd()],
    ),
    "a unary response in an array": (
        make_completion(),
        b"[" + PLAIN + b"]",
        [TextDelta("Hello", tokens=2), ChoiceEnd("length"), StreamEnd()],
    ),
    "a unary response with a mark": (
        make_completion(),
        b"\xef\xbb\xbf" + PLAIN,
        [TextDelta("Hello", tokens=2), ChoiceEnd("length"), StreamEnd()],
    ),
    "a unary response without details": (
        make_completion(),
        b'{"generated_text":"a"}',
        [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()],
    ),
    "a unary response without text": (
        make_completion(),
        (
            b'{"generated_text":"","details":{"finish_reason":"eos_token","generated_tokens":1,'
            b'"prompt_tokens":4}}'
        ),
        [ChoiceEnd("eos"), Usage(4, 1), StreamEnd()],
    ),
    "a unary response in full": (
        make_completion(response_options=IDS, logprobs=LogprobsOptions(1, prompt=1), echo=True),
        UNARY_RESPONSE,
        [
            PromptEcho(0, "a b", (TokenLogprob("a", -2.5, (), 5), TokenLogprob(" b", -3.5, (), 6))),
            TextDelta(
                "Hello été",
                tokens=2,
                token_ids=(15043, 259, 2),
                logprobs=(
                    TokenLogprob("Hello", -0.25, (TopLogprob("Hello", -0.25, 15043),), 15043),
                    TokenLogprob(" été", -1.5, (TopLogprob(" you", float("-inf"), 8),), 259),
                ),
            ),
            ChoiceEnd("length"),
            Usage(3, 2),
            StreamEnd(),
        ],
    ),
    "a prompt whose tokens begin with its text": (
        make_completion(logprobs=LogprobsOptions(0, prompt=0), echo=True),
        (
            b'{"generated_text":"","details":{"finish_reason":"length","prefill":'
            b'[{"id":5,"text":"a","logprob":null}]}}'
        ),
        [PromptEcho(0, "a b", (TokenLogprob("a", None, (), 5),)), ChoiceEnd("length"), StreamEnd()],
    ),
    "a prompt of token ids is not given back": (
        make_completion(prompts=((1, 2),), echo=True),
        PLAIN,
        [TextDelta("Hello", tokens=2), ChoiceEnd("length"), StreamEnd()],
    ),
    "special tokens of a unary response": (
        make_completion(stopping=RAW),
        UNARY_RESPONSE,
        [TextDelta("Hello été</s>", tokens=2), ChoiceEnd("length"), Usage(3, 2), StreamEnd()],
    ),
    "special tokens that are not told": (
        make_completion(stopping=RAW),
        PLAIN,
        [TextDelta("Hello", tokens=2), ChoiceEnd("length"), StreamEnd()],
    ),
}


@pytest.mark.parametrize(("request_", "wire", "events"), ANSWERS.values(), ids=ANSWERS)
def test_response_is_decoded_in_any_packet_size(
    request_: GenerationRequest, wire: bytes, events: list[Event]
) -> None:
    assert decode_response(request_, wire) == events
    assert decode_response(request_, *split_into_bytes(wire)) == events


ERRORS: dict[str, tuple[bytes, type[GatewayError], str]] = {
    "overloaded": (
        b'{"error":"Model is overloaded","error_type":"overloaded"}',
        RateLimitExceeded,
        "no more requests",
    ),
    "too long": (
        (
            b'{"error":"Input validation error: `inputs` must have less than 1024 tokens. '
            b'Given: 2000","error_type":"validation"}'
        ),
        ContextTooLong,
        "less than 1024 tokens",
    ),
    "wrong": (
        (
            b'{"error":"Input validation error: `temperature` must be strictly positive",'
            b'"error_type":"validation"}'
        ),
        UnsupportedFeature,
        "strictly positive",
    ),
    "template": (
        b'{"error":"Template error: no system role","error_type":"template_error"}',
        UnsupportedFeature,
        "no system role",
    ),
    "generation": (
        b'{"error":"Request failed during generation: CUDA","error_type":"generation"}',
        WorkerFailed,
        "(424)",
    ),
    "incomplete": (
        b'{"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}',
        WorkerFailed,
        "(500)",
    ),
    "of no known shape": (b'{"error":5}', WorkerFailed, "can't be read"),
}


@pytest.mark.parametrize(("body", "kind", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("frame", ["%s", "data:%s\n\n", "event: error\ndata: %s\n\n", ":x\n\n%s"])
def test_error_body_raises_its_error(
    body: bytes, kind: type[GatewayError], message: str, frame: str
) -> None:
    wire = frame.replace("%s", body.decode()).encode()
    if "can't be read" in message and frame.endswith("\n\n%s"):
        kind, message = StreamBroken, "before its end"

    for reads in ([wire], split_into_bytes(wire)):
        with pytest.raises(kind) as excinfo:
            decode_response(make_completion(), *reads)
        assert message in excinfo.value.message


def test_error_in_a_stream_is_raised_after_earlier_events() -> None:
    begun = STREAM[: STREAM.index(b"data:", 5)]
    decoder = TGI().create_decoder(make_completion())

    assert decoder.feed(begun + b"data:" + ERRORS["generation"][0] + b"\n\n") == [
        TextDelta("Hello")
    ]
    with pytest.raises(WorkerFailed, match="424"):
        decoder.feed(b"")
    with pytest.raises(WorkerFailed, match="424"):
        decoder.close()


BROKEN: dict[str, tuple[bytes, type[WorkerError]]] = {
    "nothing": (b"", StreamBroken),
    "blanks": (b" \n", StreamBroken),
    "a mark": (b"\xef\xbb", StreamBroken),
    "no end": (STREAM[: STREAM.rindex(b"data:")], StreamBroken),
    "amid an event": (STREAM[:-30], StreamBroken),
    "no JSON": (b"data: [DONE]\n\n", WorkerFailed),
    "no stream": (b"<html>\n", StreamBroken),
    "amid an answer": (UNARY_RESPONSE[:-5], WorkerFailed),
    "another answer": (b'{"choices":[]}', WorkerFailed),
    "no answer": (b"[]", WorkerFailed),
    "not UTF-8": (b'{"generated_text":"\xff"}', WorkerFailed),
    "deep": (b"[" * 10_000, WorkerFailed),
    "broken off": (
        b'{"generated_text":"","details":{"finish_reason":"invalid flag"}}',
        WorkerFailed,
    ),
}


@pytest.mark.parametrize(("wire", "kind"), BROKEN.values(), ids=BROKEN)
def test_malformed_response_raises_a_worker_error(wire: bytes, kind: type[WorkerError]) -> None:
    for reads in ([wire], split_into_bytes(wire)):
        with pytest.raises(kind):
            decode_response(make_completion(), *reads)


@pytest.mark.parametrize("start", [b"", b"data:"], ids=["whole", "streamed"])
def test_details_without_finish_reason_are_an_error(start: bytes) -> None:
    wire = start + b'{"generated_text":"a"%b}\n\n'

    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_response(make_completion(), wire % b',"details":{}')
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_response(make_completion(source="openai"), wire % b"")


def test_top_tokens_of_mismatched_length_are_lost_and_the_text_is_kept() -> None:
    wire = (
        b'{"generated_text":"a","details":'
        b'{"finish_reason":"length","tokens":[{"id":1}],"top_tokens":[[],[]]}}'
    )

    events = decode_response(make_completion(logprobs=LogprobsOptions(1)), wire)

    assert ResponseExtra("", "response", ((("details", "top_tokens"), True),)) in events
    assert [one.text for one in events if isinstance(one, TextDelta)] == ["a"]


def test_oversized_response_raises_worker_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.sse.MAX_UNARY_BYTES", 40)
    decoder = TGI().create_decoder(make_completion())

    decoder.feed(b'{"generated_text":')

    with pytest.raises(WorkerFailed, match="larger than"):
        decoder.feed(b'"' + b"x" * 40)


@given(data=st.binary(max_size=200), framed=st.booleans())
def test_arbitrary_bytes_give_a_response_or_a_gateway_error(data: bytes, framed: bool) -> None:
    wire = b"data:" + data + b"\n\n" if framed else data
    for request in (
        make_completion(logprobs=LogprobsOptions(1), response_options=IDS, echo=True),
        make_chat(),
    ):
        events: Sequence[Event] = []
        try:
            events = decode_response(request, wire)
        except GatewayError:
            continue
        assert type(events[-1]) is StreamEnd


tokens = st.fixed_dictionaries(
    {},
    optional={
        "id": st.none() | st.integers() | st.lists(st.integers(), max_size=2),
        "text": st.none() | st.text(max_size=4),
        "logprob": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        "special": st.none() | st.booleans(),
    },
)
pieces = st.fixed_dictionaries(
    {},
    optional={
        "token": st.none() | tokens,
        "top_tokens": st.none() | st.lists(tokens, max_size=2),
        "generated_text": st.none() | st.text(max_size=4),
        "details": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "finish_reason": st.none() | st.sampled_from(["length", "eos_token", "new"]),
                "generated_tokens": st.none() | st.integers(0, 9),
                "prefill": st.none() | st.lists(tokens, max_size=2),
                "tokens": st.none() | st.lists(tokens, max_size=2),
                "top_tokens": st.none() | st.lists(st.lists(tokens, max_size=1), max_size=2),
            },
        ),
        "error": st.none() | st.text(max_size=5) | st.integers(),
    },
)


@given(bodies=st.lists(pieces, max_size=4), size=st.integers(1, 60), framed=st.booleans())
def test_response_like_json_decodes_the_same_in_any_packets(
    bodies: list[Any], size: int, framed: bool
) -> None:
    encoded = [msgspec.json.encode(body) for body in bodies]
    wire = b"".join(b"data:" + one + b"\n\n" for one in encoded) if framed else b"".join(encoded)
    request = make_completion(logprobs=LogprobsOptions(1), response_options=IDS, echo=True)

    cut = [wire[i : i + size] for i in range(0, len(wire), size)]

    assert decode_or_describe_error(request, [wire]) == decode_or_describe_error(request, cut)


def decode_or_describe_error(request: GenerationRequest, reads: Sequence[bytes]) -> Any:
    try:
        return decode_response(request, *reads)
    except GatewayError as error:
        return type(error), error.message


@given(texts=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), data=st.data())
def test_truncated_stream_never_emits_an_end_event(texts: list[str], data: st.DataObject) -> None:
    begun = b"".join(
        b"data:" + msgspec.json.encode({"token": {"id": 1, "text": one}}) + b"\n\n" for one in texts
    )
    wire = begun[: data.draw(st.integers(0, len(begun)))]
    decoder = TGI().create_decoder(make_completion())

    events = list(decoder.feed(wire))

    with pytest.raises(WorkerError):
        events += decoder.close()
    assert not any(isinstance(event, ChoiceEnd | StreamEnd) for event in events)


# --- conversations --------------------------------------------------------------------------------

HEAD = b'"created":1,"model":"org/m1","system_fingerprint":"3.3.5-native"'


def format_chat_chunk(choice: bytes, usage: bytes = b"null") -> bytes:
    body = b'{"object":"chat.completion.chunk","id":"",%s,"choices":[%s],"usage":%s}'
    return b"data: " + body % (HEAD, choice, usage) + b"\n\n"


def format_content_choice(content: bytes, end: bytes = b"null") -> bytes:
    body = b'{"index":0,"delta":{"role":"assistant","content":"%s"},"logprobs":null,'
    return body % content + b'"finish_reason":%s}' % end


def format_tool_call_choice(name: bytes, arguments: bytes) -> bytes:
    return (
        b'{"index":0,"delta":{"role":"assistant","tool_calls":[{"index":0,"id":"0","type":"function",'
        b'"function":{"name":%s,"arguments":"%s"}}]},"logprobs":null,"finish_reason":null}'
        % (name, arguments)
    )


USED = format_chat_chunk(b"", b'{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6}')
DONE = b"data: [DONE]\n\n"
SERVED = ResponseMetadata("org/m1", "3.3.5-native", "", 1, "tgi")

CONVERSATIONS: dict[str, tuple[bytes, list[Event]]] = {
    "text": (
        format_chat_chunk(format_content_choice(b"He"))
        + format_chat_chunk(format_content_choice(b"y", b'"stop"'))
        + USED
        + DONE,
        [SERVED, TextDelta("He"), TextDelta("y"), ChoiceEnd("eos"), Usage(4, 2), StreamEnd()],
    ),
    "a stop string": (
        format_chat_chunk(format_content_choice(b"He", b'"stop_sequence"')) + DONE,
        [SERVED, TextDelta("He"), ChoiceEnd("stop"), StreamEnd()],
    ),
    "a call, which has no finish reason": (
        format_chat_chunk(format_tool_call_choice(b'"f"', b"{"))
        + format_chat_chunk(format_tool_call_choice(b"null", b"}"))
        + USED
        + DONE,
        [
            SERVED,
            ToolCallStart(0, 0, "0", "f"),
            ToolCallDelta(0, 0, "{"),
            ToolCallDelta(0, 0, "}"),
            ChoiceEnd("tool_calls"),
            Usage(4, 2),
            StreamEnd(),
        ],
    ),
    "a whole call": (
        b'{"object":"chat.completion","id":"",%s,"choices":[{"index":0,"message":{"role":"assistant",'
        b'"tool_calls":[{"id":"0","type":"function","function":{"description":null,"name":"f",'
        b'"arguments":"{\\"a\\":1}"}}]},"logprobs":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6}}' % HEAD,
        [
            SERVED,
            ToolCallStart(0, 0, "0", "f"),
            ToolCallDelta(0, 0, '{"a":1}'),
            ChoiceEnd("eos"),
            Usage(4, 2),
            StreamEnd(),
        ],
    ),
}


@pytest.mark.parametrize(("wire", "events"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_chat_response_is_decoded_in_any_packet_size(wire: bytes, events: list[Event]) -> None:
    assert decode_response(make_chat(), wire) == events
    assert decode_response(make_chat(), *split_into_bytes(wire)) == events

    fold = ResponseAccumulator()
    fold.add(events)
    assert fold.result().choices


def test_truncated_or_nameless_tool_call_raises_stream_broken() -> None:
    wire = format_chat_chunk(format_tool_call_choice(b'"f"', b"{"))
    with pytest.raises(StreamBroken):
        decode_response(make_chat(), wire)
    with pytest.raises(StreamBroken, match="without its name"):
        decode_response(
            make_chat(),
            format_chat_chunk(format_tool_call_choice(b"null", b"{")),
            format_chat_chunk(format_content_choice(b"", b'"stop"')),
            DONE,
        )


@pytest.mark.parametrize(
    ("body", "kind", "message"), list(ERRORS.values())[:6], ids=list(ERRORS)[:6]
)
def test_error_in_a_chat_stream_is_classified_by_its_message(
    body: bytes, kind: type[GatewayError], message: str
) -> None:
    text = body.split(b'"')[3]
    wire = b'data: {"error":{"message":"%s","http_status_code":422}}\n\n' % text + DONE

    with pytest.raises(kind) as excinfo:
        decode_response(make_chat(), wire)
    assert message in excinfo.value.message
