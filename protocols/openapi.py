"""JSON Schemas of requests and responses, built from parameter tables, structs and errors.

An adapter combines these for ``protocols.core.interfaces.OpenApiProvider``::

    operation = {
        "summary": "…",
        "requestBody": build_request_body(object_of({"prompt": STRING, **build_properties(TABLE)})),
        "responses": {
            "200": build_response(ref("Response")),
            **build_error_responses(STATUSES, ref("Error")),
        },
    }
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from protocols.core.errors import ClientDisconnected, GatewayError, MethodNotAllowed
from protocols.params import Param, ParamType

Schema = dict[str, Any]

JSON_CONTENT_TYPE = "application/json"
SSE_CONTENT_TYPE = "text/event-stream"

STRING: Schema = {"type": "string"}
NONEMPTY_STRING: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}


# --- requests -------------------------------------------------------------------------------------


def build_properties(table: Iterable[Param]) -> dict[str, Schema]:
    """The properties of a table's rows."""
    return {param.wire: build_param_schema(param) for param in table}


def build_param_schema(param: Param) -> Schema:
    """The schema of one parameter."""
    found = _TYPE_SCHEMAS[param.type](param)
    if param.disabled_values:
        found = {"anyOf": [found, {"enum": list(param.disabled_values)}]}
    if param.nullable:
        found = nullable(found)
    if param.default is not None:
        found["default"] = param.default
    if param.description:
        found["description"] = param.description
    return found


def _build_number(kind: str) -> Callable[[Param], Schema]:
    def of(param: Param) -> Schema:
        low = "exclusiveMinimum" if param.exclusive_minimum else "minimum"
        high = "exclusiveMaximum" if param.exclusive_maximum else "maximum"
        limits = {low: param.minimum, high: param.maximum}
        return {"type": kind, **{k: limit for k, limit in limits.items() if limit is not None}}

    return of


def _build_string(param: Param) -> Schema:
    return {"enum": list(param.choices)} if param.choices else dict(STRING)


def _build_array(items: Schema) -> Callable[[Param], Schema]:
    def of(param: Param) -> Schema:
        limits = {"minItems": param.min_items or None, "maxItems": param.max_items}
        return array_of(items, **{k: limit for k, limit in limits.items() if limit is not None})

    return of


def _build_strings(param: Param) -> Schema:
    return {"anyOf": [dict(STRING), _build_array(STRING)(param)]}


_TYPE_SCHEMAS: Mapping[ParamType, Callable[[Param], Schema]] = {
    "int": _build_number("integer"),
    "strict int": _build_number("integer"),
    "float": _build_number("number"),
    "bool": lambda _: dict(BOOLEAN),
    "str": _build_string,
    "strings": _build_strings,
    "string list": _build_array(STRING),
    "ints": _build_array(INTEGER),
}


# --- shapes ---------------------------------------------------------------------------------------


def nullable(schema: Schema) -> Schema:
    """This schema, or null."""
    return {"anyOf": [schema, NULL]}


def enum_of(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def array_of(items: Schema, **limits: int) -> Schema:
    """A list; ``limits`` are JSON Schema's ``minItems`` and ``maxItems``."""
    return {"type": "array", "items": items, **limits}


def map_of(values: Schema, **limits: Any) -> Schema:
    """An object with any names; ``limits`` are JSON Schema's."""
    return {"type": "object", "additionalProperties": values, **limits}


def object_of(properties: Mapping[str, Schema], *required: str, more: bool = True) -> Schema:
    """An object; ``more`` allows further properties."""
    found: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        found["required"] = list(required)
    if not more:
        found["additionalProperties"] = False
    return found


def ref(name: str) -> Schema:
    """A reference to a component of the same adapter."""
    return {"$ref": f"#/components/schemas/{name}"}


def build_struct_schemas(*types: type[Struct]) -> dict[str, Schema]:
    """Schemas of wire structs and of the structs within them, by class name.

    A field with a default is always written and therefore required; one that may be unset is not.
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


_UNLISTED_ERRORS = (ClientDisconnected, MethodNotAllowed)
"""Errors that no client of an operation receives."""


def build_request_body(schema: Schema) -> Schema:
    """A required request body."""
    return {"required": True, "content": {JSON_CONTENT_TYPE: {"schema": schema}}}


def build_response(schema: Schema | None, event: Schema | None = None) -> Schema:
    """A response: unary, a stream of events with data ``event``, or both."""
    content = {} if schema is None else {JSON_CONTENT_TYPE: {"schema": schema}}
    if event is not None:
        content[SSE_CONTENT_TYPE] = {"schema": object_of({"data": event}, "data")}
    return {"description": "The response.", "content": content}


def build_event_data(schema: Schema, *others: str) -> Schema:
    """The data of an event: JSON, or one of the literal texts ``others``."""
    told = {"type": "string", "contentMediaType": JSON_CONTENT_TYPE, "contentSchema": schema}
    return {"anyOf": [*({"const": other} for other in others), told]} if others else told


def build_error_responses(
    statuses: Iterable[tuple[type[GatewayError], int]], schema: Schema
) -> Schema:
    """The error responses by status; the description lists the possible errors."""
    meanings: dict[int, list[str]] = {}
    for kind, status in statuses:
        if kind not in _UNLISTED_ERRORS:
            sentence = (inspect.getdoc(kind) or "").partition(".")[0]
            meanings.setdefault(status, []).append(f"{sentence}.")
    return {
        str(status): {
            "description": " ".join(meanings[status]),
            "content": {JSON_CONTENT_TYPE: {"schema": schema}},
        }
        for status in sorted(meanings)
    }
