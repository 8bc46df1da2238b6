"""When a client disconnects, the gateway closes its connection to the worker at once."""

import asyncio

import pytest

from tests.cross.client import Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import RequestOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

CEILING = 1.0
"""Seconds allowed on a shared machine; the aim is a tenth of it."""


async def test_client_disconnect_closes_the_worker_connection(
    environment: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    request = client.build_request(f"{worker}-slow", RequestOptions(stream=stream))
    _, writer = await asyncio.open_connection("127.0.0.1", environment.port)
    lines = [f"POST {request.url.raw_path.decode()} HTTP/1.1", "Host: localhost"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(request.content)}", "", ""]
    writer.write("\r\n".join(lines).encode() + request.content)
    received = await environment.server.wait_for_request()

    writer.close()
    left = asyncio.get_running_loop().time()

    assert await environment.server.wait_for_disconnect(received) - left < CEILING

    async with asyncio.timeout(CEILING):
        while not environment.records:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
    assert environment.record.outcome == "cancelled"
