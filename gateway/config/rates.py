"""How much in which time: rates and daily budgets, read and written."""

import re
from typing import Final, NamedTuple

RATE: Final = re.compile(r"([1-9][0-9]{0,9})([kMG]?)/(s|min|h|day)")
BUDGET: Final = re.compile(r"([1-9][0-9]{0,9})([kMG]?)/day")
_PERIODS: Final = {"s": 1, "min": 60, "h": 3600, "day": 86400}
_TIMES: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_MOST: Final = 10**12


class PerTime(NamedTuple):
    """So much in so many seconds."""

    amount: int
    period: int


def rate(text: str) -> PerTime:
    """So many in a second, minute, hour or day: 10/s, 600/min, 200k/min, 5M/day."""
    found = RATE.fullmatch(text)
    if found is None:
        raise ValueError("is not a rate; write how many, and in which time: 10/s, 600/min, 200k/h")
    return PerTime(_amount(found), _PERIODS[found[3]])


def write_rate(told: PerTime) -> str:
    """The shortest way to say it."""
    unit = next(name for name, seconds in _PERIODS.items() if seconds == told.period)
    return f"{_short(told.amount)}/{unit}"


def budget(text: str) -> int:
    """So many tokens from 00:00 UTC to the next: 500k/day, 5M/day."""
    found = BUDGET.fullmatch(text)
    if found is None:
        raise ValueError("is not a budget; write how many tokens a day: 500k/day or 5M/day")
    return _amount(found)


def write_budget(amount: int) -> str:
    """The shortest way to say it."""
    return f"{_short(amount)}/day"


def _amount(found: re.Match[str]) -> int:
    amount = int(found[1]) * _TIMES[found[2]]
    if amount > _MOST:
        raise ValueError("is out of range; write at most 1000G")
    return amount


def _short(amount: int) -> str:
    letter = max((one for one in _TIMES if amount % _TIMES[one] == 0), key=_TIMES.__getitem__)
    return f"{amount // _TIMES[letter]}{letter}"
