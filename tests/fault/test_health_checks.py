"""Workers are probed, and only healthy ones get requests."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig, make_bearer_credentials
from backends.pool.pool import PoolBackend
from backends.pool.settings import HealthCheckSettings
from protocols.core.request import GenerationRequest
from tests.fault.line_protocol import (
    STREAMED,
    collect_events,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import CLOSE, HANG, Reply, ScriptedWorker, make_reply
from tests.support.waiting import PATIENCE, wait_until

WELL: Reply = [make_reply(b"ok")]
ILL: Reply = [make_reply(b"{}", "503 Loading")]
OFTEN = HealthCheckSettings(interval=0.02, timeout=30.0)


def apply_strict_thresholds(checks: HealthCheckSettings) -> HealthCheckSettings:
    return replace(checks, fall=2, rise=2, slow_start=0.0)


def get_worker_state(backend: PoolBackend, position: int = 0) -> str:
    return backend.report_workers()[position].state


async def test_health_check_uses_the_protocol_request_and_the_worker_key() -> None:
    async with (
        ScriptedWorker(WELL, probed=None) as worker,
        run_pool(
            WorkerConfig(worker.url + "/base", credentials=make_bearer_credentials("s3cret")),
            health=OFTEN,
        ),
    ):
        await worker.wait_for_request(3)

    assert worker.requests[0].method == "GET"
    assert worker.requests[0].path == "/base/health"
    assert worker.requests[0].headers["authorization"] == "Bearer s3cret"


async def test_health_check_uses_the_configured_path() -> None:
    probe = HealthCheckSettings(interval=0.02, path="/v2/health/ready")
    async with ScriptedWorker(WELL, probed=None) as worker, run_pool(worker.url, health=probe):
        await worker.wait_for_request()

    assert (worker.requests[0].method, worker.requests[0].path) == ("GET", "/v2/health/ready")


@pytest.mark.parametrize(
    "ill",
    [ILL, [HANG], [CLOSE], [make_reply(b"", "404 Not Found")], [make_reply(b"x" * (2 << 20))]],
    ids=["503", "hangs", "closes", "404", "endless"],
)
async def test_failed_health_checks_eject_a_worker_until_recovery(ill: Reply) -> None:
    probes = HealthCheckSettings(interval=0.02, timeout=1.0)
    replies = [ill] * 4 + [WELL] * 1000

    async with (
        ScriptedWorker(*replies, probed=None) as bad,
        ScriptedWorker(WELL, probed=None) as other,
        run_pool(bad.url, other.url, health=apply_strict_thresholds(probes)) as backend,
    ):
        await wait_until(lambda: get_worker_state(backend) == "out")
        assert backend.ready
        await wait_until(lambda: get_worker_state(backend) == "up")

    assert bad.request_count >= 6


@pytest.fixture
def reserved_socket() -> Iterator[socket.socket]:
    """A port that is reserved but not yet listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


async def test_pool_starts_without_a_live_worker_and_becomes_ready_later(
    reserved_socket: socket.socket,
) -> None:
    url = f"http://127.0.0.1:{reserved_socket.getsockname()[1]}"
    async with run_pool(url, health=apply_strict_thresholds(OFTEN)) as backend:
        await wait_until(lambda: not backend.ready)
        async with ScriptedWorker(WELL, listener=reserved_socket, probed=None):
            await wait_until(lambda: backend.ready)

            assert get_worker_state(backend) == "up"


async def test_health_checks_follow_the_set_of_workers() -> None:
    async with (
        ScriptedWorker(WELL, probed=None) as a,
        ScriptedWorker(WELL, probed=None) as b,
        run_pool(a.url, health=OFTEN) as backend,
    ):
        await a.wait_for_request()
        backend.replace_workers([WorkerConfig(b.url)])
        await b.wait_for_request(2)
        await asyncio.sleep(0.1)
        request_count = a.request_count

        await b.wait_for_request(b.request_count + 5)

        assert a.request_count == request_count
        assert [one.url for one in backend.report_workers()] == [b.url]


async def test_workers_set_at_runtime_are_health_checked() -> None:
    async with ScriptedWorker(WELL, probed=None) as worker, run_pool(health=OFTEN) as backend:
        assert not backend.ready

        backend.replace_workers([WorkerConfig(worker.url)])
        await worker.wait_for_request()
        assert backend.ready


async def test_invalid_health_check_path_ejects_the_worker() -> None:
    probe = HealthCheckSettings(interval=0.02, path="no path")
    async with ScriptedWorker(WELL, probed=None) as worker:
        async with run_pool(worker.url, health=apply_strict_thresholds(probe)) as backend:
            await wait_until(lambda: get_worker_state(backend) == "out")

        assert worker.request_count == 0


async def test_closed_pool_sends_no_health_checks() -> None:
    async with ScriptedWorker([HANG], probed=None) as worker:
        async with run_pool(worker.url, health=HealthCheckSettings(interval=0.02, timeout=60.0)):
            await worker.wait_for_request()
        await worker.wait_for_disconnect()
        request_count = worker.request_count
        await asyncio.sleep(0.1)

    assert worker.request_count == request_count


async def test_only_healthy_workers_get_requests() -> None:
    """The unhealthy worker would answer a request, but gets none."""
    async with (
        ScriptedWorker(ILL, probed=None) as ill,
        ScriptedWorker([reply_text("Hello")]) as well,
        run_pool(ill.url, well.url, health=apply_strict_thresholds(OFTEN)) as backend,
    ):
        await wait_until(lambda: get_worker_state(backend) == "out")
        for _ in range(10):
            assert join_text(await collect_events(backend)) == "Hello"

    assert {request.method for request in ill.requests} == {"GET"}


UNARY = GenerationRequest(model="m", kind="completion", prompts=("x",))


@pytest.mark.parametrize("request_", [STREAMED, UNARY], ids=["stream", "unary"])
@pytest.mark.parametrize(
    "silence",
    [[HANG], [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", HANG]],
    ids=["nothing", "only a head"],
)
async def test_request_without_data_from_an_ejected_worker_is_retried_elsewhere(
    request_: GenerationRequest, silence: Reply
) -> None:
    """Given a worker that stops to respond at its first request, and another worker."""
    probes = apply_strict_thresholds(HealthCheckSettings(interval=0.02, timeout=1.0))
    async with (
        ScriptedWorker(silence, probed=lambda: [HANG] if frozen.requests else WELL) as frozen,
        ScriptedWorker([reply_text("Hello")]) as other,
        run_pool(frozen.url, other.url, health=probes, policy="round_robin") as backend,
    ):
        assert join_text(await collect_events(backend, request_)) == "Hello"
        assert get_worker_state(backend) == "out"
        assert frozen.request_count == 1


async def test_request_to_the_only_worker_continues_after_ejection() -> None:
    """Given a worker whose probes hang while it answers, it is ejected, and the answer arrives."""
    probes = apply_strict_thresholds(HealthCheckSettings(interval=0.02, timeout=0.1))
    answer = asyncio.Event()
    async with (
        ScriptedWorker(
            [answer, reply_text("Hello")], probed=lambda: [HANG] if slow.requests else WELL
        ) as slow,
        run_pool(slow.url, health=probes) as backend,
    ):
        response = asyncio.get_running_loop().create_task(collect_events(backend, UNARY))

        await wait_until(lambda: get_worker_state(backend) == "out")
        answer.set()

        assert join_text(await response) == "Hello"


@pytest.mark.parametrize("request_", [STREAMED, UNARY], ids=["stream", "unary"])
async def test_ejected_worker_that_still_responds_finishes_its_requests(
    request_: GenerationRequest,
) -> None:
    """Given a worker that reports unhealthy once it has a request, and another worker."""
    answer = asyncio.Event()
    async with (
        ScriptedWorker(
            [answer, reply_text("Hello")], probed=lambda: ILL if leaving.requests else WELL
        ) as leaving,
        ScriptedWorker([reply_text("Hello")]) as other,
        run_pool(
            leaving.url, other.url, health=apply_strict_thresholds(OFTEN), policy="round_robin"
        ) as backend,
    ):
        response = asyncio.get_running_loop().create_task(collect_events(backend, request_))

        await wait_until(lambda: get_worker_state(backend) == "out")

        assert not response.done()
        answer.set()
        assert join_text(await response) == "Hello"

    assert "POST" not in {request.method for request in other.requests}


async def test_warm_up_waits_for_one_health_check_of_each_worker() -> None:
    """The check may fail; a worker that is removed is no longer waited for."""
    slow = HealthCheckSettings(interval=60.0, timeout=60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = WorkerConfig(f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with (
            ScriptedWorker(WELL, probed=None) as worker,
            run_pool(worker.url, hangs, health=slow) as backend,
        ):
            warm = asyncio.get_running_loop().create_task(backend.warm_up())
            await worker.wait_for_request(1)
            await asyncio.sleep(0.05)

            assert not warm.done()

            backend.replace_workers([WorkerConfig(worker.url)])
            async with asyncio.timeout(PATIENCE):
                await warm


async def test_warm_up_without_health_checks_returns_at_once() -> None:
    async with run_pool("http://127.0.0.1:9", health=None) as backend, asyncio.timeout(PATIENCE):
        await backend.warm_up()
