"""The HTTP client: its requests, its connection pool, and TLS verification."""

import asyncio
import socket
import ssl
from functools import partial
from pathlib import Path

import pytest

from backends.http.client import AsyncioHttpClient, build_request_head
from backends.http.interfaces import (
    WorkerConfig,
    WorkerCredentials,
    join_path,
    make_basic_credentials,
    make_bearer_credentials,
    make_header_credentials,
    make_query_credentials,
)
from protocols.core.errors import InternalError, StreamBroken, WorkerUnreachable
from protocols.core.interfaces import UpstreamRequest
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    HANG,
    Reply,
    ScriptedWorker,
    chunk,
    chunked,
    head,
    make_reply,
)
from tests.unit.backends.http.client_requests import open_client, read_body

ASK = UpstreamRequest("/v1/say%2Fit?x=1", b'{"a":1}', (("Content-Type", "application/json"),))
OK = [make_reply(b"fine")]
PEM = Path(__file__).parents[3] / "fault" / "loopback.pem"


async def send_and_read(
    upstream: AsyncioHttpClient, url: str, request: UpstreamRequest = ASK
) -> bytes:
    return await read_body(await upstream.send(url, request, 2.0))


async def test_request_line_headers_and_body_are_sent() -> None:
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker.url + "/base/") == b"fine"

    [request] = worker.requests
    assert (request.method, request.path) == ("POST", "/base/v1/say%2Fit?x=1")
    assert request.body == b'{"a":1}'
    assert request.headers == {
        "host": worker.url.removeprefix("http://"),
        "content-type": "application/json",
        "content-length": "7",
        "accept-encoding": "identity",
    }


async def test_per_request_headers_are_not_sent_with_the_next_request() -> None:
    async with ScriptedWorker(OK, OK) as worker, open_client() as upstream:
        for own in ((("X-Id", "1"), ("X-Key", "k")), ()):
            reading = await upstream.send(worker.url, ASK, 2.0, own)
            assert await read_body(reading) == b"fine"

    first, second = ([*one.headers] for one in worker.requests)
    shared, after = ["host", "content-type"], ["accept-encoding", "content-length"]

    assert first == [*shared, "x-id", "x-key", *after]
    assert second == [*shared, *after]


async def test_get_request_has_no_body() -> None:
    async with ScriptedWorker(OK, probed=None) as worker, open_client() as upstream:
        await send_and_read(upstream, worker.url, UpstreamRequest("/health", b"", method="GET"))

    assert worker.requests[0].method == "GET"
    assert worker.requests[0].headers.keys() == {"host", "accept-encoding"}


async def test_large_body_is_sent_with_content_length() -> None:
    body = bytes(range(256)) * (40 << 10)
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        await send_and_read(upstream, worker.url, UpstreamRequest("/", body))

    assert worker.requests[0].body == body
    assert worker.requests[0].headers["content-length"] == str(len(body))


async def test_status_and_headers_are_available_before_the_body() -> None:
    go_on = asyncio.Event()
    reply: Reply = [head("418 Teapot", X_Tea="yes", content_length="4"), go_on, b"fine"]
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert reading.status == 418
        assert reading.headers == {"x-tea": "yes", "content-length": "4"}

        go_on.set()
        assert await read_body(reading) == b"fine"


async def test_read_returns_the_received_data() -> None:
    second = asyncio.Event()
    reply: Reply = [CHUNKED + chunk(b"a") + chunk(b"b"), second, chunk(b"c"), b"0\r\n\r\n"]
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert b"".join(await reading.read()) == b"ab"

        second.set()
        assert await reading.read() == [b"c"]
        assert await reading.read() == []

        reading.release()


async def test_data_received_before_a_disconnect_can_be_read() -> None:
    """The consumer is slow: when it reads, the connection is already closed."""
    reply: Reply = [CHUNKED + chunk(b"a") + chunk(b"b"), CLOSE]
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        await asyncio.sleep(0.1)

        assert b"".join(await reading.read()) == b"ab"
        for _ in range(2):
            with pytest.raises(StreamBroken):
                await reading.read()

        reading.abort()


# ── connections ───────────────────────────────────────────────────────────────────────────────────


async def get_used_connections(
    upstream: AsyncioHttpClient, worker: ScriptedWorker, times: int
) -> list[int]:
    """Return the connections that the next requests use, one after the other."""
    before = worker.request_count
    for _ in range(times):
        await send_and_read(upstream, worker.url)
    return [one.connection for one in worker.requests[before:]]


async def send_concurrently(upstream: AsyncioHttpClient, url: str, times: int) -> None:
    """Send concurrent requests that end in order."""
    readings = [await upstream.send(url, ASK, 2.0) for _ in range(times)]
    for reading in readings:
        await read_body(reading)


async def test_most_recently_used_connection_is_reused_first() -> None:
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        await send_concurrently(upstream, worker.url, 3)
        last = worker.requests[-1].connection
        assert await get_used_connections(upstream, worker, 5) == [last] * 5

    assert worker.connections == 3


async def test_connection_is_closed_after_the_idle_timeout() -> None:
    async with ScriptedWorker(OK) as worker, open_client(idle=0.1) as upstream:
        assert await get_used_connections(upstream, worker, 2) == [0, 0]
        await asyncio.sleep(0.3)
        assert await get_used_connections(upstream, worker, 2) == [1, 1]


async def test_idle_connections_are_limited() -> None:
    async with ScriptedWorker(OK) as worker, open_client(keep=2) as upstream:
        await send_concurrently(upstream, worker.url, 5)
        await send_concurrently(upstream, worker.url, 5)

    assert worker.connections == 8


async def test_aborted_connection_is_not_reused() -> None:
    replies: list[Reply] = [[CHUNKED + chunk(b"a"), HANG], OK]
    async with ScriptedWorker(*replies) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        reading.abort()
        reading.abort()

        await worker.wait_for_disconnect()

        assert await get_used_connections(upstream, worker, 2) == [1, 1]


async def test_idle_connection_is_preferred_to_a_new_one() -> None:
    replies: list[Reply] = [OK, [CHUNKED, HANG], OK]
    async with ScriptedWorker(*replies) as worker, open_client() as upstream:
        first = await upstream.send(worker.url, ASK, 2.0)
        second = await upstream.send(worker.url, ASK, 2.0)
        await read_body(first)

        second.abort()

        assert await get_used_connections(upstream, worker, 2) == [0, 0]


async def test_connection_released_before_the_end_is_closed() -> None:
    replies: list[Reply] = [[CHUNKED + chunk(b"a"), HANG], OK]
    async with ScriptedWorker(*replies) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        reading.release()
        await worker.wait_for_disconnect()


async def test_try_send_requires_an_idle_connection() -> None:
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        assert upstream.try_send(worker.url, ASK) is None

        await read_body(await upstream.send_on_new_connection(worker.url, ASK, 2.0))
        reading = upstream.try_send(worker.url, ASK)
        assert reading is not None
        assert reading.read_available() == []
        assert await reading.wait_headers()
        assert await read_body(reading) == b"fine"

        await read_body(await upstream.send_on_new_connection(worker.url, ASK, 2.0))

    assert [one.connection for one in worker.requests] == [0, 0, 1]


async def test_idle_connection_closed_by_the_worker_has_no_response() -> None:
    async with ScriptedWorker(OK, [CLOSE]) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker.url) == b"fine"

        reading = upstream.try_send(worker.url, ASK)
        assert reading is not None
        assert not await reading.wait_headers()

        reading.release()
        assert upstream.connections.open == 0


async def test_abort_before_the_headers_raises_stream_broken() -> None:
    async with ScriptedWorker(OK, [HANG]) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker.url) == b"fine"

        reading = upstream.try_send(worker.url, ASK)
        assert reading is not None

        asyncio.get_running_loop().call_later(0.05, reading.abort)
        with pytest.raises(StreamBroken):
            await reading.wait_headers()


async def test_cancelled_wait_for_headers_closes_the_connection() -> None:
    async with ScriptedWorker(OK, [HANG], [HANG]) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker.url) == b"fine"
        for _ in range(2):  # on an idle connection, then on a new one
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(upstream.send(worker.url, ASK, 2.0), 0.05)
            await asyncio.sleep(0.05)
            assert upstream.connections.open == 0


async def test_wait_headers_returns_at_once_if_headers_were_received() -> None:
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert await reading.wait_headers()
        assert await read_body(reading) == b"fine"


async def test_read_after_abort_raises_stream_broken() -> None:
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        await asyncio.sleep(0.05)
        assert reading.complete

        reading.abort()
        assert reading.read_available() == []
        with pytest.raises(StreamBroken):
            await reading.read()


async def test_long_path_is_sent() -> None:
    path = f"/{'a' * 5000}"
    async with ScriptedWorker(OK) as worker, open_client() as upstream:
        await send_and_read(upstream, worker.url, UpstreamRequest(path, b"{}"))

    assert worker.requests[0].path == path


async def test_connection_close_header_is_honored() -> None:
    reply: Reply = [make_reply(b"fine", connection="close"), HANG]
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        assert await get_used_connections(upstream, worker, 2) == [0, 1]


async def test_extra_bytes_after_a_response_are_not_the_next_response() -> None:
    replies: list[Reply] = [[make_reply(b"fine") + make_reply(b"poison")], OK]
    async with ScriptedWorker(*replies) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker.url) == b"fine"
        assert await send_and_read(upstream, worker.url) == b"fine"


async def test_extra_bytes_do_not_change_the_response() -> None:
    reply: Reply = [make_reply(b"fine", x_a="1") + head("500 Oops", content_length="0")]
    async with ScriptedWorker(reply) as worker, open_client() as upstream:
        reading = await upstream.send(worker.url, ASK, 2.0)
        assert (reading.status, reading.headers["x-a"]) == (200, "1")
        assert await read_body(reading) == b"fine"


async def test_unread_response_does_not_leak_into_the_next_response() -> None:
    async with (
        ScriptedWorker([make_reply(b"old")], [make_reply(b"new")]) as worker,
        open_client() as upstream,
    ):
        await send_and_read(upstream, worker.url)
        left = await upstream.send(worker.url, ASK, 2.0)
        left.release()

        taken = await upstream.send(worker.url, ASK, 2.0)

        assert left.read_available() == []
        assert await read_body(taken) == b"new"


async def test_cookies_are_not_stored() -> None:
    async with (
        ScriptedWorker([make_reply(b"fine", set_cookie="a=b")]) as worker,
        open_client() as upstream,
    ):
        await get_used_connections(upstream, worker, 2)

    assert all("cookie" not in one.headers for one in worker.requests)


# ── TLS and addresses ─────────────────────────────────────────────────────────────────────────────


def make_tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


async def test_untrusted_certificate_is_rejected() -> None:
    async with ScriptedWorker(OK, tls=make_tls_context()) as worker:
        async with open_client() as upstream:
            with pytest.raises(WorkerUnreachable):
                await send_and_read(upstream, worker.url)
        async with open_client(ca=str(PEM)) as upstream:
            assert await send_and_read(upstream, worker.url) == b"fine"

    assert worker.request_count == 1


async def test_certificate_for_another_host_is_rejected() -> None:
    async with (
        ScriptedWorker(OK, tls=make_tls_context()) as worker,
        open_client(ca=str(PEM)) as upstream,
    ):
        with pytest.raises(WorkerUnreachable):
            await send_and_read(upstream, worker.url.replace("127.0.0.1", "localhost"))

    assert worker.request_count == 0


async def test_abort_closes_a_tls_connection_immediately() -> None:
    reply: Reply = [CHUNKED + chunk(b"a"), HANG]
    async with (
        ScriptedWorker(reply, tls=make_tls_context()) as worker,
        open_client(ca=str(PEM)) as upstream,
    ):
        reading = await upstream.send(worker.url, ASK, 2.0)
        reading.abort()
        await worker.wait_for_disconnect()


async def test_connect_timeout_applies_to_a_worker_with_a_full_backlog() -> None:
    """The listener's queue is full, so that the kernel completes no handshake."""
    async with open_client() as upstream:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            host, port = listener.getsockname()
            crowd = [asyncio.open_connection(host, port) for _ in range(4)]
            waiting = asyncio.gather(*crowd, return_exceptions=True)
            await asyncio.sleep(0.1)

            with pytest.raises(WorkerUnreachable):
                await upstream.send(f"http://{host}:{port}", ASK, 0.2)

            waiting.cancel()


@pytest.mark.parametrize("path", ["v1", "", "@evil.test/", "/a b", "/a\r\nX: y", "/a#b", "/é"])
async def test_invalid_path_is_rejected(path: str) -> None:
    async with open_client() as upstream:
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
def test_invalid_worker_url_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        WorkerConfig(url)


@pytest.mark.parametrize(
    ("base", "path", "requested"),
    [
        ("", "/v1/chat/completions", "/v1/chat/completions"),
        ("/base", "/v1/chat/completions", "/base/v1/chat/completions"),
        ("/openai", "/v1/models", "/openai/v1/models"),
        ("/v1", "/v1/chat/completions", "/v1/chat/completions"),
        ("/v1", "/health", "/health"),
        ("/v1", "/v2/models/m/generate", "/v1/v2/models/m/generate"),
        ("/api/v1", "/v1/models", "/api/v1/models"),
        ("/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
        ("/v1beta/openai", "/v1/embeddings", "/v1beta/openai/embeddings"),
        ("/api/paas/v4", "/health", "/api/paas/v4/health"),
        ("/v4x-y", "/v1/models", "/v4x-y/v1/models"),
        ("/triton/v2", "/v2/models/m/infer", "/triton/v2/models/m/infer"),
        ("/api/v1/triton", "/v2/models/m/infer", "/api/v1/triton/v2/models/m/infer"),
        ("/serving-endpoints", "/serving-endpoints/m/invocations",
         "/serving-endpoints/m/invocations"),
        ("/generate", "/generate", "/generate/generate"),
    ],
)  # fmt: skip
def test_path_of_a_worker_url_replaces_the_version_of_the_protocol(
    base: str, path: str, requested: str
) -> None:
    assert join_path(base, path) == requested
    head = build_request_head(f"https://w.example{base}/", UpstreamRequest(path, b"{}"))
    assert head.startswith(f"POST {requested} HTTP/1.1\r\n".encode())


def test_worker_key_must_be_printable_and_is_never_shown() -> None:
    keyed = WorkerConfig("http://a", credentials=make_bearer_credentials("s3cret"))
    assert "s3cret" not in repr(keyed) + repr(keyed.credentials)
    for make in (make_bearer_credentials, partial(make_query_credentials, "key")):
        with pytest.raises(ValueError, match="printable") as excinfo:
            make("s3cret\r\nX: y")
        assert "s3cret" not in str(excinfo.value)


@pytest.mark.parametrize(
    ("credentials", "path", "headers"),
    [
        (make_bearer_credentials("s3cret"), "/v1/x?a=1", ("Authorization", "Bearer s3cret")),
        (make_header_credentials("api-key", "s3cret"), "/v1/x?a=1", ("api-key", "s3cret")),
        (make_query_credentials("key", "s3cret/&"), "/v1/x?a=1&key=s3cret%2F%26", None),
        (
            make_basic_credentials("me", "s3cret"),
            "/v1/x?a=1",
            ("Authorization", "Basic bWU6czNjcmV0"),
        ),
    ],
)
def test_worker_credentials_are_added_to_a_request_and_masked_where_it_is_shown(
    credentials: WorkerCredentials, path: str, headers: tuple[str, str] | None
) -> None:
    request, mine = UpstreamRequest("/v1/x?a=1", b"{}"), (("x-request-id", "r"),)

    sent, sent_headers = credentials.authorize(request, mine)
    shown, shown_headers = credentials.hide_secrets().authorize(request, mine)

    assert (sent.path, sent.body, sent.method) == (path, b"{}", "POST")
    assert sent_headers == (*mine, *([headers] if headers else ()))
    assert "s3cret" not in repr((shown, shown_headers))
    assert "bWU6" not in repr(shown_headers)
    assert shown.path == ("/v1/x?a=1" if headers else "/v1/x?a=1&key=***")

    quoted = f"no such key: {headers[1] if headers else path}"
    assert "s3cret" not in credentials.mask_text(quoted)
    assert credentials.mask_text("nothing secret") == "nothing secret"


def test_configured_headers_replace_those_of_the_request_and_are_masked() -> None:
    """Names have no case; a short value is no secret and stays readable in a worker's text."""
    headers = {"X-Title": "My secret app", "anthropic-version": "1"}
    credentials = make_bearer_credentials("s3cret").add_headers(headers)
    request = UpstreamRequest("/v1/x", b"{}", (("Anthropic-Version", "2"), ("accept", "a")))

    sent, added = credentials.authorize(request, (("x-title", "theirs"), ("x-request-id", "r")))
    _, shown = credentials.hide_secrets().authorize(request, ())

    assert sent.headers == (("accept", "a"),)
    assert added == (
        ("x-request-id", "r"),
        ("Authorization", "Bearer s3cret"),
        ("X-Title", "My secret app"),
        ("anthropic-version", "1"),
    )
    assert {value for _, value in shown} == {"***"}
    assert credentials.mask_text("My secret app, 1") == "***, 1"


async def test_unstarted_client_raises_internal_error() -> None:
    with pytest.raises(InternalError):
        await AsyncioHttpClient().send("http://a", ASK, 1.0)


async def test_stream_without_the_last_chunk_raises_stream_broken() -> None:
    async with ScriptedWorker([chunked(b"a")]) as worker, open_client() as upstream:
        assert await send_and_read(upstream, worker.url) == b"a"
    async with ScriptedWorker([chunked(b"a")[:-5], CLOSE]) as worker, open_client() as upstream:
        with pytest.raises(StreamBroken):
            await send_and_read(upstream, worker.url)
