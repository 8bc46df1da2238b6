"""When a configuration is read again, and what is reported of it."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.config.errors import ConfigError, ConfigIssue
from gateway.config.loader import LoadedConfig, load_bytes
from gateway.observability.metrics.reloads import ReloadCollector
from gateway.runtime.reload import ConfigSource, Reloader, ReloadResult, ReloadTrigger
from tests.support.waiting import PATIENCE

GOOD = b"backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n"
OTHER = GOOD.replace(b"m:", b"n:")
BAD = GOOD.replace(b"backend: a", b"backend: b")


def load_config_bytes(data: bytes) -> LoadedConfig:
    return load_bytes(data, "g.yaml", env={})


class ReloaderTestBench:
    """A reloader, and what it read, applied and reported."""

    def __init__(self, *files: bytes | Exception) -> None:
        self._files = iter(files)
        self.applied: list[str] = []
        self.results: list[ReloadResult] = []
        self.may = asyncio.Event()
        self.may.set()
        self.reads = 0
        self.began = asyncio.Event()
        self.reloader = Reloader(
            ConfigSource(load_config_bytes(GOOD), self._read), self._take, self.results.append
        )

    def _read(self) -> LoadedConfig:
        self.reads += 1
        content = next(self._files)
        if isinstance(content, Exception):
            raise content
        return load_config_bytes(content)

    async def _take(self, one: LoadedConfig) -> None:
        self.began.set()
        await self.may.wait()
        self.applied.append(one.hash)


async def test_loaded_configuration_is_applied_and_reported() -> None:
    bench = ReloaderTestBench(OTHER)
    result = await bench.reloader.reload()

    assert result.is_ok
    assert bench.applied == [result.hash] == [load_config_bytes(OTHER).hash]
    assert bench.results == [result]


async def test_invalid_file_is_reported_with_position_and_not_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = ReloaderTestBench(BAD, OTHER)
    result = await bench.reloader.reload()
    assert (result.is_ok, result.hash, bench.applied) == (False, load_config_bytes(GOOD).hash, [])

    [complaint] = result.issues
    assert (complaint.line, complaint.column) == (2, 23)
    assert "g.yaml:2:23: there is no backend 'b'" in caplog.text
    assert (await bench.reloader.reload()).is_ok


async def test_unexpected_error_is_reported_and_nothing_is_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = ReloaderTestBench(RuntimeError("a bug"), OTHER)
    result = await bench.reloader.reload()

    assert [one.message for one in result.issues] == ["the gateway failed; its log has the cause"]
    assert "a bug" in caplog.text
    assert (await bench.reloader.reload()).is_ok


async def test_concurrent_reload_requests_share_one_further_reload() -> None:
    """The running reload may have read the file too early for them."""
    bench = ReloaderTestBench(GOOD, OTHER)
    bench.may.clear()

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bench.reloader.reload())
        await bench.began.wait()
        others = [tasks.create_task(bench.reloader.reload()) for _ in range(9)]
        await asyncio.sleep(0)
        bench.may.set()

    assert bench.reads == 2
    assert first.result().hash == load_config_bytes(GOOD).hash
    assert {one.result().hash for one in others} == {load_config_bytes(OTHER).hash}


async def test_cancelled_caller_does_not_cancel_the_reload() -> None:
    bench = ReloaderTestBench(OTHER, GOOD)
    bench.may.clear()
    task = asyncio.get_running_loop().create_task(bench.reloader.reload())
    await bench.began.wait()
    task.cancel()
    bench.may.set()

    assert (await bench.reloader.reload()).is_ok
    assert bench.applied[:1] == [load_config_bytes(OTHER).hash]


async def test_close_cancels_the_running_reload() -> None:
    bench = ReloaderTestBench(OTHER)
    bench.may.clear()
    task = asyncio.get_running_loop().create_task(bench.reloader.reload())
    await bench.began.wait()

    await bench.reloader.aclose()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.results == []


async def test_files_of_an_invalid_configuration_are_watched() -> None:
    """Correcting one of them may make it valid."""
    bad = ConfigError("g.yaml", [], ["new.pem"])
    bench = ReloaderTestBench(bad, OTHER)
    await bench.reloader.reload()

    assert bench.reloader.files == {"new.pem"}

    await bench.reloader.reload()
    assert bench.reloader.files == frozenset()


def render_samples(reloads: ReloadCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(reloads)
    lines = (line for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_source_without_a_file_is_polled_and_read_again_after_a_change() -> None:
    bench = ReloaderTestBench(OTHER)
    answers = iter([False, False, True])
    read_count = 0

    def has_changed() -> bool:
        nonlocal read_count
        read_count += 1
        return next(answers, False)

    trigger = ReloadTrigger(bench.reloader, None, has_changed, poll_interval=0.001)
    running = asyncio.create_task(trigger.run())
    async with asyncio.timeout(PATIENCE):
        await bench.began.wait()

    assert read_count >= 3

    running.cancel()
    await asyncio.wait({running})
    assert bench.applied == [load_config_bytes(OTHER).hash]


async def test_storm_of_requests_reloads_once_between_two_pauses() -> None:
    """Requests that come during a pause are one request, and the last of them has an effect."""
    bench = ReloaderTestBench(OTHER, GOOD)
    paused, go_on = asyncio.Queue[float](), asyncio.Event()

    async def pause(seconds: float) -> None:
        paused.put_nowait(seconds)
        await go_on.wait()

    trigger = ReloadTrigger(bench.reloader, None, pause=pause)
    running = asyncio.create_task(trigger.run())
    trigger.reload_requested.set()
    async with asyncio.timeout(30):
        first = await paused.get()
        for _ in range(100):
            trigger.reload_requested.set()
            await asyncio.sleep(0)
        assert bench.reads == 1
        go_on.set()
        second = await paused.get()

    assert bench.reads == 2
    assert bench.applied == [load_config_bytes(OTHER).hash, load_config_bytes(GOOD).hash]
    assert all(0 < seconds <= 1 for seconds in (first, second))
    running.cancel()
    await asyncio.wait({running})


def test_reloads_are_counted() -> None:
    times = iter([100.0, 200.0])
    reloads = ReloadCollector("aaa", lambda: next(times))
    at = "interlingua_config_last_reload_success_timestamp_seconds"
    well = "interlingua_config_last_reload_successful"
    total = "interlingua_config_reloads_total"
    first = render_samples(reloads)
    reloads.record_reload(ReloadResult("aaa", "g.yaml", (ConfigIssue(1, 1, "no"),)))
    failed = render_samples(reloads)
    reloads.record_reload(ReloadResult("bbb", "g.yaml"))

    mended = render_samples(reloads)

    assert [one[at] for one in (first, failed, mended)] == [100, 100, 200]
    assert [one[well] for one in (first, failed, mended)] == [1, 0, 1]
    assert failed['interlingua_config_info{hash="aaa"}'] == 1
    assert mended['interlingua_config_info{hash="bbb"}'] == 1
    assert mended[f'{total}{{result="success"}}'] == mended[f'{total}{{result="failure"}}'] == 1
    assert first[f'{total}{{result="success"}}'] == first[f'{total}{{result="failure"}}'] == 0
