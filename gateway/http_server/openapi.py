"""A listener in the words of OpenAPI 3.1, put together from what its dialects tell. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.routing.paths import AdapterMount
from protocols.core.interfaces import Endpoint, OpenApiProvider

_PATH_PARAM = re.compile(r"\{(\w+)\}")
_SCHEMA_REF = "#/components/schemas/"
_HEALTH_PATH_ITEM = {
    "get": {
        "summary": "Tell that the gateway listens.",
        "responses": {
            "200": {
                "description": "It does.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            "503": {
                "description": "It does, but for no longer: requests should go elsewhere.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
        },
    }
}


def build_document(mounts: Sequence[AdapterMount], *, version: str, keyed: bool) -> bytes:
    """The document, as JSON.

    ``keyed``: endpoints want a key, except those that are open. An endpoint of which its dialect
    tells nothing is left out; of several dialects with one path, the first has it.
    """
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for number, mount in enumerate(mounts):
        if not isinstance(mount.adapter, OpenApiProvider):
            continue
        told = mount.adapter.openapi_fragment()
        space = f"{mount.adapter.name}.{number}."
        for endpoint in mount.adapter.endpoints:
            if (operation := told.operations.get(endpoint.operation)) is not None:
                whole = {
                    "tags": [mount.adapter.name],
                    **_build_security(endpoint, keyed=keyed),
                    **operation,
                }
                _add_operation(
                    paths, mount.prefix + endpoint.path, endpoint.method, _prefix_refs(whole, space)
                )
        schemas |= {
            space + name: _prefix_refs(schema, space) for name, schema in told.schemas.items()
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


def _build_security(endpoint: Endpoint, *, keyed: bool) -> dict[str, Any]:
    return {"security": [{"key": []}]} if keyed and not endpoint.public else {}


def _add_operation(
    paths: dict[str, dict[str, Any]], path: str, method: str, operation: Any
) -> None:
    """Two paths that differ only in what their parameters are called are one."""
    shape = _PATH_PARAM.sub("{}", path)
    known = next((one for one in paths if _PATH_PARAM.sub("{}", one) == shape), path)
    item = paths.setdefault(known, _build_parameters(_PATH_PARAM.findall(known)))
    item.setdefault(method.lower(), operation)


def _build_parameters(names: Iterable[str]) -> dict[str, Any]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    return {"parameters": found} if found else {}


def _prefix_refs(node: Any, space: str) -> Any:
    """The same, with its references into ``space``, where the dialect's schemas are."""
    match node:
        case {"$ref": str(target)}:
            return {"$ref": _SCHEMA_REF + space + target.removeprefix(_SCHEMA_REF)}
        case Mapping():
            return {key: _prefix_refs(value, space) for key, value in node.items()}
        case list() | tuple():
            return [_prefix_refs(value, space) for value in node]
        case _:
            return node
