"""Completions, embeddings and the list of models: W64 to W83."""

import base64
import struct
from typing import Any

from gateway.conformance.cases import EVENTS, Answer, Case, expect, match
from gateway.conformance.openai.shapes import (
    HELLO,
    MODELS,
    PIECES,
    TEXT_ID,
    embed,
    invalid,
    one_answer,
    refused,
    text,
    texts,
    usage,
    vectors,
)

SAID = (HELLO, "stop")
VECTOR = [3, 2, 0.5, -0.25]
PACKED = base64.b64encode(struct.pack("<4f", *VECTOR)).decode()
LOGPROBS = {
    "tokens": list(PIECES),
    "token_logprobs": [-0.5, -0.5, -0.5],
    "top_logprobs": [{one: -0.5, "alt1": -1.5} for one in PIECES],
    "text_offset": [0, 5, 11],
}


def frame(choices: list[Any], used: Any) -> dict[str, Any]:
    """One chunk of P's stream when usage is wanted."""
    return {
        "id": TEXT_ID,
        "object": "text_completion",
        "created": int,
        "model": "mock",
        "choices": choices,
        "usage": used,
    }


def piece(said: str, reason: str | None = None) -> dict[str, Any]:
    """One with text."""
    choice = {"text": said, "index": 0, "logprobs": None, "finish_reason": reason}
    return frame([choice], None)


def lists_the_models(got: Answer) -> None:
    """Every model is there, each with the keys that clients read."""
    cards = {one["id"]: one for one in got.json["data"]}
    expect({"mock", "org/m1"} <= set(cards), f"only {list(cards)}")
    for name, card in cards.items():
        wanted = {"id": name, "object": "model", "created": int, "owned_by": str}
        match(wanted, card, f"the model {name}", whole=False)


COMPLETIONS = (
    text("W64", body_is=texts()),
    text(
        "W65",
        given={"prompt": ["a", "b c"], "n": 2},
        body_is=texts(SAID, SAID, SAID, SAID, prompt=3, completion=12),
    ),
    text(
        "W66",
        given={"model": "mock-20"},
        body_is=texts(("abcdefghijklmnop", "length"), completion=16),
    ),
    text(
        "W66 said",
        given={"model": "mock-20", "max_tokens": 20},
        body_is=texts(("abcdefghijklmnopqrst", "stop"), completion=20),
    ),
    text("W67", given={"echo": True}, body_is=texts(("a bHello world!", "stop"))),
    text("W68", given={"logprobs": 2}, body_is=texts(logprobs=LOGPROBS)),
    text("W69", given={"logprobs": 6}, **invalid("integer_above_max_value", "logprobs")),
    text("W70", given={"prompt": [1, 2, 3]}, body_is=texts(prompt=3)),
    text(
        "W70 two",
        given={"prompt": [[1, 2], [3]]},
        body_is=texts(SAID, SAID, prompt=3, completion=6),
    ),
    text("W71", given={"prompt": []}, **invalid("empty_array", "prompt")),
    text("W71 empty string", given={"prompt": ""}, body_is=texts(prompt=0)),
    text("W71 missing", given={"prompt": None}, **invalid("missing_required_parameter", "prompt")),
    text(
        "W72",
        given={"stream": True, "stream_options": {"include_usage": True}},
        content_type=EVENTS,
        events=[*map(piece, PIECES), piece("", "stop"), frame([], usage()), "[DONE]"],
        check=one_answer,
    ),
    text("W73", given={"best_of": 2, "n": 3}, **invalid(None, "best_of")),
    text(
        "W74",
        given={"prompt": ["hi"], "logprobs": None, "seed": None},
        body_is=texts(prompt=1),
    ),
)

EMBEDDINGS = (
    embed("W75", body_is=vectors(VECTOR)),
    embed("W76", given={"encoding_format": "base64"}, body_is=vectors(PACKED)),
    embed("W77", given={"encoding_format": None}, body_is=vectors(VECTOR)),
    embed(
        "W78",
        given={"input": ["a", "b"]},
        body_is=vectors([1, 1, 0.5, -0.25], [1, 1, 0.5, -0.25]),
    ),
    embed(
        "W78 lengths",
        given={"input": ["abc", "b c d"]},
        body_is=vectors([3, 1, 0.5, -0.25], [5, 3, 0.5, -0.25], tokens=4),
    ),
    embed("W79", given={"input": ""}, **invalid("empty_string", "input")),
    embed("W79 empty array", given={"input": []}, **invalid("empty_array", "input")),
    embed("W79 one of two", given={"input": ["a", ""]}, **invalid("empty_string", "input[1]")),
    embed("W80", given={"encoding_format": "int8"}, **invalid("invalid_value", "encoding_format")),
    embed("W81", given={"input": ["a"] * 2049}, **invalid("array_above_max_length", "input")),
    embed(
        "W81 as many as there may be",
        given={"input": ["a"] * 2048},
        body_has={"usage": {"prompt_tokens": 2048}},
    ),
)

LISTS = (
    Case("W82", "GET", MODELS, body_is={"object": "list", "data": list}, check=lists_the_models),
    Case(
        "W83",
        "GET",
        f"{MODELS}/org%2Fm1",
        body_is={"id": "org/m1", "created": int, "object": "model", "owned_by": str},
    ),
    Case("W83 unknown", "GET", f"{MODELS}/none", **refused(404, "model_not_found", "model")),
)

CASES = (*COMPLETIONS, *EMBEDDINGS, *LISTS)
