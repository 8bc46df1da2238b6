"""Slow clients (34), thousands of connections (35), and exhausted descriptors (36)."""

import asyncio
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import httpx
import pytest

from gateway.runtime.process import raise_fd_limit
from tests.conftest import Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.waiting import PATIENCE, wait_until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
TYPE = b"Connection: close\r\nContent-Type: application/json\r\n"
BODY = HEAD + TYPE + b"Content-Length: 40\r\n\r\n"
WRONG = b'{"model": "m", "messages": "no"}        '
"""Forty bytes."""
LOOPS: Mapping[str, tuple[str, ...]] = {
    "uvloop": (sys.executable, "-m", "gateway"),
    "asyncio": (
        sys.executable,
        "-c",
        "import sys; sys.modules['uvloop'] = None; from gateway.cli import main; main()",
    ),
}


# ── 34 ──────────────────────────────────────────────────────────────────────────────────────────


async def send_slowly(port: int, first: bytes, rest: bytes) -> bytes:
    """Send the rest of a request byte by byte and return the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)

    async def send_bytes() -> None:
        with suppress(ConnectionError):
            for byte in rest:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)

    dripping = asyncio.create_task(send_bytes())
    try:
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    finally:
        dripping.cancel()
        writer.transport.abort()


@pytest.mark.fault(34)
async def test_slow_headers_and_bodies_time_out_and_others_are_served(
    serve: Serve,
) -> None:
    """Headers have a total timeout; a body may be slow but not pause."""
    limits = {"header_timeout": "1s", "body_timeout": "1s", "drain_timeout": "1s"}
    gateway = await serve(build_config(limits=limits, admin=None))
    async with asyncio.TaskGroup() as tasks:
        head = [
            tasks.create_task(send_slowly(gateway.port, HEAD, b"X: " + b"y" * 300))
            for _ in range(20)
        ]
        body = [tasks.create_task(send_slowly(gateway.port, BODY + b"{", b"")) for _ in range(20)]
        slow = tasks.create_task(
            send_slowly(gateway.port, BODY, b'{"model": "m", "messages": "no" }       ')
        )
        served = 0
        while not all(one.done() for one in (*head, *body)):
            served += (await gateway.http.get("/health")).status_code == httpx.codes.OK
            await asyncio.sleep(0.05)

    assert all(one.result().startswith(b"HTTP/1.1 408 ") for one in head)
    assert all(one.result().startswith(b"HTTP/1.1 400 ") for one in body)
    assert b"did not arrive whole" in body[0].result()
    assert b"messages" in slow.result(), "the slow body was read"
    assert served > 5

    await wait_until(lambda: len(gateway.records) >= served + 21)
    assert {one.outcome for one in gateway.records} <= {"ok", "client_error"}


# ── 35 ──────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def open_idle_connections(port: int, most: int) -> AsyncIterator[list[socket.socket]]:
    """Open this many connections without sending anything."""
    async with AsyncExitStack() as stack:
        connections = []
        for n in range(most):
            one = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            connections.append(one)
            if n % 50 == 0:
                await asyncio.sleep(0)
        yield connections


@pytest.mark.fault(35)
@pytest.mark.slow
async def test_idle_connections_above_the_limit_evict_only_idle_connections(
    tmp_path: Path,
) -> None:
    """Streams continue, and requests on new and on kept connections are served."""
    raise_fd_limit()
    echo = {"kind": "echo", "script": ["t "] * 40, "delay": "50ms"}
    text = build_config(backends={"echo": echo}, limits={"connections": 500})
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}

    async with GatewayProcess(tmp_path, text) as gateway:
        before = gateway.count_descriptors()
        url = f"{gateway.urls[0]}/v1/chat/completions"
        async with gateway.http.stream("POST", url, json=body) as response:
            chunks = response.aiter_text()
            received = await anext(chunks)
            for _ in range(10):
                async with (
                    open_idle_connections(gateway.port, 500),
                    httpx.AsyncClient(timeout=30) as new,
                ):
                    assert gateway.count_descriptors() <= before + 510
                    for _ in range(5):
                        health = await new.get(f"{gateway.urls[0]}/health")
                        assert health.status_code == httpx.codes.OK
            received += "".join([part async for part in chunks])

    assert received.endswith("data: [DONE]\n\n")


# ── 36 ──────────────────────────────────────────────────────────────────────────────────────────


async def is_served(url: str) -> bool:
    """Return whether a new connection gets a response."""
    async with httpx.AsyncClient(timeout=10) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@pytest.mark.fault(36)
@pytest.mark.parametrize("loop", LOOPS)
async def test_gateway_survives_file_descriptor_exhaustion(tmp_path: Path, loop: str) -> None:
    """The limit of the process is lowered; when it is raised again, the gateway serves at once."""
    async with GatewayProcess(tmp_path, build_config(admin=None), program=LOOPS[loop]) as gateway:
        soft, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        few = (gateway.count_descriptors() + 10, hard)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, few)
        began = time.monotonic()
        async with open_idle_connections(gateway.port, 60):
            await asyncio.sleep(3)
            lines = gateway.read_output().splitlines()[1:]
            assert gateway.process.poll() is None
        seconds = time.monotonic() - began
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(PATIENCE):
            while not await is_served(gateway.urls[0]):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.1)
    assert len(lines) <= 10 * seconds + 10, "ten messages per second without descriptors"


@pytest.mark.fault(36)
async def test_client_connections_use_at_most_half_of_the_descriptors(
    tmp_path: Path,
) -> None:
    """The other half is for workers and files."""
    text = build_config(backends={"echo": {"kind": "echo"}}, admin=None)
    limited = ("prlimit", "--nofile=164:164", *LOOPS["uvloop"])

    async with GatewayProcess(tmp_path, text, program=limited) as gateway:
        before = gateway.count_descriptors()
        async with open_idle_connections(gateway.port, 300):
            assert await is_served(gateway.urls[0])
            assert gateway.count_descriptors() <= before + 51

    assert "accept" not in gateway.read_output()
