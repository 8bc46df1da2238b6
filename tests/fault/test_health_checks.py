"""Workers are asked whether they are well, and requests go to those that are."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig
from backends.pool.pool import PoolBackend
from backends.pool.settings import HealthCheckSettings
from protocols.core.request import GenerationRequest
from tests.fakes import CLOSE, HANG, Reply, ScriptedWorker, chunked, whole
from tests.fault.lines import STREAMED, heard, pool, say, text, until

WELL: Reply = [whole(b"ok")]
ILL: Reply = [whole(b"{}", "503 Loading")]
GOOD = [chunked(say("Hello"), b"end\n")]
OFTEN = HealthCheckSettings(interval=0.02, timeout=0.2)


def strict(checks: HealthCheckSettings) -> HealthCheckSettings:
    return replace(checks, fall=2, rise=2, slow_start=0.0)


def state(backend: PoolBackend, position: int = 0) -> str:
    return backend.report_workers()[position].state


async def test_a_probe_is_the_dialects_with_the_workers_own_key() -> None:
    async with (
        ScriptedWorker(WELL) as worker,
        pool(WorkerConfig(worker.url + "/base", bearer="s3cret"), health=OFTEN),
    ):
        await worker.until_asked(3)

    assert worker.requests[0].method == "GET"
    assert worker.requests[0].path == "/base/health"
    assert worker.requests[0].headers["authorization"] == "Bearer s3cret"


async def test_a_path_that_was_configured_is_asked_for() -> None:
    probe = HealthCheckSettings(interval=0.02, path="/v2/health/ready")
    async with ScriptedWorker(WELL) as worker, pool(worker.url, health=probe):
        await worker.until_asked()

    assert (worker.requests[0].method, worker.requests[0].path) == ("GET", "/v2/health/ready")


@pytest.mark.parametrize(
    "ill",
    [ILL, [HANG], [CLOSE], [whole(b"", "404 Not Found")], [whole(b"x" * (2 << 20))]],
    ids=["503", "hangs", "closes", "404", "endless"],
)
async def test_a_worker_that_is_ill_gets_no_requests_until_it_is_well(ill: Reply) -> None:
    probes = HealthCheckSettings(interval=0.02, timeout=0.1)
    replies = [ill] * 4 + [WELL] * 1000
    async with (
        ScriptedWorker(*replies) as bad,
        ScriptedWorker(WELL) as other,
        pool(bad.url, other.url, health=strict(probes)) as backend,
    ):
        await until(lambda: state(backend) == "out")
        assert backend.ready
        await until(lambda: state(backend) == "up")

    assert bad.asked >= 6


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    """An address where nobody listens yet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


async def test_a_pool_starts_with_no_worker_alive_and_finds_them_when_they_come(
    reserved: socket.socket,
) -> None:
    url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    async with pool(url, health=strict(OFTEN)) as backend:
        await until(lambda: not backend.ready)
        async with ScriptedWorker(WELL, listener=reserved):
            await until(lambda: backend.ready)

            assert state(backend) == "up"


async def test_probes_follow_the_set_of_workers() -> None:
    async with (
        ScriptedWorker(WELL) as a,
        ScriptedWorker(WELL) as b,
        pool(a.url, health=OFTEN) as backend,
    ):
        await a.until_asked()
        backend.replace_workers([WorkerConfig(b.url)])
        await b.until_asked(2)
        await asyncio.sleep(0.1)
        asked = a.asked
        await b.until_asked(b.asked + 5)

        assert a.asked == asked
        assert [one.url for one in backend.report_workers()] == [b.url]


async def test_a_set_that_changes_before_the_start_is_probed_from_the_start() -> None:
    async with ScriptedWorker(WELL) as worker, pool(health=OFTEN) as backend:
        assert not backend.ready
        backend.replace_workers([WorkerConfig(worker.url)])
        await worker.until_asked()
        assert backend.ready


async def test_a_path_that_is_none_finds_nobody_well() -> None:
    probe = HealthCheckSettings(interval=0.02, path="no path")
    async with ScriptedWorker(WELL) as worker:
        async with pool(worker.url, health=strict(probe)) as backend:
            await until(lambda: state(backend) == "out")

        assert worker.asked == 0


async def test_a_pool_that_closes_probes_no_more() -> None:
    async with ScriptedWorker([HANG]) as worker:
        async with pool(worker.url, health=HealthCheckSettings(interval=0.02, timeout=60.0)):
            await worker.until_asked()
        await worker.until_left()
        asked = worker.asked
        await asyncio.sleep(0.1)

    assert worker.asked == asked


async def test_requests_go_where_probes_are_good() -> None:
    """The ill one's answer to a request would be good: it is not asked."""
    probe = HealthCheckSettings(interval=0.02, timeout=0.2)
    async with (
        ScriptedWorker(ILL) as ill,
        ScriptedWorker(GOOD) as well,
        pool(ill.url, well.url, health=strict(probe)) as backend,
    ):
        await until(lambda: state(backend) == "out")
        for _ in range(10):
            assert text(await heard(backend)) == "Hello"

    assert {request.method for request in ill.requests} == {"GET"}


WHOLE = GenerationRequest(model="m", kind="completion", prompts=("x",))


@pytest.mark.parametrize("request_", [STREAMED, WHOLE], ids=["stream", "whole"])
@pytest.mark.parametrize(
    "silence",
    [[HANG], [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", HANG]],
    ids=["nothing", "only a head"],
)
async def test_who_has_heard_nothing_from_a_worker_that_is_out_asks_another(
    request_: GenerationRequest, silence: Reply
) -> None:
    async with (
        ScriptedWorker(WELL, silence, [HANG]) as frozen,
        ScriptedWorker(GOOD) as other,
        pool(frozen.url, other.url, health=strict(OFTEN), policy="round_robin") as backend,
    ):
        await frozen.until_asked()
        assert text(await heard(backend, request_)) == "Hello"
        assert state(backend) == "out"


async def test_who_waits_for_the_only_worker_goes_on_waiting() -> None:
    async with (
        ScriptedWorker(WELL, [0.6, *GOOD], [HANG], ILL) as slow,
        pool(slow.url, health=strict(OFTEN)) as backend,
    ):
        await slow.until_asked()
        answer = asyncio.get_running_loop().create_task(heard(backend, WHOLE))
        await until(lambda: state(backend) == "out")
        assert text(await answer) == "Hello"


@pytest.mark.parametrize("request_", [STREAMED, WHOLE], ids=["stream", "whole"])
async def test_a_worker_that_is_leaving_finishes_what_it_has(request_: GenerationRequest) -> None:
    """It answers its probes, and that it is not well; another is there."""
    async with (
        ScriptedWorker(WELL, [0.4, *GOOD], ILL) as leaving,
        ScriptedWorker(GOOD) as other,
        pool(leaving.url, other.url, health=strict(OFTEN), policy="round_robin") as backend,
    ):
        await leaving.until_asked()
        answer = asyncio.get_running_loop().create_task(heard(backend, request_))
        await until(lambda: state(backend) == "out")
        assert not answer.done()
        assert text(await answer) == "Hello"

    assert "POST" not in {request.method for request in other.requests}


async def test_a_pool_is_warm_when_each_worker_was_probed_once() -> None:
    """However that went; one that is taken away meanwhile is waited for no more."""
    slow = HealthCheckSettings(interval=60.0, timeout=60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = WorkerConfig(f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with (
            ScriptedWorker(WELL) as worker,
            pool(worker.url, hangs, health=slow) as backend,
        ):
            warm = asyncio.get_running_loop().create_task(backend.warm_up())
            await worker.until_asked(1)
            await asyncio.sleep(0.05)
            assert not warm.done()
            backend.replace_workers([WorkerConfig(worker.url)])
            async with asyncio.timeout(5):
                await warm


async def test_a_pool_without_probes_is_warm_at_once() -> None:
    async with pool("http://127.0.0.1:9", health=None) as backend, asyncio.timeout(1):
        await backend.warm_up()
