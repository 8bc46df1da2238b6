"""Discovery over sources that the test scripts, by pauses that the test ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError, WorkerDiscovery

A, B, C = (WorkerConfig(f"http://10.0.0.{last}:80") for last in (1, 2, 3))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - many a thing may come true
            await asyncio.sleep(0)


class Scripted:
    """A Source that names what it was told to; an exception is raised."""

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


class Hanging:
    """A Source that never tells."""

    interval = 10.0

    def __init__(self) -> None:
        self.left = False

    async def list_workers(self) -> Sequence[WorkerConfig]:
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True
        return ()


class Pauses:
    """Pauses that last until the test ends them; ``asked`` are their seconds."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._going = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self._going.acquire()

    async def end(self, source: Scripted) -> None:
        """End one; ``source`` has looked again, and pauses again, when this returns."""
        pauses = len(self.asked)
        self._going.release()
        await until(lambda: len(self.asked) > pauses)


class Pool:
    """What was told to it, sets of URLs' last digits."""

    def __init__(self) -> None:
        self.sets: list[str] = []
        self.workers: Sequence[WorkerConfig] = ()

    def replace(self, workers: Sequence[WorkerConfig]) -> None:
        self.workers = workers
        self.sets.append(shown(workers))


def shown(workers: Sequence[WorkerConfig]) -> str:
    return "".join(sorted(worker.url.rstrip("/")[-4] for worker in workers))


@asynccontextmanager
async def discovering(
    *sources: Scripted | Hanging, static: Sequence[WorkerConfig] = ()
) -> AsyncIterator[tuple[WorkerDiscovery, Pool, Pauses]]:
    pool, pauses = Pool(), Pauses()
    discovery = WorkerDiscovery("gpu", static, sources, pool.replace, sleep=pauses)
    await discovery.start(within=0.05)
    try:
        yield discovery, pool, pauses
    finally:
        await discovery.aclose()


def test_names_of_the_test_are_the_urls_last_digits() -> None:
    assert shown([C, A]) == "13"


async def test_what_a_source_names_joins_what_is_configured() -> None:
    async with discovering(Scripted([B, C]), static=[A]) as (discovery, pool, _):
        assert pool.sets == ["123"]
        assert discovery.workers == (A, B, C)


async def test_the_set_is_told_of_when_it_changes_and_only_then() -> None:
    source = Scripted([A], [A], [A, B], [B, A], [B])
    async with discovering(source) as (_, pool, pauses):
        for _ in range(4):
            await pauses.end(source)

    assert pool.sets == ["1", "12", "2"]


async def test_a_worker_with_another_weight_is_a_change() -> None:
    heavy = WorkerConfig(A.url, weight=3)
    source = Scripted([A], [heavy])
    async with discovering(source) as (discovery, pool, pauses):
        await pauses.end(source)

        assert pool.sets == ["1", "1"]
        assert discovery.workers == (heavy,)


@pytest.mark.parametrize("fault", [DiscoveryError("SERVFAIL"), (), RuntimeError("a fault of ours")])
async def test_a_failure_keeps_the_last_good_set(fault: Exception | Sequence[WorkerConfig]) -> None:
    source = Scripted([A, B], fault, fault, [B])
    async with discovering(source) as (discovery, pool, pauses):
        await pauses.end(source)
        await pauses.end(source)

        assert pool.sets == ["12"]
        assert discovery.failures == 2
        assert len(discovery.source_errors) == 1

        await pauses.end(source)

        assert pool.sets == ["12", "2"]
        assert discovery.failures == 2
        assert discovery.source_errors == []


async def test_one_source_that_fails_does_not_keep_another_from_being_heard() -> None:
    bad, good = Scripted(RuntimeError("broke")), Scripted([A])
    async with discovering(bad, Hanging(), good) as (discovery, pool, _):
        assert pool.sets == ["1"]
        assert discovery.source_errors == ["a source raised RuntimeError"]


async def test_pauses_are_the_sources_own_and_after_failures_short_at_first() -> None:
    down = DiscoveryError("down")
    source = Scripted([A], *[down] * 6, [A], every=10.0)
    async with discovering(source) as (_, _, pauses):
        for _ in range(7):
            await pauses.end(source)

        assert pauses.asked == [10, 1, 2, 4, 8, 10, 10, 10]


async def test_a_failure_never_makes_the_pause_longer() -> None:
    async with discovering(Scripted(DiscoveryError("down"), every=0.5)) as (_, _, pauses):
        assert pauses.asked == [0.5]


async def test_changes_of_state_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    down, other = DiscoveryError("SERVFAIL"), DiscoveryError("silence")
    source = Scripted([A], down, down, other, other, [A], [A], down)
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with discovering(source, static=[A]) as (_, _, pauses):
            for _ in range(7):
                await pauses.end(source)

    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert told == ["SERVFAIL", "silence", "discovery works again", "SERVFAIL"]


async def test_a_fault_of_ours_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with discovering(Scripted(RuntimeError("our fault"))):
            pass

    assert "our fault" in caplog.text


async def test_comings_and_goings_are_logged_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    keyed = WorkerConfig(B.url, bearer="sk-canary")
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with discovering(Scripted([keyed]), static=[A]) as (discovery, _, _):
            discovery.remove(A.url)

    assert [record.getMessage() for record in caplog.records] == [
        "gpu: discovery added http://10.0.0.2:80",
        "gpu: the admin removed http://10.0.0.1:80",
    ]


async def test_the_start_waits_for_the_first_look_and_not_for_ever() -> None:
    pool = Pool()
    discovery = WorkerDiscovery("gpu", [A], [Hanging(), Scripted([B])], pool.replace)

    await discovery.start(within=0.01)

    assert pool.sets == ["12"]
    await discovery.aclose()


async def test_closing_stops_at_once_whatever_a_source_does() -> None:
    source = Hanging()
    discovery = WorkerDiscovery("gpu", [A], [source, Scripted([B])], Pool().replace)
    await discovery.start(within=0.01)

    await discovery.aclose()

    assert source.left
    assert len(asyncio.all_tasks()) == 1


async def test_one_that_never_started_can_be_closed() -> None:
    await WorkerDiscovery("gpu", [A], [], Pool().replace).aclose()


# --- the admin's word ----------------------------------------------------------------------------


async def test_the_admin_adds_and_removes() -> None:
    async with discovering(static=[A]) as (discovery, pool, _):
        assert discovery.add(B) is True
        assert discovery.remove(A.url + "/") is True
        assert discovery.remove(C.url) is False

    assert pool.sets == ["12", "2"]


async def test_the_admin_may_put_a_worker_in_the_place_of_another() -> None:
    heavy = WorkerConfig(A.url + "/", weight=5)
    async with discovering(Scripted([A, B]), static=[A]) as (discovery, pool, _):
        assert discovery.add(heavy) is False
        assert discovery.add(heavy) is False

        assert pool.sets == ["12", "12"]
        assert set(discovery.workers) == {heavy, B}


async def test_the_last_worker_is_not_removed() -> None:
    async with discovering(static=[A]) as (discovery, pool, _):
        with pytest.raises(ValueError, match="last worker"):
            discovery.remove(A.url)

    assert pool.sets == []


async def test_one_removed_stays_away_while_a_source_names_it() -> None:
    source = Scripted([A, B], [A, B, C])
    async with discovering(source) as (discovery, pool, pauses):
        discovery.remove(A.url)
        await pauses.end(source)

        assert pool.sets == ["12", "2", "23"]
        discovery.add(A)
        assert pool.sets[-1] == "123"


async def test_one_removed_is_forgotten_when_nobody_names_it() -> None:
    """An address may be another worker's later."""
    source = Scripted([A, B], [B], [A, B])
    async with discovering(source) as (discovery, pool, pauses):
        discovery.remove(A.url)
        await pauses.end(source)
        await pauses.end(source)

    assert pool.sets == ["12", "2", "12"]


async def test_a_set_of_which_all_were_removed_is_not_taken() -> None:
    source = Scripted([A, B], [A])
    async with discovering(source) as (discovery, pool, pauses):
        discovery.remove(A.url)
        await pauses.end(source)

        assert pool.sets == ["12", "2"]
        assert discovery.workers == (B,)


async def test_there_is_a_limit_to_how_many_are_added() -> None:
    many = [WorkerConfig(f"http://w:{port}") for port in range(1, 10_001)]
    async with discovering(static=many) as (discovery, _, _):
        with pytest.raises(ValueError, match="already"):
            discovery.add(A)

        assert discovery.add(WorkerConfig("http://w:1", weight=2)) is False


async def test_a_source_is_not_taken_beyond_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    many = [WorkerConfig(f"http://w:{port}") for port in range(1, 10_003)]
    with caplog.at_level(logging.WARNING, "interlingua"):
        async with discovering(Scripted(many)) as (discovery, _, _):
            assert len(discovery.workers) == 10_000

    [record] = caplog.records
    assert record.getMessage().endswith(" and 9980 more")


async def test_what_the_admin_did_is_told() -> None:
    discovery = WorkerDiscovery("gpu", [A, B], [], lambda _: None)
    assert discovery.manual_workers == ()
    discovery.add(C)
    discovery.remove(A.url)
    assert sorted(discovery.manual_workers) == [A.url, C.url]
