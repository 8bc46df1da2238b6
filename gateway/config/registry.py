"""What the configuration must know of protocols and backends.

This is the only module of the configuration that runs their code: it creates the adapters of
protocols and compiles chat templates. Each protocol is imported when the configuration names it.
"""

import functools
import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from protocols.core.interfaces import ClientAdapter, get_request_kinds

_RESERVED_PARAMS = frozenset({"self", "profile", "prefix", "renderer", "fields"})
"""Parameters of adapters that are not options, since the configuration has keys for them."""

_TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}

_CACHE_SIZE = 256


EndpointKey = tuple[str, str]
"""An endpoint's method and path, with ``{}`` for every path parameter."""


class EndpointIndex:
    """Finds the endpoints that match requests which a given endpoint matches, too.

    The keys are in a tree by method and segments, so that a search reads only those that resemble
    the given one, however many there are.
    """

    def __init__(self) -> None:
        self._root: dict[str, Any] = {}

    def add(self, key: EndpointKey, owner: str = "") -> None:
        """Add an endpoint. If it is known, the first owner stays."""
        node = self._root
        for step in _split_key(key):
            node = node.setdefault(step, {})
        node.setdefault(_OWNER, (key, owner))

    def find_shared(self, key: EndpointKey) -> tuple[EndpointKey, str] | None:
        """The first endpoint, in their order, that shares requests with ``key``, and its owner."""
        nodes = [self._root]
        for step in _split_key(key):
            nodes = [child for node in nodes for child in _find_children(node, step)]
        return min((node[_OWNER] for node in nodes if _OWNER in node), default=None)


_OWNER = "/"
"""The entry of an endpoint's owner in its node: no segment contains a slash."""


def _split_key(key: EndpointKey) -> Iterator[str]:
    method, path = key
    yield method
    yield from path.split("/")


def _find_children(node: Mapping[str, Any], step: str) -> Iterator[Any]:
    """The children for segments that ``step`` matches, or that match it; ``{}`` is any text."""
    if step == "{}":
        yield from (child for name, child in node.items() if name not in ("", _OWNER))
    else:
        if step in node:
            yield node[step]
        if step and "{}" in node:
            yield node["{}"]


def load_symbol(reference: str) -> Any:
    """Import the object named ``module:name``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


class ProtocolRegistry:
    """The registered protocols, as ``module:class`` by name."""

    def __init__(self, registry: Mapping[str, str]) -> None:
        self.names = tuple(registry)
        self._references = registry

    def load_adapter_class(self, name: str) -> type:
        """The class of a registered protocol."""
        adapter_class: type = load_symbol(self._references[name])
        return adapter_class

    def get_profiles(self, name: str) -> tuple[str, ...]:
        """A protocol's profiles, the default one first."""
        profiles: tuple[str, ...] = self.load_adapter_class(name).profiles  # type: ignore[attr-defined]
        return profiles

    def serves_clients(self, name: str) -> bool:
        """Whether a listener can serve it."""
        return hasattr(self.load_adapter_class(name), "read_routing_info")

    def serves_workers(self, name: str) -> bool:
        """Whether a pool's workers can speak it."""
        return hasattr(self.load_adapter_class(name), "read_error")

    def has_version_header(self, name: str) -> bool:
        """Whether its clients send a header of their own, so that it may share paths."""
        return hasattr(self.load_adapter_class(name), "version_header")

    def accepts_param(self, name: str, parameter: str) -> bool:
        """Whether the constructor of its adapter has this parameter."""
        return parameter in inspect.signature(self.load_adapter_class(name)).parameters

    def get_options(self, name: str) -> Mapping[str, Any]:
        """The types of a protocol's own options, by name: the other parameters of its adapter."""
        return _list_options(self.load_adapter_class(name))

    def get_model_options(self, name: str) -> Mapping[str, Any] | None:
        """The types of a protocol's model options, by name; None if it does not declare them."""
        return getattr(self.load_adapter_class(name), "model_options", None)

    def endpoints(
        self, name: str, profile: str | None, options: Mapping[str, Any]
    ) -> frozenset[EndpointKey]:
        """The method and path of each of its endpoints, with {} for every path parameter.

        Raises ValueError for options that the adapter rejects.
        """
        adapter_class = self.load_adapter_class(name)
        return _list_endpoints(adapter_class, profile, frozenset(options.items()))

    def get_path_prefixes(self, name: str, profile: str | None) -> tuple[str, ...]:
        """The paths that the protocol adds to a worker's URL."""
        return _get_path_prefixes(self.load_adapter_class(name), profile)

    def get_request_kinds(self, name: str, profile: str | None) -> frozenset[str]:
        """The kinds of requests that workers of the protocol answer."""
        return _get_request_kinds(self.load_adapter_class(name), profile)

    def create_adapter(
        self, name: str, profile: str | None, options: Mapping[str, Any]
    ) -> ClientAdapter:
        """Create the adapter of a protocol."""
        adapter: ClientAdapter = self.load_adapter_class(name)(profile, **options)
        return adapter


# What the checks read of an adapter depends on its class and options alone, and a file may name the
# same protocol many times.


@functools.cache
def _list_options(adapter_class: type) -> Mapping[str, Any]:
    init = adapter_class.__init__  # type: ignore[misc]
    hints = typing.get_type_hints(init)
    return {
        parameter.name: hints.get(parameter.name, Any)
        for parameter in inspect.signature(init).parameters.values()
        if parameter.name not in _RESERVED_PARAMS and parameter.kind is not parameter.VAR_KEYWORD
    }


@functools.lru_cache(_CACHE_SIZE)
def _list_endpoints(
    adapter_class: type, profile: str | None, options: frozenset[tuple[str, Any]]
) -> frozenset[EndpointKey]:
    keys = set()
    for endpoint in adapter_class(profile, **dict(options)).endpoints:
        steps = endpoint.path.split("/")
        path = "/".join("{}" if step.startswith("{") else step for step in steps)
        keys.add((endpoint.method, path))
    return frozenset(keys)


@functools.lru_cache(_CACHE_SIZE)
def _get_path_prefixes(adapter_class: type, profile: str | None) -> tuple[str, ...]:
    return tuple(adapter_class(profile).path_prefixes)


@functools.lru_cache(_CACHE_SIZE)
def _get_request_kinds(adapter_class: type, profile: str | None) -> frozenset[str]:
    return frozenset(get_request_kinds(adapter_class(profile)))


def find_template_error(path: str) -> str | None:
    """Why a chat template can't be compiled; None if it can."""
    from backends.chat_template import ChatTemplate  # noqa: PLC0415 - importing Jinja takes time

    try:
        ChatTemplate(path)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def describe_type_mismatch(value: Any, expected: Any) -> str | None:
    """Why the value of a protocol's option has the wrong type; None if it has the right one."""
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError:
        kinds = (expected,) if expected in _TYPE_NAMES else typing.get_args(expected)
        names = [_TYPE_NAMES.get(kind, str(kind)) for kind in kinds if kind is not type(None)]
        return f"must be {' or '.join(names)}"
    return None
