"""Scalar parameters by table: one row says how a parameter is called, read, checked and written.

A dialect declares its rows once. From them come the reading of a client's request, the writing of a
worker's request, the report of what a pair of dialects loses, and the reference pages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Literal, Protocol, Self, runtime_checkable

import msgspec
from msgspec import Raw, Struct

from gateway.core.errors import InvalidParameter, Problem
from gateway.core.loss import Carry, Reason
from gateway.core.types import SECTIONS
from protocols.body import value

Type = Literal["int", "strict int", "float", "bool", "str", "strings", "string list", "ints"]
"""``int`` also takes 5.0; ``strings`` is one string or a list; the others are what they say."""

_UNSET: Any = msgspec.UNSET
_REMEMBERED: Final = 128
"""Sets of names, for each table: most requests set the same few fields."""
_NUMBERS = (int, float)
"""Without bool, which is a number to Python and none to JSON."""


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

    param_tables: Mapping[str, tuple[Param, ...]]


_Places = dict[str, list[tuple[int, Param]]]
"""Rows by a name, each with its place in its table."""


class Found(_Places):
    """Rows by a name, and which they are for several."""

    __slots__ = ("select_params",)

    select_params: Callable[[tuple[str, ...]], Sequence[Param]]
    """The rows that have one of these names, in their table's order.

    What is asked is remembered: names are not to be a client's own inventions.
    """

    def __init__(self, key: Literal["wire", "field"], rows: Iterable[Param]) -> None:
        """``key``: what of a row names it."""
        places: _Places = {}
        for place, row in enumerate(rows):
            places.setdefault(getattr(row, key), []).append((place, row))
        super().__init__(places)
        self.select_params = lru_cache(_REMEMBERED)(partial(_ordered, places))


def _ordered(places: _Places, names: tuple[str, ...]) -> Sequence[Param]:
    found = [one for name in names if name in places for one in places[name]]
    return tuple([row for _, row in sorted(found)])


class Table(tuple[Param, ...]):  # noqa: SLOT001 - nothing that is made of a tuple can have slots
    """Rows in their order, each to be found by its wire name and by its field."""

    by_wire: Found
    by_field: Found

    def __new__(cls, *rows: Param) -> Self:
        """The table of these rows."""
        made = super().__new__(cls, rows)
        made.by_wire = Found("wire", rows)
        made.by_field = Found("field", rows)
        return made


def sent(table: Table, fields: Iterable[str]) -> Sequence[Param]:
    """The rows of what a client sent, in the table's order."""
    rows = table.by_wire
    return rows.select_params(tuple([name for name in fields if name in rows]))


def asked(table: Table, said: Iterable[str]) -> Sequence[Param]:
    """The rows of what a request has ``said``, in the table's order."""
    return table.by_field.select_params(tuple(said))


class Values(dict[str, Any]):
    """What was read: values by path, and the wire names that the client gave."""

    __slots__ = ("given",)

    def __init__(self) -> None:
        self.given: set[str] = set()

    def get_section(self, name: str) -> dict[str, Any]:
        """The values of one section."""
        begin, at = f"{name}.", len(name) + 1
        return {path[at:]: what for path, what in self.items() if path[:at] == begin}

    def build_request_arguments(self) -> dict[str, Any]:
        """Keyword arguments for a request: its own fields, and a struct for each section set."""
        own: dict[str, Any] = {"given": frozenset(self.given)}
        sections: dict[str, dict[str, Any]] = {}
        for path, what in self.items():
            if path in _PLACES:
                section, name = _PLACES[path]
                if section in sections:
                    sections[section][name] = what
                else:
                    sections[section] = {name: what}
            elif "." not in path:
                own[path] = what
        for name, values in sections.items():
            own[name] = SECTIONS[name](**values)
        return own


_PLACES: Mapping[str, tuple[str, str]] = {
    f"{section}.{name}": (section, name)
    for section, struct in SECTIONS.items()
    for name in struct.__struct_fields__
}


def read(table: Table, fields: Mapping[str, Raw], *, at: str = "") -> Values:
    """The parameters of ``table`` found in ``fields``, in the table's order.

    ``at`` is put before a name in a complaint. Raises InvalidParameter for the first wrong one,
    with the row as ``expected``.
    """
    values = Values()
    for param in sent(table, fields):
        put(param, value(fields[param.wire]), values, at=at)
    return values


def take(param: Param, raw: Raw, into: Values, *, at: str = "") -> None:
    """Read one parameter as it was sent. Raises InvalidParameter; see ``read``."""
    put(param, value(raw), into, at=at)


def put(param: Param, got: Any, into: Values, *, at: str = "") -> None:
    """Read one parameter from its JSON value. Raises InvalidParameter; see ``read``."""
    if got is None and param.null:
        return
    got = check(param, got, at=at)
    into.given.add(param.wire)
    if got not in param.off or isinstance(got, bool):
        into[param.field] = got


def check(param: Param, got: Any, *, at: str = "") -> Any:
    """``got`` as the row's type. Raises InvalidParameter."""
    converted = _convert(param, got)
    if converted is _UNSET:
        raise _complaint(param, "type", got, f"must be {_TYPES[param.type]}", at)
    kind = type(converted)
    if kind in _NUMBERS:
        _check_range(param, converted, at)
    elif kind is tuple:
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


_AS_SENT: Mapping[Type, type] = {
    "int": int,
    "strict int": int,
    "float": float,
    "bool": bool,
    "str": str,
}
"""What JSON gives for the types that need no conversion."""


def _convert(param: Param, got: Any) -> Any:
    if type(got) is _AS_SENT.get(param.type):
        return got
    match param.type, got:
        case (_, bool()):
            return _UNSET
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


def write(table: Table, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``table`` for what is ``said`` in a request, clamped to the rows' ranges."""
    written = {}
    for row in asked(table, said):
        if row.reason == "dropped":
            continue
        got, low, high = said[row.field], row.low, row.high
        if (
            (low is not None and got < low)
            or (high is not None and got > high)
            or type(got) is tuple
        ):
            got = clamped(row, got)
        written[row.wire] = got
    return written


def clamped(row: Param, got: Any) -> Any:
    """The value as it is written, within the row's range."""
    kind = type(got)
    if kind in _NUMBERS:
        if row.low is not None and got < row.low:
            return kind(row.low)
        if row.high is not None and got > row.high:
            return kind(row.high)
        return got
    return list(got) if kind is tuple else got


def carries(table: Iterable[Param]) -> dict[str, Carry]:
    """What a worker with this table takes, for ``gateway.core.loss.losses``."""
    return {p.field: Carry(p.wire, p.low, p.high, p.reason) for p in table}


def names(table: Iterable[Param]) -> dict[str, str]:
    """The wire name of each path, for reports."""
    return {p.field: p.wire for p in table}
