"""The number of a prompt's beginning: what shares it, and what does not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.pool.load_balancing import hash_prefix
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    Message,
    Role,
    TextPart,
    Tool,
)

LONG = "One of the many rules of this house. " * 40


def turn(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


def chat(*messages: Message, **fields: Any) -> GenerationRequest:
    fields.setdefault("model", "m")
    return GenerationRequest(kind="chat", messages=messages, **fields)


def completion(*prompts: str | tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=prompts)


def embedding(*inputs: str, instruction: str | None = None) -> EmbeddingRequest:
    return EmbeddingRequest(model="m", inputs=inputs, instruction=instruction)


HI = chat(turn("user", "hi"))


def test_it_is_the_same_on_every_machine() -> None:
    """Known answers: replicas and later runs must agree on them."""
    requests = [HI, completion("hi"), completion((1, 2))]

    assert [hash_prefix(one) for one in requests] == [
        14104501462469212263,
        5163593467208011395,
        7840509736353257666,
    ]


@pytest.mark.parametrize(
    "other",
    [
        chat(turn("user", "hi"), turn("assistant", "hello"), turn("user", "and now?")),
        chat(turn("user", "hi"), stream=True, n=3, client_id="c", priority=1),
    ],
)
def test_later_turns_change_nothing(other: GenerationRequest) -> None:
    assert hash_prefix(other) == hash_prefix(HI)


@pytest.mark.parametrize(
    "other",
    [
        chat(turn("user", "ho")),
        chat(turn("system", "hi")),
        chat(turn("system", "x"), turn("user", "hi")),
        chat(turn("user", "hi"), model="n"),
        chat(turn("user", "hi"), adapter="a"),
        chat(turn("user", "hi"), tools=(Tool("f"),)),
        chat(Message("user", (TextPart("hi"), ImagePart("https://x/y.png")))),
        chat(Message("user", (TextPart("h"), TextPart("i")))),
        completion("hi"),
        embedding("hi"),
        embedding("hi", instruction="q: "),
        GenerationRequest(model="m", kind="chat"),
    ],
)
def test_what_a_worker_reads_first_counts(other: GenerationRequest | EmbeddingRequest) -> None:
    assert hash_prefix(other) != hash_prefix(HI)


def test_a_long_beginning_may_have_any_end() -> None:
    """It is the documents and rules in front that a cache shares, and not the question."""
    one = chat(turn("system", LONG), turn("user", "a?"))
    other = chat(turn("system", LONG + "b"), turn("user", "c?"))

    assert hash_prefix(one) == hash_prefix(other) != hash_prefix(HI)
    assert hash_prefix(completion(LONG + "a")) == hash_prefix(completion(LONG + "b"))
    tokens = tuple(range(256))
    assert hash_prefix(completion((*tokens, 1))) == hash_prefix(completion((*tokens, 2)))
    assert hash_prefix(completion((1, *tokens))) != hash_prefix(completion((2, *tokens)))


def test_of_several_prompts_the_first_counts() -> None:
    assert hash_prefix(completion("a", "b")) == hash_prefix(completion("a", "c"))
    assert hash_prefix(completion("a", "b")) != hash_prefix(completion("b", "a"))
    assert hash_prefix(embedding("a", "b")) == hash_prefix(embedding("a", "c"))


@given(st.text(st.characters(), max_size=40))
def test_any_text_has_a_number(text: str) -> None:
    number = hash_prefix(chat(turn("user", text)))

    assert 0 <= number < 2**64


def test_half_a_character_is_no_error() -> None:
    assert hash_prefix(completion("\ud800")) == hash_prefix(completion("?"))
