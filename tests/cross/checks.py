"""Checks of a request's fields: the names, types and ranges that a worker's protocol allows."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from tests.cross.worker_server import ReceivedRequest

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def integer(low: int, high: int = 2**63 - 1) -> Check:
    """Accept integers in this range."""
    return lambda value: type(value) is int and low <= value <= high


def number(low: float, high: float = 3e38, *, above: bool = False) -> Check:
    """Accept numbers in this range; with ``above``, not ``low`` itself."""
    return lambda value: (
        type(value) in (int, float) and low <= value <= high and not (above and value == low)
    )


def strings(most: int) -> Check:
    """Accept a list of at most this many non-empty strings."""
    return lambda value: (
        isinstance(value, list) and 0 < len(value) <= most and all(map(is_text, value))
    )


def string_or(check: Check) -> Check:
    """Accept a single string, or what the other check accepts."""
    return lambda value: is_text(value) or check(value)


def equals(wanted: Any) -> Check:
    return lambda value: value == wanted and type(value) is type(wanted)


def is_message_list(value: Any) -> bool:
    """Accept a conversation of plain texts."""
    return (
        isinstance(value, list)
        and value != []
        and all(turn.keys() == {"role", "content"} and is_text(turn["content"]) for turn in value)
    )


def is_tool_list(value: Any) -> bool:
    """Accept functions, each with a name and a schema."""
    return isinstance(value, list) and value != [] and all(
        one["type"] == "function" and is_text(one["function"]["name"])
        and isinstance(one["function"]["parameters"], dict) for one in value
    )  # fmt: skip


ALWAYS: Final[Check] = lambda value: value is not None  # noqa: E731 - a check like the others


def check_fields(
    request: ReceivedRequest,
    received: Mapping[str, Any],
    fields: Fields,
    must: Collection[str] = (),
    where: str = "",
) -> None:
    """Record fields that are unknown, invalid or missing as faults of the request."""
    for name, value in received.items():
        if name not in fields:
            request.faults.append(f"{where}{name} is unknown")
        elif not fields[name](value):
            request.faults.append(f"{where}{name} is wrong: {value!r}")
    request.faults += [f"{where}{name} is missing" for name in must if name not in received]
