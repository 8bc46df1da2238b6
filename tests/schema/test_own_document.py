"""``/openapi.json``: it is an OpenAPI document, and the gateway does as it says."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import CONFORMANCE, Running, Serve
from tests.schema.survey import survey

EXAMPLES = 100
ANSWERED = 0.5
"""The least share of answers to the requests drawn: a survey of refusals shows nothing."""

ROOTS = [
    "/v1/",
    "/reject/v1/completions",
    "/serving-endpoints/",
    "/api/2.0/",
    "/v2/models/{model}/generate",
]

ACCEPTED = {
    ("/v2/models/{model}/generate", "not_a_server_error"): (
        "what its JSON layer refuses is the original's own 500; `status: sane` makes it 400"
    ),
}
"""Findings that are none, by root and check."""


async def told(gateway: Running) -> dict[str, Any]:
    response = await gateway.http.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def below(document: dict[str, Any], root: str) -> dict[str, Any]:
    """The part of the document below a root, its models named and its answers closed.

    The document names no model, and lets an answer grow; here an unknown key in one is a fault.
    Every other request is to be streamed, where it may be.
    """
    paths = {path: item for path, item in document["paths"].items() if path.startswith(root)}
    for item in paths.values():
        for parameter in item.pop("parameters", []):
            parameter["schema"] = {"enum": ["mock"]}
            item.setdefault("parameters", []).append(parameter)
        for operation in (one for name, one in item.items() if name != "parameters"):
            if body := operation.get("requestBody"):
                media = body["content"]["application/json"]
                media["schema"] = {"anyOf": [*_bodies(media["schema"])]}
            _close(operation["responses"])
    _close(document["components"])
    return {**document, "paths": paths}


def _bodies(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for body in schema.get("anyOf", [schema]):
        properties = body["properties"]
        if "model" in properties:
            properties["model"] = {"const": "mock"}
        yield body
        if "stream" in properties:
            asked = {**properties, "stream": {"const": True}}
            yield {**body, "properties": asked, "required": [*body["required"], "stream"]}


def _close(node: Any) -> None:
    """An event, which is nothing but ``data`` in the document, has other lines that are no keys."""
    match node:
        case {"type": "object", "properties": dict(properties)}:
            node["additionalProperties"] = "data" in properties and len(properties) == 1
            _close(list(properties.values()))
        case dict():
            _close(list(node.values()))
        case list():
            for inner in node:
                _close(inner)
        case _:
            pass


async def test_it_is_told_to_anybody(serve: Serve) -> None:
    gateway = await serve(CONFORMANCE)

    document = await told(gateway)

    assert document["openapi"] == "3.1.0"
    assert document["paths"]["/v1/chat/completions"]["post"]["security"] == [{"key": []}]
    assert (await gateway.http.get("/v1/models")).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS)
async def test_the_gateway_does_as_it_says(mock: Running, root: str) -> None:
    document = below(await told(mock), root)

    found = await survey(document, mock.url, examples=EXAMPLES)

    faults = [one for one in found.findings if (root, one.check) not in ACCEPTED]
    assert faults == []
    for operation in found.statuses:
        assert found.accepted(operation) > ANSWERED, (operation, found.statuses)
    assert not [record for record in mock.records if record.outcome == "gateway_error"]
