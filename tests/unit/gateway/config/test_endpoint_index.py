"""Protocols that share paths on a listener are found in linear time."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.config.registry import EndpointIndex, EndpointKey

MODELS = "backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n"

SEGMENTS = st.lists(st.sampled_from(["", "a", "b", "{}"]), min_size=1, max_size=4)
KEYS = st.tuples(
    st.sampled_from(["GET", "POST"]), SEGMENTS.map(lambda steps: "/" + "/".join(steps))
)


def shares_requests(first: EndpointKey, second: EndpointKey) -> bool:
    """The definition: each segment is equal in both paths or a parameter in one of them."""
    steps, others = first[1].split("/"), second[1].split("/")
    return (
        first[0] == second[0]
        and len(steps) == len(others)
        and all(
            step == other or bool(step and other and "{}" in (step, other))
            for step, other in zip(steps, others, strict=True)
        )
    )


@given(claimed=st.lists(KEYS, max_size=8), key=KEYS)
def test_the_first_endpoint_that_shares_requests_is_found(
    claimed: Sequence[EndpointKey], key: EndpointKey
) -> None:
    index = EndpointIndex()
    for number, one in enumerate(claimed):
        index.add(one, f"owner {number}")
    shared = sorted(one for one in claimed if shares_requests(one, key))

    expected = (shared[0], f"owner {claimed.index(shared[0])}") if shared else None

    assert index.find_shared(key) == expected


def count_calls(text: str) -> int:
    """Return the number of Python functions called while the configuration is loaded."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    load_text(text, "g", env={})  # the first load fills the caches
    sys.setprofile(count)
    try:
        load_text(text, "g", env={})
    finally:
        sys.setprofile(None)
    return calls


def list_listeners(number: int) -> str:
    rows = "".join(
        f'  - {{address: "127.0.0.1:{8000 + n}", protocols: [openai, triton]}}\n'
        for n in range(number)
    )
    return f"listeners:\n{rows}{MODELS}"


def list_mounts(number: int) -> str:
    mounts = ", ".join(f"{{name: tgi, prefix: /p{n}}}" for n in range(number))
    return f'listeners: [{{address: "127.0.0.1:0", protocols: [{mounts}]}}]\n{MODELS}'


@pytest.mark.parametrize("build", [list_listeners, list_mounts])
def test_loading_calls_grow_linearly(build: Callable[[int], str]) -> None:
    few, twice, four_times = (count_calls(build(number)) for number in (8, 16, 32))
    assert four_times - twice <= 2.1 * (twice - few)


def test_a_path_shared_with_a_version_header_is_not_free_for_a_third_protocol() -> None:
    """Anthropic's clients send a version header; OpenAI's and TGI's do not."""
    text = f'listeners: [{{address: "127.0.0.1:0", protocols: [anthropic, openai]}}]\n{MODELS}'
    load_text(text, "g", env={})
    with pytest.raises(ConfigError, match="GET /v1/models belongs to openai on this listener"):
        load_text(text.replace("openai]", "openai, tgi]"), "g", env={})
