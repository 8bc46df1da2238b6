"""Types of options that several commands have."""

import math
from typing import Any, Final

import click

from protocols.core.units import parse_bearer_token


class NumberRange(click.FloatRange):
    """A number of a range. Click lets NaN through, since no comparison with it holds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click.ParamType."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


class KeyType(click.ParamType[str]):
    """A key that the command sends in a header. An error does not show it."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See click.ParamType."""
        try:
            parse_bearer_token(value)
        except ValueError as error:
            self.fail(f"the key {error}", param, ctx)
        return str(value)


SENT_KEY: Final = KeyType()
