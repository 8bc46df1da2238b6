"""Responses that are never streams: what their encoders and decoders share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from protocols.chat.errors import raise_worker_error
from protocols.chat.responses import ResponseStyle, create_header_builder
from protocols.core import sse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Event
from protocols.core.interfaces import Headers, ResponseContext

_BOM: Final = b"\xef\xbb\xbf"


class UnaryEncoder:
    """The part of a ``ResponseEncoder`` that only streams need."""

    content_type: str = "application/json"

    def __init__(
        self, style: ResponseStyle, context: ResponseContext, headers: Headers = ()
    ) -> None:
        self._response_style = style
        self._build_headers = create_header_builder(style, context, headers)

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``; there is nothing to stream."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._response_style.encode_error_event(error)


class UnaryBodyDecoder(ABC):
    """Collects the body of a response; ``read_body`` decodes it."""

    def __init__(self, complaint: Callable[[bytes], None] = raise_worker_error) -> None:
        """``complaint`` raises the error in a body that is no response."""
        self._raise_if_error = complaint
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._body += data
        if len(self._body) > sse.MAX_UNARY_BYTES:
            raise WorkerFailed("The worker's answer is too large.")
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = bytes(self._body).removeprefix(_BOM)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        return self.read_body(body)

    @abstractmethod
    def read_body(self, body: bytes) -> Sequence[Event]:
        """The events of a complete body. Raises WorkerError."""
