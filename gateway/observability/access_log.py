"""The access log: one line per request, in JSON or text, between the gateway's log messages.

If the reader of the log stalls, lines are queued up to a limit. Lines beyond it are dropped and
counted, and a message says how many as soon as the reader continues.
"""

import copy
import itertools
import logging
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.log_format import LogFormat, escape_controls, escape_json, format_notice, format_time
from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.log_rate import LogRateFilter
from gateway.observability.record import RequestRecord, ignore_record

_SERVER_ERROR: Final = 500

_STDERR_DESCRIPTOR: Final = 2
_DIGITS: Final = 6
"""Decimal places of numbers in JSON."""
_TIMES: Final = ("started_at", "duration", "overhead", "first_byte", "first_token")
_FLUSH_TIMEOUT: Final = 2.0
"""Seconds to write the remaining lines at shutdown."""

RequestLogFormat = Literal["auto", "text", "json", "off"]
"""The format of requests' lines; ``auto`` is that of log messages, and ``off`` writes none."""

_LOGGER: Final = b"access"
_encode_lines: Final = msgspec.json.Encoder().encode_lines
_encode: Final = msgspec.json.Encoder().encode


@contextmanager
def open_access_log(
    max_waiting: int, request_format: RequestLogFormat, log_format: LogFormat
) -> Iterator["AccessLogWriter"]:
    """Open the access log on standard error and route all log messages through it."""
    lines = AccessLogWriter(_STDERR_DESCRIPTOR, max_waiting, request_format, log_format)
    lines.start()
    try:
        with lines.capture_logger(logging.getLogger()):
            yield lines
    finally:
        lines.close(_FLUSH_TIMEOUT)


class AccessLogWriter:
    """Writes log lines to a file descriptor."""

    def __init__(
        self,
        descriptor: int,
        max_waiting: int,
        request_format: RequestLogFormat = "auto",
        log_format: LogFormat = "json",
    ) -> None:
        """Queue at most ``max_waiting`` lines. ``log_format`` is that of log messages."""
        self._log_format = log_format
        self._is_text = (log_format if request_format == "auto" else request_format) == "text"
        self._descriptor = descriptor
        self._writer = BackgroundWriter("log", max_waiting, self._write_batch)
        self._logged_dropped = 0
        """Dropped lines that a log message has reported."""
        self.write_record: Callable[[Struct], None] = (
            ignore_record if request_format == "off" else self._writer.enqueue
        )
        """Write a record as a line."""
        self.start = self._writer.start
        self.close = self._writer.close

    def count_dropped(self) -> int:
        """The number of dropped lines."""
        return self._writer.dropped

    def write_text(self, text: str) -> None:
        """Write a line of text."""
        self._writer.enqueue(text.encode(errors="backslashreplace") + b"\n")

    def write_notice(self, text: str) -> None:
        """Write lines in the format of log messages, whatever the log's level."""
        self.write_text(format_notice(text, self._log_format))

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
        lines = [line for line in batch if type(line) is not RequestRecord or not line.is_throttled]
        try:
            for piece in _encode_batch(lines, is_text=self._is_text):
                self._write_all(piece)
            if lost := self._writer.dropped - self._logged_dropped:
                self._logged_dropped += lost
                text = f"{lost} log lines were dropped here"
                line = format_notice(text, self._log_format, logging.WARNING)
                self._write_all(line.encode() + b"\n")
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


def _encode_batch(batch: Sequence[Struct | bytes], *, is_text: bool) -> Iterator[bytes]:
    """Encode a batch in chunks; encoding records together halves the time."""
    for kind, group in itertools.groupby(batch, type):
        entries = [*group]
        if kind is bytes:
            yield from _group_lines(cast("Sequence[bytes]", entries))
        elif is_text and kind is RequestRecord:
            records = cast("Sequence[RequestRecord]", entries)
            yield from _group_lines(format_record(one).encode() + b"\n" for one in records)
        elif kind is RequestRecord:
            yield from _group_lines(_encode_records(cast("Sequence[RequestRecord]", entries)))
        else:
            yield from _split_lines(
                escape_json(_encode_lines(map(_round_numbers, cast("Sequence[Struct]", entries))))
            )


def _encode_records(records: Sequence[RequestRecord]) -> Iterator[bytes]:
    """Lines of JSON that begin as those of log messages do."""
    lines = escape_json(_encode_lines(map(_round_numbers, records))).split(b"\n")
    for record, line in zip(records, lines, strict=False):
        time_text = format_time(record.started_at + record.duration, "json")
        text = f"{record.method} {record.path} {record.status}"
        yield b'{"time":"%b","level":"%b","logger":"%b","message":%b,%b\n' % (
            time_text.encode(),
            get_level(record).lower().encode(),
            _LOGGER,
            escape_json(_encode(text)),
            line[1:],
        )


def _round_numbers(record: Struct) -> Struct:
    """The record with times in whole microseconds."""
    if isinstance(record, RequestRecord):
        rounded = copy.copy(record)
        for name in _TIMES:
            if value := getattr(record, name):
                setattr(rounded, name, round(value, _DIGITS))
        return rounded
    changes: dict[str, object] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value and isinstance(value, float):
            changes[name] = round(value, _DIGITS)
        elif isinstance(value, Struct):
            changes[name] = _round_numbers(value)
    return replace(record, **changes)


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


def get_level(record: RequestRecord) -> str:
    """The level of its line."""
    return "INFO" if record.status < _SERVER_ERROR else "WARNING"


def format_record(record: RequestRecord) -> str:
    """A request's line of text. What clients and workers sent cannot start another line."""
    parts = [
        format_time(record.started_at + record.duration, "text"),
        f"{get_level(record)} access:",
        f'{record.client or "-"} "{record.method} {record.path}" {record.status}',
        *_describe_target(record),
        *_describe_response(record),
        f"{record.duration:.3f}s",
        f"id={record.id}",
    ]
    if record.error:
        parts.append(f"error={record.error}")
    elif record.outcome != "ok":
        parts.append(f"outcome={record.outcome}")
    for failure in record.worker_failures:
        status = f" {failure.status}" if failure.status is not None else ""
        parts.append(f'worker_error="{failure.worker}{status}: {failure.text or failure.error}"')
    return escape_line(" ".join(parts))


def _describe_target(record: RequestRecord) -> Iterator[str]:
    if record.key:
        yield f"key={record.key}"
    if record.model:
        yield f"model={record.model}" + (f"@{record.version}" if record.version else "")
    if record.worker or record.backend:
        yield f"worker={record.worker}" if record.worker else f"backend={record.backend}"
    if record.fallback_from:
        yield f"fallback_from={record.fallback_from}"


def _describe_response(record: RequestRecord) -> Iterator[str]:
    if record.first_token is not None:
        yield f"ttft={record.first_token:.3f}s"
    if record.usage is not None:
        yield f"tokens={record.usage.prompt_tokens}+{record.usage.completion_tokens}"
    elif record.tokens:
        yield f"tokens=?+{record.tokens}"


def escape_line(line: str) -> str:
    """The line with controls, such as ends of lines, as escapes."""
    if line.isprintable():
        return line
    return escape_controls(line).replace("\n", "\\n").replace("\t", "\\t")
