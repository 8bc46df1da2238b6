"""Discovery with scripted sources and sleeps that the test ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from backends.http.interfaces import WorkerConfig, make_bearer_credentials
from backends.pool.discovery import DiscoveryError, WorkerDiscovery
from tests.support.waiting import wait_until

A, B, C = (WorkerConfig(f"http://10.0.0.{last}:80") for last in (1, 2, 3))


class ScriptedSource:
    """A source that returns scripted workers; an exception is raised."""

    def __init__(self, *looks: Sequence[WorkerConfig] | Exception, every: float = 10.0) -> None:
        self.looks = list(looks)
        self.interval = every
        self.looked = 0

    async def list_workers(self) -> Sequence[WorkerConfig]:
        now = self.looks[min(self.looked, len(self.looks) - 1)]
        self.looked += 1
        if isinstance(now, Exception):
            raise now
        return now


class HangingSource:
    """A source that never returns."""

    interval = 10.0

    def __init__(self) -> None:
        self.left = False

    async def list_workers(self) -> Sequence[WorkerConfig]:
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True
        return ()


class ControlledSleep:
    """Sleeps that last until the test ends them; ``requested`` are the durations."""

    def __init__(self) -> None:
        self.lookup_times: list[float] = []
        self._going = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.lookup_times.append(seconds)
        await self._going.acquire()

    async def end(self, source: ScriptedSource) -> None:
        """End a sleep; return once ``source`` was queried and sleeps again."""
        pauses = len(self.lookup_times)
        self._going.release()
        await wait_until(lambda: len(self.lookup_times) > pauses)


class RecordingPool:
    """Records the sets of workers that it gets, as the last digits of their URLs."""

    def __init__(self) -> None:
        self.sets: list[str] = []
        self.workers: Sequence[WorkerConfig] = ()

    def replace(self, workers: Sequence[WorkerConfig]) -> None:
        self.workers = workers
        self.sets.append(format_workers(workers))


def format_workers(workers: Sequence[WorkerConfig]) -> str:
    return "".join(sorted(worker.url.rstrip("/")[-4] for worker in workers))


@asynccontextmanager
async def run_discovery(
    *sources: ScriptedSource | HangingSource, static: Sequence[WorkerConfig] = ()
) -> AsyncIterator[tuple[WorkerDiscovery, RecordingPool, ControlledSleep]]:
    pool, pauses = RecordingPool(), ControlledSleep()
    discovery = WorkerDiscovery("gpu", static, sources, pool.replace, sleep=pauses)
    await discovery.start(within=0.05)
    try:
        yield discovery, pool, pauses
    finally:
        await discovery.aclose()


def test_format_workers_returns_the_last_digits_of_the_urls() -> None:
    assert format_workers([C, A]) == "13"


async def test_discovered_workers_are_added_to_the_configured_ones() -> None:
    async with run_discovery(ScriptedSource([B, C]), static=[A]) as (discovery, pool, _):
        assert pool.sets == ["123"]
        assert discovery.workers == (A, B, C)


async def test_pool_is_updated_only_if_the_worker_set_changes() -> None:
    source = ScriptedSource([A], [A], [A, B], [B, A], [B])
    async with run_discovery(source) as (_, pool, pauses):
        for _ in range(4):
            await pauses.end(source)

    assert pool.sets == ["1", "12", "2"]


async def test_changed_weight_updates_the_pool() -> None:
    heavy = WorkerConfig(A.url, weight=3)
    source = ScriptedSource([A], [heavy])
    async with run_discovery(source) as (discovery, pool, pauses):
        await pauses.end(source)

        assert pool.sets == ["1", "1"]
        assert discovery.workers == (heavy,)


@pytest.mark.parametrize("fault", [DiscoveryError("SERVFAIL"), (), RuntimeError("a fault of ours")])
async def test_failed_discovery_keeps_the_last_worker_set(
    fault: Exception | Sequence[WorkerConfig],
) -> None:
    source = ScriptedSource([A, B], fault, fault, [B])
    async with run_discovery(source) as (discovery, pool, pauses):
        await pauses.end(source)
        await pauses.end(source)

        assert pool.sets == ["12"]
        assert discovery.failures == 2
        assert len(discovery.source_errors) == 1

        await pauses.end(source)

        assert pool.sets == ["12", "2"]
        assert discovery.failures == 2
        assert discovery.source_errors == []


async def test_failing_source_does_not_block_other_sources() -> None:
    bad, good = ScriptedSource(RuntimeError("broke")), ScriptedSource([A])
    async with run_discovery(bad, HangingSource(), good) as (discovery, pool, _):
        assert pool.sets == ["1"]
        assert discovery.source_errors == ["a source raised RuntimeError"]


async def test_failed_source_is_retried_with_exponential_backoff() -> None:
    down = DiscoveryError("down")
    source = ScriptedSource([A], *[down] * 6, [A], every=10.0)
    async with run_discovery(source) as (_, _, pauses):
        for _ in range(7):
            await pauses.end(source)

        assert pauses.lookup_times == [10, 1, 2, 4, 8, 10, 10, 10]


async def test_retry_delay_never_exceeds_the_source_interval() -> None:
    async with run_discovery(ScriptedSource(DiscoveryError("down"), every=0.5)) as (_, _, pauses):
        assert pauses.lookup_times == [0.5]


async def test_discovery_state_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    down, other = DiscoveryError("SERVFAIL"), DiscoveryError("silence")
    source = ScriptedSource([A], down, down, other, other, [A], [A], down)
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with run_discovery(source, static=[A]) as (_, _, pauses):
            for _ in range(7):
                await pauses.end(source)

    states = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert states == ["SERVFAIL", "silence", "discovery works again", "SERVFAIL"]


async def test_unexpected_discovery_error_is_logged_with_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with run_discovery(ScriptedSource(RuntimeError("our fault"))):
            pass

    assert "our fault" in caplog.text


async def test_added_and_removed_workers_are_logged_without_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keyed = WorkerConfig(B.url, credentials=make_bearer_credentials("sk-canary"))
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with run_discovery(ScriptedSource([keyed]), static=[A]) as (discovery, _, _):
            discovery.remove(A.url)

    assert [record.getMessage() for record in caplog.records] == [
        "gpu: discovery added http://10.0.0.2:80",
        "gpu: the admin removed http://10.0.0.1:80",
    ]


async def test_start_waits_a_limited_time_for_the_first_discovery() -> None:
    pool = RecordingPool()
    discovery = WorkerDiscovery("gpu", [A], [HangingSource(), ScriptedSource([B])], pool.replace)

    await discovery.start(within=0.01)

    assert pool.sets == ["12"]

    await discovery.aclose()


async def test_close_cancels_a_hanging_source() -> None:
    source = HangingSource()
    discovery = WorkerDiscovery("gpu", [A], [source, ScriptedSource([B])], RecordingPool().replace)
    await discovery.start(within=0.01)

    await discovery.aclose()

    assert source.left
    assert len(asyncio.all_tasks()) == 1


async def test_unstarted_discovery_can_be_closed() -> None:
    await WorkerDiscovery("gpu", [A], [], RecordingPool().replace).aclose()


# --- changes by the admin -------------------------------------------------------------------------


async def test_admin_adds_and_removes_workers() -> None:
    async with run_discovery(static=[A]) as (discovery, pool, _):
        assert discovery.add(B) is True
        assert discovery.remove(A.url + "/") is True
        assert discovery.remove(C.url) is False

    assert pool.sets == ["12", "2"]


async def test_admin_replaces_a_worker_with_the_same_url() -> None:
    heavy = WorkerConfig(A.url + "/", weight=5)
    async with run_discovery(ScriptedSource([A, B]), static=[A]) as (discovery, pool, _):
        assert discovery.add(heavy) is False
        assert discovery.add(heavy) is False

        assert pool.sets == ["12", "12"]
        assert set(discovery.workers) == {heavy, B}


async def test_last_worker_cannot_be_removed() -> None:
    async with run_discovery(static=[A]) as (discovery, pool, _):
        with pytest.raises(ValueError, match="last worker"):
            discovery.remove(A.url)

    assert pool.sets == []


async def test_removed_worker_stays_removed_while_listed_by_a_source() -> None:
    source = ScriptedSource([A, B], [A, B, C])
    async with run_discovery(source) as (discovery, pool, pauses):
        discovery.remove(A.url)
        await pauses.end(source)

        assert pool.sets == ["12", "2", "23"]

        discovery.add(A)
        assert pool.sets[-1] == "123"


async def test_removal_is_forgotten_when_no_source_lists_the_worker() -> None:
    """The address may belong to another worker later."""
    source = ScriptedSource([A, B], [B], [A, B])
    async with run_discovery(source) as (discovery, pool, pauses):
        discovery.remove(A.url)
        await pauses.end(source)
        await pauses.end(source)

    assert pool.sets == ["12", "2", "12"]


async def test_discovered_set_of_only_removed_workers_is_ignored() -> None:
    source = ScriptedSource([A, B], [A])
    async with run_discovery(source) as (discovery, pool, pauses):
        discovery.remove(A.url)
        await pauses.end(source)

        assert pool.sets == ["12", "2"]
        assert discovery.workers == (B,)


async def test_number_of_added_workers_is_limited() -> None:
    many = [WorkerConfig(f"http://w:{port}") for port in range(1, 10_001)]
    async with run_discovery(static=many) as (discovery, _, _):
        with pytest.raises(ValueError, match="already"):
            discovery.add(A)

        assert discovery.add(WorkerConfig("http://w:1", weight=2)) is False


async def test_number_of_discovered_workers_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    many = [WorkerConfig(f"http://w:{port}") for port in range(1, 10_003)]
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with run_discovery(ScriptedSource(many)) as (discovery, _, _):
            assert len(discovery.workers) == 10_000

    [record] = caplog.records
    assert record.getMessage().endswith(" and 9980 more")


async def test_manual_workers_list_admin_changes() -> None:
    discovery = WorkerDiscovery("gpu", [A, B], [], lambda _: None)
    assert discovery.manual_workers == ()

    discovery.add(C)
    discovery.remove(A.url)
    assert sorted(discovery.manual_workers) == [A.url, C.url]
