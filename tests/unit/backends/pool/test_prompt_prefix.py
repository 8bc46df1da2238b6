"""The hash of a prompt's prefix: which prompts share it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

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


def make_message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


def make_chat(*messages: Message, **fields: Any) -> GenerationRequest:
    fields.setdefault("model", "m")
    return GenerationRequest(kind="chat", messages=messages, **fields)


def make_completion(*prompts: str | tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=prompts)


def make_embedding(*inputs: str, instruction: str | None = None) -> EmbeddingRequest:
    return EmbeddingRequest(model="m", inputs=inputs, instruction=instruction)


HI = make_chat(make_message("user", "hi"))


def test_prompt_prefix_hash_is_stable_across_machines() -> None:
    """Replicas and later runs must agree on these hashes."""
    requests = [HI, make_completion("hi"), make_completion((1, 2))]

    assert [hash_prefix(one) for one in requests] == [
        14104501462469212263,
        5163593467208011395,
        7840509736353257666,
    ]


@pytest.mark.parametrize(
    "other",
    [
        make_chat(
            make_message("user", "hi"),
            make_message("assistant", "hello"),
            make_message("user", "and now?"),
        ),
        make_chat(make_message("user", "hi"), stream=True, n=3, client_id="c", priority=1),
    ],
)
def test_later_turns_do_not_change_the_prefix_hash(other: GenerationRequest) -> None:
    assert hash_prefix(other) == hash_prefix(HI)


def test_place_of_a_text_in_the_body_does_not_change_the_prefix_hash() -> None:
    """A request that is passed through and one that is translated get the same worker."""
    message = make_message("user", "hi")
    [part] = message.parts
    located = replace(message, parts=(replace(part, at="messages[0].content[0]"),))

    assert hash_prefix(make_chat(located)) == hash_prefix(HI)


@pytest.mark.parametrize(
    "other",
    [
        make_chat(make_message("user", "ho")),
        make_chat(make_message("system", "hi")),
        make_chat(make_message("system", "x"), make_message("user", "hi")),
        make_chat(make_message("user", "hi"), model="n"),
        make_chat(make_message("user", "hi"), adapter="a"),
        make_chat(make_message("user", "hi"), tools=(Tool("f"),)),
        make_chat(Message("user", (TextPart("hi"), ImagePart("https://x/y.png")))),
        make_chat(Message("user", (TextPart("h"), TextPart("i")))),
        make_completion("hi"),
        make_embedding("hi"),
        make_embedding("hi", instruction="q: "),
        GenerationRequest(model="m", kind="chat"),
    ],
)
def test_prompt_beginning_and_model_change_the_prefix_hash(
    other: GenerationRequest | EmbeddingRequest,
) -> None:
    assert hash_prefix(other) != hash_prefix(HI)


def test_prefix_hash_ignores_text_after_the_prefix_length() -> None:
    """A cache shares the documents and rules at the start, and not the question."""
    one = make_chat(make_message("system", LONG), make_message("user", "a?"))
    other = make_chat(make_message("system", LONG + "b"), make_message("user", "c?"))

    assert hash_prefix(one) == hash_prefix(other) != hash_prefix(HI)
    assert hash_prefix(make_completion(LONG + "a")) == hash_prefix(make_completion(LONG + "b"))

    tokens = tuple(range(256))
    assert hash_prefix(make_completion((*tokens, 1))) == hash_prefix(make_completion((*tokens, 2)))
    assert hash_prefix(make_completion((1, *tokens))) != hash_prefix(make_completion((2, *tokens)))


def test_prefix_hash_uses_the_first_prompt() -> None:
    assert hash_prefix(make_completion("a", "b")) == hash_prefix(make_completion("a", "c"))
    assert hash_prefix(make_completion("a", "b")) != hash_prefix(make_completion("b", "a"))
    assert hash_prefix(make_embedding("a", "b")) == hash_prefix(make_embedding("a", "c"))


@given(st.text(st.characters(), max_size=40))
def test_any_text_has_a_64_bit_prefix_hash(text: str) -> None:
    number = hash_prefix(make_chat(make_message("user", text)))

    assert 0 <= number < 2**64


def test_lone_surrogate_has_a_prefix_hash() -> None:
    assert hash_prefix(make_completion("\ud800")) == hash_prefix(make_completion("?"))
