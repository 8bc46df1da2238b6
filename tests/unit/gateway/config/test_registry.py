"""The registry reads protocols' options and model settings from their adapter classes."""

import sys
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.config.registry import EndpointIndex, describe_type_mismatch
from protocols.core.interfaces import Endpoint


class ClientAdapterWithOptions:
    """Has options of its own and requires a model setting."""

    profiles: ClassVar[tuple[str, ...]] = ("new", "old")
    model_options: ClassVar[dict[str, Any]] = {"price": float, "tier": Literal["a", "b"]}
    path_prefixes = ("/d",)
    endpoints = (Endpoint("POST", "/d/{model}/run"), Endpoint("GET", "/d/{name}/run"))

    def __init__(
        self, profile: str | None = None, *, depth: int | None = None, prefix: str = "/d"
    ) -> None:
        if depth == 13:
            raise ValueError("13 is no depth")
        self.arguments = (profile, depth, prefix)

    def read_routing_info(self) -> None:
        """The method that client adapters have."""


class UpstreamOnlyAdapter:
    """An adapter for workers only."""

    profiles: ClassVar[tuple[str, ...]] = ("only",)
    path_prefixes = ("/m",)

    def __init__(self, profile: str | None = None) -> None:
        self.arguments = profile

    def read_error(self) -> None:
        """The method that upstream adapters have."""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("demanding")
    module.Demanding = ClientAdapterWithOptions  # type: ignore[attr-defined]
    module.Mute = UpstreamOnlyAdapter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "demanding", module)
    names = {
        "openai": "demanding:Demanding",
        "mindie": "demanding:Mute",
        "ovms": "there.is.no.such.module:X",
    }
    monkeypatch.setattr("gateway.config.loader.PROTOCOLS", names)


def collect_issues(mount: str, model: str = "backend: a") -> list[str]:
    text = (
        f'listeners: [{{address: "127.0.0.1:0", protocols: [{mount}]}}]\n'
        f"backends: {{a: {{kind: echo}}}}\nmodels: {{m: {{{model}}}}}\n"
    )
    try:
        load_text(text, "g", env={})
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        ("openai", ""),
        ("{name: openai, depth: 3, profile: old}", ""),
        ("{name: openai, depth: deep}", "must be a whole number"),
        ("{name: openai, depth: 13}", "13 is no depth"),
        ("{name: openai, depth: ~}", "has no value; give it one or remove the key"),
        ("{name: openai, depth: 99999999999999999999}", "must be a number of at most 18 digits"),
        ('{name: openai, depth: "3"}', "must be a whole number"),
        ("{name: openai, dept: 3}", "there is no 'dept' here; did you mean 'depth'?"),
        ("{name: openai, profile: ole}", "'ole' is not a profile of openai; did you mean 'old'?"),
        ("{name: openai, profile: [], depth: x}", "must be a string, not a list"),
        ("ovms", "the protocol ovms can't be used here: No module named 'there'"),
        ("triton", "'triton' is not a protocol; known: openai, mindie, ovms"),
        ("mindie", "mindie is for workers only, and not for clients"),
        ("openai, openai", "GET /d/{}/run belongs to openai on this listener already"),
        ("openai, {name: openai, prefix: /x}", ""),
    ],
)
def test_listener_protocol_options_are_checked_by_the_adapter_class(
    mount: str, message: str
) -> None:
    issues = collect_issues(mount)
    assert len(issues) == bool(message)
    assert message in "".join(issues)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{price: 1.5, tier: a}", ""),
        ("{price: 2}", ""),
        ("{price: cheap}", "must be a number (at models.m.openai.price)"),
        ("{tier: c}", "must be a or b (at models.m.openai.tier)"),
        ("{prise: 1}", "openai has no model option 'prise'; did you mean 'price'?"),
        ("{price: [1]}", "must be a string, a number, true or false, not a list"),
        ("[price]", "must be a mapping, not a list (at models.m.openai)"),
    ],
)
def test_model_options_are_checked_by_the_adapter_class(options: str, message: str) -> None:
    issues = collect_issues("openai", f"backend: a, openai: {options}")
    assert len(issues) == bool(message)
    assert message in "".join(issues)


def test_upstream_only_protocol_is_rejected_for_a_model() -> None:
    assert collect_issues("openai", "backend: a, protocol: openai") == []
    [issue] = collect_issues("openai", "backend: a, protocol: mindie")
    assert "mindie is for workers only, and not for clients" in issue


def test_default_listener_serves_only_client_protocols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"openai": "demanding:Demanding", "mindie": "demanding:Mute"}
    monkeypatch.setattr("gateway.config.loader.PROTOCOLS", names)
    config = load_text("backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n", "g", env={})

    assert [one.name for one in config.listeners[0].protocols] == ["openai"]


def test_pool_accepts_an_upstream_only_protocol() -> None:
    text = (
        'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
        'backends: {a: {protocol: mindie, workers: ["http://w:1"]}}\nmodels: {m: {backend: a}}\n'
    )

    assert load_text(text, "g", env={}).backends["a"].kind == "pool"
    with pytest.raises(ConfigError, match="the protocol mindie adds /m itself"):
        load_text(text.replace("w:1", "w:1/m"), "g", env={})


@pytest.mark.parametrize(
    ("value", "wanted", "message"),
    [
        (True, bool, None),
        ("true", bool, "must be true or false"),
        (None, int | None, None),
        ("x", int | str, None),
        (1.5, int | None, "must be a whole number"),
        (1, Literal["a"], "must be a"),
    ],
)
def test_type_mismatch_is_described(value: object, wanted: Any, message: str | None) -> None:
    assert describe_type_mismatch(value, wanted) == message


SHARED = [
    (("GET", "/a/b"), ("GET", "/a/b"), True),
    (("GET", "/a/b"), ("POST", "/a/b"), False),
    (("GET", "/a/{}"), ("GET", "/a/b"), True),
    (("GET", "/a/b"), ("GET", "/{}/b"), True),
    (("GET", "/{}/c"), ("GET", "/b/{}"), True),
    (("GET", "/{}/c"), ("GET", "/b/d"), False),
    (("GET", "/a/{}"), ("GET", "/a"), False),
    (("GET", "/a/{}"), ("GET", "/a/"), False),
    (("GET", "/a/{}"), ("GET", "/a/b/c"), False),
]


@pytest.mark.parametrize(("one", "other", "shared"), SHARED)
def test_shared_endpoint_is_found_also_behind_path_parameters(
    one: tuple[str, str], other: tuple[str, str], *, shared: bool
) -> None:
    assert find_owner(one, other) == (other if shared else None)
    assert find_owner(other, one) == (one if shared else None)


def find_owner(key: tuple[str, str], claimed: tuple[str, str]) -> tuple[str, str] | None:
    index = EndpointIndex()
    index.add(claimed)
    shared = index.find_shared(key)
    return shared and shared[0]
