"""A worker that is lost is made up for, where that is safe, and no client notices."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from backends.interfaces import Timeouts
from protocols.core.errors import GatewayError, Overloaded, StreamBroken
from tests.fakes import CHUNKED, CLOSE, HANG, RESET, Reply, ScriptedWorker, chunk, chunked, whole
from tests.fault.lines import heard, pool, say, text

GOOD = [chunked(say("Hello"), say(" world"), b"end\n")]
SAYS = chunk(say("Hello"))
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)

# ── another worker ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens, nor can while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_fault_01_nobody_listens(nowhere: str) -> None:
    async with pool(nowhere) as backend:
        assert backend.ready
        with pytest.raises(Overloaded):
            await heard(backend)

        assert not backend.ready


async def test_a_worker_that_comes_back_is_asked_although_it_was_left_alone() -> None:
    """It is the only one: better ask it than refuse at once."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with pool(url) as backend:
            with pytest.raises(Overloaded):
                await heard(backend)
            async with ScriptedWorker(GOOD, listener=listener):
                assert text(await heard(backend)) == "Hello world"

            assert backend.ready


async def test_no_such_name() -> None:
    async with pool("http://nowhere.invalid:1") as backend:
        with pytest.raises(Overloaded):
            await heard(backend)


async def test_fault_01_a_worker_that_is_down_costs_no_request_an_error(nowhere: str) -> None:
    async with (
        ScriptedWorker(GOOD) as worker,
        pool(nowhere, worker.url, policy="round_robin") as backend,
    ):
        answers = await asyncio.gather(*(heard(backend) for _ in range(100)))

        assert backend.ready
    assert {text(events) for events in answers} == {"Hello world"}
    assert len(worker.requests) == 100


@pytest.mark.parametrize("lost", [[RESET], [CLOSE], [CHUNKED, CLOSE], [HANG], [CHUNKED, HANG]])
async def test_fault_02_03_a_worker_lost_before_its_first_event_is_replaced_once(
    lost: Reply,
) -> None:
    async with (
        ScriptedWorker(lost) as bad,
        ScriptedWorker(GOOD) as good,
        pool(bad.url, good.url, policy="round_robin", timeouts=HASTY) as backend,
    ):
        events = await heard(backend)

    assert text(events) == "Hello world"
    assert (len(bad.requests), len(good.requests)) == (1, 1)


async def test_a_request_that_brings_workers_down_does_not_go_round() -> None:
    async with (
        ScriptedWorker([RESET]) as a,
        ScriptedWorker([RESET]) as b,
        ScriptedWorker([RESET]) as c,
    ):
        async with pool(a.url, b.url, c.url) as backend:
            with pytest.raises(StreamBroken):
                await heard(backend)

        assert sum(len(worker.requests) for worker in (a, b, c)) == 2


@pytest.mark.parametrize(
    "final",
    [
        [whole(b"{}", "501 Not Implemented")],
        [b"garbage\r\n\r\n", CLOSE],
        [CHUNKED + SAYS, 0.05, CLOSE],
    ],
)
async def test_what_a_worker_said_is_final(final: Reply) -> None:
    async with (
        ScriptedWorker(final) as bad,
        ScriptedWorker(GOOD) as good,
        pool(bad.url, good.url, policy="round_robin") as backend,
    ):
        with pytest.raises(GatewayError):
            await heard(backend)

    assert len(good.requests) == 0


# ── kept connections ────────────────────────────────────────────────────────────────────────────


async def test_a_kept_connection_that_was_closed_is_replaced_unnoticed() -> None:
    """The worker closes each connection as its second request comes: 1 replay, no error."""
    async with ScriptedWorker(GOOD, [CLOSE], GOOD) as worker, pool(worker.url) as backend:
        first = await heard(backend)
        second = await heard(backend)

    assert text(first) == text(second) == "Hello world"
    assert [one.connection for one in worker.requests] == [0, 0, 1]


async def test_a_fresh_connection_is_not_replayed() -> None:
    async with ScriptedWorker([RESET], GOOD) as worker, pool(worker.url) as backend:
        with pytest.raises(StreamBroken):
            await heard(backend)

    assert len(worker.requests) == 1


async def test_a_replay_is_free_only_once() -> None:
    async with ScriptedWorker(GOOD, [RESET]) as worker, pool(worker.url) as backend:
        await heard(backend)
        with pytest.raises(StreamBroken):
            await heard(backend)

    assert len(worker.requests) == 3


async def test_an_answer_begun_on_a_kept_connection_is_not_replayed() -> None:
    half: Reply = [b"HTTP/1.1 200 OK\r\nContent-", CLOSE]
    async with ScriptedWorker(GOOD, half) as worker, pool(worker.url) as backend:
        await heard(backend)
        with pytest.raises(StreamBroken):
            await heard(backend)

    assert len(worker.requests) == 2
