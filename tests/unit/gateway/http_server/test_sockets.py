"""Where connections come in, and that nobody is lost there."""

import asyncio
import gc
import socket
from collections.abc import Callable

import pytest
import uvloop

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.overload import ConnectionTracker
from gateway.http_server.sockets import ListenSockets


class Met(asyncio.Protocol):
    """Hangs up when it is met."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_comes_as_the_door_shuts_is_not_left_waiting(
    loop: Callable[[], asyncio.AbstractEventLoop], turns: int
) -> None:
    """So many turns of the loop before: each finds the connection further in."""

    async def come_and_shut() -> bytes:
        door = ListenSockets(Met, ConnectionTracker(ServerLimitsConfig()))
        port = await door.listen("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            door.stop_accepting()
            await door.close_sockets()
            try:
                return await asyncio.to_thread(client.recv, 1)
            except ConnectionResetError:
                return b""

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(come_and_shut()) == b""
    gc.collect()


async def test_a_door_may_be_shut_again_and_then_nobody_comes_in() -> None:
    door = ListenSockets(Met, ConnectionTracker(ServerLimitsConfig()))
    port = await door.listen("127.0.0.1", 0)
    door.stop_accepting()
    door.stop_accepting()
    await door.close_sockets()
    await door.close_sockets()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_a_door_that_was_never_open_can_be_shut() -> None:
    await ListenSockets(Met, ConnectionTracker(ServerLimitsConfig())).close_sockets()
