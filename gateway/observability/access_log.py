"""The log: a line of JSON for each exchange, and between them what the gateway has to say.

Nobody may read it for a while. Then lines wait, so many at most, and the rest are left out and
counted; how many is said as soon as somebody reads on.
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

# What is logged again and again is said a few times a second.
#
# A loop that can't accept a connection, since the process has no descriptor left, says so a thousand
# times a second; the log must not go down with it.

_MAX_PER_SECOND: Final = 2
"""Times in a second that the same is said, and once of these with its traceback."""
_MAX_TRACKED_MESSAGES: Final = 256
"""Messages that are told apart."""


class _MessageState(Struct):
    """A message: how often it came since when, and how often that was not said."""

    window_start: float
    count: int = 0
    suppressed: int = 0


class LogRateFilter(logging.Filter):
    """Lets each message of a logger pass, but not too often. ``clock`` gives seconds.

    One with another kind of error is another one. The first that passes again tells how many did
    not.
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
        heard = self._message_states.setdefault(name, _MessageState(now))
        if now - heard.window_start >= 1.0:
            heard.window_start, heard.count = now, 0
        heard.count += 1
        if heard.count > _MAX_PER_SECOND:
            heard.suppressed += 1
            return False
        if heard.count > 1:
            record.exc_info = None
        if heard.suppressed:
            record.msg = f"{record.getMessage()} ({heard.suppressed} more of these were left out)"
            record.args = ()
            heard.suppressed = 0
        return True


_STDERR_DESCRIPTOR: Final = 2
_FLUSH_TIMEOUT: Final = 2.0
"""Seconds in which these must be taken."""

_encode_lines: Final = msgspec.json.Encoder().encode_lines


@contextmanager
def open_access_log(most: int, *, exchanges: bool) -> Iterator["AccessLogWriter"]:
    """The process's own on standard error, with whatever is logged, for as long as this lasts."""
    lines = AccessLogWriter(_STDERR_DESCRIPTOR, most, exchanges=exchanges)
    lines.start()
    try:
        with lines.capture_logger(logging.getLogger()):
            yield lines
    finally:
        lines.close(_FLUSH_TIMEOUT)


class AccessLogWriter:
    """Writes to a descriptor."""

    def __init__(self, descriptor: int, most: int, *, exchanges: bool = True) -> None:
        """So many lines may wait at ``most``. ``exchanges``: whether these have lines, too."""
        self._descriptor = descriptor
        self._writer = BackgroundWriter("log", most, self._write_batch)
        self._logged_dropped = 0
        """Lost lines of which was said that they are."""
        self.write_record: Callable[[Struct], None] = (
            self._writer.enqueue if exchanges else ignore_record
        )
        """Write this as a line of JSON."""
        self.start = self._writer.start
        self.close = self._writer.close

    def count_dropped(self) -> int:
        """How many lines nobody will read."""
        return self._writer.dropped

    def write_text(self, text: str) -> None:
        """Write a line of text."""
        self._writer.enqueue(text.encode(errors="backslashreplace") + b"\n")

    @contextmanager
    def capture_logger(self, logger: logging.Logger) -> Iterator[None]:
        """What is logged there is said here, in the same form, for as long as this lasts.

        The same is said a few times a second at most.
        """
        before = logger.handlers
        seldom = LogRateFilter(time.monotonic)
        logger.handlers = [
            _TextLogHandler(self.write_text, one.formatter, seldom) for one in before
        ]
        try:
            yield
        finally:
            logger.handlers = before

    def _write_batch(self, batch: Sequence[Struct | bytes]) -> int:
        """Write them; gives how many had to be left out."""
        try:
            for piece in _encode_batch(batch):
                self._write_all(piece)
            if lost := self._writer.dropped - self._logged_dropped:
                self._logged_dropped += lost
                self._write_all(b"WARNING interlingua: %d lines of this log are lost here\n" % lost)
        except OSError:  # whoever read it is gone for good, or the disk is full
            return len(batch)
        return 0

    def _write_all(self, data: bytes) -> None:
        """Write all of it, however long that takes. Raises OSError."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process may have made it so, if it has it, too
                select.select([], [self._descriptor], [])


def _encode_batch(batch: Sequence[Struct | bytes]) -> Iterator[bytes]:
    """A batch in pieces. What is to be JSON is encoded many at once, which takes half the time."""
    for kind, some in itertools.groupby(batch, type):
        together = [*some]
        if kind is bytes:
            yield from _group_lines(cast("Sequence[bytes]", together))
        else:
            yield from _split_lines(_encode_lines(together))


def _group_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, as many together as a pipe takes without another process's in between."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > select.PIPE_BUF:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece


def _split_lines(lines: bytes) -> Iterator[bytes]:
    """The same of lines that are together already, as many are when they are encoded at once."""
    begin = 0
    while begin < len(lines):
        end = lines.rfind(b"\n", begin, begin + select.PIPE_BUF) + 1
        end = end or lines.index(b"\n", begin) + 1  # one that is longer
        yield lines[begin:end]
        begin = end


class _TextLogHandler(logging.Handler):
    """Says what is logged."""

    def __init__(
        self, say: Callable[[str], None], form: logging.Formatter | None, seldom: LogRateFilter
    ) -> None:
        super().__init__()
        self.setFormatter(form)
        self.addFilter(seldom)
        self._write_text = say

    def emit(self, record: logging.LogRecord) -> None:
        """See logging's Handler."""
        self._write_text(self.format(record))
