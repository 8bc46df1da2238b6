"""Usage databases are read whatever version made them, and before the first row."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.evidence.experiments import list_experiments
from gateway.evidence.rollout import RolloutState
from gateway.evidence.rollout_sqlite import SqliteRolloutStore
from gateway.evidence.rollout_store import open_rollout_store
from gateway.evidence.sequential import Tally
from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import (
    ADDED_COLUMNS,
    USAGE_COLUMNS,
    SqliteUsageRecorder,
    build_usage_row,
    query_sqlite_intervals,
    query_sqlite_usage,
    read_sqlite_usage,
)

NOW: Final = 1_700_000_000.0
RECORD: Final = RequestRecord(
    "r", NOW, "openai", model="chat", version="2", split="chat", key="web"
)
FIRST_COLUMNS: Final = len(USAGE_COLUMNS) - len(ADDED_COLUMNS)
CONFIG: Final = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{echo: {{kind: echo}}}}
models:
  chat:
    versions: {{"1": {{backend: echo}}, "2": {{backend: echo}}}}
    split: {{weights: {{"1": 50, "2": 50}}}}
    rollout: {{to: "2", steps: [50, 100], guardrails: {{errors: {{max_increase: 1%}}}}}}
observe: {{usage: {file}}}
"""


def create_table(file: Path, count: int) -> None:
    """Create the table of a version that had the first ``count`` columns, with one row."""
    columns = ", ".join(" ".join(one) for one in USAGE_COLUMNS[:count])
    values = ", ".join("?" * count)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"CREATE TABLE usage ({columns}, PRIMARY KEY (at, id)) WITHOUT ROWID")
        connection.execute(
            f"INSERT INTO usage VALUES ({values})",  # noqa: S608 - columns of ours
            build_usage_row(replace(RECORD, outcome="worker_error"))[:count],
        )


@pytest.mark.parametrize("count", range(FIRST_COLUMNS, len(USAGE_COLUMNS) + 1))
def test_table_of_an_older_version_is_read_with_defaults(tmp_path: Path, count: int) -> None:
    """Nothing is written: the file may be read only."""
    file = tmp_path / "u.sqlite"
    create_table(file, count)
    file.chmod(0o400)
    before = file.read_bytes()

    [total] = query_sqlite_usage(str(file), ["model", "key"], 0)
    assert (total.by, total.requests, total.errors) == ({"model": "chat", "key": "web"}, 1, 1)
    [interval] = query_sqlite_intervals(str(file), 60, 0)
    assert (interval.version, interval.requests, interval.errors) == ("2", 1, 1)
    extract = read_sqlite_usage(str(file), "chat", 0)
    assert extract.rows == [build_usage_row(replace(RECORD, outcome="worker_error"))]
    assert (extract.models, extract.outcomes) == (["chat"], [])

    config = load_text(CONFIG.format(file=file), "g.yaml", env={})
    [experiment] = list_experiments(config)
    assert [one.assigned for one in experiment.versions] == [0, 1]
    rollout = config.models["chat"].rollout
    assert rollout is not None
    samples = open_rollout_store(config).read_samples(rollout, "chat", "chat", RolloutState())
    assert samples.errors == (Tally(0, 0), Tally(1, 1))
    assert file.read_bytes() == before


@pytest.mark.parametrize("count", [FIRST_COLUMNS, len(USAGE_COLUMNS)])
def test_request_of_an_older_version_is_there_to_be_judged(tmp_path: Path, count: int) -> None:
    file = tmp_path / "u.sqlite"
    create_table(file, count)
    recorder = SqliteUsageRecorder(str(file), 1e12, lambda: NOW, feedback=True)
    judged = Feedback(NOW, "web", False, "id", "r", "up", "boolean", 1.0)
    for feedback, is_there in (
        (judged, True),
        (replace(judged, target="other"), False),
        (replace(judged, column="response_id", target="msg_r"), False),
    ):
        assert asyncio.run(recorder.find_request(feedback)) is is_there


def create_rollout(file: Path) -> None:
    SqliteRolloutStore(str(file)).load("chat", "plan", NOW)


@pytest.mark.parametrize("create", [create_rollout, Path.touch, lambda file: None])
def test_file_before_its_first_row_has_no_rows(tmp_path: Path, create: object) -> None:
    """A rollout has made it, or nobody has: then it is not made by reading it."""
    file = tmp_path / "u.sqlite"
    assert callable(create)
    create(file)
    was_there = file.exists()

    assert query_sqlite_usage(str(file), ["model"], 0) == []
    assert query_sqlite_intervals(str(file), 60, 0) == []
    assert read_sqlite_usage(str(file), "chat", 0).rows == []
    [experiment] = list_experiments(load_text(CONFIG.format(file=file), "g.yaml", env={}))
    assert experiment.problem == "fewer than two versions were sent requests"
    assert file.exists() == was_there


def test_file_in_a_missing_folder_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        query_sqlite_usage(str(tmp_path / "none" / "u.sqlite"), ["model"], 0)
