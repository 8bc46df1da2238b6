"""Listening sockets: connections are accepted, and none is lost on close."""

import asyncio
import gc
import socket
from collections.abc import Callable

import pytest
import uvloop

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.overload import ConnectionTracker
from gateway.http_server.sockets import ListenSockets


class ClosingProtocol(asyncio.Protocol):
    """Hangs up when it is met."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_client_that_connects_during_close_is_disconnected(
    loop: Callable[[], asyncio.AbstractEventLoop], turns: int
) -> None:
    """So many turns of the loop before: each finds the connection further in."""

    async def come_and_shut() -> bytes:
        sockets = ListenSockets(ClosingProtocol, ConnectionTracker(ServerLimitsConfig()))
        port = await sockets.listen("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            sockets.stop_accepting()
            await sockets.close_sockets()
            try:
                return await asyncio.to_thread(client.recv, 1)
            except ConnectionResetError:
                return b""

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(come_and_shut()) == b""
    gc.collect()


async def test_closed_socket_may_be_closed_again_and_rejects_connections() -> None:
    sockets = ListenSockets(ClosingProtocol, ConnectionTracker(ServerLimitsConfig()))
    port = await sockets.listen("127.0.0.1", 0)
    sockets.stop_accepting()
    sockets.stop_accepting()
    await sockets.close_sockets()
    await sockets.close_sockets()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_unopened_socket_can_be_closed() -> None:
    await ListenSockets(ClosingProtocol, ConnectionTracker(ServerLimitsConfig())).close_sockets()
