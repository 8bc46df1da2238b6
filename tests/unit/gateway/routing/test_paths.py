"""A path selects a protocol and an endpoint before the body is read."""

from typing import Any, cast

import pytest
from msgspec import Struct

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.errors import MethodNotAllowed, PathNotFound
from protocols.core.interfaces import ClientAdapter, Endpoint


class FakeAdapter(Struct):
    """A protocol with only paths."""

    name: str
    path_prefixes: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]


ONE = FakeAdapter(
    "one",
    ("/v1",),
    (
        Endpoint("POST", "/v1/chat"),
        Endpoint("GET", "/v1/models/{model}"),
        Endpoint("GET", "/v1/names/{model}", takes_slashes=True),
        Endpoint("GET", "/v1/names/{model}/ready"),
        Endpoint("GET", "/v1/models/{model}/ready", strict_slash=True),
        Endpoint("GET", "/v1/models/{model}/at/{version}", strict_slash=True),
        Endpoint("POST", "/v1/models/{model}/at/{version}", strict_slash=True),
        Endpoint("GET", "/v1/models/{model}/at/{version}.{kind}"),
    ),
)
TWO = FakeAdapter(
    "two",
    ("/v1/deep", "/v2"),
    (Endpoint("POST", "/v1/chat"), Endpoint("GET", "/v2", strict_slash=True)),
)


ROOT = FakeAdapter("root", ("/v9",), (Endpoint("POST", "/"),))


def make_mount(fake: FakeAdapter, prefix: str = "") -> AdapterMount:
    return AdapterMount(cast("ClientAdapter", cast("Any", fake)), prefix)


class DatedAdapter(FakeAdapter):
    """A protocol whose clients send a version header."""

    version_header: str = "x-dated"


DATED = DatedAdapter(
    "dated", ("/v1/dated",), (Endpoint("GET", "/v1/models/{model}"), Endpoint("POST", "/v1/dated"))
)
PATHS = PathRouter([make_mount(ONE), make_mount(TWO), make_mount(TWO, "/other")])


@pytest.mark.parametrize(
    ("method", "path", "protocol", "params"),
    [
        ("POST", "/v1/chat", "one", {}),
        ("POST", "/v1/chat/", "one", {}),
        ("POST", "/other/v1/chat", "two", {}),
        ("GET", "/v2", "two", {}),
        ("GET", "/v1/models/m", "one", {"model": "m"}),
        ("GET", "/v1/models/m/", "one", {"model": "m"}),
        ("GET", "/v1/models/org%2Fm", "one", {"model": "org/m"}),
        ("GET", "/v1/models/m/ready", "one", {"model": "m"}),
        ("GET", "/v1/names/org/group/m:tag", "one", {"model": "org/group/m:tag"}),
        ("GET", "/v1/names/org%2Fgroup/m%3Atag/", "one", {"model": "org/group/m:tag"}),
        ("GET", "/v1/names/m/ready", "one", {"model": "m"}),
        ("POST", "/v1/models/m/at/1", "one", {"model": "m", "version": "1"}),
        ("GET", "/v1/models/%6d/at/1.x", "one", {"model": "m", "version": "1.x"}),
        ("GET", "/v1/models/m/at/1.x/", "one", {"model": "m", "version": "1", "kind": "x"}),
    ],
)
def test_path_matches_its_endpoint(
    method: str, path: str, protocol: str, params: dict[str, str]
) -> None:
    endpoint = PATHS.find_endpoint(method, path)

    assert endpoint.mount.adapter.name == protocol
    assert endpoint.params == params


@pytest.mark.parametrize(
    "path", ["/", "/v3", "/v2/", "/V1/chat", "/v1/chat/x", "/v1/models/a/b", "/v1/models/m/ready/"]
)
def test_unknown_path_raises_path_not_found(path: str) -> None:
    with pytest.raises(PathNotFound):
        PATHS.find_endpoint("GET", path)


def test_route_of_a_static_path_is_cached() -> None:
    assert PATHS.find_endpoint("POST", "/v1/chat") is PATHS.find_endpoint("POST", "/v1/chat")
    assert [
        one.mount.adapter.name for one in PATHS.find_endpoint("POST", "/v1/chat").alternatives
    ] == ["two"]


def test_wrong_method_error_lists_the_allowed_methods() -> None:
    with pytest.raises(MethodNotAllowed) as e:
        PATHS.find_endpoint("DELETE", "/v1/chat")
    assert (e.value.allowed, e.value.path) == (("POST",), "/v1/chat")
    with pytest.raises(MethodNotAllowed) as e:
        PATHS.find_endpoint("DELETE", "/v1/models/m/at/1")
    assert e.value.allowed == ("GET", "POST")


@pytest.mark.parametrize(
    ("path", "protocol"),
    [("/v1/nope", "one"), ("/v1/deep/x", "two"), ("/v2/x", "two"), ("/nope", "one")],
)
def test_unknown_path_belongs_to_the_longest_prefix(path: str, protocol: str) -> None:
    assert PATHS.find_owner(path).adapter.name == protocol


def test_root_of_a_prefix_has_a_slash_or_none() -> None:
    router = PathRouter([make_mount(ROOT, "/deep")])

    assert router.find_endpoint("POST", "/deep").endpoint is ROOT.endpoints[0]
    assert router.find_endpoint("POST", "/deep/").endpoint is ROOT.endpoints[0]
    with pytest.raises(PathNotFound):
        router.find_endpoint("POST", "/")


PATTERN = FakeAdapter("pattern", ("/v1",), (Endpoint("GET", "/v1/{any}"),))
FIXED = FakeAdapter("fixed", ("/v1",), (Endpoint("GET", "/v1/models"),))


def test_path_that_another_protocols_pattern_matches_is_shared() -> None:
    match = PathRouter([make_mount(PATTERN), make_mount(FIXED)]).find_endpoint("GET", "/v1/models")

    assert match.endpoint is PATTERN.endpoints[0]
    assert [one.endpoint for one in match.alternatives] == [FIXED.endpoints[0]]


@pytest.mark.parametrize(
    ("headers", "named", "protocol"),
    [({}, [], "one"), ({"x-dated": "1"}, ["dated"], "dated"), ({"x-other": "1"}, [], "one")],
)
def test_version_header_selects_its_protocol(
    headers: dict[str, str], named: list[str], protocol: str
) -> None:
    match = PathRouter([make_mount(DATED), make_mount(ONE)]).find_endpoint("GET", "/v1/models/m")

    assert list(match.list_header_protocols(headers)) == named
    assert list(match.list_default_protocols()) == ["one"]

    names = [*named, *match.list_default_protocols()]
    assert match.select_protocol(names).mount.adapter.name == protocol


@pytest.mark.parametrize(
    ("path", "headers", "owner"),
    [
        ("/v1/nope", {}, "one"),
        ("/v1/nope", {"x-dated": "1"}, "dated"),
        ("/v1/dated/x", {}, "dated"),
        ("/nope", {"x-dated": "1"}, "dated"),
        ("/other/nope", {"x-dated": "1"}, "dated"),
    ],
)
def test_unknown_path_with_a_version_header_belongs_to_its_protocol(
    path: str, headers: dict[str, str], owner: str
) -> None:
    paths = PathRouter([make_mount(ONE), make_mount(DATED), make_mount(TWO, "/other")])

    assert paths.find_owner(path, headers).adapter.name == owner
