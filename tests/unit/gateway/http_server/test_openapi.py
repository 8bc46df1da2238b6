"""A listener has one OpenAPI document, merged from those of its protocols."""

import importlib
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from gateway.http_server.openapi import build_document
from gateway.routing.paths import AdapterMount
from protocols import PROTOCOLS
from protocols.core.interfaces import Endpoint, OpenApiFragment, OpenApiProvider

ANSWER = {"responses": {"200": {"description": "."}}}


class FakeAdapter:
    """A protocol with only what the document needs."""

    roots = ("/",)

    def __init__(self, name: str, *endpoints: Endpoint, about: str = "x") -> None:
        self.name = name
        self.endpoints = endpoints
        self._about = about

    def openapi_fragment(self) -> OpenApiFragment:
        operation = {"summary": self._about, "requestBody": {"$ref": "#/components/schemas/Body"}}
        return OpenApiFragment({"ask": operation}, {"Body": {"title": self._about}})


def build_openapi(*mounts: AdapterMount, keyed: bool = False) -> Any:
    return msgspec.json.decode(build_document(mounts, version="1", keyed=keyed))


def make_mount(adapter: Any, prefix: str = "") -> AdapterMount:
    return AdapterMount(adapter, prefix)


def load_adapter_class(name: str) -> Any:
    module, _, attribute = PROTOCOLS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


EVERY = [
    (name, profile)
    for name in sorted(PROTOCOLS)
    if hasattr(load_adapter_class(name), "read_routing_info")
    for profile in load_adapter_class(name).profiles
]
"""The protocols for clients, with each profile."""


def iterate_objects(node: Any) -> Iterator[dict[str, Any]]:
    match node:
        case dict():
            yield node
            for inner in node.values():
                yield from iterate_objects(inner)
        case list():
            for inner in node:
                yield from iterate_objects(inner)
        case _:
            pass


ASK = Endpoint("POST", "/a/{model}", operation="ask")


def test_path_has_its_prefix_and_parameters() -> None:
    document = build_openapi(make_mount(FakeAdapter("one", ASK), "/p"))

    [parameter] = document["paths"]["/p/a/{model}"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("model", "path", True)
    assert document["paths"]["/p/a/{model}"]["post"]["tags"] == ["one"]


def test_endpoint_without_an_operation_is_omitted() -> None:
    document = build_openapi(
        make_mount(FakeAdapter("one", Endpoint("GET", "/b", "inform", "other")))
    )

    assert list(document["paths"]) == ["/health"]


def test_equal_schema_names_of_two_protocols_are_kept_apart() -> None:
    other = Endpoint("POST", "/b", operation="ask")
    document = build_openapi(
        make_mount(FakeAdapter("one", ASK)), make_mount(FakeAdapter("two", other, about="y"))
    )

    assert document["components"]["schemas"] == {
        "one.0.Body": {"title": "x"},
        "two.1.Body": {"title": "y"},
    }

    body = document["paths"]["/b"]["post"]["requestBody"]
    assert body == {"$ref": "#/components/schemas/two.1.Body"}


def test_first_protocol_owns_a_shared_path() -> None:
    same = Endpoint("POST", "/a/{name}", operation="ask")
    endpoint = Endpoint("GET", "/a/{name}", "inform", "ask")
    document = build_openapi(
        make_mount(FakeAdapter("one", ASK)),
        make_mount(FakeAdapter("two", same, endpoint, about="y")),
    )

    item = document["paths"]["/a/{model}"]
    assert (item["post"]["summary"], item["get"]["summary"]) == ("x", "y")
    assert [parameter["name"] for parameter in item["parameters"]] == ["model"]
    assert "/a/{name}" not in document["paths"]


def test_security_scheme_is_declared_if_keys_are_configured() -> None:
    open_ = Endpoint("GET", "/b", "inform", "ask", public=True)
    document = build_openapi(make_mount(FakeAdapter("one", ASK, open_)), keyed=True)

    assert document["paths"]["/a/{model}"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/b"]["get"]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert "securitySchemes" not in build_openapi(make_mount(FakeAdapter("one", ASK)))["components"]


@pytest.mark.parametrize(("name", "profile"), EVERY)
def test_openapi_document_of_every_profile_is_valid(name: str, profile: str) -> None:
    adapter = load_adapter_class(name)(profile)
    document = build_openapi(make_mount(adapter))

    schemas = {f"#/components/schemas/{one}" for one in document["components"]["schemas"]}
    referred = {node["$ref"] for node in iterate_objects(document) if "$ref" in node}
    assert referred <= schemas

    for schema in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    for body in (node for node in iterate_objects(document) if "schema" in node):
        jsonschema_rs.meta.validate(body["schema"])
    variants = {endpoint.operation for endpoint in adapter.endpoints}

    if isinstance(adapter, OpenApiProvider):
        assert adapter.openapi_fragment().operations.keys() <= variants


def test_operation_names_the_position_of_its_protocol_on_the_listener() -> None:
    first = FakeAdapter("one", Endpoint("POST", "/a", operation="ask"))
    second = FakeAdapter("one", Endpoint("POST", "/b", operation="ask"))

    paths = build_openapi(make_mount(first), make_mount(second))["paths"]

    assert (paths["/a"]["post"]["x-mount"], paths["/b"]["post"]["x-mount"]) == (0, 1)
