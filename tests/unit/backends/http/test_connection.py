"""What a worker may send, and what is made of it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from backends.http.client import AsyncioHttpClient
from protocols.core.errors import InternalError, StreamBroken, WorkerError, WorkerFailed
from protocols.core.interfaces import UpstreamRequest
from tests.fakes import CHUNKED, CLOSE, HANG, RESET, Reply, ScriptedWorker, chunk, head, whole
from tests.serving import serving
from tests.unit.backends.http.client_requests import client, rest

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ASK = UpstreamRequest("/", b"{}")
OK = [whole(b"fine")]


async def ask(upstream: AsyncioHttpClient, worker: ScriptedWorker) -> bytes:
    return await rest(await upstream.send(worker.url, ASK, 2.0))


def lines(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, "", ""]).encode()


LONG = f"a: {'x' * 9000}\r\n".encode()


@pytest.mark.parametrize(
    "reply",
    [
        [b"SSH-2.0-OpenSSH_9\r\n", HANG],
        [b"HTTP/1.1 nope OK\r\n\r\n", HANG],
        [b"\x16\x03\x01\x02\x00", HANG],
        [lines("content-length: 4", "content-length: 5") + b"fine!", HANG],
        [lines("content-length: 4", "transfer-encoding: chunked") + b"0\r\n\r\n", HANG],
        [lines("content-length: -1"), HANG],
        [lines("content-length: 4x") + b"fine", HANG],
        [lines(f"a: {'x' * 9000}", "content-length: 4") + b"fine", HANG],
        [lines(*[f"a{n}: x" for n in range(200)], "content-length: 4") + b"fine", HANG],
        [b"HTTP/1.1 200 OK\r\na: ", *[b"x" * 5000] * 40, HANG],
        [b"HTTP/1.1 200 OK\r\n", LONG + b"b: ", HANG],
        [lines("transfer-encoding: chunked") + b"0\r\n" + LONG + b"\r\n", HANG],
        [lines("transfer-encoding: chunked") + b"0\r\n" + b"a: x\r\n" * 200 + b"\r\n", HANG],
        [*[b"HTTP/1.1 100 Continue\r\n\r\n" * 1000] * 10, HANG],
        [b"HTTP/1.1 200 OK\r\na b: c\r\ncontent-length: 0\r\n\r\n", HANG],
    ],
    ids=[
        "another protocol",
        "no status",
        "tls",
        "two lengths",
        "length and chunks",
        "negative",
        "not a number",
        "a long header",
        "many headers",
        "a header without end",
        "a long header of a head without end",
        "a long header after a body",
        "many headers after a body",
        "announcements without end",
        "a space in a name",
    ],
)
async def test_what_is_not_http_is_refused_and_let_go(reply: Reply) -> None:
    async with ScriptedWorker(reply) as worker, client() as upstream:
        with pytest.raises(WorkerFailed):
            await ask(upstream, worker)
        await worker.until_left()


@pytest.mark.parametrize(
    "rest_of_it",
    [
        [b"zz\r\n", HANG],
        [b"-1\r\n", HANG],
        [b"1" * 40 + b"\r\n", HANG],
        [b"5;" + b"x" * 9000, *[b"x" * 9000] * 20, HANG],
        [b"0\r\nA: ", *[b"x" * 9000] * 20, HANG],
        [b"0\r\n", LONG + b"b: ", HANG],
        [b"5\r\nab", CLOSE],
        [b"5\r\nab", RESET],
        [CLOSE],
    ],
    ids=[
        "no size",
        "a negative size",
        "a huge size",
        "an extension without end",
        "a trailer without end",
        "a long trailer, and one without end",
        "closed in a chunk",
        "reset in a chunk",
        "closed between chunks",
    ],
)
async def test_a_body_that_breaks_is_broken_after_what_was_said(rest_of_it: Reply) -> None:
    reply: Reply = [CHUNKED + chunk(b"said"), 0.02, *rest_of_it]
    async with ScriptedWorker(reply) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert b"".join(await reading.read()).startswith(b"said")
        with pytest.raises(StreamBroken):
            await rest(reading)


async def test_what_announces_an_answer_is_passed_over() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    async with ScriptedWorker([early, whole(b"fine")]) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert reading.status == 200
        assert "link" not in reading.headers
        assert await rest(reading) == b"fine"
        await ask(upstream, worker)
    assert worker.connections == 1


async def test_a_worker_that_changes_the_protocol_is_asked_no_more_on_that_line() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    async with ScriptedWorker([switch, HANG], OK) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert reading.status == 101
        reading.release()
        assert await ask(upstream, worker) == b"fine"
    assert worker.connections == 2


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    replies: list[Reply] = [[head("200 OK"), b"fi", 0.02, b"ne", CLOSE], [head("200 OK"), RESET]]
    async with ScriptedWorker(*replies) as worker, client() as upstream:
        assert await ask(upstream, worker) == b"fine"
        with pytest.raises(StreamBroken):
            await ask(upstream, worker)


async def test_what_was_cut_off_did_not_end() -> None:
    """Nothing tells the body's end but the connection's, and that was ours."""
    async with ScriptedWorker([head("200 OK"), b"fi", HANG]) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert b"".join(await reading.read()) == b"fi"
        reading.abort()
        await worker.until_left()
        with pytest.raises(StreamBroken):
            await reading.read()


async def test_a_worker_waits_for_one_who_reads_slowly() -> None:
    """What nobody takes is held up to a bound, and comes when it is asked for."""
    written = 0
    piece = chunk(b"x" * (1 << 16))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"{}")
        writer.write(CHUNKED)
        for _ in range(400):
            writer.write(piece)
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with serving(answer) as url, client() as upstream:
        reading = await upstream.send(url, ASK, 2.0)
        still = -1
        while still != written:
            still = written
            await asyncio.sleep(0.3)
        assert 0 < written < 300
        assert len(await rest(reading)) == 400 << 16


async def test_an_answer_before_the_whole_question_ends_the_connection() -> None:
    """What is left of the question would be read as the next one."""
    early = ScriptedWorker([whole(b"no", status="413 Too Large"), HANG], OK, read_body=False)
    async with early as worker, client() as upstream:
        reading = await upstream.send(worker.url, UpstreamRequest("/", b"x" * (32 << 20)), 2.0)
        assert await rest(reading) == b"no"
        await worker.until_left()


async def test_a_connection_that_ended_while_it_rested_is_replaced() -> None:
    async with ScriptedWorker([whole(b"fine"), 0.05, CLOSE], OK) as worker, client() as upstream:
        assert await ask(upstream, worker) == b"fine"
        await asyncio.sleep(0.2)
        assert await ask(upstream, worker) == b"fine"
    assert worker.connections == 2


async def test_one_that_ends_under_a_question_is_replaced_once_and_a_new_one_is_not() -> None:
    async with ScriptedWorker(OK, [CLOSE], OK, [CLOSE], [CLOSE]) as worker, client() as upstream:
        assert await ask(upstream, worker) == b"fine"
        assert await ask(upstream, worker) == b"fine"
        assert worker.asked == 3
        with pytest.raises(StreamBroken):
            await ask(upstream, worker)
    assert worker.asked == 5


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nX: y", "a\rb", "a\0b"])
async def test_a_header_is_one_line(value: str) -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        with pytest.raises(InternalError):
            await upstream.send(worker.url, UpstreamRequest("/", b"", (("X-A", value),)), 2.0)
        with pytest.raises(InternalError):
            await upstream.send(worker.url, UpstreamRequest("/", b""), 2.0, (("X-A", value),))
    assert worker.asked == 0


async def test_many_at_once_each_get_their_own_answer() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            top = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(top.split(b"Content-Length: ")[1].split()[0]))
            writer.write(whole(body))
            await writer.drain()

    async def one(upstream: AsyncioHttpClient, url: str, n: int) -> bool:
        body = b"%d" % n
        return await rest(await upstream.send(url, UpstreamRequest("/", body), 10.0)) == body

    async with serving(echo) as url, client() as upstream:
        for start in (0, 300):
            asked = (one(upstream, url, start + n) for n in range(300))
            assert all(await asyncio.gather(*asked))


async def test_closing_ends_what_runs() -> None:
    async with ScriptedWorker([CHUNKED + chunk(b"a"), HANG]) as worker:
        async with client() as upstream:
            reading = await upstream.send(worker.url, ASK, 2.0)
            await reading.read()
        with pytest.raises(WorkerError):
            await reading.read()
        await worker.until_left()
