"""Concurrency limits of workers, queueing, and the choice of a worker."""

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig
from backends.interfaces import PreparedRequest
from backends.pool.pool import PoolBackend
from backends.pool.settings import QueueSettings
from protocols.core.errors import DeadlineExceeded, Overloaded
from protocols.core.events import Event
from protocols.core.request import GenerationRequest
from tests.fault.line_protocol import (
    STREAMED,
    build_context,
    collect_events,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import HANG, ScriptedWorker


def start_requests(backend: PoolBackend, times: int) -> list[asyncio.Task[list[Event]]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(collect_events(backend)) for _ in range(times)]


async def test_worker_gets_at_most_max_concurrency_requests() -> None:
    async with (
        ScriptedWorker([0.02, reply_text("Hello")]) as worker,
        run_pool(WorkerConfig(worker.url, max_concurrency=3)) as backend,
    ):
        answers = await asyncio.gather(*start_requests(backend, 20))

    assert {join_text(events) for events in answers} == {"Hello"}
    assert worker.most_active == 3
    assert worker.connections == 3


async def test_least_load_spreads_requests() -> None:
    gate = asyncio.Event()
    async with (
        ScriptedWorker([gate, reply_text("Hello")]) as a,
        ScriptedWorker([gate, reply_text("Hello")]) as b,
        run_pool(a.url, b.url) as backend,
    ):
        tasks = start_requests(backend, 20)
        await a.wait_for_request(10)
        await b.wait_for_request(10)
        gate.set()
        await asyncio.gather(*tasks)

    assert (a.most_active, b.most_active) == (10, 10)


async def test_least_load_avoids_a_worker_that_is_slow() -> None:
    gate = asyncio.Event()
    async with (
        ScriptedWorker([gate, reply_text("Hello")]) as slow,
        ScriptedWorker([reply_text("Hello")]) as fast,
        run_pool(slow.url, fast.url) as backend,
    ):
        [task] = start_requests(backend, 1)
        await slow.wait_for_request()
        for _ in range(10):
            await collect_events(backend)
        gate.set()
        await task

    assert (slow.request_count, fast.request_count) == (1, 10)


async def test_round_robin_follows_weights() -> None:
    async with (
        ScriptedWorker([reply_text("Hello")]) as a,
        ScriptedWorker([reply_text("Hello")]) as b,
        run_pool(WorkerConfig(a.url, weight=3), b.url, policy="round_robin") as backend,
    ):
        for _ in range(40):
            await collect_events(backend)

    assert (a.request_count, b.request_count) == (30, 10)


async def test_queued_requests_are_served_in_fifo_order() -> None:
    async with (
        ScriptedWorker([0.01, reply_text("Hello")]) as worker,
        run_pool(WorkerConfig(worker.url, max_concurrency=1)) as backend,
    ):
        order: list[int] = []

        async def one(number: int) -> None:
            await collect_events(backend)
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(8)))

    assert order == list(range(8))


async def test_full_queue_rejects_requests_as_overloaded() -> None:
    async with ScriptedWorker([HANG]) as worker:
        one = WorkerConfig(worker.url, max_concurrency=1)
        async with run_pool(one, queue=QueueSettings(max=2, wait=5)) as backend:
            tasks = start_requests(backend, 3)
            await worker.wait_for_request()

            with pytest.raises(Overloaded):
                await collect_events(backend)

            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    assert worker.request_count == 1


async def test_queue_wait_times_out() -> None:
    async with ScriptedWorker([HANG]) as worker:
        one = WorkerConfig(worker.url, max_concurrency=1)
        async with run_pool(one, queue=QueueSettings(max=2, wait=0.1)) as backend:
            [task] = start_requests(backend, 1)
            await worker.wait_for_request()

            with pytest.raises(DeadlineExceeded) as excinfo:
                await collect_events(backend)

            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    assert excinfo.value.phase == "queue"


async def test_cancelled_queued_requests_leak_no_concurrency_slots() -> None:
    """30 queued requests are cancelled, some as they get a slot: all slots are free again."""
    async with (
        ScriptedWorker([0.005, reply_text("Hello")]) as worker,
        run_pool(WorkerConfig(worker.url, max_concurrency=2)) as backend,
    ):
        tasks = start_requests(backend, 40)
        await worker.wait_for_request(2)
        for number, task in enumerate(tasks):
            if number % 4:
                task.cancel()
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks, return_exceptions=True)
        answers = await asyncio.gather(*start_requests(backend, 6))

        assert [member.in_flight for member in backend._workers._workers] == [0]

    outcomes = Counter(task.cancelled() for task in tasks)
    assert outcomes[True] > 10
    assert {join_text(events) for events in answers} == {"Hello"}


def build_request(prompt: str = "hi", **labels: str) -> GenerationRequest:
    return replace(STREAMED, prompts=(prompt,), labels=labels)


TWICE = [f"{number} of many" for number in range(40)] * 2
"""So many that they can't all hash to one of two workers, whatever the ports."""


async def test_prefix_policy_sends_the_same_prompt_prefix_to_the_same_worker() -> None:
    async with (
        ScriptedWorker([reply_text("Hello")]) as a,
        ScriptedWorker([reply_text("Hello")]) as b,
        run_pool(a.url, b.url, policy="prefix") as backend,
    ):
        where = []
        for prompt in TWICE:
            before = a.request_count
            await collect_events(backend, build_request(prompt))
            where.append(a.request_count > before)

    half = len(where) // 2
    assert where[:half] == where[half:]
    assert set(where) == {True, False}


@pytest.mark.parametrize("label", ["prompt_cache_key", "user", "safety_identifier"])
async def test_session_policy_sends_the_same_session_to_the_same_worker(label: str) -> None:
    async with (
        ScriptedWorker([reply_text("Hello")]) as a,
        ScriptedWorker([reply_text("Hello")]) as b,
        run_pool(a.url, b.url, policy="session") as backend,
    ):
        where = []
        for number, name in enumerate(TWICE):
            before = a.request_count
            await collect_events(backend, build_request(str(number), **{label: name}))
            where.append(a.request_count > before)

    half = len(where) // 2
    assert where[:half] == where[half:]
    assert set(where) == {True, False}


async def test_session_policy_uses_the_principal_without_a_session_label() -> None:
    async with (
        ScriptedWorker([reply_text("Hello")]) as a,
        ScriptedWorker([reply_text("Hello")]) as b,
        run_pool(a.url, b.url, policy="session") as backend,
    ):
        for _ in range(6):
            async for _ in backend.send(PreparedRequest(STREAMED), build_context(principal="web")):
                pass

    assert {a.request_count, b.request_count} == {0, 6}


async def test_queued_requests_are_served_by_priority() -> None:
    gate = asyncio.Event()
    async with (
        ScriptedWorker([gate, reply_text("Hello")], [reply_text("Hello")]) as worker,
        run_pool(WorkerConfig(worker.url, max_concurrency=1)) as backend,
    ):
        order: list[int] = []

        async def one(priority: int | None) -> None:
            await collect_events(backend, replace(STREAMED, priority=priority))
            order.append(-1 if priority is None else priority)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one(1))
            await worker.wait_for_request()
            for priority in (200, 50, None, 0):
                tasks.create_task(one(priority))
                await asyncio.sleep(0)
            gate.set()

    assert order == [1, 0, 50, -1, 200]


async def test_removed_worker_finishes_its_requests() -> None:
    gate = asyncio.Event()
    async with (
        ScriptedWorker([gate, reply_text("Hello")]) as old,
        ScriptedWorker([reply_text("Hello")]) as new,
        run_pool(old.url) as backend,
    ):
        [task] = start_requests(backend, 1)
        await old.wait_for_request()
        backend.replace_workers([WorkerConfig(new.url)])
        for _ in range(3):
            await collect_events(backend)
        gate.set()

        assert join_text(await task) == "Hello"
        assert [one.url for one in backend.report_workers()] == [new.url]

    assert (old.request_count, new.request_count) == (1, 3)
