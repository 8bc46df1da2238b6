"""A client stops reading: the worker pauses, memory stays flat, the stream is closed (33)."""

import asyncio
import json
import socket
from http import HTTPStatus

import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.protocol_clients import (
    CLIENTS,
    RELAYED,
    TRANSLATED,
    Client,
    build_event,
    get_single_record,
    get_worker_reports,
    serve_gateway,
)
from tests.fault.test_invalid_responses import get_resident_memory
from tests.support.fakes import chunk
from tests.support.slow_readers import open_unread_stream, run_flooding_worker, wait_until_blocked
from tests.support.waiting import PATIENCE, wait_until

PIECE = chunk(build_event("x" * 16_000))
MOST = 96 << 20
"""Bytes of the worker's response."""
SMALL_BUFFER = 4096
PIPELINED = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{e: {{kind: echo, script: ["{text}"]}}}}
models: {{m: {{backend: e}}}}
"""
PIPELINED_HEADERS = "Host: localhost\r\nContent-Length: "
PIPELINED_COUNT = 600
MOST_PIPELINED = 300 << 10
"""Bytes of the requests in one read of a socket, and some."""


def open_stream(gateway: RunningGateway, client: Client, receive_buffer: int) -> socket.socket:
    """Request a stream in the client's protocol, and read nothing of it."""
    path, body = client.protocol.call("m", stream=True)
    return open_unread_stream(gateway.port, path, body, receive_buffer)


@pytest.mark.fault(33)
@pytest.mark.parametrize("client", [RELAYED, TRANSLATED], ids=lambda one: one.name)
async def test_unread_stream_pauses_its_worker_and_is_closed_after_idle_timeout(
    serve: Serve, client: Client
) -> None:
    """The ``idle`` timeout is a second here. Socket buffers hold some megabytes."""
    async with run_flooding_worker(PIECE, MOST) as flood:
        gateway = await serve_gateway(serve, flood.url, timeouts={"idle": "1s"})
        base = get_resident_memory()
        with open_stream(gateway, client, SMALL_BUFFER):
            written = await wait_until_blocked(flood)
            grown = get_resident_memory() - base
            await wait_until(lambda: flood.cut)
            record = await get_single_record(gateway)

    assert written < 24 << 20
    assert grown < 12 << 20
    assert flood.sent < 24 << 20
    assert (record.outcome, record.error, record.status) == ("cancelled", "ClientDisconnected", 200)

    [report] = get_worker_reports(gateway)
    assert (report.state, report.error) == ("up", ""), "a slow client is no failure of the worker"


@pytest.mark.fault(33)
async def test_other_clients_are_served_during_an_unread_stream(serve: Serve) -> None:
    async with run_flooding_worker(PIECE, MOST) as flood:
        gateway = await serve_gateway(serve, flood.url)
        with open_stream(gateway, RELAYED, SMALL_BUFFER):
            await wait_until_blocked(flood)
            health = [await gateway.http.get("/health") for _ in range(20)]

    assert {answer.status_code for answer in health} == {200}


@pytest.mark.fault(33)
async def test_slow_reader_is_not_disconnected(serve: Serve) -> None:
    """It is behind for longer than ``idle``, but no single write waits that long."""
    async with run_flooding_worker(PIECE, MOST) as flood:
        gateway = await serve_gateway(serve, flood.url, timeouts={"idle": "1s"})
        with open_stream(gateway, CLIENTS[1], 1 << 18) as slow:
            slow.setblocking(False)
            loop = asyncio.get_running_loop()

            for _ in range(16):
                taken = 0
                while taken < 2 << 20:
                    taken += len(await loop.sock_recv(slow, 1 << 18))
                await asyncio.sleep(0.1)

            assert not flood.cut
            assert gateway.records == []
        await wait_until(lambda: gateway.records)

    assert gateway.records[0].outcome == "cancelled"
    assert gateway.records[0].error == "", "the client disconnected by itself"


@pytest.mark.fault(33)
@pytest.mark.parametrize("client", [RELAYED, TRANSLATED], ids=lambda one: one.name)
async def test_unread_stream_takes_at_most_128_kib_of_the_memory_budget(
    serve: Serve, client: Client
) -> None:
    async with run_flooding_worker(PIECE, MOST) as flood:
        gateway = await serve_gateway(serve, flood.url)
        with open_stream(gateway, client, SMALL_BUFFER):
            await wait_until_blocked(flood)
            held = gateway.app.memory.get_use("responses")

        assert 0 < held <= 128 << 10
        await wait_until(lambda: gateway.app.memory.get_use("responses") == 0)


@pytest.mark.fault(33)
async def test_end_of_the_memory_budget_closes_the_unread_stream_and_serves_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http_server.connection._MIN_EVICTION_AGE", 0.2)
    async with run_flooding_worker(PIECE, MOST) as flood:
        gateway = await serve_gateway(serve, flood.url)
        memory = gateway.app.memory
        with open_stream(gateway, RELAYED, SMALL_BUFFER):
            await wait_until_blocked(flood)
            await asyncio.sleep(1.3)  # the listener's clock ticks each second
            memory.limit = memory.used
            path, body = RELAYED.protocol.call("m", stream=False)
            unfinished_json = body[:-1]  # the gateway reads it, and no worker gets it
            served = await gateway.http.post(path, content=unfinished_json)
            await wait_until(lambda: flood.cut)

    assert served.status_code == HTTPStatus.BAD_REQUEST
    assert memory.get_status().closed == 1
    assert memory.get_use("responses") == 0


def count_answers(gateway: RunningGateway) -> int:
    return sum(record.path != "/health" for record in gateway.records)


@pytest.mark.fault(33)
async def test_pipelined_requests_wait_until_their_client_reads(serve: Serve) -> None:
    """Neither the responses nor the requests of a client that reads nothing pile up."""
    # Given responses of which some fill the buffers of sockets
    gateway = await serve(PIPELINED.format(text="x" * 20_000))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "y" * 4000}]})
    request = f"POST /v1/chat/completions HTTP/1.1\r\n{PIPELINED_HEADERS}{len(body)}\r\n\r\n{body}"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=SMALL_BUFFER)

    # When a client sends many requests at once, and reads only when no more are served
    writer.write(request.encode() * PIPELINED_COUNT)
    await wait_until(lambda: bool(gateway.app.memory.get_use("responses")))
    served = -1
    while served != count_answers(gateway):
        served = count_answers(gateway)
        for _ in range(20):
            await gateway.http.get("/health")
    held = gateway.app.memory.get_use("bodies")
    async with asyncio.timeout(PATIENCE):
        for _ in range(PIPELINED_COUNT):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
    writer.transport.abort()

    # Then it got them all, and most of them were served only then
    assert served < PIPELINED_COUNT // 2
    assert held < MOST_PIPELINED
    await wait_until(lambda: not gateway.app.memory.get_use("responses"))
    assert gateway.app.memory.get_use("bodies") == 0
