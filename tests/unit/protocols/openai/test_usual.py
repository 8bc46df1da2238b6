"""A usual conversation is read at once, and as it would be by the reader of all conversations."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from gateway.core.errors import ClientError
from gateway.core.types import GenerateRequest
from protocols.body import read_object
from protocols.openai.requests import read_chat
from protocols.openai.usual import read_usual

SAID = {"role": "user", "content": "say hi"}
LEAST: dict[str, Any] = {"model": "mock", "messages": [SAID]}


def carefully(body: bytes) -> GenerateRequest | None:
    """What the reader of all conversations gives; None where it refuses."""
    try:
        return read_chat(read_object(body), client_id="c-1", timeout=2.5)
    except ClientError:
        return None


def at_once(body: bytes) -> GenerateRequest | None:
    return read_usual(body, client_id="c-1", timeout=2.5)


def exact(request: GenerateRequest | None) -> tuple[Any, bytes, list[Any]]:
    """The request, how its numbers are written, and what it says in its order.

    1 is 1.0 to Python, and 0.0 is -0.0.
    """
    said = [] if request is None else [*request.said.items()]
    return request, msgspec.json.encode(request, order="deterministic"), said


# --- the law --------------------------------------------------------------------------------------

TEXTS = st.text(max_size=6)
SOME = st.text(min_size=1, max_size=6)
FLAGS = st.sampled_from([True, False, None])
PLAIN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": TEXTS}
)
COUNTS = st.none() | st.integers(1, 2**70)
PENALTIES = st.none() | st.integers(-2, 2) | st.floats(-2, 2)
USUAL = {
    "max_tokens": COUNTS,
    "max_completion_tokens": COUNTS,
    "temperature": st.none() | st.integers(0, 2) | st.floats(0, 2),
    "top_p": st.none() | st.integers(0, 1) | st.floats(0, 1),
    "n": st.none() | st.integers(1, 128),
    "stop": st.none() | SOME | st.lists(SOME, max_size=4),
    "presence_penalty": PENALTIES,
    "frequency_penalty": PENALTIES,
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "user": st.none() | TEXTS,
}
MADE = {"model": SOME, "messages": st.lists(PLAIN, min_size=1, max_size=3)}
OPTIONS = st.none() | st.fixed_dictionaries({}, optional={"include_usage": FLAGS})
STREAMED = st.fixed_dictionaries(
    {**MADE, "stream": st.just(value=True)}, optional={**USUAL, "stream_options": OPTIONS}
)
WHOLE = st.fixed_dictionaries(
    MADE,
    optional={**USUAL, "stream": st.sampled_from([False, None]), "stream_options": st.none()},
)

NUMBERS = st.sampled_from(
    [-3, -0.0, 1e-7, 5.0, 2.5, 3, 128, 129, 2**63 - 1, 2**63, -(2**63), 2**70, 1e300]
)
STRAY = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.lists(TEXTS, max_size=5))
"""Values that suit some parameter, and are wrong for most."""
ODD = st.one_of(
    st.fixed_dictionaries({"role": SOME, "content": STRAY}, optional={"name": STRAY}),
    st.fixed_dictionaries({"role": st.sampled_from(["tool", "function"]), "content": TEXTS}),
    STRAY,
)
ANY = st.fixed_dictionaries(
    {"model": SOME | STRAY, "messages": st.lists(PLAIN | ODD, max_size=3) | STRAY},
    optional={
        **{name: usual | STRAY for name, usual in USUAL.items()},
        "stream": FLAGS | STRAY,
        "stream_options": STRAY
        | st.fixed_dictionaries({}, optional={"include_usage": FLAGS | STRAY, "other": STRAY}),
        "logprobs": FLAGS,
        "store": STRAY,
    },
)


@forall(asked=WHOLE | STREAMED, escaped=st.booleans())
def test_the_usual_is_read_at_once(asked: Any, escaped: bool) -> None:
    body = json.dumps(asked, ensure_ascii=escaped).encode()
    found = at_once(body)

    assert found is not None
    assert exact(found) == exact(carefully(body))


@forall(asked=ANY)
def test_whatever_is_read_at_once_is_read_as_ever(asked: Any) -> None:
    body = json.dumps(asked).encode()
    found = at_once(body)

    assert found is None or exact(found) == exact(carefully(body))


def test_who_says_nothing_of_itself_is_read_as_ever() -> None:
    body = msgspec.json.encode(LEAST)

    assert exact(read_usual(body)) == exact(read_chat(read_object(body)))


# --- what shows in the bytes alone ----------------------------------------------------------------


def least(more: bytes) -> bytes:
    return msgspec.json.encode(LEAST)[:-1] + b"," + more + b"}"


@pytest.mark.parametrize(
    "more",
    [
        b'"temperature":-0',
        b'"temperature":-0.0',
        b'"temperature":1E0',
        b'"temperature":0.1e-400',
        b'"temperature":1,"temperature":2',
        b'"temperature":1,"temperature":null',
        b'"model":"other"',
        b'"\\u0075ser":"\\u00e9"',
        b'"messages":[{"role":"\\u0075ser","content":"a","content":"b"}]',
        b'"stop":[]',
        b'"stream":true,"stream_options":{"include_usage":true}',
    ],
)
def test_other_spellings(more: bytes) -> None:
    body = least(more)

    assert at_once(body) is not None
    assert exact(at_once(body)) == exact(carefully(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        msgspec.json.encode(LEAST) + b"x",
        least(b'"user":"\xff"'),
        least(b'"user":"\\ud800"'),
        least(b'"\xff":1'),
        least(b'"max_tokens":5.0'),
        least(b'"temperature":3,"temperature":1'),
        least(b'"seed":-1'),
        least(b'"stream_options":{}'),
        least(b'"stream":true,"stream_options":{"other":"\xff"}'),
        least(b'"extra":' + b"[" * 100_000 + b"]" * 100_000),
    ],
)
def test_what_the_other_reader_is_asked_for(body: bytes) -> None:
    assert at_once(body) is None
