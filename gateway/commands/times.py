"""Since when: as the commands are told it."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import click

_RELATIVE_TIME = re.compile(r"([0-9]{1,6})([smhd])")
_TIME_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_since(stated: str | None) -> float:
    """In Unix seconds; 0 for the beginning. Raises BadParameter."""
    if stated is None:
        return 0.0
    if match := _RELATIVE_TIME.fullmatch(stated):
        ago = timedelta(**{_TIME_UNITS[match[2]]: int(match[1])})
        return (datetime.now(UTC) - ago).timestamp()
    try:
        return datetime.fromisoformat(stated).astimezone().timestamp()
    except ValueError:
        text = f"{stated!r} is neither a time such as 2026-11-21T10:00 nor as long ago as 24h"
        raise click.BadParameter(text, param_hint="--since") from None
