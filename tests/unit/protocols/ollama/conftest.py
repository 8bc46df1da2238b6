"""Calls as a client makes them, without a socket."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.ollama import Ollama

MakeCall = Callable[..., ClientRequest]


@pytest.fixture
def make() -> MakeCall:
    """Resolves the path as the server does; ``body`` is JSON's meaning, or bytes."""

    def call(path: str, body: Any = b"", *, method: str = "POST") -> ClientRequest:
        match = PathRouter([AdapterMount(Ollama())]).find_endpoint(method, path)
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return ClientRequest(match.endpoint, match.params, {}, "", raw, path, started_at=7.0)

    return call


class SteppingClock:
    """A clock that goes on by a second with each look."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def about() -> ResponseContext:
    return ResponseContext("r1", 1716825108, "llama3", "1", "llama-3-8b", SteppingClock())
