"""51: the file of usage can't be written. No answer is the worse for it."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from tests.fault.fronts import until
from tests.fault.gateways import GatewayProcess, written

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def configured(file: Path) -> str:
    return written(observe={"usage": str(file)})


async def answered(gateway: GatewayProcess, times: int) -> None:
    for _ in range(times):
        answer = await gateway.http.post(f"{gateway.urls[0]}/v1/chat/completions", json=ASKED)
        assert answer.status_code == 200


async def lost(gateway: GatewayProcess) -> float:
    page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")
    [line] = [
        one
        for one in page.text.splitlines()
        if one.startswith("interlingua_usage_rows_dropped_total")
    ]
    return float(line.split()[1])


def count(file: Path) -> int:
    """The rows that there are by now."""
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(file)) as found:
        return int(found.execute("SELECT count(*) FROM usage").fetchone()[0])
    return 0


async def test_rows_wait_while_the_file_is_locked(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    async with GatewayProcess(tmp_path, configured(file)) as gateway:
        await answered(gateway, 1)
        await until(lambda: file.exists() and count(file) == 1, 10)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await answered(gateway, 20)
            await until(lambda: "database is locked" in gateway.said(), 10)
            await answered(gateway, 1)
            assert await lost(gateway) == 0
            other.execute("ROLLBACK")
        assert await gateway.stop() == 0
    assert count(file) == 22


async def test_a_folder_that_is_taken_away_costs_rows_and_no_answers(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with GatewayProcess(tmp_path, configured(folder / "usage.sqlite")) as gateway:
        folder.rmdir()
        await answered(gateway, 1)
        await until(lambda: "unable to open database file" in gateway.said(), 10)
        await answered(gateway, 20)
        assert await gateway.stop() == 0
        assert "usage: 21 rows were dropped" in gateway.said()


async def test_a_full_disk_costs_no_answers(tmp_path: Path) -> None:
    """What is written to ``/dev/full`` meets one."""
    file = tmp_path / "usage.sqlite"
    async with GatewayProcess(tmp_path, configured(file)) as gateway:
        file.symlink_to("/dev/full")
        await answered(gateway, 1)
        await until(lambda: "usage is not written" in gateway.said(), 10)
        await answered(gateway, 20)
        file.unlink()
        await until(lambda: file.exists() and count(file) == 21, 10)
        assert await lost(gateway) == 0
