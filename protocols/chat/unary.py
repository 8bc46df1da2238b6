"""Responses that are never streams: what their encoders and decoders share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from protocols.chat.responses import ResponseStyle, create_header_builder, encode_json
from protocols.chat.worker_errors import raise_worker_error
from protocols.core import sse
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Event, ResponseExtra
from protocols.core.extra import KeyTree, find_unknown_keys, write_extra_fields
from protocols.core.interfaces import Headers, ResponseContext
from protocols.core.json_text import decode_json

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
        self._chunks: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > sse.MAX_UNARY_BYTES:
            raise WorkerFailed("The worker's answer is too large.")
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = b"".join(self._chunks).removeprefix(_BOM)
        self._chunks = []
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        return self.read_body(body)

    @abstractmethod
    def read_body(self, body: bytes) -> Sequence[Event]:
        """The events of a complete body. Raises WorkerError."""


# --- keys that no event represents ----------------------------------------------------------------


def list_unknown_keys(
    answer: Any,
    source: str,
    known: KeyTree,
    items: tuple[KeyTree, Literal["score", "data"]] = ({}, "data"),
) -> Iterator[ResponseExtra]:
    """The keys of an answer, and of the items of its list, that are not in these trees.

    ``items``: the known keys of an item, which has its ``index``, and the scope of its event.
    """
    known_of_item, scope = items
    listed = answer
    if isinstance(answer, dict):
        if unknown := find_unknown_keys(answer, known):
            yield ResponseExtra(source, "response", tuple(unknown.items()))
        listed = [one for key in ("results", "data") for one in answer.get(key) or ()]
    for item in listed:
        if unknown := find_unknown_keys(item, known_of_item):
            yield ResponseExtra(source, scope, tuple(unknown.items()), item["index"])


def keep_identity(body: Any, response: UnaryResponse, source: str) -> None:
    """Set the id and the time of a body of this source to the worker's, if it has the same."""
    for key, value in response.metadata.get_identity(source).items():
        setattr(body, key, value)


def add_extra_keys(body: bytes, response: UnaryResponse, source: str) -> bytes:
    """The body with the worker's keys that have no place in events, if it has this source."""
    own = [one for one in response.extra if one.source == source]
    if not own:
        return body
    fields = decode_json(body)
    listed = fields.get("results") or fields.get("data") or ()
    items = {item["index"]: item for item in listed}
    for one in own:
        target = fields if one.scope == "response" else items.get(one.index)
        if target is not None:  # the client may want the best documents only
            write_extra_fields(target, dict(one.values))
    return encode_json(fields)
