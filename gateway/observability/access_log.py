"""The access log: one JSON line per request, between the gateway's own log messages.

If the reader of the log stalls, lines are queued up to a limit. Lines beyond it are dropped and
counted, and a message says how many as soon as the reader continues.
"""

import itertools
import logging
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, cast

import msgspec
from msgspec import Struct

from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.record import ignore_record

# Repeated messages are rate limited: a process without free file descriptors would log a failed
# accept a thousand times a second.

_MAX_PER_SECOND: Final = 2
"""Equal messages per second; only the first one keeps its traceback."""
_MAX_TRACKED_MESSAGES: Final = 256
"""Distinct messages that are tracked."""


class _MessageState(Struct):
    """How often a message was logged in its window, and how often it was suppressed."""

    window_start: float
    count: int = 0
    suppressed: int = 0


class LogRateFilter(logging.Filter):
    """Limits how often each message is logged. ``clock`` gives seconds.

    Messages with different exception types are different. The next message that passes says how
    many were suppressed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._message_states: dict[tuple[object, ...], _MessageState] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging's Filter."""
        now, error = self._clock(), record.exc_info
        name = (record.name, str(record.msg), error and error[0])
        if len(self._message_states) >= _MAX_TRACKED_MESSAGES and name not in self._message_states:
            self._message_states.clear()
        state = self._message_states.setdefault(name, _MessageState(now))
        if now - state.window_start >= 1.0:
            state.window_start, state.count = now, 0
        state.count += 1
        if state.count > _MAX_PER_SECOND:
            state.suppressed += 1
            return False
        if state.count > 1:
            record.exc_info = None
        if state.suppressed:
            record.msg = f"{record.getMessage()} ({state.suppressed} more of these were left out)"
            record.args = ()
            state.suppressed = 0
        return True


_STDERR_DESCRIPTOR: Final = 2
_FLUSH_TIMEOUT: Final = 2.0
"""Seconds to write the remaining lines at shutdown."""

_encode_lines: Final = msgspec.json.Encoder().encode_lines


@contextmanager
def open_access_log(max_waiting: int, *, log_requests: bool) -> Iterator["AccessLogWriter"]:
    """Open the access log on standard error and route all log messages through it."""
    lines = AccessLogWriter(_STDERR_DESCRIPTOR, max_waiting, log_requests=log_requests)
    lines.start()
    try:
        with lines.capture_logger(logging.getLogger()):
            yield lines
    finally:
        lines.close(_FLUSH_TIMEOUT)


class AccessLogWriter:
    """Writes log lines to a file descriptor."""

    def __init__(self, descriptor: int, max_waiting: int, *, log_requests: bool = True) -> None:
        """Queue at most ``max_waiting`` lines; ``log_requests``: whether requests are logged."""
        self._descriptor = descriptor
        self._writer = BackgroundWriter("log", max_waiting, self._write_batch)
        self._logged_dropped = 0
        """Dropped lines that a log message has reported."""
        self.write_record: Callable[[Struct], None] = (
            self._writer.enqueue if log_requests else ignore_record
        )
        """Write a record as a JSON line."""
        self.start = self._writer.start
        self.close = self._writer.close

    def count_dropped(self) -> int:
        """The number of dropped lines."""
        return self._writer.dropped

    def write_text(self, text: str) -> None:
        """Write a line of text."""
        self._writer.enqueue(text.encode(errors="backslashreplace") + b"\n")

    @contextmanager
    def capture_logger(self, logger: logging.Logger) -> Iterator[None]:
        """Write the messages of this logger here, in their format and rate limited."""
        handlers = logger.handlers
        rate_filter = LogRateFilter(time.monotonic)
        logger.handlers = [
            _TextLogHandler(self.write_text, one.formatter, rate_filter) for one in handlers
        ]
        try:
            yield
        finally:
            logger.handlers = handlers

    def _write_batch(self, batch: Sequence[Struct | bytes]) -> int:
        """Write a batch; returns how many lines were dropped."""
        try:
            for piece in _encode_batch(batch):
                self._write_all(piece)
            if lost := self._writer.dropped - self._logged_dropped:
                self._logged_dropped += lost
                self._write_all(b"WARNING interlingua: %d log lines were dropped here\n" % lost)
        except OSError:  # the reader is gone, or the disk is full
            return len(batch)
        return 0

    def _write_all(self, data: bytes) -> None:
        """Write all data, blocking as long as necessary. Raises OSError."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process that shares it may have set O_NONBLOCK
                select.select([], [self._descriptor], [])


def _encode_batch(batch: Sequence[Struct | bytes]) -> Iterator[bytes]:
    """Encode a batch in chunks; encoding records together halves the time."""
    for kind, group in itertools.groupby(batch, type):
        entries = [*group]
        if kind is bytes:
            yield from _group_lines(cast("Sequence[bytes]", entries))
        else:
            yield from _split_lines(_encode_lines(entries))


def _group_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Group lines into chunks that a pipe writes atomically."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > select.PIPE_BUF:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece


def _split_lines(lines: bytes) -> Iterator[bytes]:
    """Split encoded lines into chunks that a pipe writes atomically."""
    begin = 0
    while begin < len(lines):
        end = lines.rfind(b"\n", begin, begin + select.PIPE_BUF) + 1
        end = end or lines.index(b"\n", begin) + 1  # a longer line
        yield lines[begin:end]
        begin = end


class _TextLogHandler(logging.Handler):
    """Writes log messages as text lines."""

    def __init__(
        self,
        write_text: Callable[[str], None],
        form: logging.Formatter | None,
        rate_filter: LogRateFilter,
    ) -> None:
        super().__init__()
        self.setFormatter(form)
        self.addFilter(rate_filter)
        self._write_text = write_text

    def emit(self, record: logging.LogRecord) -> None:
        """See logging's Handler."""
        self._write_text(self.format(record))
