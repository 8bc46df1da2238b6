"""Which failures are retried on another worker, how often, and the error if all attempts fail."""

import asyncio
from contextlib import aclosing

import pytest

from backends.interfaces import PreparedRequest, Timeouts
from backends.pool.settings import CircuitBreakerSettings, RetrySettings
from protocols.core.errors import DeadlineExceeded, GatewayError, WorkerFailed
from protocols.core.events import Event, StreamStart
from tests.fault.line_protocol import (
    STREAMED,
    UNARY,
    build_context,
    collect_events,
    encode_line,
    join_text,
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
    chunked,
    make_reply,
)

HELLO_WORLD = [chunked(b"start\n", encode_line("Hello"), encode_line(" world"), b"end\n")]
STARTS = CHUNKED + chunk(b"start\n")
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)


def build_busy_reply(seconds: int) -> Reply:
    return [make_reply(b"{}", "429 Busy", retry_after=str(seconds))]


def build_status_reply(line: str, body: bytes = b"{}", **headers: str) -> Reply:
    return [make_reply(body, line, **headers)]


REPLACED: list[tuple[str, Reply]] = [
    ("429", build_busy_reply(9)),
    ("502", build_status_reply("502 Bad Gateway")),
    ("503", build_status_reply("503 Down")),
    ("503 and overloaded", build_status_reply("503 Busy", b'{"error":"overloaded"}')),
    ("503 with a time", build_status_reply("503 Busy", retry_after="3")),
    ("504", build_status_reply("504 Late")),
    ("an error as the first event", [chunked(b"{nope\n")]),
    ("an error after events that say nothing", [STARTS + chunk(b"{nope\n")]),
    ("cut after events that say nothing", [STARTS, 0.05, CLOSE]),
    ("reset after events that say nothing", [STARTS, 0.05, RESET]),
    ("silence after events that say nothing", [STARTS, HANG]),
    ("nothing but an end of the body", [chunked()]),
]


@pytest.mark.parametrize("lost", [one[1] for one in REPLACED], ids=[one[0] for one in REPLACED])
async def test_retryable_failure_is_retried_on_another_worker(lost: Reply) -> None:
    async with (
        ScriptedWorker(lost) as bad,
        ScriptedWorker(HELLO_WORLD) as good,
        run_pool(bad.url, good.url, policy="round_robin", timeouts=HASTY) as backend,
    ):
        events = await collect_events(backend)

    assert join_text(events) == "Hello world"
    assert sum(isinstance(event, StreamStart) for event in events) == 1, (
        "only of the one that answers"
    )
    assert (bad.request_count, good.request_count) == (1, 1)


async def test_events_without_content_are_buffered_in_order() -> None:
    gate = asyncio.Event()
    reply: Reply = [
        STARTS,
        gate,
        chunk(b"start\n" + encode_line("Hello")),
        chunk(b"end\n"),
        b"0\r\n\r\n",
    ]
    events: list[Event] = []

    async with ScriptedWorker(reply) as worker, run_pool(worker.url) as backend:
        task = asyncio.get_running_loop().create_task(collect_events(backend, into=events))
        await worker.wait_for_request()
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


async def test_truncated_unary_response_is_retried() -> None:
    cut: Reply = [make_reply(encode_line("Hello") + encode_line(" there") + b"end\n")[:-2], CLOSE]
    async with (
        ScriptedWorker(cut) as bad,
        ScriptedWorker(HELLO_WORLD) as good,
        run_pool(bad.url, good.url, policy="round_robin") as backend,
    ):
        events = await collect_events(backend, UNARY)

    assert join_text(events) == "Hello world"
    assert (bad.request_count, good.request_count) == (1, 1)


async def test_buffer_of_events_without_content_is_bounded() -> None:
    endless = chunk(b"start" + b"x" * (64 << 10) + b"\n")
    async with (
        ScriptedWorker([CHUNKED, *[endless] * 600, HANG]) as worker,
        run_pool(worker.url) as backend,
    ):
        with pytest.raises(WorkerFailed, match="without content"):
            await collect_events(backend)


async def test_500_is_retried_when_configured() -> None:
    settings = RetrySettings(on=("500",))
    async with (
        ScriptedWorker(build_status_reply("500 Oops")) as bad,
        ScriptedWorker(HELLO_WORLD) as good,
        run_pool(bad.url, good.url, policy="round_robin", retries=settings) as backend,
    ):
        assert join_text(await collect_events(backend)) == "Hello world"


async def test_first_failure_is_returned_without_retries() -> None:
    async with (
        ScriptedWorker(build_status_reply("502 Bad Gateway")) as bad,
        ScriptedWorker(HELLO_WORLD) as good,
        run_pool(bad.url, good.url, policy="round_robin", retries=RetrySettings(max=0)) as backend,
    ):
        with pytest.raises(WorkerFailed):
            await collect_events(backend)

    assert good.request_count == 0


async def test_all_attempts_share_one_total_timeout() -> None:
    limits = Timeouts(connect=1.0, first_token=0.3, idle=5.0, total=0.5)
    async with (
        ScriptedWorker([HANG]) as a,
        ScriptedWorker([HANG]) as b,
        run_pool(a.url, b.url, timeouts=limits) as backend,
    ):
        with pytest.raises(DeadlineExceeded) as excinfo:
            await collect_events(backend)

    assert excinfo.value.phase == "total"
    assert (a.request_count, b.request_count) == (1, 1)


@pytest.mark.parametrize(
    "reply",
    [build_status_reply("500 Oops"), [CHUNKED, CLOSE], [b"garbage\r\n\r\n", CLOSE], [STARTS, HANG]],
)
async def test_worker_with_consecutive_failures_is_ejected(reply: Reply) -> None:
    """The pool has no retries, so each failure is a request's."""
    async with (
        ScriptedWorker(reply) as bad,
        ScriptedWorker(HELLO_WORLD) as good,
        run_pool(
            bad.url,
            good.url,
            policy="round_robin",
            timeouts=HASTY,
            retries=RetrySettings(max=0),
            breaker=CircuitBreakerSettings(consecutive_failures=2),
        ) as backend,
    ):
        errors: list[GatewayError] = []
        for _ in range(8):
            try:
                await collect_events(backend)
            except GatewayError as error:
                errors.append(error)

    assert len(errors) == bad.request_count == 2
    assert good.request_count == 6


async def test_client_errors_do_not_eject_a_worker() -> None:
    reply = build_status_reply("404 Not Found")
    breaker = CircuitBreakerSettings(consecutive_failures=1, min_requests=1)

    async with ScriptedWorker(reply) as worker, run_pool(worker.url, breaker=breaker) as backend:
        for _ in range(10):
            with pytest.raises(WorkerFailed):
                await collect_events(backend)

        assert [one.state for one in backend.report_workers()] == ["up"]


async def test_client_disconnects_do_not_eject_a_worker() -> None:
    breaker = CircuitBreakerSettings(consecutive_failures=1, min_requests=1)
    async with ScriptedWorker([HANG]) as worker, run_pool(worker.url, breaker=breaker) as backend:
        for number in range(10):
            task = asyncio.get_running_loop().create_task(collect_events(backend))
            await worker.wait_for_request(number + 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        assert [one.state for one in backend.report_workers()] == ["up"]
        assert [one.in_flight for one in backend.report_workers()] == [0]


async def test_latency_is_the_time_to_first_token() -> None:
    """The first token arrives after 3 s, including 1 s until the headers."""
    now, begin, go_on = [100.0], asyncio.Event(), asyncio.Event()
    reply: Reply = [
        STARTS,
        begin,
        chunk(encode_line("Hello")),
        go_on,
        chunk(b"end\n"),
        b"0\r\n\r\n",
    ]

    async with (
        ScriptedWorker(reply) as worker,
        run_pool(worker.url, clock=lambda: now[0]) as backend,
        aclosing(backend.send(PreparedRequest(STREAMED), build_context())) as batches,
    ):
        first = asyncio.get_running_loop().create_task(anext(batches))
        await worker.wait_for_request()
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
    assert latency <= 3.0, "only the time to the first token counts"


async def test_unary_response_does_not_change_the_latency() -> None:
    async with (
        ScriptedWorker([make_reply(encode_line("Hello") + b"end\n")]) as worker,
        run_pool(worker.url) as one,
    ):
        await collect_events(one, UNARY)

        assert one.report_workers()[0].latency is None
