"""Responses of real servers are decoded, byte for byte."""

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
    ResponseExtra,
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
UNARY = GenerationRequest(model="m", kind="completion", prompts=("hi",))
NAMED = {"model_name": "m", "model_version": "1"}


def make_sse(*events: Any) -> str:
    """Format events like the real server."""
    return "".join(
        f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events
    )


def make_response(text: Any, **outputs: Any) -> dict[str, Any]:
    return {**outputs, **NAMED, "text_output": text}


def make_vllm_response(
    text: Any, reason: Any = "None", tokens: Any = 1, **outputs: Any
) -> dict[str, Any]:
    """Build a response of the vLLM backend with all requested details."""
    return make_response(text, finish_reason=reason, num_output_tokens=tokens, **outputs)


def decode(
    wire: str | bytes,
    request: GenerationRequest = STREAM,
    profile: str | Triton = "vllm",
    size: int = 1 << 20,
) -> list[Event]:
    """Decode a body in pieces of ``size`` bytes, without the metadata."""
    data = wire if isinstance(wire, bytes) else wire.encode()
    adapter = profile if isinstance(profile, Triton) else Triton(profile)
    decoder = adapter.create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    events += decoder.close()
    return [event for event in events if not isinstance(event, ResponseMetadata)]


def copy_request(request: GenerationRequest, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{**{name: getattr(request, name) for name in request.__struct_fields__}, **fields}
    )


A_B: list[Event] = [TextDelta("a"), TextDelta("b")]
ENDED: list[Event] = [*A_B, ChoiceEnd("length"), StreamEnd()]
BARE: list[Event] = [*A_B, ChoiceEnd("unknown"), StreamEnd()]
SURPLUS = ResponseExtra("", "response", ((("text_output[1]",), True),))

STREAMS: dict[str, tuple[str, str, Any]] = {
    "finish reason": (
        "vllm",
        make_sse(make_vllm_response("a"), make_vllm_response("b", "length")),
        ENDED,
    ),
    "no finish reason": ("plain", make_sse(make_response("a"), make_response("b")), BARE),
    "end after the text": (
        "vllm",
        make_sse(
            make_vllm_response("a"), make_vllm_response("b"), make_vllm_response("", "stop", 0)
        ),
        [*A_B, ChoiceEnd("eos"), StreamEnd()],
    ),
    "a list of one": (
        "vllm",
        make_sse(
            make_vllm_response(["a"], ["None"], [1]), make_vllm_response(["b"], ["length"], [1])
        ),
        ENDED,
    ),
    "one event": (
        "trtllm",
        make_sse(make_response("a b", num_output_tokens=2, num_input_tokens=3)),
        [
            StreamStart(3),
            TextDelta("a b", tokens=2),
            ChoiceEnd("unknown"),
            Usage(3, 2),
            StreamEnd(),
        ],
    ),
    "windows newlines": (
        "plain",
        make_sse(make_response("a"), make_response("b")).replace("\n", "\r\n"),
        BARE,
    ),
    "no blank": (
        "plain",
        make_sse(make_response("a"), make_response("b")).replace("data: ", "data:"),
        BARE,
    ),
    "comments and fields": (
        "plain",
        ": hi\n\nevent: x\nid: 1\n" + make_sse(make_response("a"), make_response("b")),
        BARE,
    ),
    "empty data": ("plain", make_sse(make_response("a"), "", make_response("b")), BARE),
    "byte order mark": ("plain", "\ufeff" + make_sse(make_response("a"), make_response("b")), BARE),
    "blank lines first": ("plain", "\n\n" + make_sse(make_response("a"), make_response("b")), BARE),
    "no last newline": ("plain", make_sse(make_response("a"), make_response("b"))[:-2], BARE),
    "one last newline": ("plain", make_sse(make_response("a"), make_response("b"))[:-1], BARE),
    "a piece without text": (
        "plain",
        make_sse(make_response("a"), make_response([]), make_response(""), make_response("b")),
        BARE,
    ),
    "not ascii": (
        "plain",
        make_sse(json.dumps(make_response("ä→😀"), ensure_ascii=False)),
        [TextDelta("ä→😀"), ChoiceEnd("unknown"), StreamEnd()],
    ),
    "a number that JSON does not have": (
        "vllm",
        make_sse(make_vllm_response("a"), '{"text_output":"b","finish_reason":"length","x":-Inf}'),
        [
            TextDelta("a"),
            ResponseExtra("", "response", ((("x",), float("-inf")),)),
            TextDelta("b"),
            ChoiceEnd("length"),
            StreamEnd(),
        ],
    ),
    "one JSON body": (
        "vllm",
        json.dumps(make_vllm_response("a b", "stop", 2)),
        [TextDelta("a b", tokens=2), ChoiceEnd("eos"), StreamEnd()],
    ),
    "more choices than asked": (
        "trtllm",
        make_sse(make_response(["a", "x"]), make_response(["b", "y"])),
        [SURPLUS, BARE[0], SURPLUS, *BARE[1:]],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_stream_is_decoded_in_any_packet_size(name: str, size: int) -> None:
    profile, wire, events = STREAMS[name]

    assert decode(wire, STREAM, profile, size) == events


UNARY_RESPONSES: dict[str, tuple[str, str, Any]] = {
    "the real server's bytes": (
        "plain",
        '{"id":"42","model_name":"vllm_like","model_version":"1","text_output":"hi w0 w1"}',
        [TextDelta("hi w0 w1", tokens=2), ChoiceEnd("unknown"), StreamEnd()],
    ),
    "finish reason": (
        "vllm",
        json.dumps(make_vllm_response("a b", "length", 2)),
        [TextDelta("a b", tokens=2), ChoiceEnd("length"), StreamEnd()],
    ),
    "counted": (
        "vllm",
        json.dumps(make_vllm_response("a b", "length", 2, num_input_tokens=3)),
        [TextDelta("a b", tokens=2), ChoiceEnd("length"), Usage(3, 2), StreamEnd()],
    ),
    "no reason at the end": (
        "vllm",
        json.dumps(make_vllm_response("a", "None")),
        [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()],
    ),
    "an end that we do not know": (
        "vllm",
        json.dumps(make_vllm_response("a", "bored")),
        [TextDelta("a"), ChoiceEnd("unknown", own_word="bored"), StreamEnd()],
    ),
    "an error that is none": (
        "vllm",
        json.dumps(make_vllm_response("a", "stop", error=None)),
        [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()],
    ),
    "no text": (
        "vllm",
        json.dumps(make_vllm_response("", "stop", 0)),
        [ChoiceEnd("eos"), StreamEnd()],
    ),
    "spaces": (
        "vllm",
        f" \r\n{json.dumps(make_vllm_response('a', 'stop'))}\n",
        [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()],
    ),
    "byte order mark": (
        "vllm",
        "\ufeff" + json.dumps(make_vllm_response("a", "stop")),
        [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()],
    ),
    "in pieces all the same": (
        "vllm",
        make_sse(make_vllm_response("a"), make_vllm_response("b", "length")),
        ENDED,
    ),
    "odd outputs": (
        "vllm",
        json.dumps(
            make_response("abcde", finish_reason=None, num_output_tokens=-1, num_input_tokens=True)
        ),
        [TextDelta("abcde", tokens=2), ChoiceEnd("unknown"), StreamEnd(has_ignored_usage=True)],
    ),
}


@pytest.mark.parametrize("name", UNARY_RESPONSES)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_unary_response_is_decoded_in_any_packet_size(name: str, size: int) -> None:
    profile, wire, events = UNARY_RESPONSES[name]

    assert decode(wire, UNARY, profile, size) == events


def test_stream_without_events_ends_with_unknown_finish_reason() -> None:
    none = [ChoiceEnd("unknown"), StreamEnd()]
    no_tokens = copy_request(STREAM, stopping=StopConditions(max_tokens=0))

    assert decode("", STREAM, "plain") == decode("\ufeff\n", STREAM, "trtllm") == none
    assert decode(make_sse(NAMED, make_response([])), STREAM, "plain") == none
    assert decode("", no_tokens, "vllm") == none
    assert decode("", copy_request(STREAM, n=2), "trtllm") == [
        ChoiceEnd("unknown", 0),
        ChoiceEnd("unknown", 1),
        StreamEnd(),
    ]


def test_stream_without_requested_finish_reasons_is_accepted() -> None:
    assert decode(make_sse(make_response("a"), make_response("b")), STREAM, "vllm") == BARE


def test_response_metadata_is_emitted_once() -> None:
    decoder = Triton().create_decoder(STREAM)

    events = [
        *decoder.feed(
            make_sse(make_vllm_response("a"), make_vllm_response("b", "length")).encode()
        ),
        *decoder.close(),
    ]

    assert [one for one in events if isinstance(one, ResponseMetadata)] == [ResponseMetadata("m")]
    assert not any(
        isinstance(one, ResponseMetadata)
        for one in decode(make_sse({"text_output": "a"}), STREAM, "plain")
    )


def test_outputs_of_several_choices_are_decoded() -> None:
    request = copy_request(STREAM, n=2)
    wire = make_sse(
        make_vllm_response(["a", "x"], ["None", "None"], [1, 1]),
        make_vllm_response(["b", ""], ["None", "stop"], [1, 1]),
        make_vllm_response(["c", ""], ["length", "stop"], [1, 0]),
    )

    assert decode(wire, request) == [
        TextDelta("a", 0),
        TextDelta("x", 1),
        TextDelta("b", 0),
        ChoiceEnd("eos", 1),
        TextDelta("c", 0),
        ChoiceEnd("length", 0),
        StreamEnd(),
    ]
    assert decode(
        json.dumps(make_vllm_response(["a", "b"], ["stop", "length"], [1, 2])),
        copy_request(UNARY, n=2),
    ) == [
        TextDelta("a", 0),
        ChoiceEnd("eos", 0),
        TextDelta("b", 1, tokens=2),
        ChoiceEnd("length", 1),
        StreamEnd(),
    ]


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
def test_finish_reason_and_matched_stop_are_decoded(reason: str, stop: str, end: ChoiceEnd) -> None:
    request = copy_request(UNARY, stopping=StopConditions(stop_token_ids=(7,)))
    wire = json.dumps(make_response("a", finish_reason=reason, stop_reason=stop))

    assert decode(wire, request, "llmapi") == [TextDelta("a"), end, StreamEnd()]


def test_usage_is_emitted_for_each_event_on_request() -> None:
    request = copy_request(STREAM, response_options=ResponseOptions(usage="each"))
    wire = make_sse(
        make_vllm_response("a", num_input_tokens=3),
        make_vllm_response("b", "length", 2, num_input_tokens=3),
    )

    assert decode(wire, request) == [
        StreamStart(3),
        TextDelta("a"),
        Usage(3, 1),
        TextDelta("b", tokens=2),
        ChoiceEnd("length"),
        Usage(3, 3),
        StreamEnd(),
    ]


# --- echoed prompts -------------------------------------------------------------------------------


def create_echoing_adapter(decoupled: bool = True) -> Triton:
    """Create an adapter for a backend that always echoes the prompt."""
    adapter = Triton("vllm")
    policy = {"decoupled": decoupled}
    config = {"input": [{"name": "text_input"}], "model_transaction_policy": policy}
    adapter.load_metadata("m", [json.dumps(config).encode()])
    return adapter


def test_echoed_prompt_is_removed_if_the_model_cannot_exclude_input() -> None:
    whole = [TextDelta(" w0 w1", tokens=2), ChoiceEnd("unknown"), StreamEnd()]

    assert decode(json.dumps(make_response("hi w0 w1")), UNARY, create_echoing_adapter()) == whole
    assert decode(json.dumps(make_response(" w0 w1")), UNARY, create_echoing_adapter()) == whole
    assert (
        decode(make_sse(make_response("hi w0 w1")), STREAM, create_echoing_adapter(decoupled=False))
        == whole
    )
    assert decode(json.dumps(make_response("hi w0")), UNARY, "vllm")[0] == TextDelta(
        "hi w0", tokens=2
    )


def test_stream_text_equal_to_the_prompt_is_kept() -> None:
    assert decode(
        make_sse(make_response("hi"), make_response("hi")), STREAM, create_echoing_adapter()
    )[:2] == [
        TextDelta("hi"),
        TextDelta("hi"),
    ]


# --- log probabilities ----------------------------------------------------------------------------


def build_logprob_candidates(*tokens: tuple[str, str, Any, int | None]) -> dict[str, Any]:
    return {
        key: {"logprob": logprob, "rank": rank, "decoded_token": token}
        for key, token, logprob, rank in tokens
    }


def test_logprob_candidates_are_decoded() -> None:
    request = copy_request(UNARY, logprobs=LogprobsOptions(2))
    column = [
        build_logprob_candidates(("5", "a", -0.5, 1), ("6", "b", -1.5, 2)),
        build_logprob_candidates(("7", "c", -3.5, 9), ("6", "b", -1.5, 2), ("5", "a", -0.5, 1)),
        build_logprob_candidates(("x", "d", None, None)),
        {},
    ]
    a, b = TopLogprob("a", -0.5, 5), TopLogprob("b", -1.5, 6)

    [response, *_] = decode(
        json.dumps(make_vllm_response("acd", "stop", 3, logprobs=json.dumps(column))), request
    )

    assert response == TextDelta(
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
def test_top_logprobs_are_limited_to_the_requested_number(top: int, ranks: list[float]) -> None:
    request = copy_request(UNARY, logprobs=LogprobsOptions(top))
    other_tokens = ',"8":{"logprob":-Infinity,"rank":3},"9":{"logprob":NaN,"rank":4}}]'
    column = (
        json.dumps([build_logprob_candidates(("6", "b", -1.5, 2), ("5", "a", -0.5, 1))])[:-2]
        + other_tokens
    )

    [response, *_] = decode(
        json.dumps(make_vllm_response("b", "stop", 1, logprobs=column)), request
    )

    assert isinstance(response, TextDelta)
    assert [one.logprob for one in response.logprobs[0].top] == ranks


def test_logprobs_have_one_column_per_choice() -> None:
    columns = [json.dumps([build_logprob_candidates(("5", "a", -0.5, 1))]), "null", None]
    request = copy_request(UNARY, logprobs=LogprobsOptions(), n=3)

    events = decode(json.dumps(make_response(["a", "b", "c"], logprobs=columns)), request)

    logprobs = [one.logprobs for one in events if isinstance(one, TextDelta)]
    assert logprobs == [(TokenLogprob("a", -0.5, id=5),), (), ()]


@pytest.mark.parametrize(
    ("texts", "numbers", "expected"),
    [
        ("a", -0.5, [(TokenLogprob("a", -0.5),)]),
        ("ab", [-0.5, -1.0], [(TokenLogprob("", -0.5), TokenLogprob("", -1.0))]),
        (["a", "b"], [-0.5, -1.0], [(TokenLogprob("a", -0.5),), (TokenLogprob("b", -1.0),)]),
        ("a", [None], [(TokenLogprob("a", None),)]),
    ],
)
def test_output_log_probs_numbers_are_decoded(texts: Any, numbers: Any, expected: Any) -> None:
    request = copy_request(
        UNARY, logprobs=LogprobsOptions(), n=len(texts) if isinstance(texts, list) else 1
    )

    events = decode(json.dumps(make_response(texts, output_log_probs=numbers)), request, "trtllm")

    answers = [one for one in events if isinstance(one, TextDelta)]
    assert [one.logprobs for one in answers] == expected
    assert [one.tokens for one in answers] == [len(one) for one in expected]


def test_unrequested_logprobs_are_ignored() -> None:
    wire = make_sse(make_response("a", output_log_probs=[-0.5]))

    assert decode(wire, STREAM, "trtllm") == [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]


@pytest.mark.parametrize("column", ["[", "7", '[{"5": 1}]', "[" * 9000])
def test_malformed_logprobs_are_lost_and_the_text_is_kept(column: str) -> None:
    events = decode(
        json.dumps(make_response("a", logprobs=column)),
        copy_request(UNARY, logprobs=LogprobsOptions()),
    )

    assert ResponseExtra("", "response", ((("logprobs",), True),)) in events
    assert [one.text for one in events if isinstance(one, TextDelta)] == ["a"]


# --- a response with one text ---------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=2)
WORDS = st.none() | st.sampled_from(["None", "stop", "length", ""])
DEFAULT_FIELDS = st.fixed_dictionaries(
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


def list_response_fields(response: triton_decoder.ParsedResponse) -> Any:
    """Return a response whose lists are of this type."""
    return [tuple(one) if isinstance(one, list) else one for one in astuple(response)]


def copy_output_names() -> dict[str, str]:
    """Return the backend's output names as if a model had configured them."""
    return {**triton_decoder.map_output_names({})}


@given(DEFAULT_FIELDS)
def test_default_names_fast_path_equals_the_general_parser(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()

    response = triton_decoder.parse_response(body, UNARY, triton_decoder.map_output_names({}))

    assert list_response_fields(response) == list_response_fields(
        triton_decoder.parse_response(body, UNARY, copy_output_names())
    )


@given(DEFAULT_FIELDS, ODD, VALUES)
def test_fast_path_equals_the_general_parser_for_odd_fields(
    fields: dict[str, Any], odd: str, value: Any
) -> None:
    body = json.dumps({**fields, odd: value}).encode()

    def parse(names: Mapping[str, str]) -> Any:
        try:
            return list_response_fields(triton_decoder.parse_response(body, UNARY, names))
        except GatewayError as error:
            return type(error), error.message

    assert parse(triton_decoder.map_output_names({})) == parse(copy_output_names())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"text_output":"\xff"}', b"[" * 9999])
def test_malformed_body_raises_worker_failed_in_both_parsers(body: bytes) -> None:
    for names in (triton_decoder.map_output_names({}), copy_output_names()):
        with pytest.raises(WorkerFailed):
            triton_decoder.parse_response(body, UNARY, names)


def test_unknown_outputs_of_a_stream_are_reported() -> None:
    odd = make_response("b", more=1)

    assert decode(make_sse(make_response("a"), odd, make_response("c")), profile="plain")[:4] == [
        TextDelta("a"),
        ResponseExtra("", "response", ((("more",), 1),)),
        TextDelta("b"),
        TextDelta("c"),
    ]


def test_custom_output_name_is_decoded() -> None:
    own = Triton("plain", fields={"text_output": "OUT"})

    assert decode(make_sse({"OUT": "a"}), profile=own)[0] == TextDelta("a")


@pytest.mark.parametrize(
    ("fields", "events"),
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
def test_single_text_response_is_decoded(fields: dict[str, Any], events: list[Any]) -> None:
    body = {"model_name": "m", "model_version": "1", "text_output": "Hello there", **fields}

    decoder = Triton("vllm").create_decoder(UNARY)
    assert [*decoder.feed(json.dumps(body).encode()), *decoder.close()] == events
