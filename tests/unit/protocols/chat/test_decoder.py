"""Workers' answers, in all the forms that real workers send them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

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


def sse(*chunks: Any) -> str:
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)


def delta(finish: str | None = None, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def read(wire: str | bytes, request: Request = CHAT, size: int = 1 << 20) -> list[Event]:
    """The events of a body that comes in pieces of ``size`` bytes; who served it is left out."""
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = OpenAI().create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    events += decoder.close()
    return [event for event in events if not isinstance(event, ResponseMetadata)]


HELLO = sse(
    delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo"), delta("stop")
)
SAID: list[Event] = [TextDelta("Hel"), TextDelta("lo"), ChoiceEnd("eos"), StreamEnd()]
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
        ("choices [] first", sse({"choices": [], "prompt_filter_results": []}) + HELLO),
        ("finish_reason empty", HELLO.replace("null", '""')),
        ("finish_reason missing", HELLO.replace(', "finish_reason": null', "")),
        ("index missing", HELLO.replace('"index": 0, ', "")),
        (
            "tool_calls null",
            HELLO.replace('"content": "lo"', '"content": "lo", "tool_calls": null'),
        ),
        ("the end told twice", HELLO + sse(delta("stop")) + DONE),
        ("empty object", sse({}) + HELLO + DONE),
        ("eos_token", HELLO.replace('"stop"', '"eos_token"') + DONE),
        ("content is parts", HELLO.replace('"lo"', '[{"type": "text", "text": "lo"}]')),
        ("after [DONE]", HELLO + DONE + "data: garbage\n\n"),
        (
            "text and finish in one",
            sse(delta(content="Hel"), delta("stop", content="lo")),
        ),
    ],
)
def test_streams_are_read_generously(name: str, wire: str) -> None:
    assert read(wire) == SAID, name


@pytest.mark.parametrize(
    "wire",
    [
        HELLO + sse({"choices": [], "usage": USAGE}) + DONE,
        HELLO + sse({"choices": [], "usage": USAGE}),
        HELLO.replace('"finish_reason": "stop"}]', '"finish_reason": "stop"}], "usage": %s')
        % json.dumps(USAGE),
        sse({"choices": [], "usage": {**USAGE, "completion_tokens": 0}})
        + HELLO
        + sse({"choices": [], "usage": USAGE}),
    ],
)
def test_usage_may_stand_anywhere_and_is_told_once(wire: str) -> None:
    assert read(wire) == [*SAID[:3], Usage(2, 3), StreamEnd()]


def test_choices_share_the_tokens_of_a_whole_answer_by_their_length() -> None:
    said = ["abcdef", [{"type": "text", "text": "x"}], "abc"]
    choices = [
        {"index": i, "message": {"content": one}, "finish_reason": "stop"}
        for i, one in enumerate(said)
    ]
    usage = {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
    wire = json.dumps(
        {"choices": [*choices, {"index": 3, "finish_reason": "stop"}], "usage": usage}
    )

    events = read(wire, GenerationRequest(model="m", kind="chat", n=4))

    assert [one.tokens for one in events if isinstance(one, TextDelta)] == [5, 1, 3]
    assert Usage(2, 10) in events


def test_running_usage_is_passed_on_where_it_is_wanted() -> None:
    request = GenerationRequest(
        model="m", kind="chat", response_options=ResponseOptions(usage="each")
    )
    wire = sse({**delta(content="a"), "usage": USAGE}, {**delta("length"), "usage": USAGE}) + DONE
    usage = Usage(2, 3)
    assert read(wire, request) == [TextDelta("a"), usage, ChoiceEnd("length"), usage, StreamEnd()]


@pytest.mark.parametrize(
    "wire",
    [
        sse(delta(content="Hel")),
        sse(delta(content="Hel")) + DONE,
        HELLO[:-40],
        "",
        DONE,
        sse(delta(content="a"), delta("stop", index=1)) + DONE,
        ": only a comment\n\n",
    ],
)
def test_a_stream_without_its_end_is_broken(wire: str) -> None:
    with pytest.raises(StreamBroken):
        read(wire)


def test_every_choice_that_was_asked_for_must_end() -> None:
    two = GenerationRequest(model="m", kind="chat", n=2)
    with pytest.raises(StreamBroken):
        read(HELLO, two)
    assert read(HELLO + DONE, two) == SAID
    both = read(HELLO + sse(delta("length", index=1)), two)
    assert both[-2:] == [ChoiceEnd("length", 1), StreamEnd()]


def test_a_choice_does_not_go_on_after_its_end() -> None:
    with pytest.raises(StreamBroken):
        read(HELLO + sse(delta(content="more")) + DONE)


@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (sse({"error": {"message": "x", "code": 500}}), WorkerFailed),
        (sse({"error": "x"}), WorkerFailed),
        (sse({"error": {"message": "busy", "code": 503}}), Overloaded),
        (sse({"error": {"message": "slow", "code": "429"}}), RateLimitExceeded),
        (sse({"error": {"message": "bad", "type": "invalid_request_error"}}), UnsupportedFeature),
        (sse({"error_code": "INTERNAL_ERROR", "message": "x"}), WorkerFailed),
        (
            sse({"error": {"message": "", "code": "context_length_exceeded"}}),
            ContextTooLong,
        ),
        ("data: nonsense\n\n", WorkerFailed),
        ('{"error": {"message": "x"}}\n', WorkerFailed),
        ('data: {"choices": 5}\n\n', WorkerFailed),
    ],
)
def test_an_error_in_the_stream_is_raised(wire: str, kind: type[GatewayError]) -> None:
    with pytest.raises(kind):
        read(sse(delta(content="a")) + wire if wire.startswith("data") else wire)


def test_a_bare_object_in_the_stream_is_an_error() -> None:
    with pytest.raises(Overloaded):
        read(sse(delta(content="a")) + '{"error": {"message": "x", "code": 503}}\n')


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


def test_a_whole_answer_is_read_also_for_a_stream() -> None:
    decoder = OpenAI().create_decoder(CHAT)
    assert not decoder.feed(b" " + json.dumps(FULL).encode())
    assert decoder.close() == [
        ResponseMetadata("w", id="chatcmpl-1", created=5),
        ReasoningDelta("hm"),
        TextDelta("Hello", tokens=3),
        ChoiceEnd("length"),
        Usage(2, 3, cached_tokens=1),
        StreamEnd(),
    ]


def test_a_whole_answer_without_a_reason_ends_for_an_unknown_one() -> None:
    body = {"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}
    assert read(json.dumps(body)) == [
        TextDelta("a"),
        ChoiceEnd("unknown"),
        TextDelta("b", 1),
        ChoiceEnd("unknown", 1),
        StreamEnd(),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_byte_order_mark_is_passed_over_wherever_the_reads_fall(size: int) -> None:
    body = json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]})
    assert read("\ufeff \n" + body, size=size) == [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]
    assert read("\ufeff" + HELLO, size=size) == SAID
    with pytest.raises(StreamBroken):
        read("\ufeff"[: size - 1], size=size)


@pytest.mark.parametrize("body", ["{", '{"choices": []}', '{"a": 1}'])
def test_a_whole_answer_that_is_none(body: str) -> None:
    with pytest.raises(WorkerFailed):
        read(body)


def test_an_error_under_200() -> None:
    with pytest.raises(UnsupportedFeature, match="no such tool") as caught:
        read(
            '{"object":"error","message":"no such\\u0000tool","type":"BadRequestError","code":400}'
        )
    assert "\0" not in caught.value.message


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
        ({"finish_reason": "abort"}, ChoiceEnd("unknown")),
    ],
)
def test_finish_reasons(choice: dict[str, Any], end: ChoiceEnd) -> None:
    assert read(sse({"choices": [{"index": 0, "delta": {}, **choice}]}), STOPS) == [
        end,
        StreamEnd(),
    ]


def call(**fields: Any) -> dict[str, Any]:
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {**fields, "function": function}


CALLED: list[Event] = [
    ToolCallStart(0, 0, "c1", "f"),
    ToolCallDelta(0, 0, '{"x"'),
    ToolCallDelta(0, 0, ":1}"),
    ChoiceEnd("tool_calls"),
    StreamEnd(),
]
FINISH = delta("tool_calls")


@pytest.mark.parametrize(
    "pieces",
    [
        [call(index=0, id="c1", name="f", arguments=""), call(index=0, arguments='{"x"'),
         call(index=0, arguments=":1}")],
        [call(id="c1", name="f", arguments='{"x"'), call(arguments=":1}")],
        [call(index=0, id="c1", name="f", arguments='{"x"'),
         call(index=0, id="c1", name="f", arguments=":1}")],
        [call(index=3, id="c1", name="f", arguments='{"x"'), call(index=3, arguments=":1}")],
        [call(index=0, id="c1"), call(index=0, name="f", arguments='{"x"'),
         call(index=0, arguments=":1}")],
    ],
)  # fmt: skip
def test_tool_calls_in_pieces(pieces: Sequence[dict[str, Any]]) -> None:
    wire = sse(*(delta(tool_calls=[piece]) for piece in pieces), FINISH)
    assert read(wire) == CALLED


def test_whole_tool_calls_in_one_chunk() -> None:
    both = [call(id="a", name="f", arguments={"x": 1}), call(name="g")]
    assert read(sse(delta("tool_calls", tool_calls=both))) == [
        ToolCallStart(0, 0, "a", "f"),
        ToolCallDelta(0, 0, '{"x":1}'),
        ToolCallStart(0, 1, "call_0_1", "g"),
        ChoiceEnd("tool_calls"),
        StreamEnd(),
    ]


def test_calls_without_an_index_are_told_apart_by_their_ids() -> None:
    pieces = [call(id="a", name="f", arguments="1"), call(id="b", name="g", arguments="2")]
    events = read(sse(*(delta(tool_calls=[piece]) for piece in pieces), FINISH))
    assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["f", "g"]
    assert [e.call_index for e in events if isinstance(e, ToolCallDelta)] == [0, 1]


def test_a_call_without_a_name_is_broken() -> None:
    with pytest.raises(StreamBroken):
        read(sse(delta(tool_calls=[call(index=0, id="a", arguments="{}")]), FINISH))


def test_thoughts_refusals_and_parts() -> None:
    parts = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b", "signature": "s"}]},
        {"type": "text", "text": "c"},
        {"type": "text", "text": "d"},
    ]
    wire = sse(delta(reasoning_content="a"), delta(content=parts), delta("stop", refusal="no"))
    assert read(wire)[:-2] == [
        ReasoningDelta("a"),
        ReasoningDelta("b", signature="s"),
        TextDelta("cd"),
        RefusalDelta("no"),
    ]


def test_logprobs_of_both_kinds() -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [
        {"token": "\ufffd", "logprob": -1.5, "bytes": [228]}]}  # fmt: skip
    chunk = {"choices": [{"delta": {"content": "Hi"}, "logprobs": {"content": [token]}}]}
    expected = TokenLogprob("Hi", -0.5, (TopLogprob("\ufffd", -1.5, data=b"\xe4"),))
    assert read(sse(chunk, delta("stop")))[0] == TextDelta("Hi", logprobs=(expected,))
    columns = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1],
        "top_logprobs": [None, {"c": -2}],
        "text_offset": [0, 1],
    }
    plain = GenerationRequest(model="m", kind="completion", prompts=("p",))
    body = {"choices": [{"text": "ab", "index": 0, "logprobs": columns, "finish_reason": "stop"}]}
    assert read(json.dumps(body), plain)[0] == TextDelta(
        "ab",
        tokens=2,
        logprobs=(TokenLogprob("a", None), TokenLogprob("b", -1.0, (TopLogprob("c", -2.0),))),
    )


def test_an_echoed_prompt_is_told_apart() -> None:
    columns = {"tokens": ["ab", "c"], "token_logprobs": [None, -1.0], "top_logprobs": None}
    body = {"choices": [{"text": "abc", "logprobs": columns, "finish_reason": "stop"}]}
    assert read(json.dumps(body), TEXT) == [
        PromptEcho(0, "ab", (TokenLogprob("ab", None),)),
        TextDelta("c", logprobs=(TokenLogprob("c", -1.0),)),
        ChoiceEnd("eos"),
        StreamEnd(),
    ]


@forall(st.lists(st.text(min_size=1), min_size=1, max_size=6), st.integers(1, 40), st.booleans())
def test_a_stream_survives_any_cut(texts: list[str], size: int, crlf: bool) -> None:
    wire = sse(*(delta(content=text) for text in texts), delta("stop")) + DONE
    data = wire.encode("utf-8", "surrogatepass")
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    events = read(data, size=size)
    assert [event.text for event in events if isinstance(event, TextDelta)] == texts
    assert events[-1] == StreamEnd()
