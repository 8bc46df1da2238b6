"""JSON Schemas of requests and responses: of parameter tables, type notation, structs and errors.

An adapter combines these for ``protocols.core.interfaces.OpenApiProvider``::

    types = parse_types("Message = {role: "user" | "assistant", content: string | null}")
    body = object_of({"messages": array_of(types["Message"]), **build_properties(TABLE)})
    errors = build_error_responses(STATUSES, ref("Error"))
    operation = build_operation("…", build_response(ref("Response")), errors, request=body)
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.core.errors import ClientDisconnected, GatewayError, MethodNotAllowed
from protocols.params import Param, ParamType

Schema = dict[str, Any]

JSON_CONTENT_TYPE = "application/json"
SSE_CONTENT_TYPE = "text/event-stream"
NDJSON_CONTENT_TYPE = "application/x-ndjson"

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
    schema = _TYPE_SCHEMAS[param.type](param)
    if param.disabled_values:
        schema = {"anyOf": [schema, {"enum": list(param.disabled_values)}]}
    if param.nullable:
        schema = nullable(schema)
    if param.default is not None:
        schema["default"] = param.default
    if param.description:
        schema["description"] = param.description
    return schema


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


def array_of(items: Schema, **limits: int | None) -> Schema:
    """A list; ``limits`` are JSON Schema's ``minItems`` and ``maxItems``, None for no limit."""
    known = {name: limit for name, limit in limits.items() if limit is not None}
    return {"type": "array", "items": items, **known}


def map_of(values: Schema, **limits: Any) -> Schema:
    """An object with any names; ``limits`` are JSON Schema's."""
    return {"type": "object", "additionalProperties": values, **limits}


def object_of(properties: Mapping[str, Schema], *required: str, more: bool = True) -> Schema:
    """An object; ``more`` allows further properties."""
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    if not more:
        schema["additionalProperties"] = False
    return schema


def ref(name: str) -> Schema:
    """A reference to a component of the same adapter."""
    return {"$ref": f"#/components/schemas/{name}"}


# --- type notation --------------------------------------------------------------------------------

_TOKENS: Final = re.compile(r'"[^"]*"|\w+|\.\.\.|\[[\d.]*\]|[^\s,:=]')
_BASIC_TYPES: Final[Mapping[str, Schema]] = {
    "any": {},
    "boolean": BOOLEAN,
    "integer": INTEGER,
    "null": NULL,
    "number": NUMBER,
    "object": {"type": "object"},
    "string": STRING,
}


def parse_types(text: str, **types: Schema) -> dict[str, Schema]:
    """The schemas of type declarations, by name, in TypeScript's notation.

    Example::

        Head = {id: string, created: integer}
        Item = {...Head, role: "user" | "tool", tags?: string[], text: string | null}
        List = Item[1..20]

    ``?`` marks properties that may be missing; ``[1..20]`` limits the number of items. A name
    stands for an earlier declaration, for one of ``types``, or else for a component of the adapter.
    """
    reader = _TypeReader(text, types)
    return dict(reader.read_declarations())


def parse_type(text: str, **types: Schema) -> Schema:
    """The schema of one type; see ``parse_types``."""
    return parse_types(f"Type = {text}", **types)["Type"]


class _TypeReader:
    """Reads declarations, token by token."""

    def __init__(self, text: str, types: Mapping[str, Schema]) -> None:
        self._tokens: list[str] = [*_TOKENS.findall(text), ""]
        self._position = 0
        self._types = {**_BASIC_TYPES, **types}

    def read_declarations(self) -> Iterator[tuple[str, Schema]]:
        while name := self._take():
            self._types[name] = self._read_union()
            yield name, self._types[name]

    def _take(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1]

    def _skip(self, token: str) -> bool:
        """Skip the next token if it is this one."""
        matches = self._tokens[self._position] == token
        self._position += matches
        return matches

    def _read_union(self) -> Schema:
        """Read alternatives; all literals become one."""
        types = [self._read_type()]
        while self._skip("|"):
            types.append(self._read_type())
        literals = [schema["const"] for schema in types if "const" in schema]
        if literals and len(types) > 1:
            types = [enum_of(*literals), *(schema for schema in types if "const" not in schema)]
        return {"anyOf": types} if len(types) > 1 else types[0]

    def _read_type(self) -> Schema:
        if self._skip("{"):
            schema = self._read_object()
        elif self._skip("("):
            schema = self._read_union()
            self._skip(")")
        else:
            name = self._take()
            literal = {"const": name.strip('"')}
            schema = literal if name.startswith('"') else self._types.get(name, ref(name))
        while self._tokens[self._position].startswith("["):
            minimum, _, maximum = self._take().strip("[]").partition("..")
            limits = {"minItems": minimum, "maxItems": maximum}
            schema = array_of(schema, **{key: int(limit) for key, limit in limits.items() if limit})
        return schema

    def _read_object(self) -> Schema:
        """Read the properties of an object, whose opening brace is read."""
        properties: dict[str, Schema] = {}
        required: list[str] = []
        while not self._skip("}"):
            if self._skip("..."):
                base = self._types[self._take()]
                properties |= base["properties"]
                required += base.get("required", ())
            else:
                name = self._take()
                if not self._skip("?"):
                    required.append(name)
                properties[name] = self._read_union()
        return object_of(properties, *dict.fromkeys(required))


# --- structs --------------------------------------------------------------------------------------


def build_struct_schemas(*types: type[Struct]) -> dict[str, Schema]:
    """Schemas of wire structs and of the structs within them, by class name.

    A field with a default is always written and therefore required; one that may be unset is not.
    """
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        properties = schema.get("properties", {})
        required = {*schema.get("required", ())}
        for name, value in properties.items():
            if "default" in value:
                del value["default"]
                required.add(name)
        schema["required"] = [name for name in properties if name in required]
        schema.pop("description", None)
    return schemas


# --- operations -----------------------------------------------------------------------------------


_UNLISTED_ERRORS = (ClientDisconnected, MethodNotAllowed)
"""Errors that no client of an operation receives."""


def build_request_body(schema: Schema) -> Schema:
    """A required request body."""
    return {"required": True, "content": {JSON_CONTENT_TYPE: {"schema": schema}}}


CONDITION_RESPONSE: Final[Schema] = {"description": "The condition holds."}
"""The response, without a body, of an operation that checks a condition."""


def build_response(
    schema: Schema | None, event: Schema | None = None, *, line: Schema | None = None
) -> Schema:
    """A response: unary, a stream of events with data ``event`` or of JSON lines, or both."""
    content = {} if schema is None else {JSON_CONTENT_TYPE: {"schema": schema}}
    if event is not None:
        content[SSE_CONTENT_TYPE] = {"schema": object_of({"data": event}, "data")}
    if line is not None:
        content[NDJSON_CONTENT_TYPE] = {"schema": line}
    return {"description": "The response.", "content": content}


def build_event_data(schema: Schema, *literals: str) -> Schema:
    """The data of an event: JSON, or one of the literal texts."""
    data = {"type": "string", "contentMediaType": JSON_CONTENT_TYPE, "contentSchema": schema}
    return {"anyOf": [*({"const": text} for text in literals), data]} if literals else data


def build_operation(
    summary: str, response: Schema, errors: Mapping[str, Schema], *, request: Schema | None = None
) -> Schema:
    """An operation with its response, its error responses and the schema of its request body."""
    body = {} if request is None else {"requestBody": build_request_body(request)}
    return {"summary": summary, **body, "responses": {"200": response, **errors}}


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
