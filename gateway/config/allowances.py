"""What clients may take of the models, by their keys."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from gateway.config.section import ConfigSection, PositiveInt
from gateway.config.units import Budget, NonEmptyStr, Rate


class RateLimitConfig(ConfigSection, frozen=True):
    """How much may be taken; what is left out is not limited.

    ``tokens`` and ``budget`` are of prompts and answers together, ``budget`` from 00:00 UTC to the
    next; ``concurrent`` is how many requests at a time.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrent: PositiveInt | None = None
    budget: Budget | None = None


class KeyRateLimitConfig(RateLimitConfig, frozen=True):
    """How much a key may take of all models together, and beside that of some of them."""

    models: Annotated[Mapping[NonEmptyStr, RateLimitConfig], Meta(min_length=1)] | None = None
