"""52: when the reader of the log stops reading, the gateway serves on and can be stopped."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.fault.gateway_process import build_config
from tests.support.waiting import wait_until

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
BUFFER = 10
REQUESTS = 500
"""Their log lines exceed the pipe and the buffer by far."""


class PipedGateway:
    """A gateway whose log goes to a pipe that only the test reads."""

    def __init__(self, folder: Path) -> None:
        file = folder / "gateway.yaml"
        file.write_text(build_config(observe={"access_log": {"buffer": BUFFER}}))
        self.reads, self.writes = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=self.writes,
        )
        first_line = os.read(self.reads, 1 << 16).decode().partition("\n")[0]
        self.url, self.admin = re.findall(r"http://[\d.:]+", first_line)

    def close_write_end(self) -> None:
        """Close the test's copy of the pipe's write end."""
        os.close(self.writes)
        self.writes = -1

    def fill(self) -> None:
        """Fill the pipe."""
        os.set_blocking(self.writes, False)
        with suppress(BlockingIOError):
            while True:
                os.write(self.writes, b"." * 4096)
        os.set_blocking(self.writes, True)

    async def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: self.process.poll() is not None)
        return self.process.returncode


@pytest.fixture
def piped_gateway(tmp_path: Path) -> Iterator[PipedGateway]:
    piped = PipedGateway(tmp_path)
    yield piped
    piped.process.kill()
    piped.process.wait()
    for one in (piped.reads, piped.writes):
        if one >= 0:
            os.close(one)


@pytest.mark.fault(52)
async def test_full_log_pipe_drops_lines_and_no_responses(
    piped_gateway: PipedGateway,
) -> None:
    piped_gateway.close_write_end()
    async with httpx.AsyncClient(timeout=30) as http:
        for _ in range(REQUESTS):
            response = await http.post(f"{piped_gateway.url}/v1/chat/completions", json=REQUEST)
            assert response.status_code == 200
        page = await http.get(f"{piped_gateway.admin}/metrics")
        [dropped] = re.findall(
            r"^interlingua_log_lines_dropped_total (\S+)$", page.text, re.MULTILINE
        )
        lost = int(float(dropped))

        assert 0 < lost < REQUESTS

        reading = LogReader(piped_gateway.reads)
        await wait_until(lambda: reading.count_dropped() == lost)
        await wait_until(lambda: reading.read.count(b'"id"') + lost >= REQUESTS)

        assert reading.read.count(b'"id"') + lost == REQUESTS

        await http.post(f"{piped_gateway.url}/v1/chat/completions", json=REQUEST)
    assert await piped_gateway.stop() == 0

    await asyncio.to_thread(reading.thread.join, 20)
    assert reading.read.count(b'"id"') + lost == REQUESTS + 1


@pytest.mark.fault(52)
async def test_gateway_stops_although_its_log_pipe_is_full(
    piped_gateway: PipedGateway,
) -> None:
    piped_gateway.fill()
    async with httpx.AsyncClient(timeout=30) as http:
        assert (await http.get(f"{piped_gateway.url}/v1/models")).status_code == 200
    assert await piped_gateway.stop() == 0


class LogReader:
    """Reads the pipe continuously."""

    def __init__(self, reads: int) -> None:
        self.read = b""
        self._reads = reads
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def count_dropped(self) -> int:
        """Return the number of lines that the log reports as lost."""
        return sum(
            map(
                int,
                re.findall(rb'"message":"(\d+) log lines were dropped', self.read, re.MULTILINE),
            )
        )

    def _run(self) -> None:
        while data := os.read(self._reads, 1 << 16):
            self.read += data
