"""Decodes requests as a client sends them, without a socket."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.ollama import Ollama
from tests.support.path_routers import get_path_router

MakeCall = Callable[..., ClientRequest]


@pytest.fixture
def make() -> MakeCall:
    """Resolve the path like the server; ``body`` is a JSON value or bytes."""

    def call(path: str, body: Any = b"", *, method: str = "POST") -> ClientRequest:
        match = get_path_router(Ollama()).find_endpoint(method, path)
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return ClientRequest(match.endpoint, match.params, {}, "", raw, path, started_at=7.0)

    return call


class SteppingClock:
    """A clock that advances by a second each time it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def response_context() -> ResponseContext:
    return ResponseContext("r1", 1716825108, "llama3", "1", "llama-3-8b", SteppingClock())
