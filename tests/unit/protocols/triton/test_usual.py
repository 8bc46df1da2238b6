"""A usual body means the same whether or not it is read at once."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError
from gateway.core.ports import Call
from protocols.triton import Triton
from protocols.triton.usual import Usual
from protocols.triton.vocabulary import PROFILES

NAMES = sorted(
    {"text_input", "parameters", "id", "stream", "streaming", "my_own", "stop", "text\u0131nput"}
    | {name for profile in PROFILES.values() for name in (*profile.inputs, *profile.exclude)}
    | {row.wire for profile in PROFILES.values() for row in profile.parameters}
)
USUAL = [
    "max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "exclude_input_in_output",
    "sampling_param_max_tokens", "streaming", "ignore_eos", "n",
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(["hi", 'say "hi"', "\\", "stream", "\0", ""]), st.text())
NUMBERS = st.one_of(
    st.integers(-2, 3),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, 5.0, -0.0, 1e308, 2**31, 2**63, 2**64 - 1]),
)
SCALARS = st.one_of(NUMBERS, st.booleans(), TEXTS)
VALUES = st.one_of(SCALARS, st.none(), st.lists(SCALARS, max_size=2))
FIELDS = st.lists(
    st.one_of(
        st.tuples(st.just("text_input"), TEXTS),
        st.tuples(st.sampled_from(USUAL), st.one_of(NUMBERS, st.booleans())),
        st.tuples(st.sampled_from(NAMES), VALUES),
    ),
    max_size=5,
)


def written(fields: Sequence[tuple[str, Any]], inner: Sequence[tuple[str, Any]] | None) -> bytes:
    """An object of these fields, of which several may have one name."""
    pairs = [f"{json.dumps(name)}: {json.dumps(what)}" for name, what in fields]
    if inner is not None:
        pairs.append(f'"parameters": {written(inner, None).decode()}')
    return f"{{{', '.join(pairs)}}}".encode()


BODIES = st.builds(
    lambda text, fields, inner, tail: written([*text, *fields], inner) + tail,
    st.one_of(TEXTS.map(lambda text: [("text_input", text)]), FIELDS),
    FIELDS,
    st.one_of(st.none(), FIELDS),
    st.sampled_from([b"", b"", b" ", b"x", b"\0x"]),
)
VARIANTS = ["generate", "generate_stream"]


class Unusual(Usual):
    """Takes no body for a usual one."""

    def _said(self, call: Call) -> None:
        return None


def read(dialect: Triton, call: Call) -> Any:
    """What comes of it: whether it streams, and the request or the error."""
    streams = dialect.peek(call).stream
    try:
        request = dialect.decode(call)
        return streams, request, [*request.said.items()]
    except GatewayError as error:
        return streams, type(error), vars(error), str(error)


def hold(dialect: Triton, body: bytes, variant: str, headers: Mapping[str, str]) -> None:
    """Both ways give the same."""
    [endpoint] = [one for one in dialect.endpoints[4:11] if one.variant == variant]
    call = Call(endpoint, {"model": "m"}, headers, "", body, f"/v2/models/m/{variant}")
    found = read(dialect, call)
    dialect._usual = Unusual(dialect._profile, dialect._mode)
    assert found == read(dialect, call)


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("prompts", ["raw", "chat"])
@given(
    body=BODIES,
    variant=st.sampled_from(VARIANTS),
    headers=st.sampled_from([{}, {}, {"content-encoding": "gzip"}]),
)
def test_a_usual_body_is_the_same_request(
    profile: str, prompts: Any, body: bytes, variant: str, headers: Mapping[str, str]
) -> None:
    hold(Triton(profile, prompts=prompts), body, variant, headers)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text_input": "a", "text_input": "b"}',
        b'{"text_input": "a", "n": 2, "n": 3}',
        b'{"text_input": "a", "n": 2, "parameters": {"n": 3}}',
        b'{"text_input": "\\u0022\\u0022", "n": 2, "n": 3}',
        b'{"text_input": "a", "parameters": {"n": 2}, "parameters": {"n": 3}}',
        b'{"text_input": "a", "\\u0073tream": true}',
        b'{"text_input": "a stream", "\\u0073tream": true}',
        b'{"text_input": "a", "stream": true, "exclude_input_in_output": false}',
        b'{"text_input": "a", "seed": -1, "top_k": -1}',
        b'{"text_input": "a", "temperature": 1' + b"0" * 400 + b"}",
        b'{"text_input": "\xff"}',
        b'{"text_input": "\\ud800"}',
        b'\xef\xbb\xbf{"text_input": "a"}',
        b'{"text_input": "a", "x": ' + b"[" * 20_000,
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_out_of_the_ordinary_is_read_in_the_general_way(body: bytes, variant: str) -> None:
    hold(Triton(), body, variant, {})


@pytest.mark.parametrize("flag", ["true", "false"])
@pytest.mark.parametrize("more", ["", ', "my_own": 1'], ids=["usual", "not"])
def test_a_flag_counts_however_its_name_is_spelt(client: Any, flag: str, more: str) -> None:
    for name in ("stream", "\\u0073tream"):
        body = f'{{"text_input": "a", "{name}": {flag}{more}}}'.encode()
        call = client.call("/v2/models/vllm_like/generate_stream", body, method="POST")

        assert client.dialect.peek(call).stream is (flag == "true")
        assert client.dialect.decode(call).stream is (flag == "true")


def test_a_usual_body_is_read_at_once(client: Any) -> None:
    body = {"text_input": 'a "b"', "stream": True, "parameters": {"max_tokens": 5, "top_k": 3}}
    call = client.call("/v2/models/vllm_like/generate_stream", body, method="POST")
    found = client.dialect._usual.request(call)

    assert found is not None
    assert found.stopping.max_tokens == 5
    assert found.stream
    assert found.given == {"text_input", "stream", "max_tokens", "top_k"}
