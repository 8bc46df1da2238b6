"""Server-sent events: a parser and a writer, on bytes, and the base of the decoders of streams.

The writer sends one ``data:`` line for each event. The parser accepts what real servers send: CRLF
or CR as line ends, no blank after the colon, comments, ``event:`` lines, data over several lines, a
byte order mark, and any split into pieces.
"""

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from msgspec import Struct, field

from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Event, StreamEnd
from protocols.core.json_counts import EVENT_COUNTS, SMALL_TEXT, JsonCounts

DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES: Final = 1 << 25
"""Largest event of a stream: as large as a unary response may be by default."""
MAX_UNARY_BYTES = 1 << 28
"""Largest unary response body, in bytes."""
match_plain_event: Final = re.compile(rb"data: (.*+)(?<!\r)\n\n").match
"""Matches a complete event at a position, if it is one line ``data: ...``; group 1 is the data."""
T = TypeVar("T")
_BOM = b"\xef\xbb\xbf"


def format_event(data: bytes) -> bytes:
    """``data``, which must hold no newline, as one event."""
    return b"data: " + data + b"\n\n"


def collect_events(
    payloads: Iterable[T], read: Callable[[T, list[Event]], None]
) -> tuple[list[Event], GatewayError | None]:
    """The events that ``read`` adds for each payload, or batch, up to the error that ends them.

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
    """Whether ``data`` is one complete small event that is one line ``data: ...``."""
    return (
        (last := len(data) - 2) < SMALL_TEXT
        and data.find(b"\n") == last
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
    document: bytearray | None = None
    """The document as far as it was received; None while the body is, or may be, a stream."""
    _prefix: bytes = b""

    @property
    def is_stream(self) -> bool:
        """Whether the body is known to be a stream."""
        return self.is_detected and self.document is None

    @property
    def unary_body(self) -> bytearray | None:
        """The document without the halves of characters that no decoder takes."""
        body = self.document
        return bytearray(replace_surrogates(body)) if body and has_surrogate(body) else body

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
                self.is_detected, self.document = True, bytearray(data)
                return b""
            data = self._prefix + data
            start = data.removeprefix(_BOM).lstrip()
            self._prefix = data if _BOM.startswith(data) else b""
            if self._prefix or not start:
                return b""
            self.is_detected = True
            if start.startswith(self.json_prefixes):
                self.document, data = bytearray(), start
            elif not data.startswith(_BOM):
                data = start
        if self.document is None:
            return data
        self.document += data
        if len(self.document) > MAX_UNARY_BYTES:
            raise WorkerFailed(f"the worker's answer is larger than {MAX_UNARY_BYTES} bytes")
        return b""


_ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u([dD][89abAB]..)|\\u([dD][c-fC-F]..)|\\.", re.DOTALL
)
"""An escape in a JSON string: a pair of surrogates, a first half, a second half, or another."""


_find_surrogate: Final = re.compile(rb"\\[uU][dD]").search
"""``U`` is no escape of JSON: a pattern that begins with one literal is searched fastest."""
_REPLACEMENT: Final = b"\\ufffd"
_MAX_WAITING: Final = 16
"""How many further events one with half a character waits for."""


def has_surrogate(data: bytes | bytearray) -> bool:
    """Whether JSON may have an escaped half of a character."""
    return b"\\" in data and _find_surrogate(data) is not None  # most texts have no escape


def replace_surrogates(data: bytes | bytearray) -> bytes:
    """JSON in which each lone half of a character is the replacement character.

    No decoder takes a lone half.
    """
    return _ESCAPE.sub(lambda escape: _REPLACEMENT if escape[1] or escape[2] else escape[0], data)


def has_lone_surrogate(data: bytes) -> bool:
    """Whether JSON has an escaped half of a character without the other half behind it."""
    return has_surrogate(data) and replace_surrogates(data) != data


class _FirstHalf(Struct, eq=False):
    """A first half of a character that ends a string."""

    digits: bytes
    is_joined: bool = False
    """Whether its second half came."""


class _SplitCharacters:
    """Joins characters whose halves are in two strings, of one event or of two.

    A first half that ends a string stays open for a second half that begins one. Its event waits
    for that, and all further events behind it, up to a limit: then the half is the replacement
    character, where it stood. Any other half without the other is one at once.
    """

    def __init__(self) -> None:
        self._open_halves: deque[_FirstHalf] = deque()
        self._events: deque[tuple[bytes, Sequence[_FirstHalf]]] = deque()
        """The events that wait, each with its own first halves."""

    @property
    def is_waiting(self) -> bool:
        """Whether an event waits."""
        return bool(self._events)

    def add(self, data: bytes) -> list[bytes]:
        """Add an event; returns those that are complete."""
        own: list[_FirstHalf] = []

        def read_half(escape: re.Match[bytes]) -> bytes:
            if escape[1] and data.startswith(b'"', escape.end()):
                half = _FirstHalf(escape[1])
                own.append(half)
                self._open_halves.append(half)
                return escape[0]
            if escape[2] and self._open_halves and data.endswith(b'"', 0, escape.start()):
                half = self._open_halves.popleft()
                half.is_joined = True
                return b"\\u%b\\u%b" % (half.digits, escape[2])
            return _REPLACEMENT if escape[1] or escape[2] else escape[0]

        self._events.append((_ESCAPE.sub(read_half, data), own))
        complete = []
        while self._events and (
            len(self._events) > _MAX_WAITING or all(half.is_joined for half in self._events[0][1])
        ):
            complete.append(self._take())
        return complete

    def close(self) -> list[bytes]:
        """The events that wait, at the end of the stream."""
        return [self._take() for _ in range(len(self._events))]

    def _take(self) -> bytes:
        """The first event, in which each of its first halves is gone or replaced."""
        data, own = self._events.popleft()
        rest = iter(own)

        def take_half(escape: re.Match[bytes]) -> bytes:
            if not escape[1]:
                return escape[0]
            half = next(rest)
            if half.is_joined:
                return b""
            self._open_halves.remove(half)
            return _REPLACEMENT

        return _ESCAPE.sub(take_half, data) if own else data


class SseParser(Struct, eq=False):
    """Splits a byte stream into the data of its events, independent of read boundaries.

    A line that is no field of an event (a bare JSON object, which some servers send on failure) is
    kept in ``stray`` for the caller.
    """

    limit: int = MAX_EVENT_BYTES
    """Largest event, in bytes."""
    counts: JsonCounts = EVENT_COUNTS
    """What an event may consist of."""
    stray_line: bytes | None = None
    """The last line that was no field of an event."""
    _buffer: bytearray = field(default_factory=bytearray)
    _scanned: int = 0
    _data_lines: list[bytes] = []
    _data_size: int = 0
    _at_start: bool = True
    _split_characters: _SplitCharacters | None = None
    """While an event waits for the second half of a character."""
    _after_cr: bool = False

    @property
    def is_between_events(self) -> bool:
        """Whether no event has begun, or waits for another."""
        return not self._buffer and not self._data_lines and self._split_characters is None

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The data of each complete event. Raises WorkerFailed if one exceeds a limit."""
        if not data:
            return ()
        if (
            not self._buffer
            and not self._data_lines
            and (size := len(data)) <= self.limit
            and (payloads := split_plain_events(data)) is not None
            and (size <= SMALL_TEXT or max(map(len, payloads)) <= SMALL_TEXT)
        ):
            self._at_start = False
            if self._split_characters is None and not has_surrogate(data):
                return payloads
            return [one for payload in payloads for one in self._join_characters(payload)]
        return self._parse_buffer(data)

    def feed_batches(self, data: bytes) -> Iterable[Sequence[bytes]]:
        """The same, with all events in one batch if nothing else is between them."""
        payloads = self.feed(data)
        return (payloads,) if type(payloads) is list else zip(payloads, strict=False)

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
                payload = self._pop_event()
                if self._split_characters is None and not has_surrogate(payload):
                    yield payload
                else:
                    yield from self._join_characters(payload)
        del buffer[:start]
        self._scanned = len(buffer)
        if len(buffer) + self._data_size > self.limit:
            raise WorkerFailed(f"the worker sent an event of more than {self.limit} bytes")

    def close(self) -> Sequence[bytes]:
        """The data of the last event if the body ended without its blank line, and what waits."""
        events = [*self._parse_buffer(b"\n\n")]
        return events if self._split_characters is None else events + self._split_characters.close()

    def _join_characters(self, data: bytes) -> Sequence[bytes]:
        characters = self._split_characters or _SplitCharacters()
        complete = characters.add(data)
        self._split_characters = characters if characters.is_waiting else None
        return complete

    def _pop_event(self) -> bytes:
        data = self._data_lines[0] if len(self._data_lines) == 1 else b"\n".join(self._data_lines)
        self._data_lines = []
        self._data_size = 0
        if self.counts.needs_check(len(data)):
            self.counts.check((data,))
        return data

    def _parse_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data_lines.append(value)
            self._data_size += len(value)
        elif not line.startswith((b":", b"event", b"id", b"retry")):
            self.stray_line = line


class StreamDecoder(ABC):
    """Decodes a response that is a stream of events, or one JSON document.

    A protocol says what an event and a document hold, and sets ``_is_done`` with StreamEnd. An
    error in a stream is raised only after the events before it were returned: the client gets all
    that came before. A body that ends without StreamEnd is an error.
    """

    def __init__(
        self,
        complaint: Callable[[bytes], None],
        json_prefixes: tuple[bytes, ...] = (b"{",),
        counts: JsonCounts = EVENT_COUNTS,
    ) -> None:
        """``complaint`` raises the error in a body, or in a line, that is no response.

        ``json_prefixes`` are the first bytes of a JSON document; ``counts`` limit an event.
        """
        self._raise_if_error = complaint
        self._body_reader = ResponseBodyReader(json_prefixes)
        self._sse_parser = SseParser(counts=counts)
        self._pending_error: GatewayError | None = None
        self._is_done = False

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        payloads = self._sse_parser.feed(self._body_reader.feed(data))
        events, self._pending_error = collect_events(payloads, self._read_payload)
        return events

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        if self._is_done:
            return ()
        if (document := self._body_reader.document) is not None:
            events = self._read_simple_document(document)
            return events or self._read_document(self._body_reader.unary_body or document)
        try:
            last = read_last_event(self._sse_parser, self._read_payload)
        except StreamBroken:
            if not (end := self._build_missing_end()):
                raise
            return end
        if last and type(last[-1]) is StreamEnd:
            return last
        if end := self._build_missing_end():
            return [*last, *end]
        if self._sse_parser.stray_line is not None:
            self._raise_if_error(self._sse_parser.stray_line)
        raise StreamBroken("The worker's stream stopped before its end.")

    @abstractmethod
    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        """Add what the data of one event holds. Raises WorkerError."""

    def _read_simple_document(self, document: bytearray) -> Sequence[Event]:
        """All events of a simple response that is no stream, at less cost; none of any other."""
        del document
        return ()

    @abstractmethod
    def _read_document(self, body: bytes | bytearray) -> Sequence[Event]:
        """All events of a response that is no stream. Raises WorkerError."""

    def _build_missing_end(self) -> Sequence[Event]:
        """The last events, if the end of the body may be the end of the stream; else none."""
        return ()
