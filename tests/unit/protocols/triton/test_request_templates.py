"""The fast path for requests with unchanged values equals the full encoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.request import (
    GenerationRequest,
    LogprobsOptions,
    SamplingParams,
    StopConditions,
)
from protocols.triton.endpoints import Triton
from protocols.triton.params import PROFILES
from tests.support.examples import share_examples

COUNTS = st.sampled_from([None, 0, 1, 5, 2**40, -(2**40)])
SHARES = st.sampled_from([None, 0.0, 0.5, 1.0, 7.5, -3.0])
WORDS = st.sampled_from([(), ("a",), ("a", "b")])
REQUESTS = st.builds(
    GenerationRequest,
    model=st.just("m"),
    kind=st.just("completion"),
    prompts=st.just(("hi",)),
    n=st.sampled_from([None, 1, 2]),
    stream=st.booleans(),
    logprobs=st.sampled_from([None, LogprobsOptions(top=2)]),
    sampling=st.builds(
        SamplingParams,
        temperature=SHARES,
        top_p=SHARES,
        top_k=COUNTS,
        do_sample=st.sampled_from([None, None, True, False]),
        seed=st.sampled_from([None, None, 3, 2**64 - 1]),
        repetition_penalty=SHARES,
        bad_words=WORDS,
    ),
    stopping=st.builds(
        StopConditions,
        max_tokens=COUNTS,
        min_tokens=COUNTS,
        stop=WORDS,
        ignore_eos=st.sampled_from([None, True, False]),
    ),
)


@pytest.mark.parametrize("profile", PROFILES)
@share_examples(len(PROFILES))
@given(request_=REQUESTS)
def test_template_encoding_equals_full_encoding(profile: str, request_: GenerationRequest) -> None:
    quick, full_encoder = Triton(profile), Triton(profile)
    plan = full_encoder._default_adapter
    plan._converted_fields = frozenset(row.field for row in plan._params)

    assert quick.encode_request(request_) == full_encoder.encode_request(request_)
