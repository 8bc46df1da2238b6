"""The OpenAPI 3.1 document of a listener, merged from its protocols. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.pipeline.feedback import FEEDBACK_PATH
from gateway.routing.paths import AdapterMount
from protocols.core.interfaces import OpenApiProvider

_PATH_PARAM = re.compile(r"\{(\w+)\}")
_SCHEMA_REF = "#/components/schemas/"
_HEALTH_PATH_ITEM = {
    "get": {
        "summary": "Health of the gateway.",
        "responses": {
            "200": {
                "description": "The gateway serves requests.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            "503": {
                "description": "The gateway drains: send requests elsewhere.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
        },
    }
}


_FEEDBACK_ERRORS = {
    "400": "The body is not JSON, or a field is missing or invalid: 'param' names it.",
    "401": "No API key was given, or it is not known.",
    "403": "The API key may not send feedback.",
    "404": "No finished request of this API key has the id, or its usage row was removed.",
    "413": "The body is too large.",
    "429": "Too many judgements.",
    "503": "The gateway is overloaded.",
}
_FEEDBACK_OPERATION = {
    "summary": "Feedback on a response.",
    "description": "Judges a response by its id, or that of its request (header x-request-id). The "
    "same name for the same request replaces the former value.",
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "value"],
                    "oneOf": [{"required": ["request_id"]}, {"required": ["response_id"]}],
                    "properties": {
                        "request_id": {"type": "string", "minLength": 1, "maxLength": 256},
                        "response_id": {"type": "string", "minLength": 1, "maxLength": 256},
                        "name": {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_.-]{0,63}$"},
                        "value": {
                            "anyOf": [
                                {"type": "boolean"},
                                {"type": "number", "minimum": -1e9, "maximum": 1e9},
                                {"type": "string", "minLength": 1, "maxLength": 64},
                            ]
                        },
                        "comment": {"type": "string"},
                    },
                }
            }
        },
    },
    "responses": {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
        for status, text in {"200": "The feedback was accepted.", **_FEEDBACK_ERRORS}.items()
    },
}


def build_document(
    mounts: Sequence[AdapterMount], *, version: str, keyed: bool, feedback: bool = False
) -> bytes:
    """Build the document as JSON. ``x-mount`` of an operation is the position of its mount.

    ``keyed``: non-public endpoints require an API key. ``feedback``: the listener takes feedback.
    Endpoints that their protocol does not
    describe are omitted; if several protocols have a path, the first one has it.
    """
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for number, mount in enumerate(mounts):
        adapter = mount.adapter
        if not isinstance(adapter, OpenApiProvider):
            continue
        fragment = adapter.openapi_fragment()
        namespace = f"{adapter.name}.{number}."
        for endpoint in adapter.endpoints:
            if (operation := fragment.operations.get(endpoint.operation)) is not None:
                names = {"tags": [adapter.name], "x-mount": number}
                operation = {**names, **_prefix_refs(operation, namespace)}
                if keyed and not endpoint.public:
                    operation["security"] = [{"key": []}]
                _add_operation(paths, mount.prefix + endpoint.path, endpoint.method, operation)
        schemas |= {
            namespace + name: _prefix_refs(schema, namespace)
            for name, schema in fragment.schemas.items()
        }
    paths.setdefault("/health", _HEALTH_PATH_ITEM)
    if feedback:
        security: dict[str, Any] = {"security": [{"key": []}]} if keyed else {}
        paths.setdefault(FEEDBACK_PATH, {"post": _FEEDBACK_OPERATION | security})
    components: dict[str, Any] = {"schemas": schemas}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Interlingua", "version": version},
            "paths": paths,
            "components": components,
        }
    )


def _add_operation(
    paths: dict[str, dict[str, Any]], path: str, method: str, operation: Any
) -> None:
    """Add an operation. Paths that differ only in parameter names are merged."""
    shape = _PATH_PARAM.sub("{}", path)
    described_path = next(
        (known_path for known_path in paths if _PATH_PARAM.sub("{}", known_path) == shape), path
    )
    names = _PATH_PARAM.findall(described_path)
    item = paths.setdefault(described_path, _build_parameters(names))
    item.setdefault(method.lower(), operation)


def _build_parameters(names: Iterable[str]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    return {"parameters": parameters} if parameters else {}


def _prefix_refs(node: Any, namespace: str) -> Any:
    """Prefix schema references with ``namespace``, that of a protocol."""
    match node:
        case {"$ref": str(target)}:
            return {"$ref": _SCHEMA_REF + namespace + target.removeprefix(_SCHEMA_REF)}
        case Mapping():
            return {key: _prefix_refs(value, namespace) for key, value in node.items()}
        case list() | tuple():
            return [_prefix_refs(value, namespace) for value in node]
        case _:
            return node
