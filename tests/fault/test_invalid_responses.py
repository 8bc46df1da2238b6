"""Workers send valid HTTP with an invalid response (faults 25, 26, 27 and 29)."""

import asyncio
from pathlib import Path

import pytest

from protocols.core.sse import MAX_EVENT_BYTES
from tests.conftest import Serve
from tests.fault.protocol_clients import (
    CHAT,
    DONE,
    STARTED_STREAM,
    STOP,
    STREAM,
    UNARY_RESPONSE,
    WELL,
    Client,
    assert_error_in_stream,
    assert_error_response,
    create_raw_worker,
    every_client,
    get_single_record,
    get_worker_reports,
    parametrize_cases,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.integration.test_end_to_end import JSON
from tests.support.fakes import END, HANG, Reply, chunk, head
from tests.support.tcp_server import run_server

PAUSE = 0.02
REST = chunk(STOP) + chunk(DONE) + END
BAD: dict[str, bytes] = {
    "no JSON": b"data: {nope\n\n",
    "half an object": b'data: {"choices":[{"index":0\n\n',
    "no object": b"data: 7\n\n",
    "other types": b'data: {"choices":{"index":"x"}}\n\n',
    "no UTF-8": b'data: {"choices":[{"index":0,"text":"\xff\xfe"}]}\n\n',
    "nested": b"data: " + b"[" * 100_000 + b"\n\n",
    "nested by one level too many": b'data: {"choices":[],"x":%b%b}\n\n' % (b"[" * 128, b"]" * 128),
    "a page": b"data: <html></html>\n\n",
}


@pytest.mark.fault(25)
@parametrize_cases(BAD, "no JSON")
async def test_malformed_event_ends_the_stream_with_an_error(
    serve: Serve, client: Client, case: bytes
) -> None:
    async with create_raw_worker([STARTED_STREAM, PAUSE, chunk(case) + REST]) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, client, stream=True)
        record = await get_single_record(gateway)
        [report] = get_worker_reports(gateway)

    assert_error_in_stream(response, client)
    assert (record.outcome, record.error, record.tokens) == ("truncated", "WorkerFailed", 2)
    assert report.error == "invalid_response"


@pytest.mark.fault(25)
async def test_worker_with_repeated_malformed_events_is_ejected(serve: Serve) -> None:
    async with (
        create_raw_worker([STARTED_STREAM, PAUSE, chunk(BAD["no JSON"]) + REST]) as bad,
        create_raw_worker([STREAM]) as well,
    ):
        gateway = await serve_gateway(serve, bad, well, breaker={"consecutive_failures": 3})
        answers = [await send_request(gateway, CHAT, stream=True) for _ in range(20)]
        states = [one.state for one in get_worker_reports(gateway)]

    assert bad.request_count == 3
    assert sum(b"[DONE]" in answer.content for answer in answers) == 17
    assert states == ["out", "up"]


# ── too large ─────────────────────────────────────────────────────────────────────────────────────

PIECE = chunk(b"x" * (64 << 10))
ENDLESS: Reply = [
    STARTED_STREAM,
    PAUSE,
    chunk(b"data: "),
    *[PIECE] * 640,
    chunk(b"\n\n") + REST,
    HANG,
]
"""An event of 40 MiB; the limit is 32 MiB."""


def get_resident_memory() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


async def measure_peak_memory(done: asyncio.Event) -> int:
    """Return the peak memory until the event."""
    most = get_resident_memory()
    while not done.is_set():
        await asyncio.sleep(0.002)
        most = max(most, get_resident_memory())
    return most


@pytest.mark.fault(26)
@every_client
async def test_endless_event_is_cut_off_with_bounded_memory(serve: Serve, client: Client) -> None:
    done = asyncio.Event()
    async with create_raw_worker(ENDLESS) as worker:
        gateway = await serve_gateway(serve, worker)
        base = get_resident_memory()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(measure_peak_memory(done))
            response = await send_request(gateway, client, stream=True)
            done.set()
        record = await get_single_record(gateway)

    assert_error_in_stream(response, client)
    assert len(response.content) < 8192
    assert (record.outcome, record.error) == ("truncated", "WorkerFailed")
    assert watching.result() - base < 3 * MAX_EVENT_BYTES


# ── redirects ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(27, 61)
@stream_or_unary
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Gone"])
async def test_redirect_is_not_followed(serve: Serve, status: str, *, stream: bool) -> None:
    async with create_raw_worker([STREAM if stream else UNARY_RESPONSE]) as canary:
        for_all = {"location": f"{canary.url}/v1/chat/completions", "content_length": "0"}
        async with create_raw_worker([head(status, **for_all)]) as worker:
            gateway = await serve_gateway(serve, worker)
            response = await send_request(gateway, CHAT, stream=stream)

    assert_error_response(response, 502)
    assert "location" not in response.headers
    assert canary.connections == 0


@pytest.mark.fault(27)
@every_client
async def test_redirect_is_an_error_in_every_protocol(serve: Serve, client: Client) -> None:
    async with create_raw_worker(
        [head("307 Elsewhere", location="http://x/", content_length="0")]
    ) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, client, stream=False)

    assert_error_response(response, *client.bad)


# ── early responses ───────────────────────────────────────────────────────────────────────────────

LARGE = 24 << 20
REFUSAL = b'{"error":{"message":"The prompt is too large for us.","type":"invalid_request_error"}}'


@pytest.mark.fault(29)
async def test_early_413_is_forwarded_and_stops_the_upload(serve: Serve) -> None:
    """The worker answers after the headers, and reads on only once the client has the response."""
    taken, responded = 0, asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            writer.write(WELL)
        writer.write(head("413 Too Large", content_length=str(len(REFUSAL))) + REFUSAL)
        await responded.wait()
        while data := await reader.read(1 << 20):
            taken += len(data)

    async with run_server(refuse) as url:
        gateway = await serve_gateway(serve, url, limits={"body": "32MiB"})
        path, body = CHAT.protocol.call("m", stream=False)
        body = body.replace(b"say hi", b"x" * LARGE)
        response = await gateway.http.post(path, content=body, headers=JSON)
        responded.set()
        record = await get_single_record(gateway)

    assert response.status_code == 413
    assert response.json()["error"]["message"] == "The prompt is too large for us."
    assert record.outcome == "client_error"
    assert taken < LARGE
    assert get_worker_reports(gateway)[0].state == "up", (
        "the worker is healthy: the request was too large"
    )
