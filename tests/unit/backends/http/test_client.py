"""The HTTP client by itself: what it writes, which connection it takes, whom it trusts."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import WorkerConfig
from protocols.core.errors import InternalError, StreamBroken, WorkerUnreachable
from protocols.core.interfaces import UpstreamRequest
from tests.fakes import CHUNKED, CLOSE, HANG, Reply, ScriptedWorker, chunk, chunked, head, whole
from tests.unit.backends.http.client_requests import client, rest

ASK = UpstreamRequest("/v1/say%2Fit?x=1", b'{"a":1}', (("Content-Type", "application/json"),))
OK = [whole(b"fine")]
PEM = Path(__file__).parents[3] / "fault" / "loopback.pem"


async def ask(upstream: AsyncioHttpClient, url: str, request: UpstreamRequest = ASK) -> bytes:
    return await rest(await upstream.send(url, request, 2.0))


async def test_what_the_worker_sees() -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        assert await ask(upstream, worker.url + "/base/") == b"fine"

    [request] = worker.requests
    assert (request.method, request.path) == ("POST", "/base/v1/say%2Fit?x=1")
    assert request.body == b'{"a":1}'
    assert request.headers == {
        "host": worker.url.removeprefix("http://"),
        "content-type": "application/json",
        "content-length": "7",
        "accept-encoding": "identity",
    }


async def test_what_is_of_one_request_alone_is_not_sent_with_the_next() -> None:
    async with ScriptedWorker(OK, OK) as worker, client() as upstream:
        for own in ((("X-Id", "1"), ("X-Key", "k")), ()):
            reading = await upstream.send(worker.url, ASK, 2.0, own)
            assert await rest(reading) == b"fine"

    first, second = ([*one.headers] for one in worker.requests)
    shared, after = ["host", "content-type"], ["accept-encoding", "content-length"]
    assert first == [*shared, "x-id", "x-key", *after]
    assert second == [*shared, *after]


async def test_a_get_has_no_body() -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        await ask(upstream, worker.url, UpstreamRequest("/health", b"", method="GET"))

    assert worker.requests[0].method == "GET"
    assert worker.requests[0].headers.keys() == {"host", "accept-encoding"}


async def test_a_large_body_arrives_whole_with_its_length() -> None:
    body = bytes(range(256)) * (40 << 10)
    async with ScriptedWorker(OK) as worker, client() as upstream:
        await ask(upstream, worker.url, UpstreamRequest("/", body))

    assert worker.requests[0].body == body
    assert worker.requests[0].headers["content-length"] == str(len(body))


async def test_status_and_headers_come_before_the_body() -> None:
    go_on = asyncio.Event()
    reply: Reply = [head("418 Teapot", X_Tea="yes", content_length="4"), go_on, b"fine"]
    async with ScriptedWorker(reply) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert reading.status == 418
        assert reading.headers == {"x-tea": "yes", "content-length": "4"}
        go_on.set()
        assert await rest(reading) == b"fine"


async def test_each_read_gives_what_has_come() -> None:
    second = asyncio.Event()
    reply: Reply = [CHUNKED + chunk(b"a") + chunk(b"b"), second, chunk(b"c"), b"0\r\n\r\n"]
    async with ScriptedWorker(reply) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert b"".join(await reading.read()) == b"ab"
        second.set()
        assert await reading.read() == [b"c"]
        assert await reading.read() == []
        reading.release()


async def test_what_came_before_the_break_is_not_lost() -> None:
    """The consumer was busy: by the time it reads, the connection is long gone."""
    reply: Reply = [CHUNKED + chunk(b"a") + chunk(b"b"), CLOSE]
    async with ScriptedWorker(reply) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        await asyncio.sleep(0.1)
        assert b"".join(await reading.read()) == b"ab"
        for _ in range(2):
            with pytest.raises(StreamBroken):
                await reading.read()
        reading.abort()


# ── connections ─────────────────────────────────────────────────────────────────────────────────


async def connections(upstream: AsyncioHttpClient, worker: ScriptedWorker, times: int) -> list[int]:
    """The connections that the next requests use, one after the other."""
    before = worker.asked
    for _ in range(times):
        await ask(upstream, worker.url)
    return [one.connection for one in worker.requests[before:]]


async def together(upstream: AsyncioHttpClient, url: str, times: int) -> None:
    """So many requests at a time, which end in their order."""
    readings = [await upstream.send(url, ASK, 2.0) for _ in range(times)]
    for reading in readings:
        await rest(reading)


async def test_the_connection_used_last_serves_first() -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        await together(upstream, worker.url, 3)
        last = worker.requests[-1].connection
        assert await connections(upstream, worker, 5) == [last] * 5

    assert worker.connections == 3


async def test_a_connection_that_rested_too_long_serves_no_more() -> None:
    async with ScriptedWorker(OK) as worker, client(idle=0.1) as upstream:
        assert await connections(upstream, worker, 2) == [0, 0]
        await asyncio.sleep(0.3)
        assert await connections(upstream, worker, 2) == [1, 1]


async def test_no_more_than_so_many_connections_rest() -> None:
    async with ScriptedWorker(OK) as worker, client(keep=2) as upstream:
        await together(upstream, worker.url, 5)
        await together(upstream, worker.url, 5)

    assert worker.connections == 8


async def test_a_connection_that_was_cut_off_serves_no_more() -> None:
    replies: list[Reply] = [[CHUNKED + chunk(b"a"), HANG], OK]
    async with ScriptedWorker(*replies) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        reading.abort()
        reading.abort()
        await worker.until_left()
        assert await connections(upstream, worker, 2) == [1, 1]


async def test_a_kept_connection_is_preferred_to_a_new_one() -> None:
    replies: list[Reply] = [OK, [CHUNKED, HANG], OK]
    async with ScriptedWorker(*replies) as worker, client() as upstream:
        first = await upstream.send(worker.url, ASK, 2.0)
        second = await upstream.send(worker.url, ASK, 2.0)
        await rest(first)
        second.abort()
        assert await connections(upstream, worker, 2) == [0, 0]


async def test_a_connection_given_back_too_early_is_cut_off() -> None:
    replies: list[Reply] = [[CHUNKED + chunk(b"a"), HANG], OK]
    async with ScriptedWorker(*replies) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        reading.release()
        await worker.until_left()


async def test_who_asks_at_once_needs_a_connection_that_rests() -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        assert upstream.try_send(worker.url, ASK) is None
        await rest(await upstream.send_on_new_connection(worker.url, ASK, 2.0))
        reading = upstream.try_send(worker.url, ASK)
        assert reading is not None
        assert reading.read_available() == []
        assert await reading.wait_headers()
        assert await rest(reading) == b"fine"
        await rest(await upstream.send_on_new_connection(worker.url, ASK, 2.0))

    assert [one.connection for one in worker.requests] == [0, 0, 1]


async def test_one_that_ended_while_it_rested_had_no_answer() -> None:
    async with ScriptedWorker(OK, [CLOSE]) as worker, client() as upstream:
        assert await ask(upstream, worker.url) == b"fine"
        reading = upstream.try_send(worker.url, ASK)
        assert reading is not None
        assert not await reading.wait_headers()
        reading.release()
        assert upstream.connections.open == 0


async def test_one_that_was_cut_off_before_its_head_is_broken() -> None:
    async with ScriptedWorker(OK, [HANG]) as worker, client() as upstream:
        assert await ask(upstream, worker.url) == b"fine"
        reading = upstream.try_send(worker.url, ASK)
        assert reading is not None
        asyncio.get_running_loop().call_later(0.05, reading.abort)
        with pytest.raises(StreamBroken):
            await reading.wait_headers()


async def test_who_waits_no_more_for_a_head_has_cut_it_off() -> None:
    async with ScriptedWorker(OK, [HANG], [HANG]) as worker, client() as upstream:
        assert await ask(upstream, worker.url) == b"fine"
        for _ in range(2):  # over a connection that rests, then over a new one
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(upstream.send(worker.url, ASK, 2.0), 0.05)
            await asyncio.sleep(0.05)
            assert upstream.connections.open == 0


async def test_a_head_that_is_there_need_not_be_waited_for() -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert await reading.wait_headers()
        assert await rest(reading) == b"fine"


async def test_what_was_thrown_away_does_not_look_like_the_end() -> None:
    async with ScriptedWorker(OK) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        await asyncio.sleep(0.05)
        assert reading.complete
        reading.abort()
        assert reading.read_available() == []
        with pytest.raises(StreamBroken):
            await reading.read()


async def test_a_long_path_is_a_path_like_others() -> None:
    path = f"/{'a' * 5000}"
    async with ScriptedWorker(OK) as worker, client() as upstream:
        await ask(upstream, worker.url, UpstreamRequest(path, b"{}"))

    assert worker.requests[0].path == path


async def test_a_worker_that_says_close_is_believed() -> None:
    reply: Reply = [whole(b"fine", connection="close"), HANG]
    async with ScriptedWorker(reply) as worker, client() as upstream:
        assert await connections(upstream, worker, 2) == [0, 1]


async def test_bytes_after_an_answer_are_not_the_next_one() -> None:
    replies: list[Reply] = [[whole(b"fine") + whole(b"poison")], OK]
    async with ScriptedWorker(*replies) as worker, client() as upstream:
        assert await ask(upstream, worker.url) == b"fine"
        assert await ask(upstream, worker.url) == b"fine"


async def test_nor_do_they_change_it() -> None:
    reply: Reply = [whole(b"fine", x_a="1") + head("500 Oops", content_length="0")]
    async with ScriptedWorker(reply) as worker, client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert (reading.status, reading.headers["x-a"]) == (200, "1")
        assert await rest(reading) == b"fine"


async def test_nor_does_what_nobody_read_of_the_one_before() -> None:
    async with ScriptedWorker([whole(b"old")], [whole(b"new")]) as worker, client() as upstream:
        await ask(upstream, worker.url)
        left = await upstream.send(worker.url, ASK, 2.0)
        left.release()
        taken = await upstream.send(worker.url, ASK, 2.0)

        assert left.read_available() == []
        assert await rest(taken) == b"new"


async def test_no_cookie_is_kept() -> None:
    async with ScriptedWorker([whole(b"fine", set_cookie="a=b")]) as worker, client() as upstream:
        await connections(upstream, worker, 2)

    assert all("cookie" not in one.headers for one in worker.requests)


# ── whom it talks to ────────────────────────────────────────────────────────────────────────────


def certified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


async def test_a_certificate_must_be_signed_by_someone_trusted() -> None:
    async with ScriptedWorker(OK, tls=certified()) as worker:
        async with client() as upstream:
            with pytest.raises(WorkerUnreachable):
                await ask(upstream, worker.url)
        async with client(ca=str(PEM)) as upstream:
            assert await ask(upstream, worker.url) == b"fine"

    assert worker.asked == 1


async def test_a_certificate_must_name_the_worker() -> None:
    async with ScriptedWorker(OK, tls=certified()) as worker, client(ca=str(PEM)) as upstream:
        with pytest.raises(WorkerUnreachable):
            await ask(upstream, worker.url.replace("127.0.0.1", "localhost"))

    assert worker.asked == 0


async def test_tls_is_cut_off_at_once() -> None:
    reply: Reply = [CHUNKED + chunk(b"a"), HANG]
    async with ScriptedWorker(reply, tls=certified()) as worker, client(ca=str(PEM)) as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        reading.abort()
        await worker.until_left()


async def test_a_worker_that_takes_no_connection_is_given_up_in_time() -> None:
    """The listener's queue is full, so that the kernel answers no further handshake."""
    async with client() as upstream:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            host, port = listener.getsockname()
            crowd = [asyncio.open_connection(host, port) for _ in range(4)]
            waiting = asyncio.gather(*crowd, return_exceptions=True)
            await asyncio.sleep(0.1)
            with pytest.raises(WorkerUnreachable):
                await upstream.send(f"http://{host}:{port}", ASK, 0.2)
            waiting.cancel()


@pytest.mark.parametrize("path", ["v1", "", "@evil.test/", "/a b", "/a\r\nX: y", "/a#b", "/é"])
async def test_a_path_is_a_path(path: str) -> None:
    async with client() as upstream:
        with pytest.raises(InternalError):
            await upstream.send("http://127.0.0.1:1", UpstreamRequest(path, b""), 1.0)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://a",
        "file:///etc/passwd",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://user:key@a",
        "http://a?x=1",
        "http://a#x",
        "http://a\\@b",
        "http://[::1",
    ],
)
def test_a_workers_url_is_its_base(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        WorkerConfig(url)


def test_a_key_fits_into_a_header_and_is_not_shown() -> None:
    assert "s3cret" not in repr(WorkerConfig("http://a", bearer="s3cret"))
    with pytest.raises(ValueError, match="printable") as caught:
        WorkerConfig("http://a", bearer="s3cret\r\nX: y")
    assert "s3cret" not in str(caught.value)


async def test_a_client_that_was_not_started_says_so() -> None:
    with pytest.raises(InternalError):
        await AsyncioHttpClient().send("http://a", ASK, 1.0)


async def test_a_stream_is_whole_only_with_its_last_chunk() -> None:
    async with ScriptedWorker([chunked(b"a")]) as worker, client() as upstream:
        assert await ask(upstream, worker.url) == b"a"
    async with ScriptedWorker([chunked(b"a")[:-5], CLOSE]) as worker, client() as upstream:
        with pytest.raises(StreamBroken):
            await ask(upstream, worker.url)
