"""Decodes requests as a client sends them, without a socket."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.tgi import TGI
from tests.support.path_routers import get_path_router

MakeCall = Callable[..., ClientRequest]


@pytest.fixture
def make() -> MakeCall:
    """Resolve the path like the server; ``body`` is a JSON value or bytes."""

    def call(path: str, body: Any = b"", *, method: str = "POST") -> ClientRequest:
        match = get_path_router(TGI()).find_endpoint(method, path)
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return ClientRequest(match.endpoint, match.params, {}, "", raw, path)

    return call


@pytest.fixture
def response_context() -> ResponseContext:
    return ResponseContext("r1", 1716825108, "m", "1", "w", lambda: 0.0)
