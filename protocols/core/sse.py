"""Server-sent events: a parser and a writer, on bytes.

The writer sends one ``data:`` line for each event. The parser accepts what real servers send: CRLF
or CR as line ends, no blank after the colon, comments, ``event:`` lines, data over several lines, a
byte order mark, and any split into pieces.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct, field

from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Event

DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES: Final = 1 << 25
"""Largest event of a stream: as large as a unary response may be by default."""
MAX_UNARY_BYTES = 1 << 28
"""Largest unary response body, in bytes."""
match_plain_event: Final = re.compile(rb"data: (.*+)(?<!\r)\n\n").match
"""Matches a complete event at a position, if it is one line ``data: ...``; group 1 is the data."""
_BOM = b"\xef\xbb\xbf"


def format_event(data: bytes) -> bytes:
    """``data``, which must hold no newline, as one event."""
    return b"data: " + data + b"\n\n"


def collect_events(
    payloads: Iterable[bytes], read: Callable[[bytes, list[Event]], None]
) -> tuple[list[Event], GatewayError | None]:
    """The events that ``read`` adds for each payload, up to the error that ends them.

    The caller raises the error after it forwarded the events. Raises it at once without events.
    """
    events: list[Event] = []
    try:
        for payload in payloads:
            read(payload, events)
    except GatewayError as error:
        if not events:
            raise
        return events, error
    return events, None


def read_last_event(parser: "SseParser", read: Callable[[bytes, list[Event]], None]) -> list[Event]:
    """The events that ``read`` adds for a last event without its blank line, if there is one.

    The end of the body ends it, for every protocol. Raises StreamBroken if it is no whole event.
    """
    events: list[Event] = []
    for payload in parser.close():
        try:
            read(payload, events)
        except WorkerFailed as error:
            if error.__cause__ is None:  # valid JSON that holds an error
                raise
            raise StreamBroken("The worker's stream stopped inside an event.") from error
    return events


def is_plain_event(data: bytes) -> bool:
    """Whether ``data`` is one complete event that is one line ``data: ...``."""
    return (
        data.find(b"\n") == len(data) - 2
        and data[-2:] == b"\n\n"
        and data[:6] == b"data: "
        and data.find(b"\r") < 0
    )


def split_plain_events(data: bytes) -> list[bytes] | None:
    """The data of complete events that are each one line ``data: ...``, as nearly all are.

    None if ``data`` holds anything else, or an incomplete event.
    """
    if not data.startswith(b"data: ") or not data.endswith(b"\n\n"):
        return None
    lines = data[6:-2]
    if lines.find(b"\r") >= 0:
        return None
    if lines.find(b"\n") < 0:
        return [lines]
    payloads = lines.split(b"\n\ndata: ")
    return payloads if b"".join(payloads).find(b"\n") < 0 else None


def normalize_newlines(data: bytes, *, after_cr: bool) -> tuple[bytes, bool]:
    """``data`` with LF in place of CRLF and CR, and whether it ended with a CR.

    ``after_cr``: the preceding data ended with a CR, so that a first LF belongs to it.
    """
    ends_with_cr = data.endswith(b"\r") if data else after_cr
    if after_cr:
        data = data.removeprefix(b"\n")
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), ends_with_cr


class ResponseBodyReader(Struct, eq=False):
    """The body of a response: one JSON document, or an event stream.

    The first byte after a byte order mark and blanks decides which: some servers send a document
    when the request was for a stream, and the other way round.
    """

    json_prefixes: tuple[bytes, ...] = (b"{",)
    """The first byte of a JSON document."""
    is_detected: bool = False
    """Whether the kind of body is known."""
    unary_body: bytearray | None = None
    """The document as far as it was received; None while the body is, or may be, a stream."""
    _prefix: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """Feed ``data``; returns the part that belongs to a stream.

        Raises WorkerFailed if a document exceeds the size limit.
        """
        if not self.is_detected:
            if (
                not self._prefix
                and data.startswith(self.json_prefixes)
                and len(data) <= MAX_UNARY_BYTES
            ):
                self.is_detected, self.unary_body = True, bytearray(data)
                return b""
            data = self._prefix + data
            start = data.removeprefix(_BOM).lstrip()
            self._prefix = data if _BOM.startswith(data) else b""
            if self._prefix or not start:
                return b""
            self.is_detected = True
            if start.startswith(self.json_prefixes):
                self.unary_body, data = bytearray(), start
            elif not data.startswith(_BOM):
                data = start
        if self.unary_body is None:
            return data
        self.unary_body += data
        if len(self.unary_body) > MAX_UNARY_BYTES:
            raise WorkerFailed(f"the worker's answer is larger than {MAX_UNARY_BYTES} bytes")
        return b""


class SseParser(Struct, eq=False):
    """Splits a byte stream into the data of its events, independent of read boundaries.

    A line that is no field of an event (a bare JSON object, which some servers send on failure) is
    kept in ``stray`` for the caller.
    """

    limit: int = MAX_EVENT_BYTES
    """Largest event, in bytes."""
    stray_line: bytes | None = None
    """The last line that was no field of an event."""
    _buffer: bytearray = field(default_factory=bytearray)
    _scanned: int = 0
    _data_lines: list[bytes] = []
    _data_size: int = 0
    _at_start: bool = True
    _after_cr: bool = False

    @property
    def is_between_events(self) -> bool:
        """Whether no event has begun."""
        return not self._buffer and not self._data_lines

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The data of each complete event. Raises WorkerFailed if one exceeds the size limit."""
        if not data:
            return ()
        if (
            not self._buffer
            and not self._data_lines
            and len(data) <= self.limit
            and (payloads := split_plain_events(data)) is not None
        ):
            self._at_start = False
            return payloads
        return self._parse_buffer(data)

    def _parse_buffer(self, data: bytes) -> Iterator[bytes]:
        if self._after_cr or data.find(b"\r") >= 0:
            data, self._after_cr = normalize_newlines(data, after_cr=self._after_cr)
        buffer = self._buffer
        buffer += data
        if self._at_start and len(buffer) >= len(_BOM):
            self._at_start = False
            if buffer.startswith(_BOM):
                del buffer[: len(_BOM)]
                self._scanned = 0
        start = 0
        while (end := buffer.find(b"\n", max(start, self._scanned))) >= 0:
            line = bytes(buffer[start:end])
            start = end + 1
            if line:
                self._parse_line(line)
            elif self._data_lines:
                yield self._pop_event()
        del buffer[:start]
        self._scanned = len(buffer)
        if len(buffer) + self._data_size > self.limit:
            raise WorkerFailed(f"the worker sent an event of more than {self.limit} bytes")

    def close(self) -> Sequence[bytes]:
        """The data of the last event, if the body ended without its blank line."""
        return [*self._parse_buffer(b"\n\n")]

    def _pop_event(self) -> bytes:
        data = self._data_lines[0] if len(self._data_lines) == 1 else b"\n".join(self._data_lines)
        self._data_lines = []
        self._data_size = 0
        return data

    def _parse_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data_lines.append(value)
            self._data_size += len(value)
        elif not line.startswith((b":", b"event", b"id", b"retry")):
            self.stray_line = line
