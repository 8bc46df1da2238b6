"""Usage rows: their contents, and errors of their file."""

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.observability import usage
from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.record import RequestRecord
from gateway.observability.usage import USAGE_COLUMNS, SqliteUsageRecorder, query_sqlite_usage
from protocols.core.events import Usage

PATIENCE = 20.0
FOREVER = 1e12
RECORD = RequestRecord(
    "r",
    1_700_000_000.25,
    "openai",
    "/v1/chat/completions",
    model="chat",
    version="1",
    backend="gpu",
    key="web",
    duration=1.5,
    first_token=0.25,
    usage=Usage(3, 5),
    split="rollout",
)


def get_now() -> float:
    return 1_700_000_100.0


def read_rows(path: Path) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as file:
        names = [name for name, _ in USAGE_COLUMNS]
        rows = file.execute("SELECT * FROM usage ORDER BY at, id").fetchall()
    return [dict(zip(names, row, strict=True)) for row in rows]


def write_records(path: Path, *records: RequestRecord, keep: float = FOREVER) -> None:
    ledger = SqliteUsageRecorder(str(path), keep, get_now)
    for record in records:
        ledger.record_usage(record)
    ledger.start()
    ledger.close(PATIENCE)
    assert ledger.count_dropped() == 0


class LogWaiter(logging.Handler):
    """Waits for a log message."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.messages.append(record.getMessage())
            self._more.notify_all()

    def hear(self, what: str) -> None:
        with self._more:
            assert self._more.wait_for(lambda: any(what in one for one in self.messages), PATIENCE)


@pytest.fixture
def log_waiter(monkeypatch: pytest.MonkeyPatch) -> LogWaiter:
    waiter = LogWaiter()
    monkeypatch.setattr(usage.log, "handlers", [waiter])
    monkeypatch.setattr(usage, "_RETRY_DELAY", 0.01)
    return waiter


def test_only_the_owner_can_read_a_new_usage_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any umask, and for the write-ahead log."""
    path = tmp_path / "usage.sqlite"
    modes: dict[str, int] = {}
    close = usage._SqliteUsageStore.close

    def close_after_read(store: usage._SqliteUsageStore) -> None:
        modes.update({one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()})
        close(store)

    monkeypatch.setattr(usage._SqliteUsageStore, "close", close_after_read)
    umask = os.umask(0)
    try:
        write_records(path, RECORD)
    finally:
        os.umask(umask)

    assert modes == {
        "usage.sqlite": 0o600,
        "usage.sqlite-wal": 0o600,
        "usage.sqlite-shm": 0o600,
    }


def test_usage_row_contains_key_target_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    write_records(file, RECORD)

    assert read_rows(file) == [
        {
            "at": 1_700_000_000.25,
            "id": "r",
            "key": "web",
            "protocol": "openai",
            "model": "chat",
            "version": "1",
            "split": "rollout",
            "backend": "gpu",
            "outcome": "ok",
            "error": "",
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "source": "worker",
            "duration": 1.5,
            "first_token": 0.25,
            "rule": "",
            "response_id": "",
            "user_hash": "",
            "failed_model": "",
            "failed_version": "",
            "failed_split": "",
            "failed_outcome": "",
            "measures": "",
            "shadow_of": "",
        }
    ]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(7, (0, 7, "estimated")), (0, (0, 0, ""))], ids=["some", "none"]
)
def test_uncounted_tokens_are_recorded_as_estimated(
    tmp_path: Path, tokens: int, expected: tuple[object, ...]
) -> None:
    file = tmp_path / "usage.sqlite"
    left = replace(RECORD, usage=None, tokens=tokens, outcome="cancelled", first_token=None)
    write_records(file, left)

    [row] = read_rows(file)

    assert (row["prompt_tokens"], row["completion_tokens"], row["source"]) == expected
    assert row["first_token"] is None


def test_fallback_response_is_recorded_without_a_split(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    write_records(file, replace(RECORD, fallback_from="chat@2"))
    assert [row["split"] for row in read_rows(file)] == [""]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("WorkerFailed", "worker_error"),
        ("Overloaded", "gateway_error"),
        ("ContextTooLong", "client_error"),
    ],
)
def test_row_of_a_fallback_names_the_target_that_failed_first(
    tmp_path: Path, error: str, outcome: str
) -> None:
    """Version 2 of the model fails, then version 3; version 1 of another model answers."""
    file = tmp_path / "usage.sqlite"
    failures = (f"chat@2 {error}", "chat@3 WorkerFailed")
    answered = replace(RECORD, model="small", fallback_from="chat@2", failed_attempts=failures)
    write_records(file, answered, replace(RECORD, id="s"))
    rescued, direct = read_rows(file)
    names = ("failed_model", "failed_version", "failed_split", "failed_outcome")
    assert [rescued[name] for name in names] == ["chat", "2", RECORD.split, outcome]
    assert [direct[name] for name in names] == ["", "", "", ""]


def test_request_without_a_model_writes_no_usage_row(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    write_records(file, RECORD, replace(RECORD, id="x", model="", error="Unauthorized"))
    assert [row["id"] for row in read_rows(file)] == ["r"]


def test_usage_rows_are_unique_by_time_and_id(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    later = replace(RECORD, started_at=1_700_000_001.5)
    write_records(file, RECORD, later, RECORD)

    write_records(file, RECORD)

    assert [row["at"] for row in read_rows(file)] == [1_700_000_000.25, 1_700_000_001.5]


def test_rows_are_written_to_the_table_of_a_newer_version(tmp_path: Path) -> None:
    """During an upgrade both versions write; the newer one has added a column."""
    path = tmp_path / "u.sqlite"
    write_records(path, RequestRecord("r1", 1.0, "/v1", model="m"))
    with closing(sqlite3.connect(path)) as file:
        file.execute("ALTER TABLE usage ADD COLUMN added TEXT NOT NULL DEFAULT ''")
        file.commit()
    write_records(path, RequestRecord("r2", 2.0, "/v1", model="m"))
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT id FROM usage ORDER BY at").fetchall() == [("r1",), ("r2",)]


def test_expired_rows_are_deleted(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    old = replace(RECORD, id="old", started_at=get_now() - 3601)
    write_records(file, old)

    write_records(file, RECORD, keep=3600)

    assert [row["id"] for row in read_rows(file)] == ["r"]


def test_expired_rows_are_deleted_once_per_hour(tmp_path: Path) -> None:
    file, moment = tmp_path / "usage.sqlite", get_now()
    ledger = SqliteUsageRecorder(str(file), 200, lambda: moment)
    ledger._write_batch([RECORD])
    moment += 3599
    ledger._write_batch([replace(RECORD, id="s")])

    assert [row["id"] for row in read_rows(file)] == ["r", "s"]

    moment += 1
    ledger._write_batch([replace(RECORD, id="t", started_at=moment)])
    assert [row["id"] for row in read_rows(file)] == ["t"]

    ledger.close(PATIENCE)


def test_deleted_usage_file_is_recreated(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    ledger = SqliteUsageRecorder(str(file), FOREVER, get_now)
    ledger._write_batch([RECORD])
    file.unlink()
    ledger._write_batch([replace(RECORD, id="s")])

    assert [row["id"] for row in read_rows(file)] == ["s"]

    file.rename(tmp_path / "elsewhere.sqlite")
    ledger._write_batch([replace(RECORD, id="t")])
    ledger.close(PATIENCE)

    assert [row["id"] for row in read_rows(file)] == ["t"]


def test_rows_wait_for_a_locked_file(tmp_path: Path, log_waiter: LogWaiter) -> None:
    file = tmp_path / "usage.sqlite"
    write_records(file, RECORD)
    ledger = SqliteUsageRecorder(str(file), FOREVER, get_now)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        ledger.start()
        ledger.record_usage(replace(RECORD, id="s"))
        log_waiter.hear(f"usage is not written to {file} for now: database is locked")
        other.execute("ROLLBACK")
        log_waiter.hear(f"usage is written to {file} again")

    ledger.close(PATIENCE)

    assert [row["id"] for row in read_rows(file)] == ["r", "s"]
    assert len(log_waiter.messages) == 2
    assert ledger.count_dropped() == 0


def _remove_folder(file: Path) -> None:
    file.parent.rmdir()


def _write_invalid_database(file: Path) -> None:
    file.write_text("This is no database, and long enough to be known for none." * 9)


@pytest.mark.parametrize("harm", [_remove_folder, _write_invalid_database])
def test_unwritable_rows_are_counted_and_logged(
    tmp_path: Path, log_waiter: LogWaiter, harm: Callable[[Path], None]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    harm(folder / "usage.sqlite")
    tries, again = count(1), threading.Event()

    def tried() -> float:
        if next(tries) == 3:
            again.set()
        return get_now()

    ledger = SqliteUsageRecorder(str(folder / "usage.sqlite"), FOREVER, tried)
    ledger.start()
    ledger.record_usage(RECORD)

    assert again.wait(PATIENCE)

    ledger.close(PATIENCE)
    assert ledger.count_dropped() == 1

    began, ended = log_waiter.messages
    assert began.startswith(f"usage is not written to {folder / 'usage.sqlite'} for now: ")
    assert ended == "usage: 1 rows were dropped"


def test_dropped_rows_are_logged_when_writing_resumes(
    tmp_path: Path, log_waiter: LogWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_MAX_WAITING_ROWS", 1)
    folder = tmp_path / "folder"
    ledger = SqliteUsageRecorder(str(folder / "usage.sqlite"), FOREVER, get_now)
    ledger.start()
    ledger.record_usage(RECORD)
    log_waiter.hear("usage is not written to")
    ledger.record_usage(replace(RECORD, id="s"))
    ledger.record_usage(replace(RECORD, id="t"))
    folder.mkdir()
    log_waiter.hear("usage: 1 rows were dropped")

    ledger.close(PATIENCE)

    assert [row["id"] for row in read_rows(folder / "usage.sqlite")] == ["r", "s"]


def test_close_retries_the_last_write(
    tmp_path: Path, log_waiter: LogWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_RETRY_DELAY", PATIENCE)
    folder = tmp_path / "folder"
    ledger = SqliteUsageRecorder(str(folder / "usage.sqlite"), FOREVER, get_now)
    ledger.start()
    ledger.record_usage(RECORD)
    log_waiter.hear("usage is not written to")
    folder.mkdir()

    ledger.close(PATIENCE)

    assert ledger.count_dropped() == 0
    assert len(read_rows(folder / "usage.sqlite")) == 1


def test_file_without_a_table_is_replaced(tmp_path: Path, log_waiter: LogWaiter) -> None:
    """The file is removed before its table is created."""
    file = tmp_path / "usage.sqlite"
    file.symlink_to("/dev/full")
    ledger = SqliteUsageRecorder(str(file), FOREVER, get_now)
    ledger.start()
    ledger.record_usage(RECORD)
    log_waiter.hear("database or disk is full")
    file.unlink()
    log_waiter.hear("is written to")

    ledger.close(PATIENCE)

    assert len(read_rows(file)) == 1


def test_incomplete_close_is_logged(
    tmp_path: Path, log_waiter: LogWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SqliteUsageRecorder(str(tmp_path / "usage.sqlite"), FOREVER, get_now)
    monkeypatch.setattr(BackgroundWriter, "close", lambda self, within: False)

    ledger.close(0)

    assert log_waiter.messages == [
        f"usage: the last rows were not written to {tmp_path / 'usage.sqlite'}"
    ]


def test_usage_can_be_queried_during_writes(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    ledger = SqliteUsageRecorder(str(file), FOREVER, get_now)
    ledger._write_batch([RECORD])

    assert [one.requests for one in query_sqlite_usage(str(file), ["model"], 0)] == [1]

    ledger._write_batch([replace(RECORD, id="s")])
    assert [one.requests for one in query_sqlite_usage(str(file), ["model"], 0)] == [2]

    ledger.close(PATIENCE)
    assert not os.path.exists(f"{file}-wal")  # noqa: PTH110 - a text
