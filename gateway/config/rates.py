"""How much in which time: rates and daily budgets, read and written."""

import re
from typing import Final, NamedTuple

RATE_PATTERN: Final = re.compile(r"([1-9][0-9]{0,9})([kMG]?)/(s|min|h|day)")
BUDGET_PATTERN: Final = re.compile(r"([1-9][0-9]{0,9})([kMG]?)/day")
_SECONDS_PER_PERIOD: Final = {"s": 1, "min": 60, "h": 3600, "day": 86400}
_MULTIPLIERS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_MAX_AMOUNT: Final = 10**12


class RateValue(NamedTuple):
    """So much in so many seconds."""

    amount: int
    period: int


def parse_rate(text: str) -> RateValue:
    """So many in a second, minute, hour or day: 10/s, 600/min, 200k/min, 5M/day."""
    found = RATE_PATTERN.fullmatch(text)
    if found is None:
        raise ValueError("is not a rate; write how many, and in which time: 10/s, 600/min, 200k/h")
    return RateValue(_parse_amount(found), _SECONDS_PER_PERIOD[found[3]])


def format_rate(told: RateValue) -> str:
    """The shortest way to say it."""
    unit = next(name for name, seconds in _SECONDS_PER_PERIOD.items() if seconds == told.period)
    return f"{_format_amount(told.amount)}/{unit}"


def parse_budget(text: str) -> int:
    """So many tokens from 00:00 UTC to the next: 500k/day, 5M/day."""
    found = BUDGET_PATTERN.fullmatch(text)
    if found is None:
        raise ValueError("is not a budget; write how many tokens a day: 500k/day or 5M/day")
    return _parse_amount(found)


def format_budget(amount: int) -> str:
    """The shortest way to say it."""
    return f"{_format_amount(amount)}/day"


def _parse_amount(found: re.Match[str]) -> int:
    amount = int(found[1]) * _MULTIPLIERS[found[2]]
    if amount > _MAX_AMOUNT:
        raise ValueError("is out of range; write at most 1000G")
    return amount


def _format_amount(amount: int) -> str:
    letter = max(
        (one for one in _MULTIPLIERS if amount % _MULTIPLIERS[one] == 0),
        key=_MULTIPLIERS.__getitem__,
    )
    return f"{amount // _MULTIPLIERS[letter]}{letter}"
