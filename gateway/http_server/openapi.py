"""The OpenAPI 3.1 document of a listener, merged from its protocols. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

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


def build_document(mounts: Sequence[AdapterMount], *, version: str, keyed: bool) -> bytes:
    """Build the document as JSON.

    ``keyed``: non-public endpoints require an API key. Endpoints that their protocol does not
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
                operation = {"tags": [adapter.name], **_prefix_refs(operation, namespace)}
                if keyed and not endpoint.public:
                    operation["security"] = [{"key": []}]
                _add_operation(paths, mount.prefix + endpoint.path, endpoint.method, operation)
        schemas |= {
            namespace + name: _prefix_refs(schema, namespace)
            for name, schema in fragment.schemas.items()
        }
    paths.setdefault("/health", _HEALTH_PATH_ITEM)
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
