"""Decodes requests as a client sends them, without a socket."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.ovms.endpoints import OVMS
from tests.support.path_routers import get_path_router

MakeCall = Callable[..., ClientRequest]


@pytest.fixture
def make() -> MakeCall:
    """Resolve the path like the server; ``body`` is a JSON value or bytes."""

    def call(
        path: str,
        body: Any = b"",
        *,
        method: str = "POST",
        adapter: OVMS | None = None,
        content_type: str | None = "application/json",
    ) -> ClientRequest:
        match = get_path_router(adapter or OVMS(v1=True, kserve=True)).find_endpoint(method, path)
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {} if content_type is None else {"content-type": content_type}
        return ClientRequest(match.endpoint, match.params, headers, "", raw, path)

    return call


@pytest.fixture
def response_context() -> ResponseContext:
    context = RequestContext("r1", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)
    return ResponseContext("r1", 1716825108, "llama3", "1", "llama-3-8b", context.clock)
