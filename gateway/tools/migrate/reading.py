"""Single values of the other's file, read with the words of this one's."""

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gateway.config import units
from gateway.tools.migrate.source import Env, Given, Notes

ValueT = TypeVar("ValueT")

_NO_NUMBER: Final = "is not a number here; write it into the new file by hand"


def number(given: Given | None, notes: Notes, low: float, high: float) -> float | None:
    """A number from ``low`` to ``high``; None, and a note, where it is another."""
    if given is None:
        return None
    value = given.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        notes.add(given, "left out", _NO_NUMBER)
        return None
    if not low <= value <= high:
        kept = min(max(value, low), high)
        notes.add(given, "changed", f"is {kept:g} now: it may be from {low:g} to {high:g}")
        return kept
    return value


def whole(given: Given | None, notes: Notes, low: int, high: int) -> int | None:
    """The same, without a fraction."""
    found = number(given, notes, low, high)
    return None if found is None else int(found)


def seconds(given: Given | None, notes: Notes) -> str | None:
    """A time limit, as it is written here."""
    found = number(given, notes, 0, 168 * 3600)
    if given is None or found is None:
        return None
    written = f"{found:.9f}".rstrip("0").rstrip(".")
    if written == "0":
        notes.add(given, "left out", "it leaves no time at all")
        return None
    return f"{written}s"


def name(given: Given, notes: Notes) -> str | None:
    """The public name of a model; None, and a note, where it can't be one here."""
    return checked(given, notes, units.model)


def checked(given: Given, notes: Notes, read: Callable[[str], ValueT]) -> ValueT | None:
    """A text as ``read`` reads it; None, and a note, where it can't be read so."""
    value = given.value
    if not isinstance(value, str):
        notes.add(given, "left out", "must be a text")
        return None
    try:
        return read(value)
    except ValueError as error:
        notes.add(given, "left out", str(error))
        return None


def texts(given: Given | None) -> list[Given]:
    """Those of a list, or the one."""
    if given is None:
        return []
    return [*given.items()] or [given]


def shown(value: Any) -> str:
    """A value that is no secret, in a note."""
    return f"${{{value.name}}}" if isinstance(value, Env) else repr(value)
