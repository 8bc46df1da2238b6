"""Answers in good HTTP that are bad all the same (faults 25, 26, 27 and 29)."""

import asyncio
from pathlib import Path

import pytest

from protocols.core.sse import MAX_EVENT_BYTES
from tests.conftest import Serve
from tests.fault.protocol_clients import (
    CHAT,
    DONE,
    SAYS,
    STOP,
    STREAM,
    WELL,
    WHOLE,
    Client,
    assert_error_in_stream,
    assert_error_response,
    both,
    create_raw_worker,
    every_client,
    get_single_record,
    get_worker_reports,
    parametrize_cases,
    send_request,
    serve_gateway,
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
    "a page": b"data: <html></html>\n\n",
}


@pytest.mark.fault(25)
@parametrize_cases(BAD, "no JSON")
async def test_malformed_event_ends_the_stream_with_an_error(
    serve: Serve, client: Client, case: bytes
) -> None:
    async with create_raw_worker([SAYS, PAUSE, chunk(case) + REST]) as worker:
        front = await serve_gateway(serve, worker)
        got = await send_request(front, client, stream=True)
        record = await get_single_record(front)
        [report] = get_worker_reports(front)

    assert_error_in_stream(got, client)
    assert (record.outcome, record.error, record.tokens) == ("truncated", "WorkerFailed", 2)
    assert report.error == "invalid_response"


@pytest.mark.fault(25)
async def test_worker_with_repeated_malformed_events_is_ejected(serve: Serve) -> None:
    async with (
        create_raw_worker([SAYS, PAUSE, chunk(BAD["no JSON"]) + REST]) as bad,
        create_raw_worker([STREAM]) as well,
    ):
        front = await serve_gateway(serve, bad, well, breaker={"consecutive_failures": 3})
        answers = [await send_request(front, CHAT, stream=True) for _ in range(20)]
        states = [one.state for one in get_worker_reports(front)]

    assert bad.request_count == 3
    assert sum(b"[DONE]" in answer.content for answer in answers) == 17
    assert states == ["out", "up"]


# ── too much ────────────────────────────────────────────────────────────────────────────────────

PIECE = chunk(b"x" * (64 << 10))
ENDLESS: Reply = [SAYS, PAUSE, chunk(b"data: "), *[PIECE] * 640, chunk(b"\n\n") + REST, HANG]
"""An event of 40 MiB, which is over the limit of 32 MiB."""


def get_resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


async def measure_peak_memory(done: asyncio.Event) -> int:
    """The most memory until then."""
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
        front = await serve_gateway(serve, worker)
        base = get_resident_memory()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(measure_peak_memory(done))
            got = await send_request(front, client, stream=True)
            done.set()
        record = await get_single_record(front)

    assert_error_in_stream(got, client)
    assert len(got.content) < 8192
    assert (record.outcome, record.error) == ("truncated", "WorkerFailed")
    assert watching.result() - base < 3 * MAX_EVENT_BYTES


# ── elsewhere ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(27, 61)
@both
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Gone"])
async def test_redirect_is_not_followed(serve: Serve, status: str, *, stream: bool) -> None:
    async with create_raw_worker([STREAM if stream else WHOLE]) as canary:
        for_all = {"location": f"{canary.url}/v1/chat/completions", "content_length": "0"}
        async with create_raw_worker([head(status, **for_all)]) as worker:
            front = await serve_gateway(serve, worker)
            got = await send_request(front, CHAT, stream=stream)

    assert_error_response(got, 502)
    assert "location" not in got.headers
    assert canary.connections == 0


@pytest.mark.fault(27)
@every_client
async def test_redirect_is_an_error_in_every_protocol(serve: Serve, client: Client) -> None:
    async with create_raw_worker(
        [head("307 Elsewhere", location="http://x/", content_length="0")]
    ) as worker:
        front = await serve_gateway(serve, worker)
        got = await send_request(front, client, stream=False)

    assert_error_response(got, *client.bad)


# ── early ───────────────────────────────────────────────────────────────────────────────────────

LARGE = 24 << 20
REFUSAL = b'{"error":{"message":"The prompt is too large for us.","type":"invalid_request_error"}}'


@pytest.mark.fault(29)
async def test_early_413_is_forwarded_and_stops_the_upload(serve: Serve) -> None:
    """The worker answers by the head alone, and reads on only when the client was told."""
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
        front = await serve_gateway(serve, url, limits={"body": "32MiB"})
        path, body = CHAT.way.call("m", stream=False)
        body = body.replace(b"say hi", b"x" * LARGE)
        got = await front.http.post(path, content=body, headers=JSON)
        responded.set()
        record = await get_single_record(front)

    assert got.status_code == 413
    assert got.json()["error"]["message"] == "The prompt is too large for us."
    assert record.outcome == "client_error"
    assert taken < LARGE
    assert get_worker_reports(front)[0].state == "up", "it is well: the request was too large"
