"""Which failures another worker makes up for, how often, and what is told when none does."""

import asyncio
from contextlib import aclosing

import pytest

from backends.interfaces import PreparedRequest, Timeouts
from backends.pool.settings import CircuitBreakerSettings, RetrySettings
from protocols.core.errors import DeadlineExceeded, GatewayError, WorkerFailed
from protocols.core.events import Event, StreamStart
from tests.fakes import CHUNKED, CLOSE, HANG, RESET, Reply, ScriptedWorker, chunk, chunked, whole
from tests.fault.lines import STREAMED, UNARY, context, heard, pool, say, text

GOOD = [chunked(b"start\n", say("Hello"), say(" world"), b"end\n")]
STARTS = CHUNKED + chunk(b"start\n")
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)


def busy(seconds: int) -> Reply:
    return [whole(b"{}", "429 Busy", retry_after=str(seconds))]


def status(line: str, body: bytes = b"{}", **headers: str) -> Reply:
    return [whole(body, line, **headers)]


REPLACED: list[tuple[str, Reply]] = [
    ("429", busy(9)),
    ("502", status("502 Bad Gateway")),
    ("503", status("503 Down")),
    ("503 and overloaded", status("503 Busy", b'{"error":"overloaded"}')),
    ("503 with a time", status("503 Busy", retry_after="3")),
    ("504", status("504 Late")),
    ("an error as the first event", [chunked(b"{nope\n")]),
    ("an error after events that say nothing", [STARTS + chunk(b"{nope\n")]),
    ("cut after events that say nothing", [STARTS, 0.05, CLOSE]),
    ("reset after events that say nothing", [STARTS, 0.05, RESET]),
    ("silence after events that say nothing", [STARTS, HANG]),
    ("nothing but an end of the body", [chunked()]),
]


@pytest.mark.parametrize("lost", [one[1] for one in REPLACED], ids=[one[0] for one in REPLACED])
async def test_another_worker_makes_up_for_it(lost: Reply) -> None:
    async with (
        ScriptedWorker(lost) as bad,
        ScriptedWorker(GOOD) as good,
        pool(bad.url, good.url, policy="round_robin", timeouts=HASTY) as backend,
    ):
        events = await heard(backend)

    assert text(events) == "Hello world"
    assert sum(isinstance(event, StreamStart) for event in events) == 1, (
        "only of the one that answers"
    )
    assert (bad.asked, good.asked) == (1, 1)


async def test_what_says_nothing_is_kept_back_and_comes_in_its_order() -> None:
    gate = asyncio.Event()
    reply: Reply = [STARTS, gate, chunk(b"start\n" + say("Hello")), chunk(b"end\n"), b"0\r\n\r\n"]
    events: list[Event] = []
    async with ScriptedWorker(reply) as worker, pool(worker.url) as backend:
        task = asyncio.get_running_loop().create_task(heard(backend, into=events))
        await worker.until_asked()
        await asyncio.sleep(0.05)
        assert not events
        gate.set()
        await task

    assert [type(event).__name__ for event in events] == [
        "StreamStart",
        "StreamStart",
        "TextDelta",
        "ChoiceEnd",
        "StreamEnd",
    ]


async def test_an_answer_in_one_piece_is_made_up_for_to_its_last_byte() -> None:
    cut: Reply = [whole(say("Hello") + say(" there") + b"end\n")[:-2], CLOSE]
    async with (
        ScriptedWorker(cut) as bad,
        ScriptedWorker(GOOD) as good,
        pool(bad.url, good.url, policy="round_robin") as backend,
    ):
        events = await heard(backend, UNARY)

    assert text(events) == "Hello world"
    assert (bad.asked, good.asked) == (1, 1)


async def test_what_is_kept_back_is_bounded() -> None:
    endless = chunk(b"start" + b"x" * (64 << 10) + b"\n")
    async with (
        ScriptedWorker([CHUNKED, *[endless] * 300, HANG]) as worker,
        pool(worker.url) as backend,
    ):
        with pytest.raises(WorkerFailed, match="without content"):
            await heard(backend)


async def test_500_is_made_up_for_where_the_operator_says_so() -> None:
    settings = RetrySettings(on=("500",))
    async with (
        ScriptedWorker(status("500 Oops")) as bad,
        ScriptedWorker(GOOD) as good,
        pool(bad.url, good.url, policy="round_robin", retries=settings) as backend,
    ):
        assert text(await heard(backend)) == "Hello world"


async def test_without_retries_the_first_failure_is_told() -> None:
    async with (
        ScriptedWorker(status("502 Bad Gateway")) as bad,
        ScriptedWorker(GOOD) as good,
        pool(bad.url, good.url, policy="round_robin", retries=RetrySettings(max=0)) as backend,
    ):
        with pytest.raises(WorkerFailed):
            await heard(backend)

    assert good.asked == 0


async def test_tries_have_one_deadline_together() -> None:
    limits = Timeouts(connect=1.0, first_token=0.3, idle=5.0, total=0.5)
    async with (
        ScriptedWorker([HANG]) as a,
        ScriptedWorker([HANG]) as b,
        pool(a.url, b.url, timeouts=limits) as backend,
    ):
        with pytest.raises(DeadlineExceeded) as caught:
            await heard(backend)

    assert caught.value.phase == "total"
    assert (a.asked, b.asked) == (1, 1)


@pytest.mark.parametrize(
    "reply", [status("500 Oops"), [CHUNKED, CLOSE], [b"garbage\r\n\r\n", CLOSE], [STARTS, HANG]]
)
async def test_a_worker_that_fails_again_and_again_is_left(reply: Reply) -> None:
    """Requests that it fails are those of a pool without retries."""
    async with (
        ScriptedWorker(reply) as bad,
        ScriptedWorker(GOOD) as good,
        pool(
            bad.url,
            good.url,
            policy="round_robin",
            timeouts=HASTY,
            retries=RetrySettings(max=0),
            breaker=CircuitBreakerSettings(consecutive_failures=2),
        ) as backend,
    ):
        told: list[GatewayError] = []
        for _ in range(8):
            try:
                await heard(backend)
            except GatewayError as error:
                told.append(error)

    assert len(told) == bad.asked == 2
    assert good.asked == 6


async def test_a_worker_that_errs_for_the_clients_sake_stays() -> None:
    reply = status("404 Not Found")
    breaker = CircuitBreakerSettings(consecutive_failures=1, min_requests=1)
    async with ScriptedWorker(reply) as worker, pool(worker.url, breaker=breaker) as backend:
        for _ in range(10):
            with pytest.raises(WorkerFailed):
                await heard(backend)

        assert [one.state for one in backend.report_workers()] == ["up"]


async def test_a_client_that_leaves_says_nothing_of_a_worker() -> None:
    breaker = CircuitBreakerSettings(consecutive_failures=1, min_requests=1)
    async with ScriptedWorker([HANG]) as worker, pool(worker.url, breaker=breaker) as backend:
        for number in range(10):
            task = asyncio.get_running_loop().create_task(heard(backend))
            await worker.until_asked(number + 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        assert [one.state for one in backend.report_workers()] == ["up"]
        assert [one.in_flight for one in backend.report_workers()] == [0]


async def test_the_time_to_the_first_token_is_known() -> None:
    """3 s to the first token, of which the second that the head took is a part."""
    now, begin, go_on = [100.0], asyncio.Event(), asyncio.Event()
    reply: Reply = [STARTS, begin, chunk(say("Hello")), go_on, chunk(b"end\n"), b"0\r\n\r\n"]
    async with (
        ScriptedWorker(reply) as worker,
        pool(worker.url, clock=lambda: now[0]) as backend,
        aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches,
    ):
        first = asyncio.get_running_loop().create_task(anext(batches))
        await worker.until_asked()
        now[0] += 3.0
        begin.set()
        await first
        assert backend.report_workers()[0].latency == 3.0
        now[0] += 0.5
        go_on.set()
        async for _ in batches:
            pass
        latency = backend.report_workers()[0].latency

    assert latency is not None
    assert latency <= 3.0, "what comes after the first token is another matter"


async def test_a_whole_text_tells_nothing_of_the_first_token() -> None:
    async with ScriptedWorker([whole(say("Hello") + b"end\n")]) as worker, pool(worker.url) as one:
        await heard(one, UNARY)

        assert one.report_workers()[0].latency is None
