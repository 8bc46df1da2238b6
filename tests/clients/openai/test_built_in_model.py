"""The first minutes of a newcomer: the client's own example against the built-in models."""

from functools import partial

import pytest
from openai import BadRequestError, OpenAI

pytestmark = pytest.mark.slow


def test_it_answers(small: OpenAI) -> None:
    answer = small.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
    )

    assert "Paris" in (answer.choices[0].message.content or "")


def test_its_stream_says_the_same(small: OpenAI) -> None:
    with small.chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        stream_options={"include_usage": True},
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert len(pieces) > 1
    assert "Paris" in "".join(pieces)
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(pieces)


def test_what_it_can_not_promise_is_told_or_refused(small: OpenAI) -> None:
    """It has no way to hold an answer to a schema."""
    asked = partial(
        small.chat.completions.with_raw_response.create,
        model="smollm2",
        messages=[{"role": "user", "content": "Name the capital of France as JSON."}],
        response_format={"type": "json_object"},
        max_tokens=4,
    )

    assert "response_format" in asked().headers["x-interlingua-loss"]
    with pytest.raises(BadRequestError) as refused:
        asked(extra_headers={"x-interlingua-strict": "1"})
    assert refused.value.param == "response_format"


def test_like_texts_are_near(small: OpenAI) -> None:
    texts = ["a cat sleeps", "a kitten naps", "interest rates rose"]
    answer = small.embeddings.create(model="minilm", input=texts)

    cat, kitten, rates = (one.embedding for one in answer.data)
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(
        a * b for a, b in zip(cat, rates, strict=True)
    )
