"""Routers of one adapter each, shared by tests: building one takes longer than using it."""

from collections.abc import Hashable
from typing import Final

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.interfaces import ClientAdapter

_routers: Final[dict[Hashable, PathRouter]] = {}


def get_path_router(adapter: ClientAdapter) -> PathRouter:
    """The paths of this adapter alone. Adapters of a class with equal endpoints share the router.

    So the mount of a match may have another adapter of the class.
    """
    key = (type(adapter), tuple(adapter.endpoints))
    if key not in _routers:
        _routers[key] = PathRouter([AdapterMount(adapter)])
    return _routers[key]
