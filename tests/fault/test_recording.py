"""67: recordings can't be written, or the process that writes them is killed."""

import asyncio
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.observability.recording import RecordedRequest, read_recordings
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.waiting import wait_until

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello " * 50}]}


def build_recording_config(to: Path, **fields: Any) -> str:
    return build_config(defaults={"record": {"to": str(to), "bodies": "full"}}, **fields)


async def send_chats(gateway: GatewayProcess, times: int) -> None:
    for _ in range(times):
        response = await gateway.http.post(f"{gateway.urls[0]}/v1/chat/completions", json=BODY)
        assert response.status_code == 200


async def get_dropped(gateway: GatewayProcess) -> float:
    page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")
    [line] = [
        one
        for one in page.text.splitlines()
        if one.startswith("interlingua_recorded_requests_dropped_total")
    ]
    return float(line.split()[1])


async def wait_for_all(gateway: GatewayProcess, to: Path, sent: int) -> float:
    """Wait until each request was recorded or dropped; returns how many were dropped."""
    for _ in range(600):
        dropped = await get_dropped(gateway)
        if dropped + len(read_whole(to)[0]) == sent:
            return dropped
        await asyncio.sleep(0.05)
    raise TimeoutError


def read_whole(to: Path) -> tuple[list[RecordedRequest], int]:
    """Return the readable recordings, and the number of unreadable lines."""
    if not to.exists():
        return [], 0
    reader = read_recordings(to)
    return [*reader], reader.skipped_lines


@pytest.mark.fault(67)
async def test_killed_process_leaves_readable_recordings(tmp_path: Path) -> None:
    """Killed at any moment under load, at most the last line is incomplete.

    The next process writes another file and reads nothing of the first.
    """
    to, total = tmp_path / "recordings", 0
    for number in range(6):
        gateway = GatewayProcess(tmp_path, build_recording_config(to))
        process = await gateway.__aenter__()
        await send_chats(process, 5 + 7 * number)
        if number == 5:  # the others may be killed before anything is written
            await wait_until(lambda: read_whole(to)[0] != [])
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        await process.http.aclose()
        records, skipped = read_whole(to)
        assert skipped <= number + 1
        assert len(records) >= total
        assert all(one.request == BODY for one in records)
        total = len(records)

    assert total > 0


@pytest.mark.fault(67)
async def test_full_disk_costs_records_and_no_responses(tmp_path: Path) -> None:
    """A file size limit acts as a full disk; when it is lifted, recordings are written again."""
    to = tmp_path / "recordings"
    async with GatewayProcess(tmp_path, build_recording_config(to)) as gateway:
        await send_chats(gateway, 2)
        await wait_until(lambda: len(read_whole(to)[0]) == 2)
        size = sum(one.stat().st_size for one in to.iterdir())
        pid, limit = gateway.process.pid, resource.RLIMIT_FSIZE
        before = resource.prlimit(pid, limit, (size + 100, resource.RLIM_INFINITY))
        try:
            await send_chats(gateway, 1)
            await wait_until(lambda: "requests are not recorded in" in gateway.read_output())
            resource.prlimit(pid, limit, (1, resource.RLIM_INFINITY))
            await send_chats(gateway, 4)
            await wait_until(lambda: read_whole(to)[1] == 0)
        finally:
            resource.prlimit(pid, limit, before)
        await send_chats(gateway, 2)
        dropped = await wait_for_all(gateway, to, 9)

        assert dropped >= 1
        assert await gateway.stop() == 0

    records, skipped = read_whole(to)

    assert (len(records), skipped) == (9 - dropped, 0)


@pytest.mark.fault(67)
async def test_graceful_shutdown_writes_the_rest(tmp_path: Path) -> None:
    """Every request answered before SIGTERM is recorded; each process writes its own file."""
    to = tmp_path / "recordings"
    async with GatewayProcess(tmp_path, build_recording_config(to), "--processes", "2") as gateway:
        await send_chats(gateway, 30)
        assert await gateway.stop() == 0

    records, skipped = read_whole(to)

    assert (len(records), skipped) == (30, 0)
    assert {one.stat().st_mode & 0o777 for one in to.iterdir()} == {0o600}
