"""Which dialect and endpoint a path belongs to: the first thing known of a request.

Paths are matched as they were sent, still percent-encoded, so that a model's name may hold an
encoded slash; what a ``{name}`` stood for is handed on decoded.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.errors import MethodNotAllowed, PathNotFound
from gateway.core.ports import Dialect, Endpoint

_PARAM = re.compile(r"\{(\w+)\}")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Mount(Struct, frozen=True):
    """A dialect on a listener, below ``prefix`` ("" or "/name")."""

    dialect: Dialect
    prefix: str = ""


class Found(Struct, frozen=True):
    """The endpoint of a path, and the path's parameters, decoded.

    ``rivals`` are the endpoints that further dialects of the listener have at the same path.
    """

    mount: Mount
    endpoint: Endpoint
    params: Mapping[str, str]
    rivals: tuple["Found", ...] = ()

    def among(self, names: Iterable[str]) -> "Found":
        """Of this and its rivals, that of the dialect which is named first; else this."""
        by_name = {one.mount.dialect.name: one for one in (*self.rivals, self)}
        return next((by_name[name] for name in names if name in by_name), self)


class Paths:
    """The paths of one listener's dialects; of two dialects with one path, the first has it."""

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self.mounts = mounts
        self._tables = [_Table(mount) for mount in mounts]
        claims = [claim for mount in mounts for claim in set(claimed(mount))]
        self._shared = len(claims) > len(set(claims))
        self._found = {
            (method, path): self._search(method, path)
            for table in self._tables
            for path, methods in table.static.items()
            for method in methods
        }
        """Of the paths without a ``{name}``."""

    def find(self, method: str, path: str) -> Found:
        """The endpoint. Raises PathNotFound or MethodNotAllowed."""
        asked = (method, path)
        return self._found[asked] if asked in self._found else self._search(method, path)

    def _search(self, method: str, path: str) -> Found:
        found: list[Found] = []
        allowed: list[str] = []
        for table in self._tables:
            methods, params = table.match(path)
            allowed += methods
            if (endpoint := methods.get(method)) is not None:
                found.append(Found(table.mount, endpoint, params))
                if not self._shared:
                    break
        if found:
            first, *rivals = found
            return replace(first, rivals=tuple(rivals)) if rivals else first
        if allowed:
            raise MethodNotAllowed(
                f"{method} is not a method of this path",
                allowed=tuple(sorted(set(allowed))),
                path=path,
            )
        raise PathNotFound(f"no endpoint is called {path[:200]!r}", method=method, path=path)

    def owner(self, path: str) -> Mount:
        """The mount in whose words to speak of a path that is no endpoint's."""
        owners = [
            (len(mount.prefix + root), mount)
            for mount in self.mounts
            for root in mount.dialect.roots
            if path.startswith(mount.prefix + root)
        ]
        return max(owners, key=lambda owner: owner[0])[1] if owners else self.mounts[0]

    def claims(self, path: str) -> bool:
        """Whether a dialect has this very path."""
        return any(table.match(path)[0] for table in self._tables)


class _Table:
    """The paths of one dialect where it is mounted."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self.static: dict[str, dict[str, Endpoint]] = {}
        """Those without a ``{name}``: their endpoints by method."""
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Endpoint]]] = {}
        for endpoint in mount.dialect.endpoints:
            self._add(mount.prefix + endpoint.path, endpoint)

    def match(self, path: str) -> tuple[Mapping[str, Endpoint], Mapping[str, str]]:
        """The endpoints of a path by method, and the path's parameters; none where it has none."""
        if (methods := self.static.get(path)) is not None:
            return methods, _NOTHING
        for pattern, endpoints in self._patterns.values():
            if match := pattern.fullmatch(path):
                return endpoints, {name: unquote(text) for name, text in match.groupdict().items()}
        return _NOTHING, _NOTHING

    def _add(self, path: str, endpoint: Endpoint) -> None:
        if "{" not in path:
            self.static.setdefault(path, {})[endpoint.method] = endpoint
            if not endpoint.exact and not path.endswith("/"):
                self.static.setdefault(path + "/", {})[endpoint.method] = endpoint
            return
        pattern = "".join(
            f"(?P<{piece}>[^/]+)" if i % 2 else re.escape(piece)
            for i, piece in enumerate(_PARAM.split(path))
        )
        pattern += "" if endpoint.exact else "/?"
        _, methods = self._patterns.setdefault(pattern, (re.compile(pattern), {}))
        methods[endpoint.method] = endpoint


def claimed(mount: Mount) -> Iterator[tuple[str, str]]:
    """Method and path of each endpoint; what stands for a segment is not told apart."""
    for endpoint in mount.dialect.endpoints:
        yield endpoint.method, mount.prefix + _PARAM.sub("{}", endpoint.path)
