"""The access log: its lines, and what happens when it is not read."""

import logging
import os
import select
from collections.abc import Iterator

import msgspec
import pytest
from msgspec import Struct

from backends.interfaces import WorkerFailure
from gateway.observability.access_log import (
    AccessLogWriter,
    _group_lines,
    _split_lines,
    format_record,
    open_access_log,
)
from gateway.observability.record import RequestRecord
from protocols.core.events import Usage

PATIENCE = 20.0


LOG_FIELDS = {
    "time": "1970-01-01T00:00:00.000Z",
    "level": "info",
    "logger": "access",
    "message": "  0",
}
"""What the line of an empty record begins with, as each log line does."""
LINE_START = msgspec.json.encode(LOG_FIELDS)[:-1] + b","


class Pipe(Struct):
    """Both ends of a pipe."""

    reads: int
    writes: int

    def rest(self) -> bytes:
        """Read until all writers have closed."""
        os.close(self.writes)
        self.writes = -1
        with os.fdopen(os.dup(self.reads), "rb") as file:
            return file.read()

    def fill(self) -> int:
        """Fill the pipe and return the number of bytes."""
        os.set_blocking(self.writes, False)
        filled = 0
        try:
            while True:
                filled += os.write(self.writes, b"." * 4096)
        except BlockingIOError:
            return filled


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    new_pipe = Pipe(*os.pipe())
    yield new_pipe
    for one in (new_pipe.reads, new_pipe.writes):
        if one >= 0:
            os.close(one)


def test_records_and_text_are_written_in_order(pipe: Pipe) -> None:
    lines = AccessLogWriter(pipe.writes, 10)
    lines.write_record(RequestRecord("a", model="m"))
    lines.write_text("and \ud800")
    lines.write_record(RequestRecord("b"))
    lines.start()

    assert lines.close(PATIENCE)

    first, middle, second = pipe.rest().splitlines()
    assert msgspec.json.decode(first) == LOG_FIELDS | {"id": "a", "model": "m"}
    assert middle == rb"and \ud800"
    assert msgspec.json.decode(second) == LOG_FIELDS | {"id": "b"}


def test_request_format_off_writes_no_records(pipe: Pipe) -> None:
    lines = AccessLogWriter(pipe.writes, 10, "off")
    lines.write_record(RequestRecord("a"))
    lines.write_text("hello")

    lines.start()

    assert lines.close(PATIENCE)
    assert pipe.rest() == b"hello\n"


def test_captured_logger_keeps_its_format_until_released(pipe: Pipe) -> None:
    logger = logging.getLogger("interlingua.test")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    lines = AccessLogWriter(pipe.writes, 10)
    lines.start()
    with lines.capture_logger(logger):
        logger.warning("here: %d", 1)

    assert logger.handlers == [handler]

    logger.handlers, logger.propagate = [], True
    assert lines.close(PATIENCE)
    assert pipe.rest() == b"WARNING: here: 1\n"


def test_full_pipe_drops_lines_and_reports_their_number(pipe: Pipe) -> None:
    filled = pipe.fill()
    lines = AccessLogWriter(pipe.writes, 2)
    for name in "abcde":
        lines.write_record(RequestRecord(name))

    assert lines.count_dropped() == 3

    lines.start()
    assert not lines.close(0.1)
    assert os.read(pipe.reads, filled) == b"." * filled
    assert lines.close(PATIENCE)

    *records, notice = pipe.rest().splitlines()
    assert records == [b'%b"id":"a"}' % LINE_START, b'%b"id":"b"}' % LINE_START]
    assert {"level": "warning", "message": "3 log lines were dropped here"}.items() <= (
        msgspec.json.decode(notice).items()
    )


def test_lines_to_a_closed_pipe_are_counted_as_dropped(pipe: Pipe) -> None:
    os.close(pipe.reads)
    pipe.reads = -1
    lines = AccessLogWriter(pipe.writes, 10)
    lines.write_record(RequestRecord("a"))
    lines.write_record(RequestRecord("b"))

    lines.start()

    assert lines.close(PATIENCE)
    assert lines.count_dropped() == 2


def test_access_log_is_written_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with open_access_log(10, "json", "text") as lines:
        lines.write_record(RequestRecord("a"))
    assert capfd.readouterr().err == LINE_START.decode() + '"id":"a"}\n'


def test_lines_are_grouped_into_atomic_pipe_writes() -> None:
    """A pipe write is atomic up to PIPE_BUF bytes (POSIX, write)."""
    lines = [b"%d %b\n" % (n, b"x" * (n * 37 % 900)) for n in range(100)] + [b"y" * 9000 + b"\n"]
    pieces = list(_group_lines(lines))

    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert all(len(piece) <= select.PIPE_BUF for piece in pieces[:-1])
    assert len(pieces) < 30
    assert list(_group_lines([])) == []


def test_long_text_is_split_at_lines_into_atomic_pipe_writes() -> None:
    sizes = [*(n * 37 % 900 for n in range(100)), 9000, 0, select.PIPE_BUF - 1, select.PIPE_BUF, 3]
    lines = b"".join(b"x" * size + b"\n" for size in sizes)

    pieces = list(_split_lines(lines))

    assert b"".join(pieces) == lines
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert [len(piece) for piece in pieces if len(piece) > select.PIPE_BUF] == [
        9001,
        select.PIPE_BUF + 1,
    ]
    assert len(pieces) < 30
    assert list(_split_lines(b"")) == []


def test_text_between_records_keeps_its_position(pipe: Pipe) -> None:
    lines = AccessLogWriter(pipe.writes, 10)
    for one in (RequestRecord("a"), RequestRecord("b")):
        lines.write_record(one)
    lines.write_text("text")
    lines.write_record(RequestRecord("c"))

    lines.start()

    assert lines.close(PATIENCE)
    first, second, text, third = pipe.rest().splitlines()
    assert text == b"text"
    assert (first, second, third) == tuple(
        b'%b"id":"%b"}' % (LINE_START, one) for one in (b"a", b"b", b"c")
    )


RECORD = RequestRecord(
    "r-1",
    1_800_000_000.123456789,
    "openai",
    "/v1/chat/completions",
    "POST",
    "192.0.2.7",
    "chat",
    "2",
    worker="http://10.0.0.1:8001",
    key="team",
    status=200,
    first_token=0.1234567891,
    duration=1.2345678912,
    usage=Usage(12, 34),
)


def test_text_line_of_a_request_has_the_main_fields() -> None:
    _, _, line = format_record(RECORD).split(" ", 2)
    assert line == (
        'INFO access: 192.0.2.7 "POST /v1/chat/completions" 200 key=team model=chat@2 '
        "worker=http://10.0.0.1:8001 ttft=0.123s tokens=12+34 1.235s id=r-1"
    )


def test_text_line_of_a_failed_request_has_the_error_text_of_the_worker() -> None:
    failure = WorkerFailure("http://w:1", "WorkerError", 500, "CUDA out of memory")
    record = RequestRecord(
        "r", path="/x", method="GET", status=502, error="WorkerError", worker_failures=(failure,)
    )

    assert format_record(record).endswith(
        'WARNING access: - "GET /x" 502 0.000s id=r error=WorkerError '
        'worker_error="http://w:1 500: CUDA out of memory"'
    )


def test_client_cannot_start_a_line_or_send_control_characters() -> None:
    line = format_record(RequestRecord("r", model="m\n2026 INFO \x1b[31m\u2028"))
    assert line.isprintable()
    assert r"m\n2026 INFO \u001b[31m\u2028" in line


def test_numbers_in_json_are_rounded_and_the_record_is_not_changed(pipe: Pipe) -> None:
    lines = AccessLogWriter(pipe.writes, 10)
    lines.write_record(RECORD)
    lines.start()

    assert lines.close(PATIENCE)

    written = msgspec.json.decode(pipe.rest(), type=RequestRecord)
    assert written.duration == 1.234568
    assert written.first_token == 0.123457
    assert written.started_at == 1_800_000_000.123457
    assert RECORD.duration == 1.2345678912


def test_request_format_text_is_independent_of_the_format_of_messages(pipe: Pipe) -> None:
    lines = AccessLogWriter(pipe.writes, 10, "text", "json")
    lines.write_record(RECORD)
    lines.write_notice("first\nsecond")
    lines.start()

    assert lines.close(PATIENCE)

    record, *notices = pipe.rest().splitlines()
    assert record.endswith(b"id=r-1")
    assert [msgspec.json.decode(one)["message"] for one in notices] == ["first", "second"]


def test_throttled_requests_have_no_lines(pipe: Pipe) -> None:
    """A message has the number of requests with wrong keys."""
    lines = AccessLogWriter(pipe.writes, 10)
    lines.write_record(RequestRecord("first"))
    lines.write_record(RequestRecord("throttled", is_throttled=True))
    lines.write_record(RequestRecord("last"))
    lines.start()

    assert lines.close(PATIENCE)

    written = [msgspec.json.decode(line) for line in pipe.rest().splitlines()]
    assert written == [LOG_FIELDS | {"id": "first"}, LOG_FIELDS | {"id": "last"}]


def test_the_level_and_message_of_a_request_are_those_of_its_line_in_text(pipe: Pipe) -> None:
    lines = AccessLogWriter(pipe.writes, 10)
    lines.write_record(
        RequestRecord("a", started_at=1.5, duration=0.25, method="POST", path="/v1/x", status=503)
    )
    lines.start()

    assert lines.close(PATIENCE)

    written = msgspec.json.decode(pipe.rest())
    assert written["time"] == "1970-01-01T00:00:01.750Z"
    assert (written["level"], written["message"]) == ("warning", "POST /v1/x 503")
