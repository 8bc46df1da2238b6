"""Decodes requests as a client sends them, without a socket."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.anthropic.endpoints import Anthropic
from protocols.core.interfaces import ClientRequest, ResponseContext
from tests.support.path_routers import get_path_router

MakeCall = Callable[..., ClientRequest]
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture
def make() -> MakeCall:
    """Decode a message request with these fields replaced; bytes are sent unchanged."""

    def call(
        changed: Mapping[str, Any] | bytes = b"",
        path: str = "/v1/messages",
        *,
        method: str = "POST",
        query: str = "",
        **headers: str,
    ) -> ClientRequest:
        match = get_path_router(Anthropic()).find_endpoint(method, path)
        body = changed or {} if not isinstance(changed, bytes) or not changed else changed
        raw = body if isinstance(body, bytes) else msgspec.json.encode({**MESSAGE, **body})
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return ClientRequest(match.endpoint, match.params, sent, query, raw, path, "7f")

    return call


@pytest.fixture
def response_context() -> ResponseContext:
    context = RequestContext("7f", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)
    return ResponseContext("7f", 1700000000, "m", "v1", "backend-m", context.clock)
