"""Usage rows in a real PostgreSQL, also when it fails, hangs or restarts."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.cli import main
from gateway.config.loader import load_text
from gateway.observability import usage, usage_postgres
from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import USAGE_COLUMNS, UsageRecorder
from gateway.runtime.gateway import build_services
from gateway.tools.connect_check import check_connections
from protocols.core.events import Usage
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.postgres_server import PostgresServer
from tests.support.waiting import wait_until

NOW = 1_700_000_100.0
RECORD = RequestRecord(
    "r",
    NOW - 10,
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
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as postgres:
        yield postgres


@pytest.fixture(autouse=True)
async def _empty_table(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_RETRY_DELAY", 0.05)
    await run_query(server, f"DROP TABLE IF EXISTS {usage_postgres.USAGE_TABLE}")


async def run_query(server: PostgresServer, query: str) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(server.url)
    try:
        return [dict(one) for one in await connection.fetch(query)]
    finally:
        await connection.close()


def read_rows(server: PostgresServer) -> list[dict[str, Any]]:
    query = f"SELECT * FROM {usage_postgres.USAGE_TABLE} ORDER BY at, id"  # noqa: S608 - a name of ours
    try:
        return asyncio.run(run_query(server, query))
    except asyncpg.UndefinedTableError:
        return []


def is_idle(server: PostgresServer) -> bool:
    """Return whether the server has no query left to answer."""
    query = (
        "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' "
        "AND state <> 'idle' AND pid <> pg_backend_pid()"
    )
    return not asyncio.run(run_query(server, query))


def start_recorder(server: PostgresServer, keep: float = 1e12) -> UsageRecorder:
    recorder = usage_postgres.create_postgres_recorder(server.url, keep, lambda: NOW)
    recorder.start()
    return recorder


def write_records(
    server: PostgresServer, *records: RequestRecord, keep: float = 1e12
) -> UsageRecorder:
    recorder = start_recorder(server, keep)
    for one in records:
        recorder.record_usage(one)
    recorder.close(20)
    return recorder


def block_until(ready: Any) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_usage_row_equals_the_sqlite_row_and_is_written_once(server: PostgresServer) -> None:
    cancelled = replace(RECORD, id="s", started_at=NOW, usage=None, first_token=None)
    cancelled.outcome = "cancelled"
    assert write_records(server, RECORD, cancelled, RequestRecord("none", NOW)).count_dropped() == 0
    assert write_records(server, RECORD, replace(RECORD, id="t")).count_dropped() == 0

    rows = read_rows(server)
    assert [*rows[0]] == [name for name, _ in USAGE_COLUMNS]
    assert [tuple(one.values()) for one in rows] == [
        usage.build_usage_row(RECORD),
        usage.build_usage_row(replace(RECORD, id="t")),
        usage.build_usage_row(cancelled),
    ]


def test_invalid_rows_are_dropped_without_losing_valid_rows(server: PostgresServer) -> None:
    bad = [replace(RECORD, id=f"bad{n}", usage=Usage(1 << 70, 1)) for n in range(2)]
    odd = replace(RECORD, id="odd\x00 id", model="half \ud83d")

    recorder = write_records(server, bad[0], RECORD, odd, bad[1])

    assert recorder.count_dropped() == 2
    assert [(one["id"], one["model"]) for one in read_rows(server)] == [
        ("odd id", "half ?"),
        ("r", "chat"),
    ]


def test_recorder_without_rows_does_not_connect(tmp_path: Path) -> None:
    recorder = usage_postgres.create_postgres_recorder(
        f"postgresql:///x?host={tmp_path}", 1e12, lambda: NOW
    )
    recorder.start()

    recorder.close(20)

    assert recorder.count_dropped() == 0


def test_rows_older_than_the_retention_are_deleted(server: PostgresServer) -> None:
    write_records(server, replace(RECORD, id="old", started_at=NOW - 200))
    write_records(server, RECORD, keep=100)
    assert [one["id"] for one in read_rows(server)] == ["r"]


def test_rows_are_written_after_a_table_lock_is_released(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert write_records(server, RECORD).count_dropped() == 0
    monkeypatch.setattr(usage_postgres, "_DATABASE_TIMEOUT", 0.3)
    recorder = start_recorder(server)

    async def locked() -> None:
        connection = await asyncpg.connect(server.url)
        try:
            async with connection.transaction():
                await connection.execute(f"LOCK TABLE {usage_postgres.USAGE_TABLE}")
                recorder.record_usage(replace(RECORD, id="s"))
                await wait_until(lambda: "is not written" in caplog.text)
        finally:
            await connection.close()

    asyncio.run(locked())
    block_until(lambda: len(read_rows(server)) == 2)

    recorder.close(20)

    assert recorder.count_dropped() == 0
    assert "is written to postgresql:///postgres again" in caplog.text
    assert "canary-password" not in caplog.text


def test_rows_are_buffered_during_an_outage_and_dropped_above_the_limit(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_postgres, "_DATABASE_TIMEOUT", 1.0)
    monkeypatch.setattr(usage, "_MAX_WAITING_ROWS", 5)
    recorder = start_recorder(server)
    recorder.record_usage(RECORD)
    block_until(lambda: len(read_rows(server)) == 1 and is_idle(server))
    server.kill()
    recorder.record_usage(replace(RECORD, id="s"))
    block_until(lambda: "is not written" in caplog.text)
    for n in range(20):
        recorder.record_usage(replace(RECORD, id=f"t{n}"))

    assert recorder.count_dropped() == 15

    server.start()
    block_until(lambda: len(read_rows(server)) == 7)
    block_until(lambda: "15 rows were dropped" in caplog.text)
    server.pause()
    recorder.record_usage(replace(RECORD, id="u"))
    block_until(lambda: caplog.text.count("is not written") == 2)
    server.resume()
    block_until(lambda: len(read_rows(server)) == 8)
    recorder.close(20)

    assert recorder.count_dropped() == 15


def test_unwritten_rows_are_counted_as_dropped_at_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    recorder = usage_postgres.create_postgres_recorder(
        f"postgresql:///x?host={tmp_path}", 1e12, lambda: NOW
    )
    recorder.start()
    recorder.record_usage(RECORD)
    block_until(lambda: "is not written" in caplog.text)

    recorder.close(20)

    assert recorder.count_dropped() == 1
    assert "1 rows were dropped" in caplog.text


# --- the gateway and the commands -----------------------------------------------------------------


def test_intervals_and_limited_sums_equal_those_of_sqlite(
    server: PostgresServer, tmp_path: Path
) -> None:
    records = [
        RequestRecord(
            f"r{n}",
            NOW - 50.0 * n,
            model="m",
            version=str(1 + n % 2),
            key=f"key{n % 3}",
            outcome=("ok", "cancelled", "worker_error")[n % 3],
            usage=Usage(3, 5),
            first_token=0.25 * n if n else None,
        )
        for n in range(12)
    ]
    write_records(server, *records)
    file = str(tmp_path / "usage.sqlite")
    recorder = usage.SqliteUsageRecorder(file, 1e12, lambda: NOW)
    recorder.start()
    for record in records:
        recorder.record_usage(record)
    recorder.close(20)

    intervals = usage_postgres.query_postgres_intervals(server.url, 120.0, NOW - 400)

    assert intervals == usage.query_sqlite_intervals(file, 120.0, NOW - 400)
    assert sum(one.requests for one in intervals) == 9
    for limit in (1, None):
        sums = usage_postgres.query_postgres_usage(server.url, ["key", "model"], 0, limit)
        assert sums == usage.query_sqlite_usage(file, ["key", "model"], 0, limit)
        assert len(sums) == (limit or 3)


async def test_usage_command_reports_the_same_sums_for_postgres_and_sqlite(
    server: PostgresServer, tmp_path: Path
) -> None:
    text = build_config(observe={"usage": {"postgres": server.url}})
    async with GatewayProcess(tmp_path, text) as gateway:
        await send_chats(gateway, 3)
        server.pause()
        try:
            await send_chats(gateway, 3)
        finally:
            server.resume()

        shown = await gateway.http.get(f"{gateway.urls[-1]}/-/config")

        assert "canary-password" not in f"{shown.text}{gateway.read_output()}"
        assert "sqlite" in shown.text
    file = build_config(observe={"usage": str(tmp_path / "usage.sqlite")})
    (tmp_path / "other").mkdir()
    async with GatewayProcess(tmp_path / "other", file) as gateway:
        await send_chats(gateway, 6)
    for by in ("model,version", "day,outcome"):
        sums = [
            await run_usage_command(source, "--by", by, "--json")
            for source in (server.url, str(tmp_path / "usage.sqlite"))
        ]
        assert sums[0].stdout == sums[1].stdout, sums[0].output
        assert '"requests":6' in sums[0].stdout

    later = await run_usage_command(server.url, "--since", "2100-01-01")

    assert later.stdout.splitlines()[-1].split()[:2] == ["all", "0"]


async def run_usage_command(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["usage", *arguments])


async def send_chats(gateway: GatewayProcess, times: int) -> None:
    for _ in range(times):
        response = await gateway.http.post(f"{gateway.urls[0]}/v1/chat/completions", json=REQUEST)
        assert response.status_code == 200


def test_usage_command_reports_database_errors_without_password(
    server: PostgresServer, tmp_path: Path
) -> None:
    for source, why in (
        (server.url.replace("/postgres?", "/none?"), "does not exist"),
        (f"postgresql://u:canary-password@/x?host={tmp_path}", "postgresql:///x can't be read"),
        ("postgresql://u:canary-password@[bad/x", "can't be read"),
    ):
        result = CliRunner().invoke(main, ["usage", source])
        assert result.exit_code == 2
        assert why in result.stderr
        assert "canary" not in result.stderr


async def test_the_connection_check_connects_to_the_database(
    server: PostgresServer, tmp_path: Path
) -> None:
    for url, state in ((server.url, "ok"), (f"postgresql:///x?host={tmp_path}", "error")):
        config = load_text(
            build_config(observe={"usage": {"postgres": url}}), "gateway.yaml", env={}
        )
        [finding] = [
            one
            for one in await check_connections(config, build_services())
            if one.subject.startswith("usage ")
        ]
        assert finding.state == state
        assert "canary" not in repr(finding)


async def find_request(server: PostgresServer, judged: Feedback) -> bool | None:
    recorder = usage_postgres.create_postgres_recorder(server.url, 1e12, lambda: NOW, feedback=True)
    is_there = await recorder.find_request(judged)
    recorder.close(20)
    await asyncio.sleep(0)  # its connection closes
    return is_there


@pytest.mark.parametrize("added", range(len(usage.ADDED_COLUMNS) + 1))
def test_table_of_an_older_version_is_read_with_defaults(
    server: PostgresServer, added: int
) -> None:
    """The last ``added`` columns are missing in the table, as older versions created it."""
    write_records(server, RECORD)
    for name, _ in usage.ADDED_COLUMNS[len(usage.ADDED_COLUMNS) - added :]:
        query = f"ALTER TABLE {usage_postgres.USAGE_TABLE} DROP COLUMN {name}"
        asyncio.run(run_query(server, query))

    [total] = usage_postgres.query_postgres_usage(server.url, ["key", "model"], 0)
    assert (total.by, total.requests) == ({"key": "web", "model": "chat"}, 1)
    assert len(usage_postgres.query_postgres_intervals(server.url, 60, 0)) == 1
    extract = usage_postgres.read_postgres_usage(server.url, "chat", 0)
    assert extract.rows == [usage.build_usage_row(RECORD)]
    judged = Feedback(NOW, "web", False, "id", RECORD.id, "up", "boolean", 1.0)
    assert asyncio.run(find_request(server, judged)) is True


def test_database_before_its_first_row_has_no_rows(server: PostgresServer) -> None:
    assert usage_postgres.query_postgres_usage(server.url, ["model"], 0) == []
    assert usage_postgres.query_postgres_intervals(server.url, 60, 0) == []
    extract = usage_postgres.read_postgres_usage(server.url, "chat", 0)
    assert (extract.models, extract.rows, extract.outcomes) == ([], [], [])
    judged = Feedback(NOW, "web", False, "id", RECORD.id, "up", "boolean", 1.0)
    assert asyncio.run(find_request(server, judged)) is False
    assert CliRunner().invoke(main, ["usage", server.url]).exit_code == 0
