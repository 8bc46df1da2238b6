"""Overload, workers that all fail, and a large request among small ones (56, 57 and 58).

Everything is counted in steps of the workers and in requests, so nothing depends on the machine's
speed.
"""

import asyncio
from collections import Counter, defaultdict
from contextlib import AsyncExitStack

import pytest

from tests.conftest import RunningGateway, Serve
from tests.fault.history import ClientObservation, History, ObservedEnd
from tests.fault.protocol_clients import (
    CHAT,
    RELAYED,
    TRANSLATED,
    Client,
    RawClient,
    assert_error_response,
    build_error_reply,
    build_event,
    build_good_reply,
    create_raw_worker,
    every_client,
    get_queue_length,
    get_worker_reports,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.fault.stepped_worker import SteppedWorker
from tests.integration.test_end_to_end import JSON
from tests.support.fakes import CHUNKED, CLOSE, HANG, RESET, Reply, chunk, make_reply
from tests.support.waiting import wait_until

# ── 56 ──────────────────────────────────────────────────────────────────────────────────────────

EACH = 4
CAPACITY = 2 * EACH
"""Requests per step of two workers."""
QUEUE = 16
BEATS = 20
URGENT, NORMAL, IDLE = 0, 128, 255
ARRIVALS = [IDLE] * 12 + [NORMAL] * 8 + [URGENT] * 4
"""Three times the capacity in each step, the highest priority last."""


class SteppedClients:
    """Clients that send requests in each step, whatever became of earlier ones.

    ``ends`` counts statuses by priority; ``waits`` has the steps that the urgent ones waited.
    """

    def __init__(self, gateway: RunningGateway, benches: list[SteppedWorker]) -> None:
        self._front = gateway
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
                    one.step()
            while self._open:
                await self._settled()
                for one in self._benches:
                    one.step()

    @property
    def _open(self) -> int:
        return self._sent - sum(count.total() for count in self.ends.values())

    async def _settled(self) -> None:
        """All slots are taken, and every request that is not running or queued has a response."""

        def quiet() -> bool:
            inside = sum(len(one.inside) for one in self._benches)
            queued = get_queue_length(self._front)
            return self._open == inside + queued and inside == min(CAPACITY, self._open)

        await wait_until(quiet)

    async def _one(self, priority: int) -> None:
        body = {"model": "m", "prompt": "hi", "priority": priority}
        came = self._beat
        response = await self._front.http.post("/v1/completions", json=body)
        self.ends[priority][response.status_code] += 1
        end: ObservedEnd = "complete" if response.status_code == 200 else "error"
        id_ = response.headers["x-request-id"]
        self.observations.append(ClientObservation(id_, "openai", False, end, response.status_code))
        if response.status_code != 200:
            self.refusals.append(response.headers["retry-after"])
        elif priority == URGENT:
            self.waits.append(self._beat - came)


@pytest.mark.fault(56)
async def test_overload_keeps_throughput_and_prefers_high_priority(
    serve: Serve,
) -> None:
    async with SteppedWorker() as a, SteppedWorker() as b:
        gateway = await serve_gateway(
            serve,
            a.url,
            b.url,
            policy="least_load",
            max_concurrency=EACH,
            queue={"max": QUEUE, "wait": "30s"},
            timeouts={"total": "60s", "first_token": "60s"},
        )
        crowd = SteppedClients(gateway, [a, b])
        await crowd.run()
        states = [one.state for one in get_worker_reports(gateway)]

    ends = crowd.ends
    done = sum(count[200] for count in ends.values())

    assert done >= 0.9 * CAPACITY * BEATS
    assert (a.most, b.most) == (EACH, EACH)
    assert ends[URGENT] == {200: 4 * BEATS}, "urgent requests are never rejected"
    assert max(crowd.waits) <= 2
    assert ends[NORMAL][200] >= 0.9 * (CAPACITY - 4) * BEATS - QUEUE
    assert ends[IDLE][200] <= CAPACITY + QUEUE, "idle requests only ran when there were no others"
    assert {status for count in ends.values() for status in count} == {200, 503}
    assert all(int(seconds) >= 1 for seconds in crowd.refusals)
    assert states == ["up", "up"]
    assert (
        History(crowd.observations, gateway.records, [*a.lines, *b.lines]).find_end_violations()
        == []
    )


@pytest.mark.fault(56)
@stream_or_unary
@every_client
async def test_full_queue_is_an_error_with_retry_after_in_every_protocol(
    serve: Serve, client: Client, *, stream: bool
) -> None:
    async with SteppedWorker() as bench, asyncio.TaskGroup() as tasks:
        gateway = await serve_gateway(
            serve, bench.url, max_concurrency=1, queue={"max": 1, "wait": "5s"}
        )
        running = [
            tasks.create_task(send_request(gateway, client, stream=stream)) for _ in range(2)
        ]
        await wait_until(lambda: len(bench.inside) == 1 and get_queue_length(gateway) == 1)
        response = await send_request(gateway, client, stream=stream)
        while not all(task.done() for task in running):
            bench.step()
            await asyncio.sleep(0.005)

    assert_error_response(response, 429, 503)
    assert int(response.headers["retry-after"]) >= 1
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
    """The budget holds with and without ejection, and for any number of retries.

    Probes close their connections, since a request on a stale one would be replayed outside the
    budget.
    """
    probed = make_reply(b"{}", connection="close")
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(create_raw_worker(reply, probed=probed))
            for _ in range(4)
        ]
        gateway = await serve_gateway(
            serve, *workers, breaker=breaker, retries={"max": 3}, timeouts={"first_token": "50ms"}
        )
        places = asyncio.Semaphore(20)

        async def one() -> int:
            async with places:
                return (await send_request(gateway, CHAT, stream=True)).status_code

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
        gateway = await serve_gateway(
            serve, a, b, breaker={"consecutive_failures": 1000, "min_requests": 1000}
        )
        during = [await send_request(gateway, CHAT, stream=False) for _ in range(90)]
        after = [await send_request(gateway, CHAT, stream=False) for _ in range(10)]

    assert Counter(answer.status_code for answer in during)[502] >= 60
    assert {answer.status_code for answer in after} == {200}


# ── 58 ──────────────────────────────────────────────────────────────────────────────────────────

TOKENS = 100_000
SMALL = 40


def build_large_request(client: Client) -> tuple[str, bytes]:
    """Build a request with a prompt of about this many tokens."""
    path, body = client.protocol.call("m", stream=True)
    return path, body.replace(b"say hi", b"word " * TOKENS)


@pytest.mark.fault(58)
@every_client
async def test_large_prompt_does_not_block_small_requests(serve: Serve, client: Client) -> None:
    """It has one of the only worker's two slots until all the small requests are done."""
    async with SteppedWorker() as bench:
        gateway = await serve_gateway(serve, bench.url, max_concurrency=2)
        path, body = build_large_request(client)
        async with asyncio.TaskGroup() as tasks:
            big = tasks.create_task(gateway.http.post(path, content=body, headers=JSON))
            await wait_until(lambda: bench.inside)
            [held] = bench.inside
            bench.inside = []
            small = [
                tasks.create_task(send_request(gateway, client, stream=True)) for _ in range(SMALL)
            ]

            while not all(one.done() for one in small):
                bench.step()
                await asyncio.sleep(0.002)

            assert not big.done()

            held.set_result(None)

    assert big.result().status_code == 200
    assert {one.result().status_code for one in small} == {200}
    assert bench.sizes[0] > 4 * TOKENS
    assert gateway.records[-1].path == path
    assert len(gateway.records) == SMALL + 1


@pytest.mark.fault(58)
async def test_slow_upload_takes_no_concurrency_slot(serve: Serve) -> None:
    """The worker has one slot; it is free until the large request is complete."""
    async with create_raw_worker(build_good_reply(stream=True)) as worker:
        gateway = await serve_gateway(serve, worker, max_concurrency=1)
        path, body = build_large_request(CHAT)
        caller = await RawClient.connect(gateway, path, body[:-1], length=len(body))
        small = [await send_request(gateway, CHAT, stream=True) for _ in range(SMALL)]

        assert worker.request_count == SMALL
        assert len(gateway.records) == SMALL

        await caller.send_more(body[-1:])
        await caller.read_until(b"[DONE]")
        caller.close()

    assert {one.status_code for one in small} == {200}
    assert worker.request_count == SMALL + 1


@pytest.mark.fault(58)
@pytest.mark.parametrize("client", [RELAYED, TRANSLATED], ids=lambda one: one.name)
async def test_long_response_does_not_block_small_requests(serve: Serve, client: Client) -> None:
    """It is sent at its client's pace, and small requests are served beside it."""
    long: Reply = [CHUNKED, *[chunk(build_event("word ") * 16)] * 200_000]
    async with (
        create_raw_worker(long) as busy,
        create_raw_worker(build_good_reply(stream=True)) as other,
    ):
        gateway = await serve_gateway(serve, busy, other, policy="least_load")
        caller = await RawClient.connect(gateway, *client.protocol.call("m", stream=True))
        received = 0

        async def listen() -> None:
            nonlocal received
            while data := await caller.reader.read(1 << 16):
                received += len(data)

        reader_task = asyncio.get_running_loop().create_task(listen())
        await wait_until(lambda: received > 1 << 16)
        answers = [await send_request(gateway, CHAT, stream=True) for _ in range(10)]
        running = not reader_task.done()
        reader_task.cancel()
        caller.close()

    assert running, "the long response ended before the small ones"
    assert {one.status_code for one in answers} == {200}
    assert (busy.request_count, other.request_count) == (1, 10)
