"""Finds the protocol and the endpoint of a request's path.

Paths are matched as they were sent, still percent-encoded, so that a model's name may have an
encoded slash; an endpoint whose path ends with the name takes plain ones, too. The values of path
parameters (``{name}``) are decoded.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.registry import EndpointIndex
from protocols.core.errors import MethodNotAllowed, PathNotFound
from protocols.core.interfaces import ClientAdapter, Endpoint, HasVersionHeader

_PATH_PARAM = re.compile(r"\{(\w+)\}")
_EMPTY: Mapping[str, Any] = MappingProxyType({})


class AdapterMount(Struct, frozen=True):
    """A protocol on a listener, below ``prefix`` ("" or "/name")."""

    adapter: ClientAdapter
    prefix: str = ""


class EndpointMatch(Struct, frozen=True):
    """The endpoint of a path, and the path's decoded parameters.

    ``alternatives`` are the endpoints of further protocols of the listener at the same path.
    """

    mount: AdapterMount
    endpoint: Endpoint
    params: Mapping[str, str]
    alternatives: tuple["EndpointMatch", ...] = ()

    def select_protocol(self, names: Iterable[str]) -> "EndpointMatch":
        """This match or the alternative whose protocol is named first; this one if none is."""
        by_name = {one.mount.adapter.name: one for one in (*self.alternatives, self)}
        return next((by_name[name] for name in names if name in by_name), self)

    def list_header_protocols(self, headers: Mapping[str, str]) -> Iterator[str]:
        """The protocols of this path whose version header is among ``headers``."""
        for one in (self, *self.alternatives):
            if has_version_header(one.mount, headers):
                yield one.mount.adapter.name

    def list_default_protocols(self) -> Iterator[str]:
        """The protocols of this path whose clients send no version header."""
        for one in (self, *self.alternatives):
            if not isinstance(one.mount.adapter, HasVersionHeader):
                yield one.mount.adapter.name


def has_version_header(mount: AdapterMount, headers: Mapping[str, str]) -> bool:
    """Whether ``headers`` include the version header of the mount's protocol."""
    adapter = mount.adapter
    return isinstance(adapter, HasVersionHeader) and adapter.version_header in headers


class PathRouter:
    """The paths of a listener's protocols. If two have the same path, the first one gets it."""

    def __init__(self, mounts: Sequence[AdapterMount]) -> None:
        self.mounts = mounts
        self._tables = [_AdapterPaths(mount) for mount in mounts]
        self._static_matches: dict[tuple[str, str], EndpointMatch] = {}
        """The matches of the paths without parameters that were asked for."""

    @cached_property
    def _has_shared_paths(self) -> bool:
        return _has_shared_paths(self.mounts)

    def find_endpoint(self, method: str, path: str) -> EndpointMatch:
        """The endpoint of a path. Raises PathNotFound or MethodNotAllowed."""
        key = (method, path)
        if key in self._static_matches:
            return self._static_matches[key]
        match = self._search_tables(method, path)
        if not match.params:
            self._static_matches[key] = match
        return match

    def _search_tables(self, method: str, path: str) -> EndpointMatch:
        matches: list[EndpointMatch] = []
        for table in self._tables:
            methods, params = table.match_path(path)
            if method in methods:
                matches.append(EndpointMatch(table.mount, methods[method], params))
                if not self._has_shared_paths:
                    break
        if not matches:
            raise self._build_error(method, path)
        first, *alternatives = matches
        return replace(first, alternatives=tuple(alternatives)) if alternatives else first

    def _build_error(self, method: str, path: str) -> MethodNotAllowed | PathNotFound:
        """The error for a path without such an endpoint."""
        allowed = {name for table in self._tables for name in table.match_path(path)[0]}
        if allowed:
            return MethodNotAllowed(
                f"{method} is not a method of this path", allowed=tuple(sorted(allowed)), path=path
            )
        return PathNotFound(f"no endpoint is called {path[:200]!r}", method=method, path=path)

    def find_owner(self, path: str, headers: Mapping[str, str] = _EMPTY) -> AdapterMount:
        """The mount whose protocol writes the error for a path without an endpoint.

        A mount whose version header is among ``headers`` owns all paths below its prefix.
        """
        owners = [
            (len(mount.prefix + root), mount)
            for mount in self.mounts
            for root in mount.adapter.path_prefixes
            if path.startswith(mount.prefix + root)
        ]
        named = [
            (len(mount.prefix), mount)
            for mount in self.mounts
            if path.startswith(f"{mount.prefix}/") and has_version_header(mount, headers)
        ]
        owners = named or owners
        return max(owners, key=lambda owner: owner[0])[1] if owners else self.mounts[0]

    def has_page(self, path: str) -> bool:
        """Whether a protocol answers GET of this path."""
        return any("GET" in table.match_path(path)[0] for table in self._tables)


class _PathPattern(Struct, frozen=True):
    """A path with parameters: their names, their groups in the regex, and its endpoints."""

    names: Sequence[str]
    groups: slice
    methods: Mapping[str, Endpoint]


class _AdapterPaths:
    """The paths of one mounted protocol."""

    def __init__(self, mount: AdapterMount) -> None:
        self.mount = mount
        self.static: dict[str, dict[str, Endpoint]] = {}
        """The paths without parameters: their endpoints by method."""
        endpoints_by_path: dict[tuple[str, bool], dict[str, Endpoint]] = {}
        for endpoint in mount.adapter.endpoints:
            path = mount.prefix + endpoint.path
            if "{" in path:
                endpoints_by_path.setdefault((path, endpoint.strict_slash), {})[endpoint.method] = (
                    endpoint
                )
            else:
                self._add_path(path, endpoint)
        self._patterns: dict[int | None, _PathPattern] = {}
        """The paths with parameters, by the number of their last group in the common regex."""
        patterns, groups = list[str](), 0
        for (path, exact), methods in sorted(endpoints_by_path.items(), key=_takes_slashes):
            pieces = _PATH_PARAM.split(path)
            pattern = "([^/]+)".join(map(re.escape, pieces[::2]))
            if _takes_slashes((path, methods)):
                pattern = pattern.removesuffix("([^/]+)") + "(.+?)"
            patterns.append(pattern + ("" if exact else "/?"))
            names = pieces[1::2]
            group_slice = slice(groups, groups + len(names))
            groups = group_slice.stop
            self._patterns[groups] = _PathPattern(names, group_slice, methods)
        self._regex = re.compile("|".join(patterns) or "(?!)")

    def match_path(self, path: str) -> tuple[Mapping[str, Endpoint], Mapping[str, str]]:
        """The endpoints of a path by method, and the path's parameters; both may be empty."""
        if path in self.static:
            return self.static[path], _EMPTY
        match = self._regex.fullmatch(path)
        if match is None:
            return _EMPTY, _EMPTY
        pattern = self._patterns[match.lastindex]
        values = match.groups()[pattern.groups]
        texts = map(unquote, values) if "%" in path else values
        return pattern.methods, dict(zip(pattern.names, texts, strict=True))

    def _add_path(self, path: str, endpoint: Endpoint) -> None:
        self.static.setdefault(path, {})[endpoint.method] = endpoint
        if not endpoint.strict_slash and path != "/":
            other_path = path.removesuffix("/") if path.endswith("/") else f"{path}/"
            self.static.setdefault(other_path, {})[endpoint.method] = endpoint


def _takes_slashes(item: tuple[Any, Mapping[str, Endpoint]]) -> bool:
    """Whether the endpoints of a path take slashes in its last parameter: they are tried last."""
    return all(endpoint.takes_slashes for endpoint in item[1].values())


def _has_shared_paths(mounts: Sequence[AdapterMount]) -> bool:
    """Whether a request may match endpoints of several mounts."""
    index = EndpointIndex()
    for mount in mounts:
        keys = [
            (one.method, mount.prefix + _PATH_PARAM.sub("{}", one.path))
            for one in mount.adapter.endpoints
        ]
        if any(map(index.find_shared, keys)):
            return True
        for key in keys:
            index.add(key)
    return False
