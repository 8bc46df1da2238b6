"""Keeps a gateway busy with requests that need no engine, one after another.

``python -m tests.bench_engine.busy_gateway PORT`` sends requests until it is killed.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench_engine.peers import ROOT

TOGETHER = 8
"""Connections, each of which sends a request after every response."""


@contextmanager
def run_busy_load(port: int) -> Iterator[None]:
    """Keep the listener on this port busy."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench_engine.busy_gateway", str(port)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise RuntimeError(f"nothing answers at port {port}")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def _ask(port: int, answered: asyncio.Event) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        answered.set()


async def _keep(port: int) -> None:
    answered = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(TOGETHER):
            group.create_task(_ask(port, answered))
        await answered.wait()
        print("busy", flush=True)  # noqa: T201 - what it says is that it has begun


if __name__ == "__main__":
    asyncio.run(_keep(int(sys.argv[1])))
