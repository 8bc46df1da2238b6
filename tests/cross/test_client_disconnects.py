"""When a client disconnects, the gateway closes its connection to the worker at once."""

import asyncio

import pytest

from tests.cross.client import Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import RequestOptions
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")


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

    await environment.server.wait_for_disconnect(received)  # the worker itself would go on for ever
    await wait_until(lambda: environment.records)
    assert environment.record.outcome == "cancelled"
