"""Requests drawn by chance: short ones of every kind, some of which can't be done."""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from protocols.core.request import (
    ChoiceFormat,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    OutputFormat,
    RegexFormat,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
)

STEM = "The gateway stands between clients and models, and passes on what both say. "
TOO_LONG = 0.02
"""The share of prompts that do not fit the model."""
SCHEMA = JsonSchemaFormat(
    msgspec.Raw(
        b'{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yz"]}},'
        b'"required":["a","b"],"additionalProperties":false}'
    ),
    strict=True,
)
REFUSED = JsonSchemaFormat(msgspec.Raw(b'{"not":{"type":"integer"}}'), strict=True)
"""A key that no grammar can keep."""


def draw_request(dice: random.Random) -> GenerationRequest:
    """The next request."""
    text = STEM[: dice.randrange(len(STEM))] + str(dice.randrange(10_000))
    if dice.random() < TOO_LONG:
        text *= 40
    fields: dict[str, Any] = {
        "sampling": dice.choice(_SAMPLING)(dice),
        "stopping": _draw_stop_conditions(dice),
        "n": dice.choice((None, None, None, 2, 4, 70_000 if dice.random() < 0.02 else 3)),
        "logprobs": dice.choice((None, None, LogprobsOptions(2), LogprobsOptions(0, prompt=1))),
        "response_options": ResponseOptions(
            usage=dice.choice(("final", "each")), token_ids=dice.random() < 0.3
        ),
    }
    if dice.random() < 0.15:
        fields["output"] = dice.choice(_FORMS)
    if dice.random() < 0.5:
        return GenerationRequest(model="m", kind="completion", prompts=(text,), **fields)
    turn = Message("user", (TextPart(text),))
    return GenerationRequest(model="m", kind="chat", messages=(turn,), **fields)


def _draw_stop_conditions(dice: random.Random) -> StopConditions:
    return StopConditions(
        max_tokens=dice.choice((0, 1, 2, 5, 12, 30)),
        min_tokens=dice.choice((None, None, 1)),
        stop=dice.choice(((), (), ("e",), ("th", "\x00", "zz"))),
        stop_token_ids=dice.choice(((), (), (120, 33))),
        include_stop=dice.choice((None, True)),
        ignore_eos=dice.choice((None, True)),
    )


_SAMPLING: tuple[Callable[[random.Random], SamplingParams], ...] = (
    lambda dice: SamplingParams(temperature=0),
    lambda dice: SamplingParams(temperature=1.2, seed=dice.randrange(99)),
    lambda dice: SamplingParams(temperature=0.9, top_p=dice.random() * 0.9 + 0.1, top_k=20),
    lambda dice: SamplingParams(temperature=1.0, typical_p=0.8, min_p=0.02),
    lambda dice: SamplingParams(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2
    ),
    lambda dice: SamplingParams(logit_bias={101: -100.0, 32: 4.0}, bad_words=("an",), seed=7),
    lambda dice: SamplingParams(allowed_token_ids=(97, 98, 99), temperature=1.0),
    lambda dice: SamplingParams(beam_width=3, length_penalty=0.8),
    lambda dice: SamplingParams(watermark=True, temperature=1.0),
    lambda dice: SamplingParams(temperature=-1.0 if dice.random() < 0.05 else 1.0),
)
_FORMS: tuple[OutputFormat, ...] = (
    SCHEMA,
    SCHEMA,
    JsonObjectFormat(),
    RegexFormat("[ab]{2,9}c"),
    ChoiceFormat(("yes", "no", "perhaps")),
    REFUSED,
)
