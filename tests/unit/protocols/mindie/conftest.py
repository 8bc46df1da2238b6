"""A MindIE server without a socket: requests and responses."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec
import pytest

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import GatewayError
from protocols.core.events import Event
from protocols.core.interfaces import ClientRequest, HttpResponse, ResponseContext, ResponseEncoder
from protocols.core.request import GenerationRequest
from protocols.mindie.endpoints import MindIE
from tests.support.path_routers import get_path_router


class MindIETestBench:
    """One adapter, a clock that a test sets, and fixed ids and times."""

    def __init__(
        self, profile: str | None = None, *, keep_alive: bool = False, **options: Any
    ) -> None:
        self.adapter = MindIE(profile, **options)
        if keep_alive:
            self.adapter.keep_connections()
        self.now = 100.0
        self._paths = get_path_router(self.adapter)

    def call(
        self,
        path: str,
        body: Any = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> ClientRequest:
        """Decode a request; ``body`` is a JSON value or bytes.

        Raises PathNotFound or MethodNotAllowed.
        """
        match = self._paths.find_endpoint(method, path)
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return ClientRequest(
            match.endpoint, match.params, headers or {}, "", raw, path, "r1", 1707275960.0
        )

    def decode(self, path: str, body: Any) -> GenerationRequest:
        return cast("GenerationRequest", self.adapter.decode_request(self.call(path, body)))

    def refused(self, path: str, body: Any) -> tuple[int, str]:
        """Return the status and the text of the error, which must occur."""
        call = self.call(path, body)
        with pytest.raises(GatewayError) as excinfo:  # noqa: PT012 - either may refuse
            self.adapter.read_routing_info(call)
            self.adapter.decode_request(call)
        reply = self.adapter.encode_error(excinfo.value, call)
        error_body = msgspec.json.decode(reply.body)
        assert list(error_body) == ["error", "error_type"]
        assert error_body["error_type"] == "Input Validation Error"
        return reply.status, error_body["error"]

    def encoder(
        self, path: str, body: Any, *, model: str = "llama_65b", name: str | None = None
    ) -> ResponseEncoder:
        headers = {} if name is None else {"req-id": name}
        call = self.call(path, body, headers=headers)
        return self.adapter.create_encoder(
            call, self.adapter.decode_request(call), self.build_response_context(model)
        )

    def build_response_context(self, model: str, *, created: int = 1707275960) -> ResponseContext:
        context = RequestContext("r1", Deadline(self.clock, 60.0), self.clock, ignore_memory)
        return ResponseContext("r1", created, model, "1", "served", context.clock)

    def clock(self) -> float:
        return self.now

    def stream(self, encoder: ResponseEncoder, *events: Event | float) -> bytes:
        """Encode the events, one batch each; a number advances the clock by that many seconds."""
        return b"".join(self.writes(encoder, *events))

    def writes(self, encoder: ResponseEncoder, *events: Event | float) -> Iterator[bytes]:
        for event in events:
            if isinstance(event, float):
                self.now += event
            else:
                yield encoder.encode_events([event])

    def whole(self, encoder: ResponseEncoder, *events: Event) -> HttpResponse:
        fold = ResponseAccumulator()
        fold.add(events)
        return encoder.encode_unary(fold.result())


@pytest.fixture
def bench() -> Callable[..., MindIETestBench]:
    return MindIETestBench
