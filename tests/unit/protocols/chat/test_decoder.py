"""Responses of workers are decoded in all the forms that real workers send."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st
from msgspec.structs import replace

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
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
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
from protocols.core.request import GenerationRequest, Request, ResponseOptions, StopConditions
from protocols.openai.endpoints import OpenAI

CHAT = GenerationRequest(model="m", kind="chat", stream=True)
TEXT = GenerationRequest(model="m", kind="completion", prompts=("ab",), echo=True)
DONE = "data: [DONE]\n\n"


def make_sse(*chunks: Any) -> str:
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)


def make_chunk(finish: str | None = None, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def decode(wire: str | bytes, request: Request = CHAT, size: int = 1 << 20) -> list[Event]:
    """Decode a body in pieces of ``size`` bytes, without the metadata."""
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = OpenAI().create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    events += decoder.close()
    return [event for event in events if not isinstance(event, ResponseMetadata)]


HELLO = make_sse(
    make_chunk(role="assistant", content=""),
    make_chunk(content="Hel"),
    make_chunk(content="lo"),
    make_chunk("stop"),
)
HELLO_EVENTS: list[Event] = [TextDelta("Hel"), TextDelta("lo"), ChoiceEnd("eos"), StreamEnd()]
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("plain", HELLO + DONE),
        ("CRLF", (HELLO + DONE).replace("\n", "\r\n")),
        ("no blank", (HELLO + DONE).replace("data: ", "data:")),
        ("no [DONE]", HELLO),
        ("[DONE] with one newline", HELLO + "data: [DONE]\n"),
        ("byte order mark", "\ufeff" + HELLO + DONE),
        ("comments, names, ids", ": ping\n\nevent: x\nid: 1\n" + HELLO + ": bye\n\n" + DONE),
        ("role in each", HELLO.replace('"content": "lo"', '"role": "assistant", "content": "lo"')),
        ("choices [] first", make_sse({"choices": [], "prompt_filter_results": None}) + HELLO),
        ("finish_reason empty", HELLO.replace("null", '""')),
        ("finish_reason missing", HELLO.replace(', "finish_reason": null', "")),
        ("index missing", HELLO.replace('"index": 0, ', "")),
        (
            "tool_calls null",
            HELLO.replace('"content": "lo"', '"content": "lo", "tool_calls": null'),
        ),
        ("the end told twice", HELLO + make_sse(make_chunk("stop")) + DONE),
        ("empty object", make_sse({}) + HELLO + DONE),
        ("eos_token", HELLO.replace('"stop"', '"eos_token"') + DONE),
        ("end_turn", HELLO.replace('"stop"', '"end_turn"') + DONE),
        ("content is parts", HELLO.replace('"lo"', '[{"type": "text", "text": "lo"}]')),
        ("after [DONE]", HELLO + DONE + "data: garbage\n\n"),
        (
            "text and finish in one",
            make_sse(make_chunk(content="Hel"), make_chunk("stop", content="lo")),
        ),
    ],
)
def test_sse_framing_variants_decode_to_the_same_events(name: str, wire: str) -> None:
    assert decode(wire) == HELLO_EVENTS, name


@pytest.mark.parametrize(
    "wire",
    [
        HELLO + make_sse({"choices": [], "usage": USAGE}) + DONE,
        HELLO + make_sse({"choices": [], "usage": USAGE}),
        HELLO.replace('"finish_reason": "stop"}]', '"finish_reason": "stop"}], "usage": %s')
        % json.dumps(USAGE),
        make_sse({"choices": [], "usage": {**USAGE, "completion_tokens": 0}})
        + HELLO
        + make_sse({"choices": [], "usage": USAGE}),
    ],
)
def test_usage_in_any_chunk_is_emitted_once(wire: str) -> None:
    assert decode(wire) == [*HELLO_EVENTS[:3], Usage(2, 3), StreamEnd()]


def test_unary_completion_tokens_are_divided_among_choices_by_length() -> None:
    contents = ["abcdef", [{"type": "text", "text": "x"}], "abc"]
    choices = [
        {"index": i, "message": {"content": one}, "finish_reason": "stop"}
        for i, one in enumerate(contents)
    ]
    usage = {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
    wire = json.dumps(
        {"choices": [*choices, {"index": 3, "finish_reason": "stop"}], "usage": usage}
    )

    events = decode(wire, GenerationRequest(model="m", kind="chat", n=4))

    assert [one.tokens for one in events if isinstance(one, TextDelta)] == [5, 1, 3]
    assert Usage(2, 10) in events


def test_usage_of_each_chunk_is_emitted_on_request() -> None:
    request = GenerationRequest(
        model="m", kind="chat", response_options=ResponseOptions(usage="each")
    )
    wire = (
        make_sse(
            {**make_chunk(content="a"), "usage": USAGE}, {**make_chunk("length"), "usage": USAGE}
        )
        + DONE
    )
    usage = Usage(2, 3)

    assert decode(wire, request) == [TextDelta("a"), usage, ChoiceEnd("length"), usage, StreamEnd()]


@pytest.mark.parametrize(
    "wire",
    [
        make_sse(make_chunk(content="Hel")),
        make_sse(make_chunk(content="Hel")) + DONE,
        HELLO[:-40],
        "",
        DONE,
        make_sse(make_chunk(content="a"), make_chunk("stop", index=2)) + DONE,
        ": only a comment\n\n",
    ],
)
def test_stream_without_finish_reason_raises_stream_broken(wire: str) -> None:
    with pytest.raises(StreamBroken):
        decode(wire)


def test_stream_without_done_needs_the_end_of_every_choice() -> None:
    two = GenerationRequest(model="m", kind="chat", n=2)
    for end in ("", DONE):
        with pytest.raises(StreamBroken):
            decode(HELLO + end, two)

    both = decode(HELLO + make_sse(make_chunk("length", index=1)), two)
    assert both[-2:] == [ChoiceEnd("length", 1), StreamEnd()]


def test_incomplete_event_after_the_end_of_every_choice_is_ignored() -> None:
    assert decode(HELLO + 'data: {"choices":[],"usa') == HELLO_EVENTS
    with pytest.raises(StreamBroken, match="inside an event"):
        decode(make_sse(make_chunk(content="Hel")) + 'data: {"choices":[{"ind')


def test_text_after_the_finish_reason_raises_stream_broken() -> None:
    with pytest.raises(StreamBroken):
        decode(HELLO + make_sse(make_chunk(content="more")) + DONE)


@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (make_sse({"error": {"message": "x", "code": 500}}), WorkerFailed),
        (make_sse({"error": "x"}), WorkerFailed),
        (make_sse({"error": {"message": "busy", "code": 503}}), Overloaded),
        (make_sse({"error": {"message": "slow", "code": "429"}}), RateLimitExceeded),
        (
            make_sse({"error": {"message": "bad", "type": "invalid_request_error"}}),
            UnsupportedFeature,
        ),
        (make_sse({"error_code": "INTERNAL_ERROR", "message": "x"}), WorkerFailed),
        (
            make_sse({"error": {"message": "", "code": "context_length_exceeded"}}),
            ContextTooLong,
        ),
        ("data: nonsense\n\n", WorkerFailed),
        ('{"error": {"message": "x"}}\n', WorkerFailed),
        ('data: {"choices": 5}\n\n', WorkerFailed),
    ],
)
def test_error_in_a_response_is_raised(wire: str, kind: type[GatewayError]) -> None:
    with pytest.raises(kind):
        decode(make_sse(make_chunk(content="a")) + wire if wire.startswith("data") else wire)


def test_error_object_without_sse_framing_is_raised() -> None:
    with pytest.raises(Overloaded):
        decode(make_sse(make_chunk(content="a")) + '{"error": {"message": "x", "code": 503}}\n')


FULL = {
    "id": "chatcmpl-1",
    "created": 5,
    "model": "w",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "reasoning": "hm"},
            "finish_reason": "length",
        }
    ],
    "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 1}},
}


def test_unary_response_to_a_streaming_request_is_decoded() -> None:
    decoder = OpenAI().create_decoder(CHAT)
    assert not decoder.feed(b" " + json.dumps(FULL).encode())
    assert decoder.close() == [
        ResponseMetadata("w", id="chatcmpl-1", created=5, source="openai"),
        ResponseExtra("openai", "message", ((("reasoning",), "hm"),)),
        ReasoningDelta("hm"),
        TextDelta("Hello", tokens=3),
        ChoiceEnd("length"),
        Usage(2, 3, cached_tokens=1),
        StreamEnd(),
    ]


@pytest.mark.parametrize("word", ["content_filter", "new"])
def test_another_finish_reason_after_the_first_is_reported(word: str) -> None:
    events = decode(HELLO + make_sse(make_chunk(word)) + DONE)

    lost = ResponseExtra("", "choice", ((("finish_reason",), word),))
    assert events == [*HELLO_EVENTS[:3], lost, StreamEnd()]


@pytest.mark.parametrize("word", ["error", "abort"])
def test_failure_after_the_finish_reason_is_an_error(word: str) -> None:
    with pytest.raises(WorkerFailed, match=word):
        decode(HELLO + make_sse(make_chunk(word)) + DONE)


@pytest.mark.parametrize("reason", [{}, {"finish_reason": None}, {"finish_reason": ""}])
def test_unary_choice_without_finish_reason_is_an_error(reason: dict[str, Any]) -> None:
    whole = {"message": {"content": "a"}, "finish_reason": "stop"}
    body = {"choices": [whole, {"message": {"content": "b"}, **reason}]}

    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode(json.dumps(body), GenerationRequest(model="m", kind="chat", n=2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_byte_order_mark_is_skipped_in_any_packet_size(size: int) -> None:
    body = json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]})
    assert decode("\ufeff \n" + body, size=size) == [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]
    assert decode("\ufeff" + HELLO, size=size) == HELLO_EVENTS
    with pytest.raises(StreamBroken):
        decode("\ufeff"[: size - 1], size=size)


@pytest.mark.parametrize("body", ["{", '{"choices": []}', '{"a": 1}'])
def test_malformed_unary_response_raises_worker_failed(body: str) -> None:
    with pytest.raises(WorkerFailed):
        decode(body)


def test_error_body_with_status_200_raises_its_error() -> None:
    with pytest.raises(UnsupportedFeature, match="no such tool") as excinfo:
        decode(
            '{"object":"error","message":"no such\\u0000tool","type":"BadRequestError","code":400}'
        )
    assert "\0" not in excinfo.value.message


STOPS = GenerationRequest(model="m", kind="chat", stopping=StopConditions(stop_token_ids=(7,)))


@pytest.mark.parametrize(
    ("choice", "end"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, ChoiceEnd("eos")),
        ({"finish_reason": "stop", "stop_reason": "x"}, ChoiceEnd("stop", matched_stop="x")),
        ({"finish_reason": "stop", "stop_reason": 7}, ChoiceEnd("stop", matched_stop=7)),
        ({"finish_reason": "stop", "matched_stop": 2}, ChoiceEnd("eos")),
        ({"finish_reason": "stop", "matched_stop": "x"}, ChoiceEnd("stop", matched_stop="x")),
        ({"finish_reason": "stop_sequence"}, ChoiceEnd("stop")),
        ({"finish_reason": "function_call"}, ChoiceEnd("tool_calls")),
        ({"finish_reason": "content_filter"}, ChoiceEnd("content_filter")),
        ({"finish_reason": "new"}, ChoiceEnd("unknown", own_word="new")),
    ],
)
def test_finish_reasons_and_matched_stops_are_decoded(
    choice: dict[str, Any], end: ChoiceEnd
) -> None:
    events = decode(make_sse({"choices": [{"index": 0, "delta": {}, **choice}]}), STOPS)

    assert [one for one in events if not isinstance(one, ResponseExtra)] == [end, StreamEnd()]


def make_call(**fields: Any) -> dict[str, Any]:
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {**fields, "function": function}


CALLED: list[Event] = [
    ToolCallStart(0, 0, "c1", "f"),
    ToolCallDelta(0, 0, '{"x"'),
    ToolCallDelta(0, 0, ":1}"),
    ChoiceEnd("tool_calls"),
    StreamEnd(),
]
FINISH = make_chunk("tool_calls")


@pytest.mark.parametrize(
    "pieces",
    [
        [
            make_call(index=0, id="c1", name="f", arguments=""),
            make_call(index=0, arguments='{"x"'),
            make_call(index=0, arguments=":1}"),
        ],
        [make_call(id="c1", name="f", arguments='{"x"'), make_call(arguments=":1}")],
        [
            make_call(index=0, id="c1", name="f", arguments='{"x"'),
            make_call(index=0, id="c1", name="f", arguments=":1}"),
        ],
        [
            make_call(index=3, id="c1", name="f", arguments='{"x"'),
            make_call(index=3, arguments=":1}"),
        ],
        [
            make_call(index=0, id="c1"),
            make_call(index=0, name="f", arguments='{"x"'),
            make_call(index=0, arguments=":1}"),
        ],
    ],
)
def test_tool_call_deltas_are_assembled(pieces: Sequence[dict[str, Any]]) -> None:
    wire = make_sse(*(make_chunk(tool_calls=[piece]) for piece in pieces), FINISH)
    assert decode(wire) == CALLED


def test_complete_tool_calls_in_one_chunk_are_decoded() -> None:
    both = [make_call(id="a", name="f", arguments={"x": 1}), make_call(name="g")]
    assert decode(make_sse(make_chunk("tool_calls", tool_calls=both))) == [
        ToolCallStart(0, 0, "a", "f"),
        ToolCallDelta(0, 0, '{"x":1}'),
        ToolCallStart(0, 1, "call_0_1", "g"),
        ChoiceEnd("tool_calls"),
        StreamEnd(),
    ]


def test_tool_calls_without_index_are_distinguished_by_id() -> None:
    pieces = [
        make_call(id="a", name="f", arguments="1"),
        make_call(id="b", name="g", arguments="2"),
    ]
    events = decode(make_sse(*(make_chunk(tool_calls=[piece]) for piece in pieces), FINISH))

    assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["f", "g"]
    assert [e.call_index for e in events if isinstance(e, ToolCallDelta)] == [0, 1]


def test_tool_call_without_name_raises_stream_broken() -> None:
    with pytest.raises(StreamBroken):
        decode(
            make_sse(make_chunk(tool_calls=[make_call(index=0, id="a", arguments="{}")]), FINISH)
        )


def test_reasoning_refusal_and_content_parts_are_decoded() -> None:
    parts = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b", "signature": "s"}]},
        {"type": "text", "text": "c"},
        {"type": "text", "text": "d"},
    ]
    wire = make_sse(
        make_chunk(reasoning_content="a"),
        make_chunk(content=parts),
        make_chunk("stop", refusal="no"),
    )

    assert decode(wire)[:-2] == [
        ReasoningDelta("a"),
        ReasoningDelta(
            "b", signature="s", at="response.choices[0].message.content[0].summary[0].signature"
        ),
        TextDelta("cd"),
        RefusalDelta("no"),
    ]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_further_choice_never_joins_another(*, streamed: bool) -> None:
    """A choice that nobody asked for is reported instead, whatever protocol the client speaks."""
    wire = (
        make_sse(
            make_chunk(content="a"),
            make_chunk(index=1, content="b"),
            make_chunk("stop"),
            make_chunk("length", index=1),
        )
        + DONE
        if streamed
        else json.dumps(
            {
                "choices": [
                    {"message": {"content": "a"}, "finish_reason": "stop"},
                    {"message": {"content": "b"}, "finish_reason": "length"},
                ]
            }
        )
    )
    lost = ResponseExtra("", "response", ((("choices[1]",), True),))

    for source in ("anthropic", "openai"):
        one = decode(wire, replace(CHAT, source=source))
        two = decode(wire, replace(CHAT, source=source, n=2))

        assert [each for each in one if each != lost] == [
            TextDelta("a"),
            ChoiceEnd("eos"),
            StreamEnd(),
        ]
        assert lost in one
        assert TextDelta("b", 1) in two


@pytest.mark.parametrize("index", [1, 7])
@pytest.mark.parametrize("streamed", [True, False])
def test_the_only_choice_may_have_any_index(index: int, *, streamed: bool) -> None:
    message = {"index": index, "message": {"content": "Hello"}, "finish_reason": "stop"}
    wire = json.dumps({"choices": [message]})
    if streamed:
        wire = make_sse(
            make_chunk(content="Hel", index=index),
            make_chunk(content="lo", index=index),
            make_chunk("stop", index=index),
        )

    events = decode(wire)

    texts = [one.text for one in events if isinstance(one, TextDelta) and one.index == 0]
    assert "".join(texts) == "Hello"
    assert ChoiceEnd("eos") in events
    lost = ResponseExtra("", "response", ((("choices[0]", "index"), index),))
    assert events.count(lost) == 1


def test_a_choice_of_index_0_never_joins_a_first_one_of_another_index() -> None:
    wire = make_sse(
        make_chunk(content="a", index=1),
        make_chunk(content="b"),
        make_chunk("stop"),
        make_chunk("stop", index=1),
    )

    events = decode(wire + DONE)

    assert [one for one in events if isinstance(one, TextDelta)] == [TextDelta("a")]
    assert events.count(ChoiceEnd("eos")) == 1
    assert ResponseExtra("", "response", ((("choices[0]",), True),)) in events


@pytest.mark.parametrize("streamed", [True, False])
def test_a_further_choice_of_several_prompts_is_an_error(*, streamed: bool) -> None:
    """A worker that sends two choices for each prompt means the second prompt with index 2."""
    choices = [{"index": i, "text": "a", "finish_reason": "stop"} for i in range(3)]
    wire = make_sse(*({"choices": [one]} for one in choices)) + DONE
    request = replace(TEXT, prompts=("a", "b"), echo=False)

    with pytest.raises(WorkerFailed, match="has the unrequested choice 2"):
        decode(wire if streamed else json.dumps({"choices": choices}), request)


@pytest.mark.parametrize("streamed", [True, False])
def test_unknown_parts_and_keys_of_parts_are_reported(*, streamed: bool) -> None:
    sources = {"type": "reference", "reference_ids": [1]}
    odd = {"type": "thinking", "thinking": 5}
    parts = [
        {"type": "text", "text": "a", "annotations": [{"type": "url_citation"}], "logprobs": []},
        sources,
        odd,
        {"kind": "other"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "b"}], "closed": True},
    ]
    message = {"content": parts}
    wire = (
        make_sse(make_chunk(content=parts), FINISH)
        if streamed
        else json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
    )

    events = decode(wire)

    [report] = [one for one in events if isinstance(one, ResponseExtra)]
    assert report.path == "response.choices[0].message"
    assert report.values == (
        (("content[0]", "annotations"), [{"type": "url_citation"}]),
        (("content[1]",), sources),
        (("content[2]",), odd),
        (("content[3]",), {"kind": "other"}),
        (("content[4]", "closed"), True),
    )
    assert TextDelta("a") in events
    assert ReasoningDelta("b") in events


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"content": 5}},
        {"message": {"content": 0}},
        {"message": {"content": {"text": "a"}, "reasoning": "hm"}},
        {"message": {"content": ["a"]}},
        {"message": {"content": [{"type": "text", "text": 5}]}},
        {"text": 5},
        {"text": ["a"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_text_of_another_type_is_no_empty_answer(choice: dict[str, Any], *, stream: bool) -> None:
    if stream and "message" in choice:
        choice = {"delta": choice["message"]}
    body = {"choices": [{"index": 0, **choice, "finish_reason": "stop"}]}

    with pytest.raises(WorkerFailed, match=r"The worker's answer has a (text|part)"):
        decode(make_sse(body) + DONE if stream else json.dumps(body))


def test_a_choice_that_is_no_object_does_not_shift_the_others() -> None:
    one = {"message": {"content": "a"}, "finish_reason": "stop"}

    with pytest.raises(WorkerFailed, match="choice that is no object"):
        decode(json.dumps({"choices": [one, 7, one]}))


def test_chat_and_completion_logprobs_are_decoded() -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [
        {"token": "\ufffd", "logprob": -1.5, "bytes": [228]}]}  # fmt: skip
    chunk = {"choices": [{"delta": {"content": "Hi"}, "logprobs": {"content": [token]}}]}
    expected = TokenLogprob("Hi", -0.5, (TopLogprob("\ufffd", -1.5, data=b"\xe4"),))

    assert decode(make_sse(chunk, make_chunk("stop")))[0] == TextDelta("Hi", logprobs=(expected,))

    columns = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1],
        "top_logprobs": [None, {"c": -2}],
        "text_offset": [0, 1],
    }
    plain = GenerationRequest(model="m", kind="completion", prompts=("p",))
    body = {"choices": [{"text": "ab", "index": 0, "logprobs": columns, "finish_reason": "stop"}]}

    assert decode(json.dumps(body), plain)[0] == TextDelta(
        "ab",
        tokens=2,
        logprobs=(TokenLogprob("a", None), TokenLogprob("b", -1.0, (TopLogprob("c", -2.0),))),
    )


def test_echoed_prompt_is_decoded_as_prompt_echo() -> None:
    columns = {"tokens": ["ab", "c"], "token_logprobs": [None, -1.0], "top_logprobs": None}
    body = {"choices": [{"text": "abc", "logprobs": columns, "finish_reason": "stop"}]}

    assert decode(json.dumps(body), TEXT) == [
        PromptEcho(0, "ab", (TokenLogprob("ab", None),)),
        TextDelta("c", logprobs=(TokenLogprob("c", -1.0),)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]


@forall(st.lists(st.text(min_size=1), min_size=1, max_size=6), st.integers(1, 40), st.booleans())
def test_stream_decodes_in_any_packet_size(texts: list[str], size: int, crlf: bool) -> None:
    wire = make_sse(*(make_chunk(content=text) for text in texts), make_chunk("stop")) + DONE
    data = wire.encode("utf-8", "surrogatepass")
    if crlf:
        data = data.replace(b"\n", b"\r\n")

    events = decode(data, size=size)

    assert [event.text for event in events if isinstance(event, TextDelta)] == texts
    assert events[-1] == StreamEnd()
