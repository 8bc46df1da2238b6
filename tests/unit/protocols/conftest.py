"""Helpers of the protocols' tests: a client request and response metadata."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.core.interfaces import ClientRequest, Endpoint, ResponseContext
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]


def endpoint(variant: str) -> Endpoint:
    return next(e for e in OpenAI().endpoints if e.operation == variant)


@pytest.fixture
def make_call() -> MakeCall:
    """Build a client request with a body (an object is encoded) and headers."""

    def make(
        variant: str,
        body: Any = b"",
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> ClientRequest:
        row = endpoint(variant)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return ClientRequest(row, params or {}, headers or {}, "", data, row.path)

    return make


@pytest.fixture
def response_context() -> ResponseContext:
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0, ignore_memory)
    return ResponseContext("r1", 1700000000, "mock", "v1", "mock-8b", context.clock)
