"""What is read of a worker's response: its head, its body, its errors and its events."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from backends.http.interfaces import WorkerConfig
from backends.interfaces import StreamItem
from backends.pool.attempt_request import ErrorReader
from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.events import (
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    Usage,
)
from protocols.core.interfaces import Headers, PassthroughReader, ResponseDecoder
from protocols.core.response_headers import ResponseHeaders

_BLOCK_SIZE: Final = 1 << 20
"""The pieces of a body are joined to blocks of so many bytes: small ones, which several responses
have between each other, would stay with the process when they are freed."""
_MAX_PIECES: Final = 1000
"""So many pieces are joined whatever their size: one of two bytes takes twenty times as much."""
_EVENTS_WITHOUT_CONTENT: Final = frozenset(
    {StreamStart, ResponseMetadata, ResponseExtra, Timing, Usage}
)
"""Events without content of the response."""


class ResponseDocument:
    """The body of a response, which is a JSON document, as far as it was received."""

    __slots__ = ("_blocks", "_pieces", "_pieces_size", "size")

    def __init__(self) -> None:
        self.size = 0
        self._blocks = list[bytes]()
        self._pieces = list[bytes]()
        self._pieces_size = 0

    def __repr__(self) -> str:
        return f"<ResponseDocument of {self.size} bytes>"

    def add(self, pieces: Sequence[bytes]) -> None:
        """The next pieces."""
        size = sum(map(len, pieces))
        self.size += size
        self._pieces += pieces
        self._pieces_size += size
        if self._pieces_size >= _BLOCK_SIZE or len(self._pieces) >= _MAX_PIECES:
            self._blocks.append(b"".join(self._pieces))
            self._pieces.clear()
            self._pieces_size = 0

    def join(self) -> bytes:
        """All of it, in one block that it keeps."""
        whole = b"".join((*self._blocks, *self._pieces))
        self.clear()
        self._blocks.append(whole)
        return whole

    def take(self) -> bytes:
        """All of it, which it keeps no longer."""
        whole = self.join()
        self.clear()
        return whole

    def clear(self) -> None:
        """Keep nothing of it."""
        self._blocks.clear()
        self._pieces.clear()
        self._pieces_size = 0


class TranslatedResponse:
    """A PassthroughReader for a response that is translated: it returns no raw bytes."""

    def __init__(self, decoder: ResponseDecoder) -> None:
        self._decoder = decoder

    def feed(self, pieces: Sequence[bytes]) -> StreamItem:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.feed(b"".join(pieces))

    def close(self) -> StreamItem:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.close()


def decode_end(reader: PassthroughReader) -> StreamItem:
    """Decode the end of the body; the last event is StreamEnd."""
    raw, events = reader.close()
    if not events or type(events[-1]) is not StreamEnd:
        events = [*events, StreamEnd()]
    return raw, events


def build_worker_error(
    read_error: ErrorReader, status: int, headers: Mapping[str, str], payload: bytes
) -> GatewayError:
    """The error for a response that is not successful, with its status and text for operators."""
    if status < HTTPStatus.BAD_REQUEST:
        error: GatewayError = WorkerFailed(f"the worker answered {status}", status=status)
    else:
        error = read_error(status, headers, payload)
    error.worker_status = status
    if not error.worker_text:
        error.worker_text = payload.decode("utf-8", "replace")
    return error


def select_headers(
    table: ResponseHeaders, headers: Mapping[str, str], worker: WorkerConfig
) -> Headers:
    """Those of a worker's headers that clients may get, without its secrets."""
    selected = table.select(headers)
    if not selected or worker.credentials is None:
        return selected
    mask = worker.credentials.mask_text
    return tuple([(name, mask(value)) for name, value in selected])


def check_content_encoding(encoding: str) -> None:
    """Raise WorkerFailed for a compressed body. The list of encodings may be empty (RFC 9110)."""
    if any(one.strip(" \t").lower() not in ("", "identity") for one in encoding.split(",")):
        raise WorkerFailed(
            f"unsupported content-encoding of the worker's response: {encoding[:100]!r}"
        )


def has_content(item: StreamItem) -> bool:
    """Whether the item holds content or the end, so that the response may be passed on."""
    for event in item[1]:
        if type(event) is TextDelta:
            if event.text or event.token_ids or event.logprobs:
                return True
        elif type(event) not in _EVENTS_WITHOUT_CONTENT:
            return True
    return False
