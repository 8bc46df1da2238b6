"""Clients that dawdle (34), that come in thousands (35), and that take every descriptor (36)."""

import asyncio
import resource
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import httpx
import pytest

from gateway.runtime.process import raise_fd_limit
from tests.conftest import Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.protocol_clients import wait_until

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
    """What is said to a client that sends the rest of what it says byte by byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)

    async def go_on() -> None:
        with suppress(ConnectionError):
            for byte in rest:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)

    dripping = asyncio.create_task(go_on())
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        dripping.cancel()
        writer.transport.abort()


@pytest.mark.fault(34)
async def test_slow_headers_and_bodies_time_out_and_others_are_served(
    serve: Serve,
) -> None:
    """A head has so long, however it comes; a body may come slowly, and may not pause."""
    limits = {"header_timeout": "1s", "body_timeout": "1s", "drain_timeout": "1s"}
    front = await serve(build_config(limits=limits, admin=None))
    async with asyncio.TaskGroup() as tasks:
        head = [
            tasks.create_task(send_slowly(front.port, HEAD, b"X: " + b"y" * 300)) for _ in range(20)
        ]
        body = [tasks.create_task(send_slowly(front.port, BODY + b"{", b"")) for _ in range(20)]
        slow = tasks.create_task(
            send_slowly(front.port, BODY, b'{"model": "m", "messages": "no" }       ')
        )
        served = 0
        while not all(one.done() for one in (*head, *body)):
            served += (await front.http.get("/health")).status_code == httpx.codes.OK
            await asyncio.sleep(0.05)

    assert all(one.result().startswith(b"HTTP/1.1 408 ") for one in head)
    assert all(one.result().startswith(b"HTTP/1.1 400 ") for one in body)
    assert b"did not arrive whole" in body[0].result()
    assert b"messages" in slow.result(), "it came slowly, and was read"
    assert served > 5
    await wait_until(lambda: len(front.records) >= served + 21)
    assert {one.outcome for one in front.records} <= {"ok", "client_error"}


# ── 35 ──────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def open_idle_connections(port: int, most: int) -> AsyncIterator[list[socket.socket]]:
    """So many connections on which nothing is ever said."""
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
    """A stream continues, and requests on new and kept connections are served."""
    raise_fd_limit()
    echo = {"kind": "echo", "script": ["t "] * 40, "delay": "50ms"}
    text = build_config(backends={"echo": echo}, limits={"connections": 500})
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with GatewayProcess(tmp_path, text) as gateway:
        before = gateway.descriptors()
        url = f"{gateway.urls[0]}/v1/chat/completions"
        async with gateway.http.stream("POST", url, json=body) as answer:
            chunks = answer.aiter_text()
            received = await anext(chunks)
            for _ in range(10):
                async with open_idle_connections(gateway.port, 500), httpx.AsyncClient() as new:
                    assert gateway.descriptors() <= before + 510
                    for _ in range(5):
                        health = await new.get(f"{gateway.urls[0]}/health")
                        assert health.status_code == httpx.codes.OK
            received += "".join([part async for part in chunks])
    assert received.endswith("data: [DONE]\n\n")


# ── 36 ──────────────────────────────────────────────────────────────────────────────────────────


async def is_served(url: str) -> bool:
    """Whether a new connection is served."""
    async with httpx.AsyncClient(timeout=2) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@pytest.mark.fault(36)
@pytest.mark.parametrize("loop", LOOPS)
async def test_gateway_survives_file_descriptor_exhaustion(tmp_path: Path, loop: str) -> None:
    """Somebody takes them away from it; when they are back it serves at once."""
    async with GatewayProcess(tmp_path, build_config(admin=None), program=LOOPS[loop]) as gateway:
        soft, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        few = (gateway.descriptors() + 10, hard)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, few)
        async with open_idle_connections(gateway.port, 60):
            await asyncio.sleep(3)
            lines = gateway.read_output().splitlines()[1:]
            assert gateway.process.poll() is None
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(5):
            while not await is_served(gateway.urls[0]):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.1)
    assert len(lines) <= 40, "ten in each second that it had none, and in the one that began"


@pytest.mark.fault(36)
async def test_client_connections_use_at_most_half_of_the_descriptors(
    tmp_path: Path,
) -> None:
    """Half of them is for workers, and for what else the gateway opens."""
    text = build_config(backends={"echo": {"kind": "echo"}}, admin=None)
    limited = ("prlimit", "--nofile=164:164", *LOOPS["uvloop"])
    async with GatewayProcess(tmp_path, text, program=limited) as gateway:
        before = gateway.descriptors()
        async with open_idle_connections(gateway.port, 300):
            assert await is_served(gateway.urls[0])
            assert gateway.descriptors() <= before + 51
    assert "accept" not in gateway.read_output()
