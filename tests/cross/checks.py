"""What a worker holds a request's fields against: its protocol's names, types and ranges."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from tests.cross.worker_server import ReceivedRequest

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]


def is_text(got: Any) -> bool:
    return isinstance(got, str) and got != ""


def is_flag(got: Any) -> bool:
    return isinstance(got, bool)


def integer(low: int, high: int = 2**63 - 1) -> Check:
    """An integer in this range."""
    return lambda got: type(got) is int and low <= got <= high


def number(low: float, high: float = 3e38, *, above: bool = False) -> Check:
    """A number in this range, without ``low`` itself where it must be above."""
    return lambda got: (
        type(got) in (int, float) and low <= got <= high and not (above and got == low)
    )


def strings(most: int) -> Check:
    """So many non-empty strings at most."""
    return lambda got: isinstance(got, list) and 0 < len(got) <= most and all(map(is_text, got))


def string_or(check: Check) -> Check:
    """A lone string, or what the other takes."""
    return lambda got: is_text(got) or check(got)


def equals(wanted: Any) -> Check:
    return lambda got: got == wanted and type(got) is type(wanted)


def is_message_list(got: Any) -> bool:
    """A conversation of plain texts."""
    return (
        isinstance(got, list)
        and got != []
        and all(turn.keys() == {"role", "content"} and is_text(turn["content"]) for turn in got)
    )


def is_tool_list(got: Any) -> bool:
    """Functions, each with a name and a schema."""
    return isinstance(got, list) and got != [] and all(
        one["type"] == "function" and is_text(one["function"]["name"])
        and isinstance(one["function"]["parameters"], dict) for one in got
    )  # fmt: skip


ALWAYS: Final[Check] = lambda got: got is not None  # noqa: E731 - a check like the others


def check_fields(
    request: ReceivedRequest,
    got: Mapping[str, Any],
    fields: Fields,
    must: Collection[str] = (),
    where: str = "",
) -> None:
    """Note fields that are unknown, wrong, or missing."""
    for name, value in got.items():
        if name not in fields:
            request.faults.append(f"{where}{name} is unknown")
        elif not fields[name](value):
            request.faults.append(f"{where}{name} is wrong: {value!r}")
    request.faults += [f"{where}{name} is missing" for name in must if name not in got]
