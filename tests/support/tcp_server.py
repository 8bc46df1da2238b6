"""A TCP server that leaves no socket or task open after its test."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from weakref import WeakSet

_TURNS = 4
"""Turns of the event loop that an accepted connection needs to get a transport and a task."""


async def wait_for_transports() -> None:
    """Let connections that were just accepted get their transports, so that they can be closed."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@asynccontextmanager
async def run_server(
    answer: Answer,
    *,
    sock: socket.socket | None = None,
    tls: ssl.SSLContext | None = None,
    limit: int = 1 << 16,
) -> AsyncIterator[str]:
    """Serve each connection on a loopback port and yield the URL; abort open ones at the end.

    A connection is closed after its answer, and a client that disconnects early is no error. A
    connection left open would only be reported by the garbage collector during some later test.
    """
    running = set[asyncio.Task[None]]()
    writers = WeakSet[asyncio.StreamWriter]()

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        task.add_done_callback(running.discard)
        writers.add(writer)
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client disconnected, or the test is over
        finally:
            writer.close()

    listener = sock or socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = await asyncio.start_server(
        serve_connection, sock=listener, ssl=tls, backlog=1024, limit=limit
    )
    host, port = listener.getsockname()[:2]
    try:
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        asyncio.get_running_loop().remove_reader(listener)
        await wait_for_transports()  # an unaccepted connection would be left open
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # transports are closed in the loop's next turn
