"""Scalar parameters as tables: a row defines a parameter's name, type, range and default.

Each protocol declares its rows once. They drive the decoding of client requests, the encoding of
worker requests, the loss report of a pair of protocols, and the reference pages.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, Final, Literal, Protocol, Self, runtime_checkable

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from protocols.core.errors import InvalidParameter, ParameterProblem
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import LossReason, ParameterSupport
from protocols.core.request import SECTIONS
from protocols.json_body import JSON_ERRORS, decode_value

ParamType = Literal["int", "strict int", "float", "bool", "str", "strings", "string list", "ints"]
"""``int`` and ``ints`` accept 5.0, too; ``strings`` is one string or a list of strings."""

NONEMPTY_STRING = Annotated[str, Meta(min_length=1)]

_UNSET: Any = msgspec.UNSET
_INT64_MAX: Final = 2**63 - 1
_CACHE_SIZE: Final = 128
"""Cached sets of names for each table: most requests set the same few fields."""
_NUMBER_TYPES = (int, float)
"""Without bool, which is a number in Python but not in JSON."""


class Param(Struct, frozen=True, dict=True):
    """One parameter. ``field`` is its path in the internal request, such as ``sampling.top_k``.

    A row of a table reads ``Param("top_p", "sampling.top_p", "float", 0, 1)``.

    The range is ``minimum`` to ``maximum``, without the limit itself if ``exclusive_minimum`` or
    ``exclusive_maximum`` is set. A value in ``disabled_values`` turns the feature off. ``default``
    is the protocol's documented default: it is set in a request only where targets would use
    another.
    """

    wire: str
    field: str
    type: ParamType
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    choices: tuple[str, ...] = ()
    disabled_values: tuple[float, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    nullable: bool = True
    """Whether ``null`` is accepted and means that the field is absent."""
    default: Any = None
    loss_reason: LossReason | None = None
    """Set on a worker's row if the worker supports the parameter only partly. ``default`` is then
    what the worker does in any case."""
    replaced_words: tuple[tuple[str, str], ...] = ()
    """Words that a worker lacks, each with the nearest one that it has."""
    description: str = ""

    @cached_property
    def decode_exact(self) -> Callable[[Raw], Any] | None:
        """Decodes a value that needs no conversion; raises one of JSON_ERRORS for any other."""
        kind = find_common_type(self, self)
        if kind is None or self.disabled_values or self.min_items:
            return None
        decode: Callable[[Raw], Any] = JsonDecoder(kind).decode
        return partial(_decode_strings, decode) if self.type == "strings" else decode

    def exceeds_limit(self, value: float, limit: float) -> bool:
        """Whether a value is above a limit that the server was set up with."""
        return value > limit

    def format_range_error(self, value: Any) -> str:
        """The server's text for a value above ``maximum``."""
        return f"'{self.wire}' must be at most {self.maximum}, got {value}"


def _decode_strings(decode: Callable[[Raw], Any], raw: Raw) -> tuple[str, ...]:
    value = decode(raw)
    return (value,) if type(value) is str else tuple(value)


def find_common_type(worker: Param, client: Param) -> Any:
    """The type of values that both rows accept unchanged; None if only their checks can decide."""
    match client.type:
        case "bool":
            return bool
        case "str":
            lacking = dict(worker.replaced_words)
            words = tuple(word for word in client.choices if word not in lacking)
            return Literal[words] if words else str
        case "int" | "strict int" | "float" as name:
            return _build_number_type(worker, client, float if name == "float" else int)
        case "strings":
            most = min((p.max_items for p in (worker, client) if p.max_items), default=None)
            return NONEMPTY_STRING | Annotated[list[NONEMPTY_STRING], Meta(max_length=most)]
        case _:
            return None


def _build_number_type(worker: Param, client: Param, kind: type) -> Any:
    low = max((p.minimum for p in (worker, client) if p.minimum is not None), default=None)
    high = min((p.maximum for p in (worker, client) if p.maximum is not None), default=None)
    if kind is int and high is not None:
        high = min(high, _INT64_MAX)
    above = any(p.exclusive_minimum and p.minimum == low for p in (worker, client))
    below = any(p.exclusive_maximum and p.maximum == high for p in (worker, client))
    bounds: dict[str, Any] = {"gt" if above else "ge": low, "lt" if below else "le": high}
    return Annotated[kind, Meta(**bounds)]


@runtime_checkable
class ParamTableProvider(Protocol):
    """An adapter that lists the parameters of its clients, for the reference pages.

    ``param_tables`` has the rows by ``Endpoint.operation``; words after a comma distinguish several
    forms of one operation.
    """

    param_tables: Mapping[str, tuple[Param, ...]]


def find_sent_param(
    adapter: object, operation: str, path: str, provided_fields: Collection[str]
) -> Param | None:
    """The adapter's row of the field with which the client set ``path``."""
    if not isinstance(adapter, ParamTableProvider):
        return None
    sent = [
        row
        for name, rows in adapter.param_tables.items()
        if name.partition(",")[0] == operation
        for row in rows
        if row.field == path and row.wire in provided_fields
    ]
    return sent[-1] if sent else None  # the last one wins in requests, too


def build_limit_error(param: Param, maximum: int, value: int) -> InvalidParameter:
    """The error for a value above a limit of the gateway, as for the parameter's own maximum."""
    row = replace(param, maximum=maximum, exclusive_maximum=False)
    text = row.format_range_error(value)
    return InvalidParameter(text, param=row.wire, problem="above", expected=row, got=value)


_PositionedParams = dict[str, list[tuple[int, Param]]]
"""Rows by name, each with its position in the table."""


class ParamIndex(_PositionedParams):
    """Rows by name, with a cached lookup of several names."""

    __slots__ = ("select_params",)

    select_params: Callable[[tuple[str, ...]], Sequence[Param]]
    """The rows with one of these names, in the table's order.

    Results are cached: only pass names of rows, never arbitrary names of a client.
    """

    def __init__(self, key: Literal["wire", "field"], rows: Iterable[Param]) -> None:
        """``key`` is the attribute of a row that names it."""
        positions: _PositionedParams = {}
        for position, row in enumerate(rows):
            positions.setdefault(getattr(row, key), []).append((position, row))
        super().__init__(positions)
        self.select_params = lru_cache(_CACHE_SIZE)(partial(_select_ordered, positions))


def _select_ordered(positions: _PositionedParams, names: tuple[str, ...]) -> Sequence[Param]:
    rows = [one for name in names if name in positions for one in positions[name]]
    return tuple([row for _, row in sorted(rows)])


class ParamTable(tuple[Param, ...]):  # noqa: SLOT001 - nothing that is made of a tuple can have slots
    """Rows in order, indexed by wire name and by field."""

    def __new__(cls, *rows: Param) -> Self:
        """Create the table of these rows."""
        return super().__new__(cls, rows)

    @cached_property
    def by_wire(self) -> ParamIndex:
        """The rows by wire name. An index is built when it is first used: most never are."""
        return ParamIndex("wire", self)

    @cached_property
    def by_field(self) -> ParamIndex:
        """The rows by field."""
        return ParamIndex("field", self)

    @cached_property
    def label_fields(self) -> frozenset[str]:
        """The wire names of labels."""
        return frozenset(row.wire for row in self if row.field.startswith("labels."))


def select_by_wire(table: ParamTable, fields: Iterable[str]) -> Sequence[Param]:
    """The rows of the fields that a client sent, in the table's order."""
    rows = table.by_wire
    return rows.select_params(tuple([name for name in fields if name in rows]))


def select_by_field(table: ParamTable, paths: Iterable[str]) -> Sequence[Param]:
    """The rows of the paths that a request has set, in the table's order."""
    return table.by_field.select_params(tuple(paths))


class ParsedParams(dict[str, Any]):
    """Decoded values by path, and the wire names that the client sent."""

    __slots__ = ("provided_fields",)

    def __init__(self) -> None:
        self.provided_fields: set[str] = set()

    def get_section(self, name: str) -> dict[str, Any]:
        """The values of one section."""
        prefix, length = f"{name}.", len(name) + 1
        return {path[length:]: value for path, value in self.items() if path[:length] == prefix}

    def build_request_arguments(self) -> dict[str, Any]:
        """Keyword arguments for a request: its own fields, and a struct for each section set."""
        arguments: dict[str, Any] = {"provided_fields": frozenset(self.provided_fields)}
        sections: dict[str, dict[str, Any]] = {}
        for path, value in self.items():
            if path in _SECTION_FIELDS:
                section, name = _SECTION_FIELDS[path]
                if section in sections:
                    sections[section][name] = value
                else:
                    sections[section] = {name: value}
            elif "." not in path:
                arguments[path] = value
        for name, values in sections.items():
            arguments[name] = SECTIONS[name](**values)
        return arguments


_SECTION_FIELDS: Mapping[str, tuple[str, str]] = {
    f"{section}.{name}": (section, name)
    for section, struct in SECTIONS.items()
    for name in struct.__struct_fields__
}


def read_params(table: ParamTable, fields: Mapping[str, Raw], *, at: str = "") -> ParsedParams:
    """Decode the parameters of ``table`` in ``fields``, in the table's order.

    ``at`` is a prefix of names in error texts. Raises InvalidParameter for the first invalid one,
    with the row as ``expected``.
    """
    values = ParsedParams()
    for param in select_by_wire(table, fields):
        read_param(param, fields[param.wire], values, at=at)
    return values


def read_param(param: Param, raw: Raw, into: ParsedParams, *, at: str = "") -> None:
    """Decode one parameter into ``into``. Raises InvalidParameter; see ``read_params``."""
    if (decode := param.decode_exact) is not None:
        try:
            into[param.field] = decode(raw)
        except JSON_ERRORS:
            pass  # it needs a conversion, or is invalid
        else:
            into.provided_fields.add(param.wire)
            return
    store_param(param, decode_value(raw), into, at=at)


def store_param(param: Param, value: Any, into: ParsedParams, *, at: str = "") -> None:
    """Store one decoded parameter in ``into``. Raises InvalidParameter; see ``read_params``."""
    if value is None and param.nullable:
        return
    value = check_param(param, value, at=at)
    into.provided_fields.add(param.wire)
    if value not in param.disabled_values or isinstance(value, bool):
        into[param.field] = value


def check_param(param: Param, value: Any, *, at: str = "") -> Any:
    """``value`` converted to the row's type. Raises InvalidParameter."""
    converted = _convert(param, value)
    if converted is _UNSET:
        raise _build_error(param, "type", value, f"must be {_EXPECTED_TEXTS[param.type]}", at)
    kind = type(converted)
    if kind in _NUMBER_TYPES:
        _check_range(param, converted, at)
    elif kind is tuple:
        if len(converted) < param.min_items:
            raise _build_error(param, "empty", value, f"needs at least {param.min_items} items", at)
        if param.max_items is not None and len(converted) > param.max_items:
            raise _build_error(
                param, "too_long", value, f"takes at most {param.max_items} items", at
            )
    elif param.choices and converted not in param.choices:
        allowed = ", ".join(map(repr, param.choices))
        raise _build_error(param, "value", value, f"must be one of {allowed}", at)
    return converted


def _check_range(param: Param, value: float, at: str) -> None:
    if value in param.disabled_values:
        return
    low, high = param.minimum, param.maximum
    if low is not None and (value < low or (param.exclusive_minimum and value == low)):
        than = "greater than" if param.exclusive_minimum else "at least"
        raise _build_error(param, "below", value, f"must be {than} {low:g}", at)
    if high is not None and (value > high or (param.exclusive_maximum and value == high)):
        than = "less than" if param.exclusive_maximum else "at most"
        raise _build_error(param, "above", value, f"must be {than} {high:g}", at)


def _build_error(
    param: Param, problem: ParameterProblem, value: Any, text: str, at: str
) -> InvalidParameter:
    excerpt = repr(value) if isinstance(value, int | float | bool) else _describe_type(value)
    name = at + param.wire
    return InvalidParameter(
        f"'{name}' {text}, got {excerpt}", param=name, problem=problem, expected=param, got=value
    )


def _describe_type(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "a value")


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


_EXPECTED_TEXTS: Mapping[ParamType, str] = {
    "int": "an integer",
    "strict int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "strings": "a string or a list of strings",
    "string list": "a list of strings",
    "ints": "a list of integers",
}


_JSON_TYPES: Mapping[ParamType, type] = {
    "int": int,
    "strict int": int,
    "float": float,
    "bool": bool,
    "str": str,
}
"""The Python type of JSON values that need no conversion."""


def _convert(param: Param, value: Any) -> Any:
    if type(value) is _JSON_TYPES.get(param.type):
        return value
    match param.type, value:
        case (_, bool()):
            return _UNSET
        case ("int", float()) if value.is_integer():
            return int(value)
        case ("float", int()):
            return _to_float(value)
        case ("strings", str()):
            return (value,)
        case (("strings" | "string list"), list()) if all(isinstance(x, str) for x in value):
            return tuple(value)
        case ("ints", list()):
            numbers = [int(x) if type(x) is float and x.is_integer() else x for x in value]
            return tuple(numbers) if all(type(x) is int for x in numbers) else _UNSET
        case _:
            return _UNSET


def _to_float(value: int) -> Any:
    try:
        return float(value)
    except OverflowError:
        return _UNSET


# --- worker requests ------------------------------------------------------------------------------


def write_params(table: ParamTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Worker fields of ``table`` for the ``values``, clamped to the rows' ranges."""
    fields = {}
    for row in select_by_field(table, values):
        if row.loss_reason == "dropped":
            continue
        value, low, high = values[row.field], row.minimum, row.maximum
        if row.replaced_words:
            value = dict(row.replaced_words).get(value, value)
        if (
            (low is not None and value < low)
            or (high is not None and value > high)
            or type(value) is tuple
        ):
            value = clamp_value(row, value)
        fields[row.wire] = value
    return fields


def clamp_value(row: Param, value: Any) -> Any:
    """The value for a worker, clamped to the row's range."""
    kind = type(value)
    if kind in _NUMBER_TYPES:
        if row.minimum is not None and value < row.minimum:
            return kind(row.minimum)
        if row.maximum is not None and value > row.maximum:
            return kind(row.maximum)
        return value
    return list(value) if kind is tuple else value


def build_parameter_support(table: Iterable[Param]) -> dict[str, ParameterSupport]:
    """The support of a worker with this table, for ``find_unsupported_parameters``."""
    return {
        p.field: ParameterSupport(
            p.wire,
            p.minimum,
            p.maximum,
            p.loss_reason,
            default=p.default if p.loss_reason else None,
            replaced_words=p.replaced_words,
        )
        for p in table
    }


def map_field_names(table: Iterable[Param]) -> dict[str, str]:
    """The wire name of each path, for loss reports."""
    return {p.field: p.wire for p in table}
