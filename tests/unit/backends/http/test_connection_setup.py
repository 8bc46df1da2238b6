"""A new connection to a worker with one or several addresses."""

import asyncio
import socket
from typing import Any

import pytest

from backends.http import client
from backends.http.client import WorkerOrigin
from tests.support.fakes import ScriptedWorker, make_reply


class RecordingProtocol(asyncio.Protocol):
    """A protocol that records its transport."""

    line: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.line = transport.get_extra_info("socket")


class AbortingProtocol(asyncio.Protocol):
    """A protocol that aborts its connection at once."""

    lost = False

    def connection_made(self, transport: Any) -> None:
        transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def make_recording_protocol() -> Any:
    return RecordingProtocol()


def make_address(port: int) -> Any:
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)


@pytest.fixture
def closed_port() -> int:
    """A port without a listener."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.parametrize("ports", ["one", "one one", "none one", "one none"])
async def test_connection_has_tcp_nodelay_and_keepalive(ports: str, closed_port: int) -> None:
    async with ScriptedWorker([make_reply(b"fine")]) as worker:
        there = {"one": int(worker.url.rpartition(":")[2]), "none": closed_port}
        addresses = [make_address(there[port]) for port in ports.split()]
        target = WorkerOrigin(
            "worker.example", there["one"], tls=False, host_header="", base_path=""
        )
        met: Any = await client._connect_any(addresses, target, None, make_recording_protocol)
        line = met.line

        assert line.getpeername() == ("127.0.0.1", there["one"])
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15


async def test_connection_aborted_on_connect_is_reported_lost() -> None:
    def meet() -> Any:
        return AbortingProtocol()

    async with ScriptedWorker([make_reply(b"fine")]) as worker:
        port = int(worker.url.rpartition(":")[2])
        target = WorkerOrigin("worker.example", port, tls=False, host_header="", base_path="")
        met: Any = await client._connect_any([make_address(port)], target, None, meet)
        await asyncio.sleep(0)

        assert met.lost


@pytest.mark.parametrize("ports", [1, 2])
async def test_failed_connect_raises_connection_refused_error(ports: int, closed_port: int) -> None:
    target = WorkerOrigin("worker.example", closed_port, tls=False, host_header="", base_path="")
    with pytest.raises(ConnectionRefusedError):
        await client._connect_any(
            [make_address(closed_port)] * ports, target, None, make_recording_protocol
        )
