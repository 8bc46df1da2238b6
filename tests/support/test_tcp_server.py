"""The TCP server for tests leaves no socket open, whenever it stops."""

import asyncio
import gc
import socket

import pytest

from tests.support.tcp_server import run_server


@pytest.mark.parametrize("turns", range(6))
def test_connection_during_shutdown_is_closed_without_a_resource_warning(turns: int) -> None:
    """Stop the server ``turns`` turns of the loop after a client connected."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    async def connect() -> socket.socket:
        async with run_server(answer) as url:
            client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            for _ in range(turns):
                await asyncio.sleep(0)
        return client

    with asyncio.Runner() as runner:
        client = runner.run(connect())
    client.close()
    gc.collect()
