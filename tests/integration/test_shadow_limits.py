"""Shadow requests end at their limits and take no capacity from clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from gateway.config.loader import load_bytes
from gateway.pipeline import shadow as shadow_module
from tests.integration.shadow_config import (
    FAULTY_REPLIES,
    LISTEN,
    NO_SHADOW,
    STREAM,
    WORKER_AS_SHADOW,
    StartGateway,
    build_echo_config,
    build_worker_config,
    run_gateways,
)
from tests.support.fakes import CHUNKED, HANG, Reply, ScriptedWorker, chunk, chunked


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """Starts gateways with shadows."""
    async with run_gateways() as start:
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


def build_shared_pool_config(*workers: ScriptedWorker, most: int = 1, room: int = 0) -> str:
    text = SHARED.replace("MOST", str(most)).replace("ROOM", str(room))
    return build_worker_config(*workers, text=text)


# --- limits ---------------------------------------------------------------------------------------


async def test_shadow_requests_above_max_concurrency_are_dropped(
    start_gateway: StartGateway,
) -> None:
    shadow = 'shadow: {to: "2", share: 100%, max_concurrency: 2}'
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, shadow=shadow))
        for _ in range(5):
            assert (await gateway.ask()).status_code == 200

        await worker.wait_for_request(2)
        assert [one.shadow.outcome for one in gateway.comparisons] == ["dropped"] * 3

        await gateway.shadows.aclose()
        comparison = await gateway.wait_for_comparison(5)
        assert (comparison.shadow.outcome, comparison.primary.outcome) == ("cancelled", "ok")

        await gateway.ask()
        await worker.wait_for_request(3)

    assert worker.most_active == 2


async def test_shadow_requests_of_all_models_have_a_maximum(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_module, "_MAX_RUNNING", 2)
    shadow = 'shadow: {to: "2", share: 100%, max_concurrency: 9}'
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, shadow=shadow))
        for _ in range(3):
            assert (await gateway.ask()).status_code == 200
        await worker.wait_for_request(2)
        assert [one.shadow.outcome for one in gateway.comparisons] == ["dropped"]
        await gateway.shadows.aclose()
    assert worker.most_active == 2


async def test_body_of_a_shadow_request_counts_in_the_memory_budget_until_it_ends(
    start_gateway: StartGateway,
) -> None:
    """The worker of version 2 does not answer."""
    shadow = 'shadow: {to: "2", share: 100%}'
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, shadow=shadow))
        assert (await gateway.ask(user="x" * 10_000)).status_code == 200
        await worker.wait_for_request(1)
        assert gateway.app.memory.get_use("bodies") > 10_000
        await gateway.shadows.aclose()
        await gateway.wait_for_comparison(1)
        assert gateway.app.memory.get_use("bodies") == 0


async def test_request_gets_no_shadow_for_which_there_is_no_room(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = 'shadow: {to: "2", share: 100%}'
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, shadow=shadow))
        monkeypatch.setattr(gateway.app.memory, "has_room", lambda size: False)
        assert (await gateway.ask()).status_code == 200
        comparison = await gateway.wait_for_comparison(1)
        assert comparison.shadow.outcome == "dropped"
        assert worker.request_count == 0


async def test_shadow_request_has_its_own_timeout(start_gateway: StartGateway) -> None:
    shadow = 'shadow: {to: "2", share: 100%, timeout: 100ms}'
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, shadow=shadow))
        response = await gateway.ask({"x-interlingua-timeout": "20"})
        comparison = await gateway.wait_for_comparison()
        await worker.wait_for_disconnect()

    assert response.status_code == 200
    assert (comparison.shadow.outcome, comparison.shadow.error) == (
        "gateway_error",
        "DeadlineExceeded",
    )
    assert comparison.primary.outcome == "ok"


async def test_client_disconnect_cancels_the_shadow_request(start_gateway: StartGateway) -> None:
    text = WORKER_AS_SHADOW.replace("delay: 5ms", "delay: 30s")
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, text=text))
        leaving = asyncio.create_task(gateway.ask(stream=True))
        await worker.wait_for_request()
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await worker.wait_for_disconnect()
        comparison = await gateway.wait_for_comparison()

    assert (comparison.primary.outcome, comparison.shadow.outcome) == ("cancelled", "cancelled")


@pytest.mark.parametrize("what", ["generate", "generate_stream"])
async def test_stop_infer_cancels_the_shadow_request(
    start_gateway: StartGateway, what: str
) -> None:
    text = WORKER_AS_SHADOW.replace("delay: 5ms", "delay: 50ms").replace(
        "[openai, triton]", "[mindie]"
    )
    text = text.replace("[a, b, c]", f"[{', '.join('abc' * 100)}]")
    body = {"id": "a1", "text_input": "hi"}

    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker, text=text))
        task = asyncio.create_task(gateway.http.post(f"/v2/models/chat/{what}", json=body))
        await worker.wait_for_request()
        stopped = await gateway.http.post("/v2/models/chat/stopInfer", json=body)
        await worker.wait_for_disconnect()
        comparison = await gateway.wait_for_comparison()
        await task

    assert stopped.status_code == 200
    assert b"a1" not in worker.requests[0].body
    assert comparison.primary.error == "ClientDisconnected"
    assert comparison.shadow.outcome == "cancelled"


async def test_write_timeout_of_the_client_cancels_the_shadow_request(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(exchange: Any, live: set[Any], *, stream: bool) -> None:
        del live, stream
        await worker.wait_for_request()
        exchange.record.outcome = "cancelled"
        exchange._request.writer.send_response(200, (), b"")

    monkeypatch.setattr("gateway.pipeline.responder.Responder.run", deaf)
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker))
        await gateway.ask()
        await worker.wait_for_disconnect()
        comparison = await gateway.wait_for_comparison()

    assert (comparison.primary.outcome, comparison.shadow.outcome) == ("cancelled", "cancelled")


async def test_failed_primary_does_not_cancel_the_shadow_request(
    start_gateway: StartGateway,
) -> None:
    text = WORKER_AS_SHADOW.replace("delay: 5ms", "fail: {mode: disconnect, after_chunks: 1}")
    go = asyncio.Event()
    slow: Reply = [CHUNKED, go, b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"]
    async with ScriptedWorker(slow) as worker:
        gateway = await start_gateway(build_worker_config(worker, text=text))
        for stream in (False, True):
            go.clear()
            await gateway.ask(stream=stream)
            go.set()
            comparison = await gateway.wait_for_comparison(1 + stream)

            assert comparison.shadow.outcome == "ok"
            assert comparison.primary.error == "StreamBroken"
            assert comparison.primary.outcome == ("truncated" if stream else "worker_error")
            assert comparison.equal is None


async def test_gateway_stop_cancels_shadow_requests(start_gateway: StartGateway) -> None:
    before = asyncio.all_tasks()
    async with ScriptedWorker([HANG]) as worker:
        gateway = await start_gateway(build_worker_config(worker))
        await gateway.ask()
        await worker.wait_for_request()
        await gateway.stop()
        left = [one for one in asyncio.all_tasks() - before if "ScriptedWorker" not in repr(one)]
        comparison = await gateway.wait_for_comparison()

    assert left == []
    assert comparison.shadow.outcome == "cancelled"


async def test_shadow_request_survives_a_reload(start_gateway: StartGateway) -> None:
    go = asyncio.Event()
    slow: Reply = [CHUNKED, go, b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"]

    async with ScriptedWorker(slow) as worker:
        gateway = await start_gateway(
            build_worker_config(worker).replace("drain_timeout: 0s", "drain_timeout: 9s")
        )
        await gateway.ask(stream=True)
        await worker.wait_for_request()
        await gateway.app.apply_config(
            load_bytes(build_echo_config(shadow=NO_SHADOW).encode(), "test.yaml", env={})
        )
        await gateway.ask(stream=True)
        go.set()
        comparison = await gateway.wait_for_comparison()

    assert [comparison.id, comparison.shadow.outcome] == ["id-0", "ok"]
    assert comparison.equal is True


# --- workers shared with clients ------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 5])
async def test_shadow_request_is_dropped_for_a_waiting_client_request(
    start_gateway: StartGateway, room: int
) -> None:
    async with ScriptedWorker([HANG], [chunked(*STREAM)]) as worker:
        gateway = await start_gateway(build_shared_pool_config(worker, room=room))
        await gateway.ask()
        await worker.wait_for_request()
        response = await gateway.ask(model="other", stream=True)
        comparison = await gateway.wait_for_comparison()
        await worker.wait_for_disconnect()

    assert response.status_code == 200
    assert [json.loads(sent.body)["model"] for sent in worker.requests] == ["new", "old"]
    assert (comparison.shadow.outcome, comparison.shadow.error) == ("dropped", "")


async def test_shadow_request_is_queued_behind_all_client_requests(
    start_gateway: StartGateway,
) -> None:
    go = asyncio.Event()
    slow: Reply = [CHUNKED, go, b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"]
    async with ScriptedWorker(slow, [chunked(*STREAM)]) as worker:
        gateway = await start_gateway(build_shared_pool_config(worker, room=5))
        asks = [asyncio.create_task(gateway.ask(model="other", stream=True))]
        await worker.wait_for_request()
        await gateway.ask(stream=True)
        for _ in range(3):
            asks.append(asyncio.create_task(gateway.ask(model="other", stream=True, priority=255)))
            await asyncio.sleep(0.02)
        go.set()
        answers = [await one for one in asks]
        comparison = await gateway.wait_for_comparison()

    assert [one.status_code for one in answers] == [200] * 4

    models = [json.loads(sent.body)["model"] for sent in worker.requests]
    assert models == ["old", "old", "old", "old", "new"]
    assert comparison.shadow.outcome == "ok"


async def test_shadow_failures_do_not_eject_workers(start_gateway: StartGateway) -> None:
    reply = FAULTY_REPLIES["answers 500"]
    async with (
        ScriptedWorker(reply) as one,
        ScriptedWorker(reply) as two,
    ):
        gateway = await start_gateway(build_shared_pool_config(one, two, most=9, room=9))
        for n in range(6):
            await gateway.ask()
            comparison = await gateway.wait_for_comparison(n + 1)
            assert (comparison.shadow.outcome, comparison.shadow.error) == (
                "worker_error",
                "WorkerFailed",
            )

        assert one.request_count + two.request_count == 6

        pool = gateway.app.backends["both"]
        assert [worker.state for worker in pool.report_workers()] == ["up", "up"]  # type: ignore[attr-defined]


async def test_shadow_requests_do_not_count_in_worker_latency(start_gateway: StartGateway) -> None:
    async with ScriptedWorker([chunked(*STREAM)]) as worker:
        gateway = await start_gateway(build_shared_pool_config(worker, most=9))
        pool: Any = gateway.app.backends["both"]

        for model in ("chat", "other"):
            assert [one.latency for one in pool.report_workers()] == [None]
            assert (await gateway.ask(model=model, stream=True)).status_code == 200
            await gateway.wait_for_comparison()

        assert [one.latency for one in pool.report_workers()] != [None]


async def test_shadow_requests_have_their_own_metrics(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(build_echo_config() + 'admin: {address: "127.0.0.1:0"}\n')
    await gateway.ask()
    await gateway.wait_for_comparison()

    page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")

    assert (
        'interlingua_shadow_requests_total{model="chat",outcome="ok",version="2"} 1.0' in page.text
    )
    assert 'interlingua_shadow_equal_total{model="chat",version="2"} 1.0' in page.text
    assert 'interlingua_requests_total{backend="two"' not in page.text
