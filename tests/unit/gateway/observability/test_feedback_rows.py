"""The feedback table in SQLite, beside the usage rows."""

import asyncio
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.observability import usage
from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import SqliteUsageRecorder, read_sqlite_usage

NOW = 1_700_000_100.0
RECORD = RequestRecord(
    "r", NOW - 10, model="chat", version="1", split="s", key="web", response_id="msg_r"
)
JUDGED = Feedback(NOW, "web", False, "id", "r", "up", "boolean", 1.0)


def write(path: Path, *items: RequestRecord | Feedback, keep: float = 1e12) -> SqliteUsageRecorder:
    recorder = SqliteUsageRecorder(str(path), keep, lambda: NOW, feedback=True)
    for item in items:
        if isinstance(item, Feedback):
            recorder.record_feedback(item)
        else:
            recorder.record_usage(item)
    recorder.start()
    recorder.close(20)
    return recorder


def read(path: Path, columns: str = "id, key, name, number") -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as file:
        return file.execute(f"SELECT {columns} FROM feedback ORDER BY id, key, name").fetchall()  # noqa: S608 - columns of the tests


def test_same_key_and_name_replace_the_value(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    recorder = write(
        path,
        RECORD,
        JUDGED,
        JUDGED,
        replace(JUDGED, number=0.0, at=NOW + 5),
        replace(JUDGED, column="response_id", target="msg_r", number=0.0, comment="no"),
        replace(JUDGED, name="down"),
    )

    assert recorder.count_dropped() == 0
    assert read(path) == [("r", "web", "down", 1.0), ("r", "web", "up", 0.0)]
    assert read(path, "comment, request_at") == [("", NOW - 10), ("no", NOW - 10)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_the_key_of_the_request_may_judge_it(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    other = replace(JUDGED, key="other")

    recorder = write(path, RECORD, other, replace(other, any_key=True, name="ops"))

    assert recorder.count_dropped() == 1
    assert read(path) == [("r", "other", "ops", 1.0)]


def test_feedback_on_an_unknown_request_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    recorder = write(path, RECORD, replace(JUDGED, target="x"), JUDGED)

    assert recorder.count_dropped() == 1
    assert len(read(path)) == 1


def test_repeated_request_id_means_the_newest_request(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    write(path, RECORD, replace(RECORD, started_at=NOW - 5), JUDGED)
    assert read(path, "request_at") == [(NOW - 5,)]


def test_hostile_text_is_stored_as_text(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    text = "'); DROP TABLE usage; --"

    write(path, replace(RECORD, id=text), replace(JUDGED, target=text, comment=text, name="a.b-c"))

    assert read(path, "id, comment") == [(text, text)]


def test_old_feedback_is_deleted_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    old = replace(RECORD, id="old", started_at=NOW - 500)
    write(path, old, replace(JUDGED, target="old"))

    write(path, RECORD, JUDGED, keep=100)

    assert [row[0] for row in read(path)] == ["r"]


def test_file_of_an_older_version_gets_the_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    columns = [" ".join(one) for one in usage.USAGE_COLUMNS if one not in usage.ADDED_COLUMNS]
    with closing(sqlite3.connect(path)) as file:
        file.execute(
            f"CREATE TABLE usage ({', '.join(columns)}, PRIMARY KEY (at, id)) WITHOUT ROWID"
        )
        marks = ", ".join("?" * len(columns))
        row = usage.build_usage_row(replace(RECORD, id="old"))[: len(columns)]
        file.execute(f"INSERT INTO usage VALUES ({marks})", row)  # noqa: S608 - question marks
        file.commit()
    write(path, RECORD, JUDGED, replace(JUDGED, target="old"))

    extract = read_sqlite_usage(str(path), "chat", 0.0)

    assert [row[1] for row in extract.rows] == ["old", "r"]
    column = [name for name, _ in usage.USAGE_COLUMNS].index("response_id")
    assert [row[column] for row in extract.rows] == ["", "msg_r"]
    assert {one.id for one in extract.outcomes} == {"old", "r"}


def test_request_is_found_by_both_ids_and_only_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    recorder = write(path, RECORD)

    def find(one: Feedback) -> bool | None:
        return asyncio.run(recorder.find_request(one))

    assert find(JUDGED) is True
    assert find(replace(JUDGED, column="response_id", target="msg_r")) is True
    assert find(replace(JUDGED, column="response_id")) is False
    assert find(replace(JUDGED, key="x")) is False
    assert find(replace(JUDGED, key="x", any_key=True)) is True

    path.unlink()
    assert find(JUDGED) is None


def test_file_without_feedback_is_read(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    recorder = SqliteUsageRecorder(str(path), 1e12, lambda: NOW)
    recorder.record_usage(RECORD)
    recorder.start()
    recorder.close(20)

    extract = read_sqlite_usage(str(path), "chat", 0.0)

    assert (extract.models, len(extract.rows), extract.outcomes) == (["chat"], 1, [])
    assert read_sqlite_usage(str(path), "chat", NOW).rows == []


def test_verdicts_on_copies_of_requests_are_no_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    copy = replace(RECORD, id="r-shadow", version="2", shadow_of="r")
    write(path, RECORD, copy, JUDGED, replace(JUDGED, any_key=True, target="r-shadow"))

    extract = read_sqlite_usage(str(path), "chat", 0.0)

    assert len(read(path)) == 2
    assert [(one.id, one.version) for one in extract.outcomes] == [("r", "1")]


def test_rows_are_kept_while_the_file_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_RETRY_DELAY", 0.05)
    path = tmp_path / "u.sqlite"
    write(path, RECORD)
    recorder = SqliteUsageRecorder(str(path), 1e12, lambda: NOW, feedback=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        recorder.start()

        recorder.record_feedback(JUDGED)

        assert asyncio.run(recorder.find_request(JUDGED)) is True

        file.execute("COMMIT")

    recorder.close(20)

    assert len(read(path)) == 1
