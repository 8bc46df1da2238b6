"""An aiohttp application on a loopback port that leaves no socket or task open after its test."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.support.tcp_server import wait_for_transports


@asynccontextmanager
async def run_web_server(app: web.Application) -> AsyncIterator[str]:
    """Serve the application and yield its URL; close all connections at the end."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # A connection that is accepted gets no transport once the server is closed: accept no more.
        asyncio.get_running_loop().remove_reader(listener)
        await wait_for_transports()
        await runner.cleanup()
        await asyncio.sleep(0)  # transports are closed in the loop's next turn
