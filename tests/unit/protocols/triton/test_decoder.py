"""Workers' answers: the bytes that real servers send, and what they mean."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from protocols.core.request import (
    GenerationRequest,
    LogprobsOptions,
    ResponseOptions,
    StopConditions,
)
from protocols.triton import decoder as triton_decoder
from protocols.triton.endpoints import Triton

STREAM = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
WHOLE = GenerationRequest(model="m", kind="completion", prompts=("hi",))
NAMED = {"model_name": "m", "model_version": "1"}


def sse(*events: Any) -> str:
    """As the real server frames them."""
    return "".join(
        f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events
    )


def said(text: Any, **outputs: Any) -> dict[str, Any]:
    return {**outputs, **NAMED, "text_output": text}


def told(text: Any, reason: Any = "None", tokens: Any = 1, **outputs: Any) -> dict[str, Any]:
    """As the vLLM backend tells everything that it is asked for."""
    return said(text, finish_reason=reason, num_output_tokens=tokens, **outputs)


def read(
    wire: str | bytes,
    request: GenerationRequest = STREAM,
    profile: str | Triton = "vllm",
    size: int = 1 << 20,
) -> list[Event]:
    """The events of a body that comes in pieces of ``size`` bytes; who served it is left out."""
    data = wire if isinstance(wire, bytes) else wire.encode()
    dialect = profile if isinstance(profile, Triton) else Triton(profile)
    decoder = dialect.create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    events += decoder.close()
    return [event for event in events if not isinstance(event, ResponseMetadata)]


def asked(request: GenerationRequest, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{**{name: getattr(request, name) for name in request.__struct_fields__}, **fields}
    )


A_B: list[Event] = [TextDelta("a"), TextDelta("b")]
ENDED: list[Event] = [*A_B, ChoiceEnd("length"), StreamEnd()]
BARE: list[Event] = [*A_B, ChoiceEnd("unknown"), StreamEnd()]

STREAMS: dict[str, tuple[str, str, Any]] = {
    "told": ("vllm", sse(told("a"), told("b", "length")), ENDED),
    "untold": ("plain", sse(said("a"), said("b")), BARE),
    "end after the text": ("vllm", sse(told("a"), told("b"), told("", "stop", 0)),
                           [*A_B, ChoiceEnd("eos"), StreamEnd()]),
    "a list of one": ("vllm", sse(told(["a"], ["None"], [1]), told(["b"], ["length"], [1])), ENDED),
    "one event": ("trtllm", sse(said("a b", num_output_tokens=2, num_input_tokens=3)),
                  [StreamStart(3), TextDelta("a b", tokens=2), ChoiceEnd("unknown"), Usage(3, 2),
                   StreamEnd()]),
    "windows newlines": ("plain", sse(said("a"), said("b")).replace("\n", "\r\n"), BARE),
    "no blank": ("plain", sse(said("a"), said("b")).replace("data: ", "data:"), BARE),
    "comments and fields": ("plain", ": hi\n\nevent: x\nid: 1\n" + sse(said("a"), said("b")), BARE),
    "empty data": ("plain", sse(said("a"), "", said("b")), BARE),
    "byte order mark": ("plain", "\ufeff" + sse(said("a"), said("b")), BARE),
    "blank lines first": ("plain", "\n\n" + sse(said("a"), said("b")), BARE),
    "no last newline": ("plain", sse(said("a"), said("b"))[:-2], BARE),
    "one last newline": ("plain", sse(said("a"), said("b"))[:-1], BARE),
    "a piece without text": ("plain", sse(said("a"), said([]), said(""), said("b")), BARE),
    "not ascii": ("plain", sse(json.dumps(said("ä→😀"), ensure_ascii=False)),
                  [TextDelta("ä→😀"), ChoiceEnd("unknown"), StreamEnd()]),
    "a number that JSON does not have": (
        "vllm", sse(told("a"), '{"text_output":"b","finish_reason":"length","x":-Inf}'), ENDED),
    "one JSON body": ("vllm", json.dumps(told("a b", "stop", 2)),
                      [TextDelta("a b", tokens=2), ChoiceEnd("eos"), StreamEnd()]),
    "more choices than asked": ("trtllm", sse(said(["a", "x"]), said(["b", "y"])), BARE),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_streams(name: str, size: int) -> None:
    profile, wire, events = STREAMS[name]

    assert read(wire, STREAM, profile, size) == events


WHOLES: dict[str, tuple[str, str, Any]] = {
    "the real server's bytes": (
        "plain",
        '{"id":"42","model_name":"vllm_like","model_version":"1","text_output":"hi w0 w1"}',
        [TextDelta("hi w0 w1", tokens=2), ChoiceEnd("unknown"), StreamEnd()],
    ),
    "told": ("vllm", json.dumps(told("a b", "length", 2)),
     [TextDelta("a b", tokens=2), ChoiceEnd("length"),
                                                           StreamEnd()]),
    "counted": ("vllm", json.dumps(told("a b", "length", 2, num_input_tokens=3)),
                [TextDelta("a b", tokens=2), ChoiceEnd("length"), Usage(3, 2), StreamEnd()]),
    "an end that is not told": ("vllm", json.dumps(told("a", "None")),
                                [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]),
    "an end that we do not know": ("vllm", json.dumps(told("a", "bored")),
                                   [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]),
    "an error that is none": ("vllm", json.dumps(told("a", "stop", error=None)),
                              [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]),
    "no text": ("vllm", json.dumps(told("", "stop", 0)), [ChoiceEnd("eos"), StreamEnd()]),
    "spaces": ("vllm", f" \r\n{json.dumps(told('a', 'stop'))}\n",
     [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]),
    "byte order mark": ("vllm", "\ufeff" + json.dumps(told("a", "stop")),
                        [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]),
    "in pieces all the same": ("vllm", sse(told("a"), told("b", "length")), ENDED),
    "odd outputs": (
        "vllm",
        json.dumps(said("abcde", finish_reason=None, num_output_tokens=-1, num_input_tokens=True)),
        [TextDelta("abcde", tokens=2), ChoiceEnd("unknown"), StreamEnd(has_ignored_usage=True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLES)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_whole_answers(name: str, size: int) -> None:
    profile, wire, events = WHOLES[name]

    assert read(wire, WHOLE, profile, size) == events


def test_a_stream_may_have_no_events() -> None:
    none = [ChoiceEnd("unknown"), StreamEnd()]
    nothing_asked = asked(STREAM, stopping=StopConditions(max_tokens=0))

    assert read("", STREAM, "plain") == read("\ufeff\n", STREAM, "trtllm") == none
    assert read(sse(NAMED, said([])), STREAM, "plain") == none
    assert read("", nothing_asked, "vllm") == none
    assert read("", asked(STREAM, n=2), "trtllm") == [
        ChoiceEnd("unknown", 0),
        ChoiceEnd("unknown", 1),
        StreamEnd(),
    ]


def test_an_older_worker_overlooks_that_it_is_asked_for_reasons() -> None:
    assert read(sse(said("a"), said("b")), STREAM, "vllm") == BARE


def test_it_says_who_answered_once() -> None:
    decoder = Triton().create_decoder(STREAM)

    events = [*decoder.feed(sse(told("a"), told("b", "length")).encode()), *decoder.close()]

    assert [one for one in events if isinstance(one, ResponseMetadata)] == [ResponseMetadata("m")]
    assert not any(
        isinstance(one, ResponseMetadata)
        for one in read(sse({"text_output": "a"}), STREAM, "plain")
    )


def test_several_choices() -> None:
    request = asked(STREAM, n=2)
    wire = sse(
        told(["a", "x"], ["None", "None"], [1, 1]),
        told(["b", ""], ["None", "stop"], [1, 1]),
        told(["c", ""], ["length", "stop"], [1, 0]),
    )

    assert read(wire, request) == [
        TextDelta("a", 0), TextDelta("x", 1), TextDelta("b", 0), ChoiceEnd("eos", 1),
        TextDelta("c", 0), ChoiceEnd("length", 0), StreamEnd(),
    ]  # fmt: skip
    assert read(json.dumps(told(["a", "b"], ["stop", "length"], [1, 2])), asked(WHOLE, n=2)) == [
        TextDelta("a", 0), ChoiceEnd("eos", 0), TextDelta("b", 1, tokens=2),
         ChoiceEnd("length", 1), StreamEnd(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "stop", "end"),
    [
        ("stop", "None", ChoiceEnd("eos")),
        ("stop", "END", ChoiceEnd("stop", matched_stop="END")),
        ("stop", "7", ChoiceEnd("stop", matched_stop=7)),
        ("stop", "8", ChoiceEnd("stop", matched_stop="8")),
        ("length", "None", ChoiceEnd("length")),
        ("length", "7", ChoiceEnd("length")),
    ],
)
def test_what_stopped_it(reason: str, stop: str, end: ChoiceEnd) -> None:
    request = asked(WHOLE, stopping=StopConditions(stop_token_ids=(7,)))
    wire = json.dumps(said("a", finish_reason=reason, stop_reason=stop))

    assert read(wire, request, "llmapi") == [TextDelta("a"), end, StreamEnd()]


def test_running_usage() -> None:
    request = asked(STREAM, response_options=ResponseOptions(usage="each"))
    wire = sse(told("a", num_input_tokens=3), told("b", "length", 2, num_input_tokens=3))

    assert read(wire, request) == [
        StreamStart(3), TextDelta("a"), Usage(3, 1), TextDelta("b", tokens=2), ChoiceEnd("length"),
         Usage(3, 3), StreamEnd(),
    ]  # fmt: skip


# --- the prompt in front --------------------------------------------------------------------------


def unable(decoupled: bool = True) -> Triton:
    """Workers of a family that gives the prompt back, and can't be told not to."""
    made = Triton("vllm")
    policy = {"decoupled": decoupled}
    config = {"input": [{"name": "text_input"}], "model_transaction_policy": policy}
    made.load_metadata("m", [json.dumps(config).encode()])
    return made


def test_the_prompt_is_cut_off_where_it_can_not_be_declined() -> None:
    whole = [TextDelta(" w0 w1", tokens=2), ChoiceEnd("unknown"), StreamEnd()]

    assert read(json.dumps(said("hi w0 w1")), WHOLE, unable()) == whole
    assert read(json.dumps(said(" w0 w1")), WHOLE, unable()) == whole
    assert read(sse(said("hi w0 w1")), STREAM, unable(decoupled=False)) == whole
    assert read(json.dumps(said("hi w0")), WHOLE, "vllm")[0] == TextDelta("hi w0", tokens=2)


def test_a_stream_never_starts_with_the_prompt() -> None:
    assert read(sse(said("hi"), said("hi")), STREAM, unable())[:2] == [
        TextDelta("hi"),
        TextDelta("hi"),
    ]


# --- log probabilities ----------------------------------------------------------------------------


def candidates(*tokens: tuple[str, str, Any, int | None]) -> dict[str, Any]:
    return {
        key: {"logprob": logprob, "rank": rank, "decoded_token": token}
        for key, token, logprob, rank in tokens
    }


def test_candidates() -> None:
    request = asked(WHOLE, logprobs=LogprobsOptions(2))
    column = [
        candidates(("5", "a", -0.5, 1), ("6", "b", -1.5, 2)),
        candidates(("7", "c", -3.5, 9), ("6", "b", -1.5, 2), ("5", "a", -0.5, 1)),
        candidates(("x", "d", None, None)),
        {},
    ]
    a, b = TopLogprob("a", -0.5, 5), TopLogprob("b", -1.5, 6)

    [answer, *_] = read(json.dumps(told("acd", "stop", 3, logprobs=json.dumps(column))), request)

    assert answer == TextDelta(
        "acd",
        tokens=3,
        logprobs=(
            TokenLogprob("a", -0.5, (a, b), 5),
            TokenLogprob("c", -3.5, (a, b), 7),
            TokenLogprob("d", None),
        ),
    )


@pytest.mark.parametrize(
    ("top", "ranks"), [(0, []), (1, [-0.5]), (-1, [-0.5, -1.5, float("-inf"), float("-inf")])]
)
def test_no_more_alternatives_than_asked(top: int, ranks: list[float]) -> None:
    request = asked(WHOLE, logprobs=LogprobsOptions(top))
    more = ',"8":{"logprob":-Infinity,"rank":3},"9":{"logprob":NaN,"rank":4}}]'
    column = json.dumps([candidates(("6", "b", -1.5, 2), ("5", "a", -0.5, 1))])[:-2] + more

    [answer, *_] = read(json.dumps(told("b", "stop", 1, logprobs=column)), request)

    assert isinstance(answer, TextDelta)
    assert [one.logprob for one in answer.logprobs[0].top] == ranks


def test_one_column_for_each_choice() -> None:
    columns = [json.dumps([candidates(("5", "a", -0.5, 1))]), "null", None]
    request = asked(WHOLE, logprobs=LogprobsOptions(), n=3)

    events = read(json.dumps(said(["a", "b", "c"], logprobs=columns)), request)

    found = [one.logprobs for one in events if isinstance(one, TextDelta)]
    assert found == [(TokenLogprob("a", -0.5, id=5),), (), ()]


@pytest.mark.parametrize(
    ("texts", "numbers", "found"),
    [
        ("a", -0.5, [(TokenLogprob("a", -0.5),)]),
        ("ab", [-0.5, -1.0], [(TokenLogprob("", -0.5), TokenLogprob("", -1.0))]),
        (["a", "b"], [-0.5, -1.0], [(TokenLogprob("a", -0.5),), (TokenLogprob("b", -1.0),)]),
        ("a", [None], [(TokenLogprob("a", None),)]),
    ],
)
def test_bare_numbers(texts: Any, numbers: Any, found: Any) -> None:
    request = asked(
        WHOLE, logprobs=LogprobsOptions(), n=len(texts) if isinstance(texts, list) else 1
    )

    events = read(json.dumps(said(texts, output_log_probs=numbers)), request, "trtllm")

    answers = [one for one in events if isinstance(one, TextDelta)]
    assert [one.logprobs for one in answers] == found
    assert [one.tokens for one in answers] == [len(one) for one in found]


def test_log_probabilities_that_nobody_asked_for() -> None:
    wire = sse(said("a", output_log_probs=[-0.5]))

    assert read(wire, STREAM, "trtllm") == [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]


@pytest.mark.parametrize("column", ["[", "7", '[{"5": 1}]', "[" * 9000])
def test_candidates_that_can_not_be_read(column: str) -> None:
    with pytest.raises(WorkerFailed):
        read(json.dumps(said("a", logprobs=column)), asked(WHOLE, logprobs=LogprobsOptions()))


# --- an answer of one text ------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=2)
WORDS = st.none() | st.sampled_from(["None", "stop", "length", ""])
USUAL = st.fixed_dictionaries(
    {"text_output": st.text(max_size=9)},
    optional={
        "model_name": st.just("m"),
        "model_version": st.just("1"),
        "finish_reason": WORDS,
        "stop_reason": WORDS,
        "num_output_tokens": st.integers(0, 2**70),
        "num_input_tokens": st.none() | st.integers(0, 9),
        "sequence_id": st.just(0),
        "sequence_end": st.booleans(),
    },
)
ODD = st.sampled_from(
    ["text_output", "model_name", "model_version", "finish_reason", "stop_reason",
     "num_output_tokens", "num_input_tokens", "sequence_id", "error", "logprobs", "more"]
)  # fmt: skip


def meant(said: triton_decoder.ParsedResponse) -> Any:
    """It, whatever its lists are made of."""
    return [tuple(one) if isinstance(one, list) else one for one in astuple(said)]


def by_other_names() -> dict[str, str]:
    """The same names as the family's, as if they were a model's own."""
    return {**triton_decoder.map_output_names({})}


@given(USUAL)
def test_an_answer_of_one_text_is_read_as_any_other(told: dict[str, Any]) -> None:
    body = json.dumps(told).encode()

    found = triton_decoder.parse_response(body, WHOLE, triton_decoder.map_output_names({}))

    assert meant(found) == meant(triton_decoder.parse_response(body, WHOLE, by_other_names()))


@given(USUAL, ODD, VALUES)
def test_so_is_one_that_holds_something_else(told: dict[str, Any], odd: str, got: Any) -> None:
    body = json.dumps({**told, odd: got}).encode()

    def found(names: Mapping[str, str]) -> Any:
        try:
            return meant(triton_decoder.parse_response(body, WHOLE, names))
        except GatewayError as error:
            return type(error), error.message

    assert found(triton_decoder.map_output_names({})) == found(by_other_names())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"text_output":"\xff"}', b"[" * 9999])
def test_what_is_wrong_with_one_is_told(body: bytes) -> None:
    for names in (triton_decoder.map_output_names({}), by_other_names()):
        with pytest.raises(WorkerFailed):
            triton_decoder.parse_response(body, WHOLE, names)


def test_a_stream_may_hold_other_events_in_part() -> None:
    odd = said("b", more=1)

    assert read(sse(said("a"), odd, said("c")), profile="plain")[:3] == [
        TextDelta("a"),
        TextDelta("b"),
        TextDelta("c"),
    ]


def test_a_model_may_have_names_of_its_own() -> None:
    own = Triton("plain", fields={"text_output": "OUT"})

    assert read(sse({"OUT": "a"}), profile=own)[0] == TextDelta("a")


@pytest.mark.parametrize(
    ("more", "events"),
    [
        (
            {},
            [
                ResponseMetadata("m"),
                TextDelta("Hello there", 0, 3),
                ChoiceEnd("unknown"),
                StreamEnd(),
            ],
        ),
        (
            {"finish_reason": "length"},
            [
                ResponseMetadata("m"),
                TextDelta("Hello there", 0, 3),
                ChoiceEnd("length"),
                StreamEnd(),
            ],
        ),
        (
            {"num_output_tokens": 2, "num_input_tokens": 5, "finish_reason": "stop"},
            [
                ResponseMetadata("m"),
                TextDelta("Hello there", 0, 2),
                ChoiceEnd("eos"),
                Usage(5, 2),
                StreamEnd(),
            ],
        ),
        ({"text_output": "", "model_name": None}, [ChoiceEnd("unknown"), StreamEnd()]),
    ],
)
def test_an_answer_of_one_text(more: dict[str, Any], events: list[Any]) -> None:
    told = {"model_name": "m", "model_version": "1", "text_output": "Hello there", **more}

    decoder = Triton("vllm").create_decoder(WHOLE)
    assert [*decoder.feed(json.dumps(told).encode()), *decoder.close()] == events
