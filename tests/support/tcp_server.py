"""A server for a test, of which nothing is left when the test is over."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from weakref import WeakSet

_TURNS = 4
"""Of the loop, until what was accepted is met: it gets a transport, a protocol and a task."""
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@asynccontextmanager
async def run_server(
    answer: Answer,
    *,
    sock: socket.socket | None = None,
    tls: ssl.SSLContext | None = None,
    limit: int = 1 << 16,
) -> AsyncIterator[str]:
    """Answer each connection on loopback; gives the URL. At the end, cut what is left.

    A connection is closed after its answer, and it is no error that who asked is gone. One that is
    not closed would be found by the collector, much later, in a test that knows nothing of it.
    """
    running = set[asyncio.Task[None]]()
    writers = WeakSet[asyncio.StreamWriter]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        task.add_done_callback(running.discard)
        writers.add(writer)
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # who asked is gone, or the test is over
        finally:
            writer.close()

    listener = sock or socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = await asyncio.start_server(answered, sock=listener, ssl=tls, backlog=1024, limit=limit)
    host, port = listener.getsockname()[:2]
    try:
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        asyncio.get_running_loop().remove_reader(listener)
        for _ in range(_TURNS):  # a server that is closed meanwhile leaves it to the collector
            await asyncio.sleep(0)
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # they are closed in the loop's next turn
