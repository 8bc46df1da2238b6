"""Which dialect and endpoint a path belongs to: the first thing known of a request.

Paths are matched as they were sent, still percent-encoded, so that a model's name may hold an
encoded slash; what a ``{name}`` stood for is handed on decoded.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from msgspec import Struct

from gateway.core.errors import MethodNotAllowed, PathNotFound
from gateway.core.ports import Dialect, Endpoint

_PARAM = re.compile(r"\{(\w+)\}")


class Mount(Struct, frozen=True):
    """A dialect on a listener, below ``prefix`` ("" or "/name")."""

    dialect: Dialect
    prefix: str = ""


class Found(Struct, frozen=True):
    """The endpoint of a path, and the path's parameters, decoded."""

    mount: Mount
    endpoint: Endpoint
    params: Mapping[str, str]


class _Path(Struct, frozen=True):
    pattern: re.Pattern[str]
    methods: dict[str, tuple[Mount, Endpoint]]


class Paths:
    """The paths of one listener's dialects; of two dialects with one path, the first has it."""

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self._mounts = mounts
        self._static: dict[str, dict[str, tuple[Mount, Endpoint]]] = {}
        self._patterns: dict[str, _Path] = {}
        for mount in mounts:
            for endpoint in mount.dialect.endpoints:
                self._add(mount, endpoint)

    def find(self, method: str, path: str) -> Found:
        """The endpoint. Raises PathNotFound or MethodNotAllowed."""
        methods = self._static.get(path)
        params: Mapping[str, str] = {}
        if methods is None:
            methods, params = self._match(method, path)
        found = methods.get(method)
        if found is None:
            raise MethodNotAllowed(
                f"{method} is not a method of this path",
                allowed=tuple(sorted(methods)),
                path=path,
            )
        return Found(found[0], found[1], params)

    def owner(self, path: str) -> Mount:
        """The mount in whose words to speak of a path that is no endpoint's."""
        owners = [
            (len(mount.prefix + root), mount)
            for mount in self._mounts
            for root in mount.dialect.roots
            if path.startswith(mount.prefix + root)
        ]
        return max(owners, key=lambda owner: owner[0])[1] if owners else self._mounts[0]

    def claims(self, path: str) -> bool:
        """Whether a dialect has this very path."""
        return path in self._static

    def _add(self, mount: Mount, endpoint: Endpoint) -> None:
        path = mount.prefix + endpoint.path
        whole = (mount, endpoint)
        if "{" not in path:
            self._static.setdefault(path, {}).setdefault(endpoint.method, whole)
            if not endpoint.exact and not path.endswith("/"):
                self._static.setdefault(path + "/", {}).setdefault(endpoint.method, whole)
            return
        pattern = "".join(
            f"(?P<{piece}>[^/]+)" if i % 2 else re.escape(piece)
            for i, piece in enumerate(_PARAM.split(path))
        )
        pattern += "" if endpoint.exact else "/?"
        known = self._patterns.get(pattern)
        if known is None:
            known = self._patterns[pattern] = _Path(re.compile(pattern), {})
        known.methods.setdefault(endpoint.method, whole)

    def _match(
        self, method: str, path: str
    ) -> tuple[dict[str, tuple[Mount, Endpoint]], Mapping[str, str]]:
        for known in self._patterns.values():
            if match := known.pattern.fullmatch(path):
                params = {name: unquote(value) for name, value in match.groupdict().items()}
                return known.methods, params
        raise PathNotFound(f"no endpoint is called {path[:200]!r}", method=method, path=path)
