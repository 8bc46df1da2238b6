"""Copies of requests: what ends them, and what they leave to clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from gateway.config.loader import load_bytes
from tests.fakes import CHUNKED, HANG, Reply, ScriptedWorker, chunk, chunked
from tests.integration.shadow_config import (
    LISTEN,
    NONE,
    PROBED,
    STREAM,
    TRIED,
    TROUBLE,
    Begin,
    echo,
    gateways,
    tried,
)


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """Starts gateways."""
    async with gateways() as start:
        yield start


SHARED = (
    LISTEN
    + """
backends:
  one: {kind: echo, script: [a, b, c]}
  both: {protocol: openai, workers: [WORKERS], total_concurrency: MOST, health: {interval: 1h},
         retries: {max: 1, budget: 100%}, breaker: {consecutive_failures: 2}, queue: {max: ROOM}}
models:
  chat: {versions: {"1": {backend: one}, "2": {backend: both, model: new}},
         split: {weights: {"1": 1, "2": 0}}, SHADOW}
  other: {backend: both, model: old}
"""
)


def shared(*workers: ScriptedWorker, most: int = 1, room: int = 0) -> str:
    text = SHARED.replace("MOST", str(most)).replace("ROOM", str(room))
    return tried(*workers, text=text)


# --- its bounds -----------------------------------------------------------------------------------


async def test_no_more_than_so_many_run_at_a_time(begin: Begin) -> None:
    shadow = 'shadow: {to: "2", share: 100%, max_concurrency: 2}'
    async with ScriptedWorker([HANG], probed=PROBED) as worker:
        front = await begin(tried(worker, shadow=shadow))
        for _ in range(5):
            assert (await front.ask()).status_code == 200
        await worker.until_asked(2)
        assert [one.shadow.outcome for one in front.told] == ["dropped"] * 3
        await front.shadows.aclose()
        told = await front.until_told(5)
        assert (told.shadow.outcome, told.primary.outcome) == ("cancelled", "ok")
        await front.ask()
        await worker.until_asked(3)

    assert worker.most_active == 2


async def test_its_time_is_its_own(begin: Begin) -> None:
    shadow = 'shadow: {to: "2", share: 100%, timeout: 100ms}'
    async with ScriptedWorker([HANG], probed=PROBED) as worker:
        front = await begin(tried(worker, shadow=shadow))
        answer = await front.ask({"x-interlingua-timeout": "20"})
        told = await front.until_told()
        await worker.until_left()

    assert answer.status_code == 200
    assert (told.shadow.outcome, told.shadow.error) == ("gateway_error", "DeadlineExceeded")
    assert told.primary.outcome == "ok"


async def test_it_ends_with_a_client_that_leaves(begin: Begin) -> None:
    text = TRIED.replace("delay: 5ms", "delay: 30s")
    async with ScriptedWorker([HANG], probed=PROBED) as worker:
        front = await begin(tried(worker, text=text))
        leaving = asyncio.create_task(front.ask(stream=True))
        await worker.until_asked()
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await worker.until_left()
        told = await front.until_told()

    assert (told.primary.outcome, told.shadow.outcome) == ("cancelled", "cancelled")


@pytest.mark.parametrize("what", ["generate", "generate_stream"])
async def test_it_ends_with_a_request_that_is_stopped(begin: Begin, what: str) -> None:
    text = TRIED.replace("delay: 5ms", "delay: 50ms").replace("[openai, triton]", "[mindie]")
    text = text.replace("[a, b, c]", f"[{', '.join('abc' * 100)}]")
    body = {"id": "a1", "text_input": "hi"}
    async with ScriptedWorker([HANG], probed=PROBED) as worker:
        front = await begin(tried(worker, text=text))
        asked = asyncio.create_task(front.http.post(f"/v2/models/chat/{what}", json=body))
        await worker.until_asked()
        stopped = await front.http.post("/v2/models/chat/stopInfer", json=body)
        await worker.until_left()
        told = await front.until_told()
        await asked

    assert stopped.status_code == 200
    assert b"a1" not in worker.requests[0].body
    assert told.primary.error == "ClientDisconnected"
    assert told.shadow.outcome == "cancelled"


async def test_it_ends_with_a_client_that_does_not_read(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(exchange: Any, live: set[Any], *, stream: bool) -> None:
        del live, stream
        await worker.until_asked()
        exchange._record.outcome = "cancelled"
        exchange._writer.send_response(200, (), b"")

    monkeypatch.setattr("gateway.pipeline.responder.Responder.run", deaf)
    async with ScriptedWorker([HANG], probed=PROBED) as worker:
        front = await begin(tried(worker))
        await front.ask()
        await worker.until_left()
        told = await front.until_told()

    assert (told.primary.outcome, told.shadow.outcome) == ("cancelled", "cancelled")


async def test_an_original_that_fails_does_not_end_it(begin: Begin) -> None:
    text = TRIED.replace("delay: 5ms", "fail: {mode: disconnect, after_chunks: 1}")
    go = asyncio.Event()
    slow: Reply = [CHUNKED, go, b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"]
    async with ScriptedWorker(slow, probed=PROBED) as worker:
        front = await begin(tried(worker, text=text))
        for stream in (False, True):
            go.clear()
            await front.ask(stream=stream)
            go.set()
            told = await front.until_told(1 + stream)
            assert told.shadow.outcome == "ok"
            assert told.primary.error == "StreamBroken"
            assert told.primary.outcome == ("truncated" if stream else "worker_error")
            assert told.equal is None


async def test_it_ends_with_the_gateway(begin: Begin) -> None:
    before = asyncio.all_tasks()
    async with ScriptedWorker([HANG], probed=PROBED) as worker:
        front = await begin(tried(worker))
        await front.ask()
        await worker.until_asked()
        await front.stop()
        left = [one for one in asyncio.all_tasks() - before if "ScriptedWorker" not in repr(one)]
        told = await front.until_told()

    assert left == []
    assert told.shadow.outcome == "cancelled"


async def test_it_outlives_its_configuration(begin: Begin) -> None:
    go = asyncio.Event()
    slow: Reply = [CHUNKED, go, b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"]
    async with ScriptedWorker(slow, probed=PROBED) as worker:
        front = await begin(tried(worker).replace("drain_timeout: 0s", "drain_timeout: 9s"))
        await front.ask(stream=True)
        await worker.until_asked()
        await front.app.apply_config(load_bytes(echo(shadow=NONE).encode(), "test.yaml", env={}))
        await front.ask(stream=True)
        go.set()
        told = await front.until_told()

    assert [told.id, told.shadow.outcome] == ["id-0", "ok"]
    assert told.equal is True


# --- workers that both have -----------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 5])
async def test_its_place_is_left_to_a_client(begin: Begin, room: int) -> None:
    async with ScriptedWorker([HANG], [chunked(*STREAM)], probed=PROBED) as worker:
        front = await begin(shared(worker, room=room))
        await front.ask()
        await worker.until_asked()
        answer = await front.ask(model="other", stream=True)
        told = await front.until_told()
        await worker.until_left()

    assert answer.status_code == 200
    assert [json.loads(sent.body)["model"] for sent in worker.requests] == ["new", "old"]
    assert (told.shadow.outcome, told.shadow.error) == ("dropped", "")


async def test_it_waits_behind_every_client(begin: Begin) -> None:
    go = asyncio.Event()
    slow: Reply = [CHUNKED, go, b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"]
    async with ScriptedWorker(slow, [chunked(*STREAM)], probed=PROBED) as worker:
        front = await begin(shared(worker, room=5))
        asks = [asyncio.create_task(front.ask(model="other", stream=True))]
        await worker.until_asked()
        await front.ask(stream=True)
        for _ in range(3):
            asks.append(asyncio.create_task(front.ask(model="other", stream=True, priority=255)))
            await asyncio.sleep(0.02)
        go.set()
        answers = [await one for one in asks]
        told = await front.until_told()

    assert [one.status_code for one in answers] == [200] * 4
    models = [json.loads(sent.body)["model"] for sent in worker.requests]
    assert models == ["old", "old", "old", "old", "new"]
    assert told.shadow.outcome == "ok"


async def test_what_fails_there_is_no_sign_of_a_workers_health(begin: Begin) -> None:
    reply = TROUBLE["fails"]
    async with (
        ScriptedWorker(reply, probed=PROBED) as one,
        ScriptedWorker(reply, probed=PROBED) as two,
    ):
        front = await begin(shared(one, two, most=9, room=9))
        for n in range(6):
            await front.ask()
            told = await front.until_told(n + 1)
            assert (told.shadow.outcome, told.shadow.error) == ("worker_error", "WorkerFailed")

        assert one.asked + two.asked == 6
        pool = front.app.backends["both"]
        assert [worker.state for worker in pool.report_workers()] == ["up", "up"]  # type: ignore[attr-defined]


async def test_its_time_is_no_sign_of_a_workers_speed(begin: Begin) -> None:
    async with ScriptedWorker([chunked(*STREAM)], probed=PROBED) as worker:
        front = await begin(shared(worker, most=9))
        pool: Any = front.app.backends["both"]
        for model in ("chat", "other"):
            assert [one.latency for one in pool.report_workers()] == [None]
            assert (await front.ask(model=model, stream=True)).status_code == 200
            await front.until_told()
        assert [one.latency for one in pool.report_workers()] != [None]


async def test_they_are_counted_for_the_admin(begin: Begin) -> None:
    front = await begin(echo() + 'admin: {address: "127.0.0.1:0"}\n')
    await front.ask()
    await front.until_told()
    page = await front.http.get(f"{front.urls[-1]}/metrics")

    assert (
        'interlingua_shadow_requests_total{model="chat",outcome="ok",version="2"} 1.0' in page.text
    )
    assert 'interlingua_shadow_equal_total{model="chat",version="2"} 1.0' in page.text
    assert 'interlingua_requests_total{backend="two"' not in page.text
