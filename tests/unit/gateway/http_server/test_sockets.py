"""Listening sockets accept connections, and none is lost on close."""

import asyncio
import gc
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import pytest
import uvloop

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.overload import ConnectionTracker
from gateway.http_server.sockets import ListenSockets

CONNECTIONS: Final = 300


class ClosingProtocol(asyncio.Protocol):
    """Closes each connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_client_that_connects_during_close_is_disconnected(
    loop: Callable[[], asyncio.AbstractEventLoop], turns: int
) -> None:
    """The listener closes after ``turns`` turns of the event loop."""

    async def come_and_shut() -> bytes:
        sockets = ListenSockets(ClosingProtocol, ConnectionTracker(ServerLimitsConfig()))
        port = await sockets.listen("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
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
        socket.create_connection(("127.0.0.1", port), timeout=30)


async def test_unopened_socket_can_be_closed() -> None:
    await ListenSockets(ClosingProtocol, ConnectionTracker(ServerLimitsConfig())).close_sockets()


class TurnCounter:
    """Counts the turns of the event loop, and what happens in each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.per_turn = [0]
        self.is_counting = True
        self._begin_turn()

    def _begin_turn(self) -> None:
        self.per_turn.append(0)
        if self.is_counting:
            self._loop.call_soon(self._begin_turn)


async def count_accepts_in_a_turn() -> int:
    """How many of many connections that come at once are accepted in one turn, at most."""
    loop = asyncio.get_running_loop()
    accepted = asyncio.Event()
    counter = TurnCounter(loop)

    class Accepted(asyncio.Protocol):
        """A connection that is counted."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            counter.per_turn[-1] += 1
            transport.close()
            if sum(counter.per_turn) == CONNECTIONS:
                accepted.set()

    sockets = ListenSockets(Accepted, ConnectionTracker(ServerLimitsConfig()))
    port = await sockets.listen("127.0.0.1", 0)
    with ExitStack() as clients:
        for _ in range(CONNECTIONS):  # the system takes them all before the loop runs again
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        async with asyncio.timeout(30):
            await accepted.wait()
        counter.is_counting = False
        await sockets.close_sockets()
    return max(counter.per_turn)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_flood_of_connections_is_accepted_in_many_turns(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Between them, the requests of others are served."""
    with asyncio.Runner(loop_factory=loop) as runner:
        most = runner.run(count_accepts_in_a_turn())

    assert most <= 20
