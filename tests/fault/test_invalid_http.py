"""Workers send invalid or unexpected HTTP (faults 23, 24 and 28)."""

import asyncio

import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.protocol_clients import (
    CHAT,
    DONE,
    HELLO,
    STOP,
    STREAM,
    UNARY_RESPONSE,
    Client,
    RawClient,
    assert_error_in_stream,
    assert_error_response,
    build_response_body,
    create_raw_worker,
    every_client,
    get_single_record,
    get_worker_reports,
    parametrize_cases,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.support.fakes import CHUNKED, CLOSE, END, HANG, Reply, chunk, head
from tests.support.waiting import wait_until

BODY = build_response_body("Hello")
LENGTH = len(BODY)


def build_sized_reply(*lengths: int, extra_headers: bytes = b"", body: bytes = BODY) -> bytes:
    """Build a response with these Content-Length headers."""
    lines = b"".join(b"Content-Length: %d\r\n" % length for length in lengths)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b%b\r\n%b" % (
        lines,
        extra_headers,
        body,
    )


TE = b"Transfer-Encoding: chunked\r\n"
LENGTHS: dict[str, Reply] = {
    "short": [build_sized_reply(LENGTH - 10)],
    "long, then closed": [build_sized_reply(LENGTH + 10), CLOSE],
    "long, then silent": [build_sized_reply(LENGTH + 10), HANG],
    "doubled": [build_sized_reply(LENGTH, LENGTH + 1), HANG],
    "doubled and equal": [build_sized_reply(LENGTH, LENGTH), HANG],
    "beside chunks": [build_sized_reply(LENGTH, extra_headers=TE, body=chunk(BODY) + END), HANG],
    "after chunks": [
        build_sized_reply(body=b"", extra_headers=TE + b"Content-Length: 9\r\n") + chunk(BODY) + END
    ],
}


@pytest.mark.fault(23)
@parametrize_cases(LENGTHS, "doubled")
async def test_wrong_content_length_is_an_error_and_closes_the_connection(
    serve: Serve, client: Client, case: Reply
) -> None:
    """Leftover bytes never become part of the next response."""
    async with create_raw_worker(case, [UNARY_RESPONSE]) as worker:
        gateway = await serve_gateway(serve, worker, timeouts={"idle": "500ms"})
        response = await send_request(gateway, client, stream=False)
        record = await get_single_record(gateway)
        after = await send_request(gateway, client, stream=False)

    assert_error_response(response, *client.bad)
    assert record.outcome in ("worker_error", "gateway_error")
    assert after.status_code == 200
    assert b"Hello" in after.content

    first, second = worker.requests
    assert first.connection != second.connection


@pytest.mark.fault(23)
@every_client
async def test_stream_shorter_than_content_length_ends_with_an_error(
    serve: Serve, client: Client
) -> None:
    async with create_raw_worker([build_sized_reply(9999, body=HELLO), CLOSE], [STREAM]) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, client, stream=True)
        record = await get_single_record(gateway)

    assert_error_in_stream(response, client)
    assert record.outcome == "truncated"


@pytest.mark.fault(23)
@every_client
async def test_stream_longer_than_content_length_ends_with_an_error(
    serve: Serve, client: Client
) -> None:
    """An end mark beyond the length does not count."""
    begun = build_sized_reply(len(HELLO), body=HELLO)
    async with create_raw_worker([begun, 0.05, STOP + DONE, CLOSE], [STREAM]) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, client, stream=True)
        await get_single_record(gateway)
        after = await send_request(gateway, client, stream=True)

    assert_error_in_stream(response, client)
    assert after.status_code == 200
    assert worker.requests[0].connection != worker.requests[1].connection


GARBAGE: dict[str, Reply] = {
    "garbage": [b"\x00\xff hello\r\n\r\n", HANG],
    "another protocol": [b"220 mail ready\r\n", HANG],
    "an unknown version": [b"HTTP/9.x 200 OK\r\n\r\n", HANG],
    "no status": [b"HTTP/1.1 OK\r\n\r\n", HANG],
    "a status of two digits": [b"HTTP/1.1 20 OK\r\n\r\n", HANG],
    "a TLS alert": [b"\x15\x03\x01\x00\x02\x02\x46", CLOSE],
    "101": [head("101 Switching Protocols", upgrade="x", connection="upgrade"), HANG],
    "204": [head("204 No Content")],
    "a flood of 1xx": [head("103 Early Hints", link="<x>") * 20_000, CLOSE],
}


@pytest.mark.fault(24)
@stream_or_unary
@pytest.mark.parametrize("reply", GARBAGE.values(), ids=GARBAGE)
async def test_invalid_http_response_returns_502(
    serve: Serve, reply: Reply, *, stream: bool
) -> None:
    async with create_raw_worker(reply) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, CHAT, stream=stream)
        record = await get_single_record(gateway)
        await wait_until(lambda: not worker.active)

    assert_error_response(response, 502)
    assert record.outcome == "worker_error"
    assert get_worker_reports(gateway)[0].error != ""


@pytest.mark.fault(24)
@every_client
async def test_invalid_http_response_is_an_error_in_every_protocol(
    serve: Serve, client: Client
) -> None:
    async with create_raw_worker(GARBAGE["garbage"]) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, client, stream=True)

    assert_error_response(response, *client.bad)


@pytest.mark.fault(24)
async def test_endless_1xx_responses_time_out(serve: Serve) -> None:
    """Other requests are served meanwhile."""
    hints: Reply = [head("103 Early Hints") * 100, 0.001]
    flood = [*hints] * 100_000

    async with create_raw_worker(flood) as worker, create_raw_worker([STREAM]) as other:
        gateway = await serve_gateway(
            serve, worker, other, retries={"max": 0}, timeouts={"first_token": "1s"}
        )
        async with asyncio.TaskGroup() as tasks:
            flooded = tasks.create_task(send_request(gateway, CHAT, stream=True))
            await worker.wait_for_request()
            other_response = await send_request(gateway, CHAT, stream=True)

            assert not flooded.done()
        await wait_until(lambda: not worker.active)

    assert other_response.status_code == 200
    assert_error_response(flooded.result(), 502, 504)


# ── further headers and bytes ─────────────────────────────────────────────────────────────────────

ALLOWED = {
    "openai-processing-ms",
    "openai-version",
    "x-served-model",
    "cache-control",
    "connection",
    "content-length",
    "content-type",
    "date",
    "server",
    "transfer-encoding",
    "x-accel-buffering",
    "x-interlingua-loss",
    "x-request-id",
}
ODD: dict[str, bytes] = {
    "a cookie": b"HTTP/1.1 200 OK\r\nSet-Cookie: evil=1\r\n",
    "a reason": b"HTTP/1.1 200 Evil Set-Cookie: evil=1\r\n",
    "a reason with a tab": b"HTTP/1.1 200 evil\tevil\r\n",
    "a reason of other bytes": b"HTTP/1.1 200 \xe9vil\xff\r\n",
    "no reason": b"HTTP/1.1 200\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nX-Evil: a\r\n evil: b\r\n",
    "a NUL": b"HTTP/1.1 200 OK\r\nX-Evil: a\x00b\r\n",
    "a bare CR": b"HTTP/1.1 200 OK\r\nX-Evil: a\rSet-Cookie: evil=1\r\n",
    "a bare LF": b"HTTP/1.1 200 OK\r\nX-Evil: a\nSet-Cookie: evil=1\r\n",
    "a name with a space": b"HTTP/1.1 200 OK\r\nX Evil: a\r\n",
    "no name": b"HTTP/1.1 200 OK\r\n: evil\r\n",
    "an escaped line": b"HTTP/1.1 200 OK\r\nX-Evil: a%0d%0aSet-Cookie: evil=1\r\n",
    "hop by hop": b"HTTP/1.1 200 OK\r\nConnection: x-evil\r\nX-Evil: 1\r\nKeep-Alive: evil\r\n",
    "a content type of two lines": b"HTTP/1.1 200 OK\r\nContent-Type: a\\r\\nevil: 1\r\n",
}


async def read_response_head(gateway: RunningGateway, *, stream: bool) -> tuple[bytes, list[bytes]]:
    """Return the status line and the headers that a client receives."""
    path, body = CHAT.protocol.call("m", stream=stream)
    caller = await RawClient.connect(gateway, path, body)
    received = await caller.read_until(b"\r\n\r\n")
    caller.close()
    status, *lines = received.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return status, lines


@pytest.mark.fault(28)
@stream_or_unary
@pytest.mark.parametrize("start", ODD.values(), ids=ODD)
async def test_odd_heads_of_workers_add_no_header_but_the_one_that_is_passed_on(
    serve: Serve, start: bytes, *, stream: bool
) -> None:
    body = STREAM[len(CHUNKED) :] if stream else chunk(BODY) + END
    async with create_raw_worker([start + b"Transfer-Encoding: chunked\r\n\r\n" + body]) as worker:
        gateway = await serve_gateway(serve, worker)
        status, headers = await read_response_head(gateway, stream=stream)

    assert status in (b"HTTP/1.1 200 OK", b"HTTP/1.1 502 Bad Gateway")
    names = {line.partition(b":")[0].decode().lower() for line in headers}
    assert names <= (ALLOWED if b"Connection" in start else {*ALLOWED, "x-evil"})
    others = [line for line in headers if not line.lower().startswith(b"x-evil: ")]
    assert b"vil" not in b"\r\n".join(others)


NAMES: list[str] = [
    f"{prefix}{name}"
    for prefix in ("", "x-", "openai-", "anthropic-", "x-ms-", "x-databricks-", "access-control-")
    for name in (
        "organization", "organization-id", "request-id", "processing-ms", "ratelimit-remaining",
        "ratelimit-limit-requests", "allow-origin", "region", "compute-time", "evil",
    )
]  # fmt: skip
UNSAFE = ["set-cookie", "location", "refresh", "www-authenticate", "link", "alt-svc", "via", "age"]
"""Each would make a client do something that only the gateway may ask for."""


@pytest.mark.fault(28)
@every_client
@stream_or_unary
@pytest.mark.parametrize("status", ["200 OK", "500 Bad", "429 Slow"])
async def test_no_header_of_a_worker_reaches_a_client_of_another_protocol(
    serve: Serve, client: Client, status: str, *, stream: bool
) -> None:
    # given a worker that sends headers of all kinds; clients of its protocol may get some
    names = UNSAFE if client.name.startswith("openai") else [*NAMES, *UNSAFE]
    lines = "".join(f"{name}: wicked\r\n" for name in names)
    start = f"HTTP/1.1 {status}\r\n{lines}Transfer-Encoding: chunked\r\n\r\n".encode()
    body = STREAM[len(CHUNKED) :] if stream else chunk(BODY) + END

    # when a client of each protocol asks it
    async with create_raw_worker([start + body]) as worker:
        gateway = await serve_gateway(serve, worker, retries={"max": 0})
        response = await send_request(gateway, client, stream=stream)

    # then it gets none that may not leave the gateway
    assert (response.status_code == 200) == (status == "200 OK")
    assert "wicked" not in str(response.headers.raw)


@pytest.mark.fault(28)
async def test_worker_reason_phrase_is_not_forwarded(serve: Serve) -> None:
    async with create_raw_worker(
        [b"HTTP/1.1 500 Evil\r\nSet-Cookie: 1\r\nContent-Length: 0\r\n\r\n"]
    ) as worker:
        gateway = await serve_gateway(serve, worker)
        status, headers = await read_response_head(gateway, stream=False)

    assert status == b"HTTP/1.1 502 Bad Gateway"
    assert {line.partition(b":")[0].decode().lower() for line in headers} <= ALLOWED
