"""``interlingua usage`` prints a usage file as a table."""

import importlib.util
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.cli.usage import usage
from gateway.observability.record import RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from protocols.core.events import Usage

RECORD = RequestRecord(
    "a", 1_700_000_000.0, model="chat", version="1", key="web", usage=Usage(1000, 20)
)
RECORDS = (
    RECORD,
    replace(RECORD, id="b", started_at=1_700_090_000.0, version="2", split="rollout"),
    replace(RECORD, id="c", outcome="worker_error", error="WorkerFailed", usage=None),
    replace(RECORD, id="d", outcome="cancelled", usage=None, tokens=4, key=""),
)


@pytest.fixture
def usage_file(tmp_path: Path) -> Path:
    path = tmp_path / "usage.sqlite"
    ledger = SqliteUsageRecorder(str(path), 1e12, lambda: 1_700_000_000.0)
    ledger._write_batch(RECORDS)
    ledger.close(1)
    return path


def run_usage(*arguments: str | Path) -> Result:
    return CliRunner().invoke(usage, [*map(str, arguments)])


def test_usage_table_lists_totals_by_key_and_model(usage_file: Path) -> None:
    result = run_usage(usage_file)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "key  model  requests  errors  cancelled  prompt tokens  completion tokens",
        "-    chat          1       0          1              0                  4",
        "web  chat          3       1          0          2,000                 40",
        "all                4       1          1          2,000                 44",
    ]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("version", [({"version": "1"}, 3), ({"version": "2"}, 1)]),
        ("split", [({"split": ""}, 3), ({"split": "rollout"}, 1)]),
        ("day", [({"day": "2023-11-14"}, 3), ({"day": "2023-11-15"}, 1)]),
        ("model,model", [({"model": "chat"}, 4)]),
    ],
)
def test_by_option_groups_the_totals(usage_file: Path, by: str, expected: list[object]) -> None:
    result = run_usage(usage_file, "--by", by, "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["by"], one["requests"]) for one in rows] == expected


def test_since_option_filters_the_records(usage_file: Path) -> None:
    result = run_usage(usage_file, "--since", "2023-11-15T12:00", "--json")
    [row] = [json.loads(line) for line in result.stdout.splitlines()]

    assert row == {
        "by": {"key": "web", "model": "chat"},
        "requests": 1,
        "errors": 0,
        "cancelled": 0,
        "prompt_tokens": 1000,
        "completion_tokens": 20,
    }


def test_empty_period_prints_a_table_of_zeros(usage_file: Path) -> None:
    assert run_usage(usage_file, "--since", "1h", "--by", "model").stdout.splitlines() == [
        "model  requests  errors  cancelled  prompt tokens  completion tokens",
        "all           0       0          0              0                  0",
    ]


@pytest.mark.parametrize(
    ("table", "exit_code"),
    [
        (None, 0),
        ("rollout_plan (model TEXT)", 0),
        ("rollout_file (n INTEGER PRIMARY KEY, id TEXT)", 0),
        ("customers (id INTEGER)", 2),
        ("responses (id TEXT)", 2),
    ],
)
def test_only_the_gateways_databases_may_lack_the_table_of_usage(
    tmp_path: Path, table: str | None, exit_code: int
) -> None:
    """An empty file and one with rollouts have no rows yet; another application's has no usage."""
    path = tmp_path / "some.sqlite"
    path.touch()
    if table is not None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"CREATE TABLE {table}")
    result = run_usage(path, "--by", "model")

    assert result.exit_code == exit_code
    assert ("is not a usage database: it has no table 'usage'" in result.stderr) == bool(exit_code)


def test_invalid_options_and_files_are_reported(usage_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("no database" * 100)
    for arguments, says in (
        ([usage_file, "--by", "modle"], "'modle' is not one of key, model, version, "),
        ([usage_file, "--since", "soon"], "neither a time"),
        ([other], "is not a usage database: file is not a database"),
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path], f"{tmp_path} is a folder, not a usage database"),
    ):
        result = run_usage(*arguments)
        assert result.exit_code == 2
        assert says in result.stderr


def test_missing_postgres_extra_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run_usage("postgresql://h/d")

    assert result.exit_code == 2
    assert "pip install 'interlingua[postgres]'" in result.stderr
