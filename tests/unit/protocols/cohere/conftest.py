"""Decodes requests as a client sends them, and responses as a worker sends them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.cohere.decoder import ChatDecoder
from protocols.cohere.endpoints import Cohere
from protocols.core.events import Event
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import GenerationRequest
from tests.support.path_routers import get_path_router

COHERE = Cohere()
TURNS: list[Any] = [{"role": "user", "content": "hi"}]
MakeCall = Callable[..., ClientRequest]


@pytest.fixture
def make() -> MakeCall:
    """Build a request with these fields beside the smallest conversation; bytes as they are."""

    def call(
        changed: Mapping[str, Any] | bytes = {},
        path: str = "/v2/chat",
        *,
        method: str = "POST",
        query: str = "",
    ) -> ClientRequest:
        match = get_path_router(COHERE).find_endpoint(method, path)
        body = (
            changed
            if isinstance(changed, bytes)
            else msgspec.json.encode({"model": "m", "messages": TURNS, **changed})
        )
        return ClientRequest(match.endpoint, match.params, {}, query, body, path, "7f")

    return call


@pytest.fixture
def response_context() -> ResponseContext:
    context = RequestContext("7f", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)
    return ResponseContext("7f", 1700000000, "m", "v1", "backend-m", context.clock)


def decode_request(call: ClientRequest) -> GenerationRequest:
    request = COHERE.decode_request(call)
    assert isinstance(request, GenerationRequest)
    return request


REQUEST = GenerationRequest(model="m", kind="chat", stream=True, source="another")


def decode_body(body: Any, request: GenerationRequest = REQUEST) -> Sequence[Event]:
    """Return the events of a unary response."""
    decoder = ChatDecoder(request)
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return [*decoder.feed(data), *decoder.close()]


def format_stream(*events: Mapping[str, Any]) -> bytes:
    """Format events as a worker sends them, each with its name."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (str(one["type"]).encode(), msgspec.json.encode(one))
        for one in events
    )


def make_event(kind: str, index: int | None = None, **message: Any) -> dict[str, Any]:
    place = {} if index is None else {"index": index}
    return {"type": kind, **place, "delta": {"message": message}}


def make_end(reason: Any = "COMPLETE", **fields: Any) -> dict[str, Any]:
    return {"type": "message-end", "delta": {"finish_reason": reason, **fields}}


def decode_stream(
    *events: Mapping[str, Any],
    end: bytes = b"data: [DONE]\n\n",
    request: GenerationRequest = REQUEST,
) -> Sequence[Event]:
    """Return the events of a stream."""
    decoder = ChatDecoder(request)
    return [*decoder.feed(format_stream(*events) + end), *decoder.close()]
