"""Too much to do, workers that all fail, and a large request among small ones (56, 57 and 58).

Everything is counted, in beats of the workers and in requests: nothing depends on how fast the
machine is.
"""

import asyncio
from collections import Counter, defaultdict
from contextlib import AsyncExitStack

import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.history import ClientObservation, History, Seen
from tests.fault.protocol_clients import (
    CHAT,
    RELAYED,
    TRANSLATED,
    Client,
    RawClient,
    assert_error_response,
    both,
    build_error_reply,
    build_event,
    build_good_reply,
    create_raw_worker,
    every_client,
    get_queue_length,
    get_worker_reports,
    send_request,
    serve_gateway,
    wait_until,
)
from tests.fault.stepped_worker import SteppedWorker
from tests.integration.test_end_to_end import JSON
from tests.support.fakes import CHUNKED, CLOSE, HANG, RESET, Reply, chunk, make_reply

# ── 56 ──────────────────────────────────────────────────────────────────────────────────────────

EACH = 4
CAPACITY = 2 * EACH
"""Requests in a beat: of two workers."""
QUEUE = 16
BEATS = 20
URGENT, NORMAL, IDLE = 0, 128, 255
ARRIVALS = [IDLE] * 12 + [NORMAL] * 8 + [URGENT] * 4
"""Three times the capacity in each beat, and what matters most comes last."""


class SteppedClients:
    """Clients that come in each beat, whatever became of those before them.

    ``ends`` counts statuses by priority; ``waits`` the beats that the urgent ones waited.
    """

    def __init__(self, front: RunningGateway, benches: list[SteppedWorker]) -> None:
        self._front = front
        self._benches = benches
        self._beat = 0
        self._sent = 0
        self.refusals: list[str] = []
        self.observations: list[ClientObservation] = []
        self.ends = defaultdict[int, Counter[int]](Counter)
        self.waits: list[int] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for self._beat in range(BEATS):
                for priority in ARRIVALS:
                    tasks.create_task(self._one(priority))
                self._sent += len(ARRIVALS)
                await self._settled()
                for one in self._benches:
                    one.beat()
            while self._open:
                await self._settled()
                for one in self._benches:
                    one.beat()

    @property
    def _open(self) -> int:
        return self._sent - sum(count.total() for count in self.ends.values())

    async def _settled(self) -> None:
        """All slots are taken, and every request that is not running or queued has a response."""

        def quiet() -> bool:
            inside = sum(len(one.inside) for one in self._benches)
            queued = get_queue_length(self._front)
            return self._open == inside + queued and inside == min(CAPACITY, self._open)

        await wait_until(quiet, 20.0)

    async def _one(self, priority: int) -> None:
        body = {"model": "m", "prompt": "hi", "priority": priority}
        came = self._beat
        answer = await self._front.http.post("/v1/completions", json=body)
        self.ends[priority][answer.status_code] += 1
        seen: Seen = "complete" if answer.status_code == 200 else "error"
        id_ = answer.headers["x-request-id"]
        self.observations.append(ClientObservation(id_, "openai", False, seen, answer.status_code))
        if answer.status_code != 200:
            self.refusals.append(answer.headers["retry-after"])
        elif priority == URGENT:
            self.waits.append(self._beat - came)


@pytest.mark.fault(56)
async def test_overload_keeps_throughput_and_prefers_high_priority(
    serve: Serve,
) -> None:
    async with SteppedWorker() as a, SteppedWorker() as b:
        front = await serve_gateway(
            serve,
            a.url,
            b.url,
            policy="least_load",
            max_concurrency=EACH,
            queue={"max": QUEUE, "wait": "30s"},
            timeouts={"total": "60s", "first_token": "60s"},
        )
        crowd = SteppedClients(front, [a, b])
        await crowd.run()
        states = [one.state for one in get_worker_reports(front)]

    ends = crowd.ends
    done = sum(count[200] for count in ends.values())
    assert done >= 0.9 * CAPACITY * BEATS
    assert (a.most, b.most) == (EACH, EACH)
    assert ends[URGENT] == {200: 4 * BEATS}, "what matters most is never refused"
    assert max(crowd.waits) <= 2
    assert ends[NORMAL][200] >= 0.9 * (CAPACITY - 4) * BEATS - QUEUE
    assert ends[IDLE][200] <= CAPACITY + QUEUE, "only while nobody else was there"
    assert {status for count in ends.values() for status in count} == {200, 503}
    assert all(int(seconds) >= 1 for seconds in crowd.refusals)
    assert states == ["up", "up"]
    assert History(crowd.observations, front.records, [*a.lines, *b.lines]).astray() == []


@pytest.mark.fault(56)
@both
@every_client
async def test_full_queue_is_an_error_with_retry_after_in_every_protocol(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    async with SteppedWorker() as bench, asyncio.TaskGroup() as tasks:
        front = await serve_gateway(
            serve, bench.url, max_concurrency=1, queue={"max": 1, "wait": "5s"}
        )
        running = [tasks.create_task(send_request(front, client, stream=stream)) for _ in range(2)]
        await wait_until(lambda: len(bench.inside) == 1 and get_queue_length(front) == 1)
        got = await send_request(front, client, stream=stream)
        while not all(task.done() for task in running):
            bench.beat()
            await asyncio.sleep(0.005)

    assert_error_response(got, 429, 503)
    assert int(got.headers["retry-after"]) >= 1
    assert [task.result().status_code for task in running] == [200, 200]
    assert len(bench.sizes) == 2


# ── 57 ──────────────────────────────────────────────────────────────────────────────────────────

REQUEST_COUNT = 60
FAILURES: dict[str, Reply] = {
    "429": build_error_reply("429 Busy", retry_after="1"),
    "500": build_error_reply("500 Oops"),
    "502": build_error_reply("502 Bad Gateway"),
    "503": build_error_reply("503 Down"),
    "503 and overloaded": build_error_reply("503 Busy", b'{"error":"overloaded"}'),
    "504": build_error_reply("504 Late"),
    "reset": [RESET],
    "closed": [CLOSE],
    "cut before the first token": [CHUNKED, CLOSE],
    "an error as the first event": [CHUNKED + chunk(b"data: {nope\n\n"), CLOSE],
    "silence": [HANG],
}


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    "breaker", [{}, {"consecutive_failures": 1000, "min_requests": 1000}], ids=["", "kept in"]
)
@pytest.mark.parametrize("reply", FAILURES.values(), ids=FAILURES)
async def test_retry_budget_limits_retries_when_all_workers_fail(
    serve: Serve, reply: Reply, breaker: dict[str, int]
) -> None:
    """Whether or not they are left alone for it, and however often one may be asked again.

    No connection is kept after a probe: that one would be replaced once at no cost.
    """
    probed = make_reply(b"{}", connection="close")
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(create_raw_worker(reply, probed=probed))
            for _ in range(4)
        ]
        front = await serve_gateway(
            serve, *workers, breaker=breaker, retries={"max": 3}, timeouts={"first_token": "50ms"}
        )
        places = asyncio.Semaphore(20)

        async def one() -> int:
            async with places:
                return (await send_request(front, CHAT, stream=True)).status_code

        statuses = await asyncio.gather(*(one() for _ in range(REQUEST_COUNT)))

    assert all(status >= 429 for status in statuses)
    assert sum(worker.request_count for worker in workers) <= 1.2 * REQUEST_COUNT + 3


@pytest.mark.fault(57)
async def test_requests_succeed_after_all_workers_recover(serve: Serve) -> None:
    script = [build_error_reply("502 Bad Gateway")] * 40
    async with (
        create_raw_worker(*script, build_good_reply(stream=False)) as a,
        create_raw_worker(*script, build_good_reply(stream=False)) as b,
    ):
        front = await serve_gateway(
            serve, a, b, breaker={"consecutive_failures": 1000, "min_requests": 1000}
        )
        during = [await send_request(front, CHAT, stream=False) for _ in range(90)]
        after = [await send_request(front, CHAT, stream=False) for _ in range(10)]

    assert Counter(answer.status_code for answer in during)[502] >= 60
    assert {answer.status_code for answer in after} == {200}


# ── 58 ──────────────────────────────────────────────────────────────────────────────────────────

TOKENS = 100_000
SMALL = 40


def build_large_request(client: Client) -> tuple[str, bytes]:
    """A request with a prompt of about so many tokens."""
    path, body = client.way.call("m", stream=True)
    return path, body.replace(b"say hi", b"word " * TOKENS)


@pytest.mark.fault(58)
@every_client
async def test_large_prompt_does_not_block_small_requests(serve: Serve, client: Client) -> None:
    """It has one of the two places of the only worker until all the small ones are through."""
    async with SteppedWorker() as bench:
        front = await serve_gateway(serve, bench.url, max_concurrency=2)
        path, body = build_large_request(client)
        async with asyncio.TaskGroup() as tasks:
            big = tasks.create_task(front.http.post(path, content=body, headers=JSON))
            await wait_until(lambda: bench.inside)
            [held] = bench.inside
            bench.inside = []
            small = [
                tasks.create_task(send_request(front, client, stream=True)) for _ in range(SMALL)
            ]
            while not all(one.done() for one in small):
                bench.beat()
                await asyncio.sleep(0.002)
            assert not big.done()
            held.set_result(None)

    assert big.result().status_code == 200
    assert {one.result().status_code for one in small} == {200}
    assert bench.sizes[0] > 4 * TOKENS
    assert front.records[-1].path == path
    assert len(front.records) == SMALL + 1


@pytest.mark.fault(58)
async def test_slow_upload_takes_no_concurrency_slot(serve: Serve) -> None:
    """The worker has one place; it is free until the last byte of the large one is there."""
    async with create_raw_worker(build_good_reply(stream=True)) as worker:
        front = await serve_gateway(serve, worker, max_concurrency=1)
        path, body = build_large_request(CHAT)
        caller = await RawClient.ask(front, path, body[:-1], length=len(body))
        small = [await send_request(front, CHAT, stream=True) for _ in range(SMALL)]
        assert worker.request_count == SMALL
        assert len(front.records) == SMALL
        await caller.send(body[-1:])
        await caller.hear(b"[DONE]")
        caller.leave()

    assert {one.status_code for one in small} == {200}
    assert worker.request_count == SMALL + 1


@pytest.mark.fault(58)
@pytest.mark.parametrize("client", [RELAYED, TRANSLATED], ids=lambda one: one.name)
async def test_long_response_does_not_block_small_requests(serve: Serve, client: Client) -> None:
    """It is said as fast as its client takes it, and the small ones get through beside it."""
    long: Reply = [CHUNKED, *[chunk(build_event("word ") * 16)] * 200_000]
    async with (
        create_raw_worker(long) as busy,
        create_raw_worker(build_good_reply(stream=True)) as other,
    ):
        front = await serve_gateway(serve, busy, other, policy="least_load")
        caller = await RawClient.ask(front, *client.way.call("m", stream=True))
        received = 0

        async def listen() -> None:
            nonlocal received
            while data := await caller.reader.read(1 << 16):
                received += len(data)

        reader_task = asyncio.get_running_loop().create_task(listen())
        await wait_until(lambda: received > 1 << 16)
        answers = [await send_request(front, CHAT, stream=True) for _ in range(10)]
        running = not reader_task.done()
        reader_task.cancel()
        caller.leave()

    assert running, "the long one was over before the small ones"
    assert {one.status_code for one in answers} == {200}
    assert (busy.request_count, other.request_count) == (1, 10)
