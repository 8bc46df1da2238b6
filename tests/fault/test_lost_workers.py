"""A failed worker is replaced by another where a retry is safe, and no client notices."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from backends.interfaces import Timeouts
from protocols.core.errors import GatewayError, Overloaded, StreamBroken
from tests.fault.line_protocol import (
    collect_events,
    encode_line,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    HANG,
    RESET,
    Reply,
    ScriptedWorker,
    chunk,
    make_reply,
)

STARTED_STREAM = chunk(encode_line("Hello"))
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)

# ── retries ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def refusing_url() -> Iterator[str]:
    """The URL of a port that is reserved but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.fault(1)
async def test_refused_connection_makes_the_pool_unready(refusing_url: str) -> None:
    async with run_pool(refusing_url) as backend:
        assert backend.ready
        with pytest.raises(Overloaded):
            await collect_events(backend)

        assert not backend.ready


async def test_request_is_sent_to_an_ejected_worker_without_alternative() -> None:
    """An attempt may succeed, while an error certainly fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async with run_pool(url) as backend:
            with pytest.raises(Overloaded):
                await collect_events(backend)
            async with ScriptedWorker([reply_text("Hello", " world")], listener=listener):
                assert join_text(await collect_events(backend)) == "Hello world"

            assert backend.ready


async def test_unresolvable_worker_name_is_an_overloaded_error() -> None:
    async with run_pool("http://nowhere.invalid:1") as backend:
        with pytest.raises(Overloaded):
            await collect_events(backend)


@pytest.mark.fault(1)
async def test_unreachable_worker_causes_no_request_errors(refusing_url: str) -> None:
    async with (
        ScriptedWorker([reply_text("Hello", " world")]) as worker,
        run_pool(refusing_url, worker.url, policy="round_robin") as backend,
    ):
        answers = await asyncio.gather(*(collect_events(backend) for _ in range(100)))

        assert backend.ready

    assert {join_text(events) for events in answers} == {"Hello world"}
    assert len(worker.requests) == 100


@pytest.mark.fault(2, 3)
@pytest.mark.parametrize("lost", [[RESET], [CLOSE], [CHUNKED, CLOSE], [HANG], [CHUNKED, HANG]])
async def test_worker_lost_before_its_first_event_is_retried_once(
    lost: Reply,
) -> None:
    async with (
        ScriptedWorker(lost) as bad,
        ScriptedWorker([reply_text("Hello", " world")]) as good,
        run_pool(bad.url, good.url, policy="round_robin", timeouts=HASTY) as backend,
    ):
        events = await collect_events(backend)

    assert join_text(events) == "Hello world"
    assert (len(bad.requests), len(good.requests)) == (1, 1)


async def test_request_that_crashes_workers_is_retried_only_once() -> None:
    async with (
        ScriptedWorker([RESET]) as a,
        ScriptedWorker([RESET]) as b,
        ScriptedWorker([RESET]) as c,
    ):
        async with run_pool(a.url, b.url, c.url) as backend:
            with pytest.raises(StreamBroken):
                await collect_events(backend)

        assert sum(len(worker.requests) for worker in (a, b, c)) == 2


@pytest.mark.parametrize(
    "final",
    [
        [make_reply(b"{}", "501 Not Implemented")],
        [b"garbage\r\n\r\n", CLOSE],
        [CHUNKED + STARTED_STREAM, 0.05, CLOSE],
    ],
)
async def test_final_worker_responses_are_not_retried(final: Reply) -> None:
    async with (
        ScriptedWorker(final) as bad,
        ScriptedWorker([reply_text("Hello", " world")]) as good,
        run_pool(bad.url, good.url, policy="round_robin") as backend,
    ):
        with pytest.raises(GatewayError):
            await collect_events(backend)

    assert len(good.requests) == 0


# ── keep-alive connections ────────────────────────────────────────────────────────────────────────


async def test_stale_keepalive_connection_is_replaced_without_error() -> None:
    """The worker closes each connection at its second request: 1 replay, no error."""
    async with (
        ScriptedWorker(
            [reply_text("Hello", " world")], [CLOSE], [reply_text("Hello", " world")]
        ) as worker,
        run_pool(worker.url) as backend,
    ):
        first = await collect_events(backend)
        second = await collect_events(backend)

    assert join_text(first) == join_text(second) == "Hello world"
    assert [one.connection for one in worker.requests] == [0, 0, 1]


async def test_request_on_a_new_connection_is_not_replayed() -> None:
    async with (
        ScriptedWorker([RESET], [reply_text("Hello", " world")]) as worker,
        run_pool(worker.url) as backend,
    ):
        with pytest.raises(StreamBroken):
            await collect_events(backend)

    assert len(worker.requests) == 1


async def test_request_is_replayed_only_once() -> None:
    async with (
        ScriptedWorker([reply_text("Hello", " world")], [RESET]) as worker,
        run_pool(worker.url) as backend,
    ):
        await collect_events(backend)
        with pytest.raises(StreamBroken):
            await collect_events(backend)

    assert len(worker.requests) == 3


async def test_request_with_a_partial_response_is_not_replayed() -> None:
    half: Reply = [b"HTTP/1.1 200 OK\r\nContent-", CLOSE]
    async with (
        ScriptedWorker([reply_text("Hello", " world")], half) as worker,
        run_pool(worker.url) as backend,
    ):
        await collect_events(backend)
        with pytest.raises(StreamBroken):
            await collect_events(backend)

    assert len(worker.requests) == 2
