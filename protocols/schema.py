"""Requests and answers as JSON Schema, from what reads and writes them: rows, structs, refusals.

A dialect puts these together to tell of itself (``gateway.core.ports.Described``)::

    operation = {
        "summary": "…",
        "requestBody": body(record({"prompt": TEXT, **rows(TABLE)}, "prompt")),
        "responses": {"200": answer(ref("Answer")), **refusals(STATUSES, ref("Error"))},
    }
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from gateway.core.errors import ClientGone, GatewayError, MethodNotAllowed
from protocols.params import Param, Type

Schema = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"

TEXT: Schema = {"type": "string"}
NONEMPTY: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}


# --- requests -------------------------------------------------------------------------------------


def rows(table: Iterable[Param]) -> dict[str, Schema]:
    """The properties that the rows of a table read."""
    return {param.wire: row(param) for param in table}


def row(param: Param) -> Schema:
    """What one row takes."""
    found = _TYPES[param.type](param)
    if param.off:
        found = {"anyOf": [found, {"enum": list(param.off)}]}
    if param.null:
        found = optional(found)
    if param.default is not None:
        found["default"] = param.default
    if param.note:
        found["description"] = param.note
    return found


def _number(kind: str) -> Callable[[Param], Schema]:
    def of(param: Param) -> Schema:
        low = "exclusiveMinimum" if param.above_low else "minimum"
        high = "exclusiveMaximum" if param.below_high else "maximum"
        limits = {low: param.low, high: param.high}
        return {"type": kind, **{k: limit for k, limit in limits.items() if limit is not None}}

    return of


def _text(param: Param) -> Schema:
    return {"enum": list(param.choices)} if param.choices else dict(TEXT)


def _list(items: Schema) -> Callable[[Param], Schema]:
    def of(param: Param) -> Schema:
        limits = {"minItems": param.min_items or None, "maxItems": param.max_items}
        return array(items, **{k: limit for k, limit in limits.items() if limit is not None})

    return of


def _strings(param: Param) -> Schema:
    return {"anyOf": [dict(TEXT), _list(TEXT)(param)]}


_TYPES: Mapping[Type, Callable[[Param], Schema]] = {
    "int": _number("integer"),
    "strict int": _number("integer"),
    "float": _number("number"),
    "bool": lambda _: dict(FLAG),
    "str": _text,
    "strings": _strings,
    "string list": _list(TEXT),
    "ints": _list(WHOLE),
}


# --- shapes ---------------------------------------------------------------------------------------


def optional(schema: Schema) -> Schema:
    """This, or null."""
    return {"anyOf": [schema, NULL]}


def one_of(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def array(items: Schema, **limits: int) -> Schema:
    """A list; ``limits`` are JSON Schema's ``minItems`` and ``maxItems``."""
    return {"type": "array", "items": items, **limits}


def mapping(values: Schema, **limits: Any) -> Schema:
    """An object with any names; ``limits`` are JSON Schema's."""
    return {"type": "object", "additionalProperties": values, **limits}


def record(properties: Mapping[str, Schema], *required: str, more: bool = True) -> Schema:
    """An object; ``more``: it may have other properties, too."""
    found: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        found["required"] = list(required)
    if not more:
        found["additionalProperties"] = False
    return found


def ref(name: str) -> Schema:
    """A component of this dialect's own."""
    return {"$ref": f"#/components/schemas/{name}"}


def structs(*types: type[Struct]) -> dict[str, Schema]:
    """Wire structs and all within them, by name.

    A field with a default is always written, and so required; one that may be unset is not.
    """
    _, found = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for schema in found.values():
        properties = schema.get("properties", {})
        always = [name for name, one in properties.items() if "default" in one]
        for name in always:
            del properties[name]["default"]
        schema["required"] = [n for n in properties if n in (*schema.get("required", ()), *always)]
        schema.pop("description", None)
    return found


# --- operations -----------------------------------------------------------------------------------


_NEVER = (ClientGone, MethodNotAllowed)
"""Of what no client of an operation is told."""


def body(schema: Schema) -> Schema:
    """A request's body, which must be there."""
    return {"required": True, "content": {JSON: {"schema": schema}}}


def answer(schema: Schema | None, event: Schema | None = None) -> Schema:
    """The answer of an operation: whole, streamed as events whose data is ``event``, or either."""
    content = {} if schema is None else {JSON: {"schema": schema}}
    if event is not None:
        content[EVENTS] = {"schema": record({"data": event}, "data")}
    return {"description": "The answer.", "content": content}


def data(schema: Schema, *others: str) -> Schema:
    """The data of an event: JSON, or one of the ``others`` as it stands."""
    told = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    return {"anyOf": [*({"const": other} for other in others), told]} if others else told


def refusals(statuses: Iterable[tuple[type[GatewayError], int]], schema: Schema) -> Schema:
    """The responses that tell of errors; each status says what may have gone wrong."""
    meanings: dict[int, list[str]] = {}
    for kind, status in statuses:
        if kind not in _NEVER:
            sentence = (inspect.getdoc(kind) or "").partition(".")[0]
            meanings.setdefault(status, []).append(f"{sentence}.")
    return {
        str(status): {
            "description": " ".join(meanings[status]),
            "content": {JSON: {"schema": schema}},
        }
        for status in sorted(meanings)
    }
