"""The admin listener times out slow connections and answers invalid requests with errors."""

import asyncio
import re

from aiohttp import web

from gateway.admin.application_listener import ApplicationListener
from gateway.config.schema import ServerLimitsConfig
from tests.support.waiting import PATIENCE


async def read_until_end(port: int, sent: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            return await reader.read()
        finally:
            writer.transport.abort()


async def test_header_timeout_closes_and_errors_do_not_reveal_the_server() -> None:
    listener = ApplicationListener(web.Application(), ServerLimitsConfig(header_timeout=0.3))
    await listener.set_up()
    port = await listener.listen("127.0.0.1", 0)
    try:
        assert await read_until_end(port, b"") == b""
        assert await read_until_end(port, b"GET / HT") == b""
        response = await read_until_end(port, b"GET /secret-path \x00HTTP/1.1\r\n\r\n")
        assert re.findall(rb"HTTP/1.[01] (\d+)", response) == [b"400"]
        for word in (b"Python", b"aiohttp", b"secret-path"):
            assert word not in response
        assert listener.malformed_by_status == {400: 1}
    finally:
        await listener.close()
