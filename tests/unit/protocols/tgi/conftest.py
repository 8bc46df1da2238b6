"""Decodes requests as a client sends them, without a socket."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.tgi import TGI

MakeCall = Callable[..., ClientRequest]


@pytest.fixture
def make() -> MakeCall:
    """Resolve the path like the server; ``body`` is a JSON value or bytes."""

    def call(path: str, body: Any = b"", *, method: str = "POST") -> ClientRequest:
        match = PathRouter([AdapterMount(TGI())]).find_endpoint(method, path)
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return ClientRequest(match.endpoint, match.params, {}, "", raw, path)

    return call


@pytest.fixture
def response_context() -> ResponseContext:
    return ResponseContext("r1", 1716825108, "m", "1", "w", lambda: 0.0)
