"""Random short requests of every kind, some of which can't be served."""

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
"""The share of prompts beyond the context length."""
SCHEMA = JsonSchemaFormat(
    msgspec.Raw(
        b'{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yz"]}},'
        b'"required":["a","b"],"additionalProperties":false}'
    ),
    strict=True,
)
REFUSED = JsonSchemaFormat(msgspec.Raw(b'{"not":{"type":"integer"}}'), strict=True)
"""A schema that no grammar can enforce."""


def draw_request(rng: random.Random) -> GenerationRequest:
    """Draw the next request."""
    text = STEM[: rng.randrange(len(STEM))] + str(rng.randrange(10_000))
    if rng.random() < TOO_LONG:
        text *= 40
    fields: dict[str, Any] = {
        "sampling": rng.choice(_SAMPLING)(rng),
        "stopping": _draw_stop_conditions(rng),
        "n": rng.choice((None, None, None, 2, 4, 70_000 if rng.random() < 0.02 else 3)),
        "logprobs": rng.choice((None, None, LogprobsOptions(2), LogprobsOptions(0, prompt=1))),
        "response_options": ResponseOptions(
            usage=rng.choice(("final", "each")), token_ids=rng.random() < 0.3
        ),
    }
    if rng.random() < 0.15:
        fields["output"] = rng.choice(_FORMS)
    if rng.random() < 0.5:
        return GenerationRequest(model="m", kind="completion", prompts=(text,), **fields)
    turn = Message("user", (TextPart(text),))
    return GenerationRequest(model="m", kind="chat", messages=(turn,), **fields)


def _draw_stop_conditions(rng: random.Random) -> StopConditions:
    return StopConditions(
        max_tokens=rng.choice((0, 1, 2, 5, 12, 30)),
        min_tokens=rng.choice((None, None, 1)),
        stop=rng.choice(((), (), ("e",), ("th", "\x00", "zz"))),
        stop_token_ids=rng.choice(((), (), (120, 33))),
        include_stop=rng.choice((None, True)),
        ignore_eos=rng.choice((None, True)),
    )


_SAMPLING: tuple[Callable[[random.Random], SamplingParams], ...] = (
    lambda rng: SamplingParams(temperature=0),
    lambda rng: SamplingParams(temperature=1.2, seed=rng.randrange(99)),
    lambda rng: SamplingParams(temperature=0.9, top_p=rng.random() * 0.9 + 0.1, top_k=20),
    lambda rng: SamplingParams(temperature=1.0, typical_p=0.8, min_p=0.02),
    lambda rng: SamplingParams(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2
    ),
    lambda rng: SamplingParams(logit_bias={101: -100.0, 32: 4.0}, bad_words=("an",), seed=7),
    lambda rng: SamplingParams(allowed_token_ids=(97, 98, 99), temperature=1.0),
    lambda rng: SamplingParams(beam_width=3, length_penalty=0.8),
    lambda rng: SamplingParams(watermark=True, temperature=1.0),
    lambda rng: SamplingParams(temperature=-1.0 if rng.random() < 0.05 else 1.0),
)
_FORMS: tuple[OutputFormat, ...] = (
    SCHEMA,
    SCHEMA,
    JsonObjectFormat(),
    RegexFormat("[ab]{2,9}c"),
    ChoiceFormat(("yes", "no", "perhaps")),
    REFUSED,
)
