"""Scalar parameters by table: one row says how a parameter is called, read, checked and written.

A dialect declares its rows once. From them come the reading of a client's request, the writing of a
worker's request, the report of what a pair of dialects loses, and the reference pages.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import Raw, Struct

from gateway.core.errors import InvalidParameter, Problem
from gateway.core.loss import Carry, Reason
from gateway.core.types import (
    EmbedRequest,
    GenerateRequest,
    Logprobs,
    Reasoning,
    Sampling,
    Stopping,
    Templating,
    Want,
)
from protocols.body import value

Type = Literal["int", "strict int", "float", "bool", "str", "strings", "string list", "ints"]
"""``int`` also takes 5.0; ``strings`` is one string or a list; the others are what they say."""

_UNSET: Any = msgspec.UNSET


class Param(Struct, frozen=True, kw_only=True):
    """One parameter. ``field`` is its path in the internal request, such as ``sampling.top_k``.

    The range is ``low`` to ``high``, without ``low`` itself where ``above_low`` is set and without
    ``high`` where ``below_high`` is. A value in ``off`` means that the feature is not used.
    ``default`` is what the dialect promises to a client that says nothing: it is documentation, and
    is materialised only where a target would do otherwise.
    """

    wire: str
    field: str
    type: Type
    low: float | None = None
    high: float | None = None
    above_low: bool = False
    below_high: bool = False
    choices: tuple[str, ...] = ()
    off: tuple[float, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    null: bool = True
    """Whether ``null`` is taken, as if the field were absent."""
    default: Any = None
    reason: Reason | None = None
    """Set on a worker's row where it carries the field only in part."""
    note: str = ""


@runtime_checkable
class Tabled(Protocol):
    """A dialect that shows what it reads from clients: for the reference pages.

    ``tables`` holds the rows by the ``Endpoint.variant`` whose requests they are; words after a
    comma tell apart what one variant reads in several ways.
    """

    tables: Mapping[str, tuple[Param, ...]]


class Values:
    """What was read: values by path, and the wire names that the client gave."""

    __slots__ = ("_sections", "given")

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, Any]] = {}
        self.given: set[str] = set()

    def set(self, path: str, what: Any) -> None:
        """Put a value at a path."""
        section, _, name = path.rpartition(".")
        self._sections.setdefault(section, {})[name] = what

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path."""
        section, _, name = path.rpartition(".")
        return self._sections.get(section, {}).get(name, default)

    def section(self, name: str) -> dict[str, Any]:
        """The values of one section; "" is the request's own fields."""
        return self._sections.get(name, {})

    def fields(self) -> dict[str, Any]:
        """Keyword arguments for a request: its own fields, and a struct for each section set."""
        fields = dict(self.section(""))
        for name, struct in _STRUCTS.items():
            if values := self._sections.get(name):
                fields[name] = struct(**values)
        fields["given"] = frozenset(self.given)
        return fields


_STRUCTS: Mapping[str, type[Struct]] = {
    "sampling": Sampling,
    "stopping": Stopping,
    "templating": Templating,
    "reasoning": Reasoning,
    "logprobs": Logprobs,
    "want": Want,
}


def read(
    table: Iterable[Param], fields: Mapping[str, Raw], into: Values | None = None, *, at: str = ""
) -> Values:
    """The parameters of ``table`` found in ``fields``, in the table's order.

    ``at`` is put before a name in a complaint. Raises InvalidParameter for the first wrong one,
    with the row as ``expected``.
    """
    values = into if into is not None else Values()
    for param in table:
        raw = fields.get(param.wire)
        if raw is None:
            continue
        got = value(raw)
        if got is None and param.null:
            continue
        got = check(param, got, at=at)
        values.given.add(param.wire)
        if got not in param.off or isinstance(got, bool):
            values.set(param.field, got)
    return values


def check(param: Param, got: Any, *, at: str = "") -> Any:
    """``got`` as the row's type. Raises InvalidParameter."""
    converted = _convert(param, got)
    if converted is _UNSET:
        raise _complaint(param, "type", got, f"must be {_TYPES[param.type]}", at)
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        _check_range(param, converted, at)
    elif isinstance(converted, tuple):
        if len(converted) < param.min_items:
            raise _complaint(param, "empty", got, f"needs at least {param.min_items} items", at)
        if param.max_items is not None and len(converted) > param.max_items:
            raise _complaint(param, "too_long", got, f"takes at most {param.max_items} items", at)
    elif param.choices and converted not in param.choices:
        allowed = ", ".join(map(repr, param.choices))
        raise _complaint(param, "value", got, f"must be one of {allowed}", at)
    return converted


def _check_range(param: Param, got: float, at: str) -> None:
    if got in param.off:
        return
    low, high = param.low, param.high
    if low is not None and (got < low or (param.above_low and got == low)):
        than = "greater than" if param.above_low else "at least"
        raise _complaint(param, "below", got, f"must be {than} {low:g}", at)
    if high is not None and (got > high or (param.below_high and got == high)):
        than = "less than" if param.below_high else "at most"
        raise _complaint(param, "above", got, f"must be {than} {high:g}", at)


def _complaint(param: Param, problem: Problem, got: Any, text: str, at: str) -> InvalidParameter:
    shown = repr(got) if isinstance(got, int | float | bool) else _kind(got)
    name = at + param.wire
    return InvalidParameter(
        f"'{name}' {text}, got {shown}", param=name, problem=problem, expected=param, got=got
    )


def _kind(got: Any) -> str:
    return _KINDS.get(type(got), "a value")


_KINDS: Mapping[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


_TYPES: Mapping[Type, str] = {
    "int": "an integer",
    "strict int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "strings": "a string or a list of strings",
    "string list": "a list of strings",
    "ints": "a list of integers",
}


def _convert(param: Param, got: Any) -> Any:
    match param.type, got:
        case ("bool", bool()) | ("str", str()):
            return got
        case (_, bool()):
            return _UNSET
        case (("int" | "strict int"), int()) | ("float", float()):
            return got
        case ("int", float()) if got.is_integer():
            return int(got)
        case ("float", int()):
            return _to_float(got)
        case ("strings", str()):
            return (got,)
        case (("strings" | "string list"), list()) if all(isinstance(x, str) for x in got):
            return tuple(got)
        case ("ints", list()) if all(type(x) is int for x in got):
            return tuple(got)
        case _:
            return _UNSET


def _to_float(got: int) -> Any:
    try:
        return float(got)
    except OverflowError:
        return _UNSET


# --- the other way: a request to a worker's fields ------------------------------------------------

RequestT = TypeVar("RequestT", GenerateRequest, EmbedRequest)


def get(request: GenerateRequest | EmbedRequest, path: str) -> Any:
    """The value at a path of a request; None where a section is absent."""
    section, _, name = path.rpartition(".")
    holder = getattr(request, section, None) if section else request
    return getattr(holder, name, None)


def write(table: Iterable[Param], request: GenerateRequest | EmbedRequest) -> dict[str, Any]:
    """The fields of ``table`` that the request sets, clamped to the rows' ranges."""
    out: dict[str, Any] = {}
    for param in table:
        got = get(request, param.field)
        if got is None or got == () or param.reason == "dropped":
            continue
        if isinstance(got, int | float) and not isinstance(got, bool):
            if param.low is not None and got < param.low:
                got = type(got)(param.low)
            elif param.high is not None and got > param.high:
                got = type(got)(param.high)
        out[param.wire] = list(got) if isinstance(got, tuple) else got
    return out


def carries(table: Iterable[Param]) -> dict[str, Carry]:
    """What a worker with this table takes, for ``gateway.core.loss.losses``."""
    return {p.field: Carry(p.wire, p.low, p.high, p.reason) for p in table}


def names(table: Iterable[Param]) -> dict[str, str]:
    """The wire name of each path, for reports."""
    return {p.field: p.wire for p in table}
