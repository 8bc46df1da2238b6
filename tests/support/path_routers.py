"""Adapters and their routers, shared by tests: building one takes longer than using it."""

import functools
from collections.abc import Hashable
from typing import Any, Final

from gateway.routing.paths import AdapterMount, PathRouter
from gateway.runtime.build import build_adapter
from protocols.core.interfaces import ClientAdapter

_routers: Final[dict[Hashable, PathRouter]] = {}


@functools.cache
def get_adapter(name: str) -> Any:
    """The adapter of a protocol in its default profile, without options."""
    return build_adapter(name, None, {})


def get_path_router(adapter: ClientAdapter) -> PathRouter:
    """The paths of this adapter alone. Adapters of a class with equal endpoints share the router.

    So the mount of a match may have another adapter of the class.
    """
    key = (type(adapter), tuple(adapter.endpoints))
    if key not in _routers:
        _routers[key] = PathRouter([AdapterMount(adapter)])
    return _routers[key]
