"""Checks of a request's fields in the server's order and words; the first failure is told.

A field is null or absent alike. Numbers in a complaint are printed as the server's JSON library
prints them. Source: MindIE-LLM 0695772, src/server/endpoint/utils/infer_param.cpp and
parameters_checker.cpp.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from protocols import params
from protocols.body import decode_value, read_object
from protocols.core.errors import InvalidParameter, MalformedRequest, ParameterProblem
from protocols.core.interfaces import ClientRequest
from protocols.params import Param, ParamType, ParsedParams

ParamKind = Literal["float", "integer", "unsigned", "boolean"]

decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
"""The fields of what is known to be an object, their values left as they were sent."""
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_INT64_LIMIT = 2**63
_EXPONENT_THRESHOLD = 10**15
_REPR_EXPONENT_THRESHOLD = 10**16


class MindieParam(Struct, frozen=True):
    """A scalar, and what is said of a wrong one; ``{got}`` stands for the value."""

    param: Param
    kind: ParamKind
    range_error: str = ""
    """Of a value outside the range."""
    type_error: str = ""
    """Of a value of another type; empty: "NAME must be KIND type."."""


class ParamCheck(Struct, frozen=True):
    """A check that no row can say. ``field`` is the path that it sets.

    ``type`` is that of the parameter, where it has no row beside.
    """

    wire: str
    field: str
    run: Callable[[Mapping[str, Raw], ParsedParams], None]
    type: ParamType | None = None


MindieParamTable = tuple[MindieParam | ParamCheck, ...]


def build_param_error(
    text: str, param: str, problem: ParameterProblem = "value", got: Any = None
) -> InvalidParameter:
    """A complaint in the server's words."""
    return InvalidParameter(text, param=param, problem=problem, got=got)


def read_body_fields(call: ClientRequest) -> Mapping[str, Raw]:
    """The body's fields. What is JSON and no object has none, as for the server.

    Raises Malformed.
    """
    try:
        return read_object(call.body)
    except MalformedRequest as error:
        if error.problem != "object":
            raise
        decode_value(Raw(call.body))  # it may be no JSON at all behind its first byte
        return {}


def get_field(fields: Mapping[str, Raw], name: str) -> Any:
    """A field's value, None where it is absent. Raises Malformed."""
    raw = fields.get(name)
    return None if raw is None else decode_value(raw)


def read_object_field(fields: Mapping[str, Raw], name: str) -> Mapping[str, Raw]:
    """The fields of an object inside. Raises InvalidParameter or Malformed."""
    got = get_field(fields, name)
    if got is None:
        return {}
    if not isinstance(got, dict):
        raise build_param_error(f"{name} must be object type.", name, "type")
    return decode_fields(fields[name])


def read_first_object(raw: Raw) -> Mapping[str, Raw]:
    """The fields of the first object of a list that is known to hold one."""
    return decode_fields(_decode_items(raw)[0])


def read_params(table: MindieParamTable, fields: Mapping[str, Raw]) -> ParsedParams:
    """The values of ``table``, checked in its order. Raises InvalidParameter or Malformed."""
    values = ParsedParams()
    for step in table:
        if isinstance(step, ParamCheck):
            step.run(fields, values)
            continue
        param = step.param
        if param.wire not in fields:
            continue
        try:
            params.read_param(param, fields[param.wire], values)
        except InvalidParameter as error:
            got = get_field(fields, param.wire)  # as it was sent: 0 and not 0.0
            raise _reword_error(step, error, got) from None
    return values


def collect_extra_fields(
    table: MindieParamTable, fields: Mapping[str, Raw], known: Iterable[str] = ()
) -> dict[str, Raw]:
    """The fields of which the internal request says nothing, as they were sent."""
    told = {step.wire if isinstance(step, ParamCheck) else step.param.wire for step in table}
    kept = {
        s.param.wire
        for s in table
        if isinstance(s, MindieParam) and s.param.field.startswith("kept.")
    }
    dropped = (told - kept) | set(known)
    return {name: raw for name, raw in fields.items() if name not in dropped}


def map_field_names(table: MindieParamTable) -> dict[str, str]:
    """The wire name of each path of the internal request."""
    found = {}
    for step in table:
        path, wire = (
            (step.field, step.wire)
            if isinstance(step, ParamCheck)
            else (step.param.field, step.param.wire)
        )
        if not path.startswith(("asked.", "kept.")):
            found[path] = wire
    return found


def list_params(table: MindieParamTable) -> tuple[Param, ...]:
    """The parameters of a table, with those that a check reads."""
    found = []
    for step in table:
        if isinstance(step, MindieParam):
            found.append(step.param)
        elif step.type is not None:
            found.append(Param(wire=step.wire, field=step.field, type=step.type))
    return tuple(found)


def format_json_number(got: Any) -> str:
    """A number as nlohmann::json prints it: exponents from 1e+15 on, and -5 down."""
    if isinstance(got, int) and not -_INT64_LIMIT <= got < 2 * _INT64_LIMIT:
        got = float(got)
    text = repr(got)
    if (
        isinstance(got, float)
        and _EXPONENT_THRESHOLD <= abs(got) < _REPR_EXPONENT_THRESHOLD
        and "e" not in text
    ):
        sign = "-" if got < 0 else ""
        digits = text.lstrip("-").replace(".", "").rstrip("0")
        return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e+15"
    return text


def count_utf16_units(text: str) -> int:
    """The length in UTF-16 units, by which the server measures."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def _reword_error(row: MindieParam, error: InvalidParameter, got: Any) -> InvalidParameter:
    param = row.param
    mistyped = error.problem == "type"
    if row.kind in ("integer", "unsigned") and type(got) is int:
        low = (
            0 if row.kind == "unsigned" else -_INT64_LIMIT
        )  # what is below or above is no such number
        mistyped = not low <= got < 2 * _INT64_LIMIT
    if mistyped:
        text = row.type_error or f"{param.wire} must be {row.kind} type."
        return InvalidParameter(text, param=param.wire, problem="type", expected=param, got=got)
    text = row.range_error.format(got=format_json_number(got))
    return InvalidParameter(text, param=param.wire, problem=error.problem, expected=param, got=got)
