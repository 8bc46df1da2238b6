"""When a configuration is read anew, and what is told of it."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.config.errors import ConfigError, ConfigIssue
from gateway.config.loader import LoadedConfig, load_bytes
from gateway.observability.metrics.system import ReloadCollector
from gateway.runtime.reload import ConfigSource, Reloader, ReloadResult

GOOD = b"backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n"
OTHER = GOOD.replace(b"m:", b"n:")
BAD = GOOD.replace(b"backend: a", b"backend: b")


def read(data: bytes) -> LoadedConfig:
    return load_bytes(data, "g.yaml", env={})


class Bench:
    """A reloader: what it read, took and told."""

    def __init__(self, *files: bytes | Exception) -> None:
        self._files = iter(files)
        self.taken: list[str] = []
        self.told: list[ReloadResult] = []
        self.may = asyncio.Event()
        self.may.set()
        self.reads = 0
        self.began = asyncio.Event()
        self.reloader = Reloader(ConfigSource(read(GOOD), self._read), self._take, self.told.append)

    def _read(self) -> LoadedConfig:
        self.reads += 1
        found = next(self._files)
        if isinstance(found, Exception):
            raise found
        return read(found)

    async def _take(self, one: LoadedConfig) -> None:
        self.began.set()
        await self.may.wait()
        self.taken.append(one.hash)


async def test_what_was_read_is_taken_and_told() -> None:
    bench = Bench(OTHER)
    told = await bench.reloader.reload()
    assert told.is_ok
    assert bench.taken == [told.hash] == [read(OTHER).hash]
    assert bench.told == [told]


async def test_a_bad_file_is_told_of_with_its_place_and_nothing_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(BAD, OTHER)
    told = await bench.reloader.reload()
    assert (told.is_ok, told.hash, bench.taken) == (False, read(GOOD).hash, [])
    [complaint] = told.issues
    assert (complaint.line, complaint.column) == (2, 23)
    assert "g.yaml:2:23: there is no backend 'b'" in caplog.text
    assert (await bench.reloader.reload()).is_ok


async def test_a_bug_is_told_of_and_nothing_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(RuntimeError("a bug"), OTHER)
    told = await bench.reloader.reload()
    assert [one.message for one in told.issues] == ["the gateway failed; its log has the cause"]
    assert "a bug" in caplog.text
    assert (await bench.reloader.reload()).is_ok


async def test_those_who_ask_meanwhile_get_one_more_reload_together() -> None:
    """The one that runs may have read too early for them."""
    bench = Bench(GOOD, OTHER)
    bench.may.clear()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bench.reloader.reload())
        await bench.began.wait()
        others = [tasks.create_task(bench.reloader.reload()) for _ in range(9)]
        await asyncio.sleep(0)
        bench.may.set()
    assert bench.reads == 2
    assert first.result().hash == read(GOOD).hash
    assert {one.result().hash for one in others} == {read(OTHER).hash}


async def test_who_asked_may_leave_and_it_goes_on() -> None:
    bench = Bench(OTHER, GOOD)
    bench.may.clear()
    asked = asyncio.get_running_loop().create_task(bench.reloader.reload())
    await bench.began.wait()
    asked.cancel()
    bench.may.set()
    assert (await bench.reloader.reload()).is_ok
    assert bench.taken[:1] == [read(OTHER).hash]


async def test_what_is_begun_is_left_at_the_end() -> None:
    bench = Bench(OTHER)
    bench.may.clear()
    asked = asyncio.get_running_loop().create_task(bench.reloader.reload())
    await bench.began.wait()
    await bench.reloader.aclose()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert bench.told == []


async def test_the_files_that_a_bad_configuration_named_are_looked_at_too() -> None:
    """Mending one may mend it."""
    bad = ConfigError("g.yaml", [], ["new.pem"])
    bench = Bench(bad, OTHER)
    await bench.reloader.reload()
    assert bench.reloader.files == {"new.pem"}
    await bench.reloader.reload()
    assert bench.reloader.files == frozenset()


def page(reloads: ReloadCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(reloads)
    lines = (line for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_reloads_are_counted() -> None:
    times = iter([100.0, 200.0])
    reloads = ReloadCollector("aaa", lambda: next(times))
    at = "interlingua_config_last_reload_success_timestamp_seconds"
    well = "interlingua_config_last_reload_successful"
    total = "interlingua_config_reloads_total"
    first = page(reloads)
    reloads.record_reload(ReloadResult("aaa", "g.yaml", (ConfigIssue(1, 1, "no"),)))
    failed = page(reloads)
    reloads.record_reload(ReloadResult("bbb", "g.yaml"))
    mended = page(reloads)
    assert [one[at] for one in (first, failed, mended)] == [100, 100, 200]
    assert [one[well] for one in (first, failed, mended)] == [1, 0, 1]
    assert failed['interlingua_config_info{hash="aaa"}'] == 1
    assert mended['interlingua_config_info{hash="bbb"}'] == 1
    assert mended[f'{total}{{result="success"}}'] == mended[f'{total}{{result="failure"}}'] == 1
    assert first[f'{total}{{result="success"}}'] == first[f'{total}{{result="failure"}}'] == 0
