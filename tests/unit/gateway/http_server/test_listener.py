"""The listener closes its connections when it stops, in slices if there are many."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import ClientConnection
from gateway.http_server.listener import Listener
from gateway.http_server.turn_slices import MAX_TURN_ITEMS, MAX_TURN_TASKS, TurnGate, TurnQueue
from gateway.pipeline.http import HttpRequest, ResponseWriter
from tests.support.waiting import wait_until


async def fail_on_request(http: HttpRequest, sink: ResponseWriter) -> None:
    raise AssertionError


async def test_connection_accepted_during_close_is_closed() -> None:
    loop, gateway = (
        asyncio.get_running_loop(),
        Listener(fail_on_request, ServerLimitsConfig(connections=10)),
    )
    await gateway.listen("127.0.0.1", 0)
    await gateway.close()
    here, there = socket.socketpair()
    there.setblocking(False)
    with there:
        await loop.connect_accepted_socket(lambda: ClientConnection(gateway, loop), here)

        assert await loop.sock_recv(there, 1) == b""
        assert gateway.connections == 0


class Turns:
    """Counts what happens in each turn of the event loop."""

    def __init__(self) -> None:
        self.counts = [0]
        self._task = asyncio.ensure_future(self._count_turns())

    def add(self) -> None:
        """Count something in this turn."""
        self.counts[-1] += 1

    def stop(self) -> None:
        """Count no more turns."""
        self._task.cancel()

    async def _count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.counts.append(0)


async def connect_many(listener: Listener, count: int) -> list[socket.socket]:
    """Clients of a listener."""
    loop, clients = asyncio.get_running_loop(), list[socket.socket]()
    for _ in range(count):
        here, there = socket.socketpair()
        there.setblocking(False)
        clients.append(there)
        await loop.connect_accepted_socket(lambda: ClientConnection(listener, loop), here)
    return clients


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLIENTS = 2 * MAX_TURN_ITEMS + 22


async def test_requests_of_clients_that_leave_at_once_are_cancelled_in_slices() -> None:
    """Thousands of clients that leave at once delay nobody else."""
    running, turns = set[int](), Turns()

    async def wait(http: HttpRequest, sink: ResponseWriter) -> None:
        running.add(id(http))
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(id(http))
            turns.add()

    listener = Listener(wait, ServerLimitsConfig(connections=1000))
    clients = await connect_many(listener, CLIENTS)
    for client in clients:
        client.send(REQUEST)
    await wait_until(lambda: len(running) == CLIENTS)

    for client in clients:
        client.close()
    await wait_until(lambda: not running)

    turns.stop()
    assert sum(turns.counts) == CLIENTS
    assert max(turns.counts) == MAX_TURN_ITEMS
    await listener.close()


async def test_one_client_that_leaves_is_cancelled_in_the_same_turn() -> None:
    queue, calls = TurnQueue(), list[int]()
    for number in range(MAX_TURN_ITEMS + 1):
        queue.call(partial(calls.append, number))

    assert calls == [*range(MAX_TURN_ITEMS)]
    await asyncio.sleep(0)
    assert calls == [*range(MAX_TURN_ITEMS + 1)], "in their order"


async def test_idle_and_other_connections_are_closed_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drain, as at a handover, delays nobody whose request still runs."""
    turns = Turns()
    for name in ("close", "abort"):
        original = getattr(ClientConnection, name)

        def count(self: ClientConnection, original: Callable[..., None] = original) -> None:
            turns.add()
            original(self)

        monkeypatch.setattr(ClientConnection, name, count)
    drained, closed = (
        Listener(fail_on_request, ServerLimitsConfig(connections=1000)) for _ in range(2)
    )
    clients = [*await connect_many(drained, CLIENTS), *await connect_many(closed, CLIENTS)]

    await drained.drain(1)
    await drained.close()
    await closed.close()

    turns.stop()
    assert drained.connections == closed.connections == 0
    assert max(turns.counts) == MAX_TURN_ITEMS
    for client in clients:
        client.close()


async def test_timeouts_of_connections_are_checked_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns()
    monkeypatch.setattr(ClientConnection, "check_timeouts", lambda _: turns.add())
    monkeypatch.setattr("gateway.http_server.listener._MAX_TURN_CHECKS", 10)
    listener = Listener(fail_on_request, ServerLimitsConfig(connections=1000, idle_timeout=0.1))
    clients = await connect_many(listener, 25)

    await listener.listen("127.0.0.1", 0)
    await wait_until(lambda: sum(turns.counts) >= 50)

    turns.stop()
    assert max(turns.counts) == 10
    await listener.close()
    for client in clients:
        client.close()


async def test_streams_that_send_fast_go_on_in_slices() -> None:
    """Another request waits for a few of them, not for all, whether they were blocked or not."""
    turns, step = Turns(), 32 << 10

    async def send(_: HttpRequest, sink: ResponseWriter) -> None:
        sink.start(200, ())
        await sink.drain()
        while True:
            sink.write(b"x" * step)
            await sink.drain()
            turns.add()

    listener = Listener(send, ServerLimitsConfig(connections=1000))
    clients = await connect_many(listener, CLIENTS)
    for client in clients:
        client.send(REQUEST)
    before = await wait_until_steady(turns)
    for client in clients:
        read_available(client)
    await wait_until(lambda: sum(turns.counts) > before + CLIENTS)

    turns.stop()
    assert before > 2 * CLIENTS
    assert max(turns.counts) == MAX_TURN_TASKS
    await listener.close()
    for client in clients:
        client.close()


async def wait_until_steady(turns: Turns) -> int:
    """Wait until nothing more happens; returns how much did."""
    last = -1
    while last != sum(turns.counts) or not last:
        last = sum(turns.counts)
        await asyncio.sleep(0.2)
    return last


def read_available(client: socket.socket) -> None:
    """Read what has arrived."""
    with suppress(BlockingIOError):
        while client.recv(1 << 20):
            pass


async def test_task_that_was_cancelled_takes_no_turn() -> None:
    gate, done = TurnGate(), list[int]()

    async def run(number: int) -> None:
        await gate.wait()
        done.append(number)

    tasks = [asyncio.ensure_future(run(number)) for number in range(2 * MAX_TURN_TASKS)]
    await asyncio.sleep(0)
    for task in tasks[:MAX_TURN_TASKS]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert done == [*range(MAX_TURN_TASKS, 2 * MAX_TURN_TASKS)]
