"""A usual answer in one piece is read by a narrow type, and means what it would have meant."""

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.errors import GatewayError
from gateway.core.ports import Decoder
from gateway.core.types import Done, End, GenerateRequest, Logprobs, Served, Text, Usage, Want
from protocols.glance import WholeDecoder
from protocols.triton import Triton
from protocols.triton.decoder import AnswerDecoder
from protocols.triton.incoming import outputs
from protocols.triton.wholes import whole

ASKED = GenerateRequest(model="m", kind="completion", prompts=("hi",))
REQUESTS = [
    ASKED,
    replace(ASKED, n=1),
    replace(ASKED, n=2),
    replace(ASKED, logprobs=Logprobs(top=1)),
    replace(ASKED, want=Want(usage="each")),
    replace(ASKED, want=Want(usage="none")),
]
WORKERS = [Triton("vllm"), Triton("trtllm"), Triton("vllm", fields={"text_output": "TEXT"})]

TEXTS = st.sampled_from(["Hello", "", "hi", "hi there", "é"])
WORDS = st.sampled_from(["stop", "eos", "length", "max_tokens", "abort", "None", "other", None, 7])
USUAL = st.fixed_dictionaries(
    {"text_output": TEXTS},
    optional={
        "model_name": st.sampled_from(["m", None]),
        "model_version": st.just("1"),
        "finish_reason": WORDS,
        "stop_reason": st.sampled_from([None, None, "None", "7"]),
        "num_output_tokens": st.integers(0, 3),
        "num_input_tokens": st.sampled_from([0, 3, None]),
    },
)
ODD: list[dict[str, Any]] = [
    *[{"text_output": texts} for texts in (["hi"], ["hi", "ho"], [], None)],
    *[{"finish_reason": words} for words in (["stop"], ["stop", "length"], [])],
    *[{"num_output_tokens": count} for count in (-1, 2.5, None, [4], "4")],
    *[{"num_input_tokens": count} for count in (-1, 2.5, [4], "4")],
    {"model_name": 7}, {"stop_reason": 7}, {"stop_reason": ["7"]}, {"id": "x"}, {"id": 7},
    {"logprobs": '[{"1": {"logprob": -0.5, "rank": 1, "decoded_token": "hi"}}]'},
    {"cumulative_logprob": -0.5}, {"error": "no"},
]  # fmt: skip
ANSWERS = st.builds(dict[str, Any].__or__, USUAL, st.sampled_from([{}, {}, *ODD]))


def heard(made: Decoder, body: bytes) -> Any:
    """What comes of this body, or the error."""
    try:
        return [*made.feed(body[:9]), *made.feed(body[9:]), *made.close()]
    except GatewayError as error:
        return type(error), error.message


@given(
    ANSWERS,
    st.sampled_from([b"", b"x"]),
    st.sampled_from(REQUESTS),
    st.sampled_from(WORKERS),
    st.sampled_from([None, "hi"]),
)
def test_it_is_read_as_any_other(
    answer: dict[str, Any],
    tail: bytes,
    request: GenerateRequest,
    worker: Triton,
    prompt: str | None,
) -> None:
    """For a worker that may give this prompt back."""
    body, writer = msgspec.json.encode(answer) + tail, worker._writer
    careful = partial(AnswerDecoder, request, writer._outputs, writer._unknown, prompt)
    glance = partial(whole, request, writer._outputs, prompt)

    assert heard(WholeDecoder(glance, careful), body) == heard(careful(), body)


@pytest.mark.parametrize(
    ("more", "events"),
    [
        ({}, [Served("m"), Text("Hello there", 0, 3), End("unknown"), Done()]),
        (
            {"finish_reason": "length"},
            [Served("m"), Text("Hello there", 0, 3), End("length"), Done()],
        ),
        (
            {"num_output_tokens": 2, "num_input_tokens": 5, "finish_reason": "stop"},
            [Served("m"), Text("Hello there", 0, 2), End("eos"), Usage(5, 2), Done()],
        ),
        ({"text_output": "", "model_name": None}, [End("unknown"), Done()]),
    ],
)
def test_usual_ones_are_seen_as_such(more: dict[str, Any], events: list[Any]) -> None:
    told = {"model_name": "m", "model_version": "1", "text_output": "Hello there", **more}

    assert whole(ASKED, outputs({}), None, msgspec.json.encode(told)) == events
