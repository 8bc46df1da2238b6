"""51: the usage file can't be written. Responses are unaffected."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.waiting import wait_until

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def build_usage_config(file: Path) -> str:
    return build_config(observe={"usage": str(file)})


async def send_chats(gateway: GatewayProcess, times: int) -> None:
    for _ in range(times):
        response = await gateway.http.post(f"{gateway.urls[0]}/v1/chat/completions", json=REQUEST)
        assert response.status_code == 200


async def get_dropped_rows(gateway: GatewayProcess) -> float:
    page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")
    [line] = [
        one
        for one in page.text.splitlines()
        if one.startswith("interlingua_usage_rows_dropped_total")
    ]
    return float(line.split()[1])


def count_rows(file: Path) -> int:
    """Return the number of rows so far."""
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(file)) as database:
        return int(database.execute("SELECT count(*) FROM usage").fetchone()[0])
    return 0


@pytest.mark.fault(51)
async def test_usage_rows_are_buffered_while_the_file_is_locked(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    async with GatewayProcess(tmp_path, build_usage_config(file)) as gateway:
        await send_chats(gateway, 1)
        await wait_until(lambda: file.exists() and count_rows(file) == 1)

        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await send_chats(gateway, 20)
            await wait_until(lambda: "database is locked" in gateway.read_output())

            await send_chats(gateway, 1)

            assert await get_dropped_rows(gateway) == 0

            other.execute("ROLLBACK")

        assert await gateway.stop() == 0

    assert count_rows(file) == 22


@pytest.mark.fault(51)
async def test_removed_usage_directory_drops_rows_and_no_responses(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with GatewayProcess(tmp_path, build_usage_config(folder / "usage.sqlite")) as gateway:
        folder.rmdir()
        await send_chats(gateway, 1)
        await wait_until(lambda: "unable to open database file" in gateway.read_output())

        await send_chats(gateway, 20)

        assert await gateway.stop() == 0
        assert "usage: 21 rows were dropped" in gateway.read_output()


@pytest.mark.fault(51)
async def test_full_disk_does_not_affect_responses(tmp_path: Path) -> None:
    """``/dev/full`` acts as a full disk."""
    file = tmp_path / "usage.sqlite"
    async with GatewayProcess(tmp_path, build_usage_config(file)) as gateway:
        file.symlink_to("/dev/full")
        await send_chats(gateway, 1)
        await wait_until(lambda: "usage is not written" in gateway.read_output())
        await send_chats(gateway, 20)
        file.unlink()

        await wait_until(lambda: file.exists() and count_rows(file) == 21)

        assert await get_dropped_rows(gateway) == 0
