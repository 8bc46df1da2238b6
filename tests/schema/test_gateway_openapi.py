"""``/openapi.json`` is a valid OpenAPI document, and the gateway conforms to it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import CONFORMANCE, RunningGateway, Serve
from tests.schema.schemathesis_run import run_schemathesis

pytestmark = pytest.mark.timeout(600)  # roots have many operations, each with examples of its own
EXAMPLES = 100
ANSWERED = 0.5
"""The minimum share of successful responses: a run with only errors shows nothing."""

LATE = "DeadlineExceeded"
"""The result of a request with a deadline of a microsecond."""

SMALL = (
    "/.well-known/",
    "/v2/health/",
    "/v2/models/{model}/config",
    "/v2/models/{model}/ready",
    "/v2/models/{model}/versions/{version}/config",
    "/kserve/v2",
    "/mindie/info",
    "/api/show",
    "/api/tags",
    "/tgi/info",
)
"""Roots of few operations: one run of all costs little more than one of each."""

ROOTS: list[str | tuple[str, ...]] = [
    SMALL,
    "/v1/",
    "/reject/v1/completions",
    "/serving-endpoints/",
    "/api/2.0/",
    "/v2/models/{model}/generate",
    "/v2/models/{model}/infer",
    "/v3/",
    "/mindie/v1/",
    "/mindie/v2",
    "/rc1/",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/tgi/generate",
    "/tgi/v1/",
    "/openai/v1/chat",
    "/openai/v1/responses",
    "/responses",
    "/classify",
]

_JSON_LAYER = "what its JSON layer refuses is the original's own 500; `status: sane` makes it 400"
ACCEPTED = {
    ("/v2/models/{model}/generate", "not_a_server_error"): _JSON_LAYER,
    ("/v2/models/{model}/infer", "not_a_server_error"): _JSON_LAYER,
    ("/v3/", "not_a_server_error"): "a model asked about that is not there is the original's 500",
}
"""Findings that are intended, by root and check."""

NEVER = ("/stopInfer", "/detokenize", "/responses/{response_id}", "/input_items")
"""Paths that can't succeed here.

No request runs that could be stopped, the scripted backend has no tokens, and no response has a
random id.
"""

NAMES = {"owner": "org", "version": "1", "served": "1", "probe": "timed-5"}
"""Values of path parameters beside the model's name, which is ``m1`` after an owner's."""


async def fetch_openapi_document(gateway: RunningGateway) -> dict[str, Any]:
    response = await gateway.http.get("/openapi.json")
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


def select_paths(document: dict[str, Any], root: str | tuple[str, ...]) -> dict[str, Any]:
    """Return the document's part below a root, or several, with fixed models and closed responses.

    The document has no model names and allows further keys in responses; here an unknown key is a
    failure. Every other request is streamed where possible.
    """
    paths = {path: item for path, item in document["paths"].items() if path.startswith(root)}
    for item in paths.values():
        owned = any(one["name"] == "owner" for one in item.get("parameters", []))
        for parameter in item.get("parameters", []):
            name = NAMES.get(parameter["name"], "m1" if owned else "mock")
            parameter["schema"] = {"enum": [name]}
        for operation in (one for name, one in item.items() if name != "parameters"):
            if body := operation.get("requestBody"):
                media = body["content"]["application/json"]
                media["schema"] = {"anyOf": [*list_body_schemas(media["schema"])]}
            forbid_unknown_keys(operation["responses"])
    forbid_unknown_keys(document["components"])
    return {**document, "paths": paths}


def list_body_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for body in schema.get("anyOf", [schema]):
        properties = body["properties"]
        if "model" in properties:
            properties["model"] = {"const": "mock"}
        yield body
        if "stream" in properties:
            streaming = {**properties, "stream": {"const": True}}
            yield {**body, "properties": streaming, "required": [*body["required"], "stream"]}


def forbid_unknown_keys(node: Any) -> None:
    """Disallow further keys, except in events, where other lines are no keys."""
    match node:
        case {"type": "object", "properties": dict(properties)}:
            node["additionalProperties"] = "data" in properties and len(properties) == 1
            forbid_unknown_keys(list(properties.values()))
        case dict():
            forbid_unknown_keys(list(node.values()))
        case list():
            for inner in node:
                forbid_unknown_keys(inner)
        case _:
            pass


async def test_openapi_document_needs_no_api_key(serve: Serve) -> None:
    gateway = await serve(CONFORMANCE)

    document = await fetch_openapi_document(gateway)

    assert document["openapi"] == "3.1.0"
    assert document["paths"]["/v1/chat/completions"]["post"]["security"] == [{"key": []}]
    assert (await gateway.http.get("/v1/models")).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root if isinstance(root, str) else "small")
async def test_gateway_conforms_to_its_openapi_document(
    mock: RunningGateway, root: str | tuple[str, ...]
) -> None:
    document = select_paths(await fetch_openapi_document(mock), root)

    report = await run_schemathesis(document, mock.url, examples=EXAMPLES)

    faults = [one for one in report.findings if (root, one.check) not in ACCEPTED]
    assert faults == []

    for operation in report.statuses:
        answered = operation.endswith(NEVER) or report.accepted(operation) > ANSWERED
        assert answered, (operation, report.statuses)
    failed = [record for record in mock.records if record.outcome == "gateway_error"]
    assert {record.error for record in failed} <= {LATE}
