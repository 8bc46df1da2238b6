"""The listener closes its connections when it stops."""

import asyncio
import socket

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import ClientConnection
from gateway.http_server.listener import Listener
from gateway.pipeline.http import HttpRequest, ResponseWriter


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
