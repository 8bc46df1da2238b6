"""The manager of guarded rollouts: it survives reloads, unreadable states and their moments."""

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.config.schema import Config
from gateway.evidence import rollout_sqlite as module
from gateway.evidence.rollout import RolloutState, StepSamples, hash_plan
from gateway.evidence.rollout_gateways import build_settings
from gateway.evidence.rollout_sqlite import SqliteRolloutStore
from gateway.evidence.sequential import Tally
from gateway.observability.record import RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from gateway.runtime import rollout as runtime_rollout
from gateway.runtime.rollout import RolloutManager
from gateway.runtime.snapshot import ConfigSnapshot
from tests.support.waiting import PATIENCE

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{echo: {{kind: echo}}}}
models:
  chat:
    versions: {{"1": {{backend: echo}}, "2": {{backend: echo}}}}
    split: {{weights: {{"1": 100, "2": 0}}}}
    {rollout}
observe: {{usage: {file}}}
"""


class RecordingRouter:
    """Keeps the weights that are set; it knows the models of its configuration only."""

    def __init__(self, config: Config) -> None:
        self._names = [*config.models]
        self.weights: dict[str, Mapping[str, int]] = {}

    def set_weights(self, name: str, weights: Mapping[str, int]) -> None:
        assert name in self._names
        self.weights[name] = weights


class Runtime:
    """A manager with the current configuration, and the file of its states."""

    def __init__(self, folder: Path, steps: str = "[1, 5, 25, 100]") -> None:
        self.path = folder / "u.sqlite"
        self.store = SqliteRolloutStore(str(self.path))
        self.snapshot = self._build(steps)
        self.clock: Iterator[float] = count(0.0, step=0.0)
        """The times that the manager reads, one after the other."""
        services = cast(
            "Any", SimpleNamespace(wall_clock=lambda: 1000.0, clock=lambda: next(self.clock))
        )
        self.manager = RolloutManager(lambda: self.snapshot, services)

    def _build(self, steps: str, model: str = "chat") -> ConfigSnapshot:
        rollout = f'rollout: {{to: "2", steps: {steps}, check_every: 1h}}' if steps else ""
        text = CONFIG.format(rollout=rollout, file=self.path).replace("chat:", f"{model}:")
        config = load_text(text, "g.yaml", env={})
        snapshot = SimpleNamespace(config=config, router=RecordingRouter(config))
        return cast("ConfigSnapshot", snapshot)

    def reload(self, steps: str, model: str = "chat") -> None:
        """Replace the configuration, as the gateway does."""
        snapshot = self._build(steps, model)
        self.manager.apply(snapshot.config, snapshot.router)
        self.snapshot = snapshot

    @property
    def weights(self) -> dict[str, Mapping[str, int]]:
        """The weights that the manager has set in the current router."""
        return cast("RecordingRouter", self.snapshot.router).weights

    @property
    def plan(self) -> str:
        rollout = self.snapshot.config.models["chat"].rollout
        assert rollout is not None
        return hash_plan(rollout)

    def set_state(self, state: RolloutState) -> None:
        before = self.store.load("chat", self.plan, 1000)
        assert self.store.save("chat", self.plan, before, state)


@pytest.mark.parametrize(
    ("step", "reloaded_steps", "weights"),
    [
        pytest.param(
            3, "[10, 100]", {"1": 10000, "2": 0}, id="another plan: nothing until it is read"
        ),
        pytest.param(2, "[1, 5, 25, 100]", {"1": 7500, "2": 2500}, id="the same plan: same step"),
    ],
)
async def test_reload_keeps_the_step_of_the_same_plan_only(
    tmp_path: Path, step: int, reloaded_steps: str, weights: Mapping[str, int]
) -> None:
    runtime = Runtime(tmp_path)
    runtime.set_state(RolloutState("paused", step, 1000))
    await runtime.manager.check()
    try:
        runtime.reload(reloaded_steps)
        assert runtime.weights["chat"] == weights
    finally:
        await runtime.manager.aclose()


async def test_rollout_that_a_reload_adds_is_followed_at_once(tmp_path: Path) -> None:
    """The task that follows the others is waiting for an hour."""
    runtime = Runtime(tmp_path, "[1, 100]")
    await runtime.manager.start()
    try:
        await asyncio.sleep(0)
        runtime.reload("[50, 100]")
        async with asyncio.timeout(PATIENCE):
            while "chat" not in runtime.manager.statuses:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        assert runtime.manager.statuses["chat"].plan == runtime.plan
    finally:
        await runtime.manager.aclose()


async def test_model_that_a_reload_removes_during_a_check_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reload comes while the state is read; its router does not know the model."""
    runtime = Runtime(tmp_path)
    load = SqliteRolloutStore.load
    loop = asyncio.get_running_loop()

    async def reload() -> None:
        runtime.reload("", "other")

    def load_slowly(
        self: SqliteRolloutStore, model: str, plan: str, now: float, step: int, *, last_read: None
    ) -> RolloutState:
        asyncio.run_coroutine_threadsafe(reload(), loop).result(30)
        return load(self, model, plan, now, step, last_read=last_read)

    monkeypatch.setattr(SqliteRolloutStore, "load", load_slowly)
    await runtime.manager.check()

    assert (runtime.weights, runtime.manager.statuses) == ({}, {})
    assert not caplog.records


async def test_state_that_can_not_be_read_is_logged_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(tmp_path)
    runtime.store.load("chat", runtime.plan, 1000)
    with closing(sqlite3.connect(runtime.path)) as file, file:
        file.execute("UPDATE rollout_plan SET state = '{'")
    try:
        await runtime.manager.start()
    finally:
        await runtime.manager.aclose()
    assert "rollout of chat: it can't be followed now; version 2 gets no requests" in caplog.text
    assert runtime.weights["chat"] == {"1": 10000, "2": 0}


async def test_version_gets_nothing_after_a_start_until_the_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database is locked; the rollout was at 5 %. Once read, the state outlasts a lock."""
    runtime = Runtime(tmp_path)
    runtime.set_state(RolloutState("paused", 1, 1000))
    load = SqliteRolloutStore.load

    def fail(*_: object, **__: object) -> RolloutState:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(SqliteRolloutStore, "load", fail)
    try:
        await runtime.manager.start()
        assert runtime.weights["chat"] == {"1": 10000, "2": 0}
        assert "locked; version 2 gets no requests until the state is known" in caplog.text
        runtime.reload("[50, 100]")
        assert runtime.weights["chat"] == {"1": 10000, "2": 0}
        runtime.reload("[1, 5, 25, 100]")

        monkeypatch.setattr(SqliteRolloutStore, "load", load)
        await runtime.manager.check()
        assert runtime.weights["chat"] == {"1": 9500, "2": 500}

        caplog.clear()
        monkeypatch.setattr(SqliteRolloutStore, "load", fail)
        await runtime.manager.check()
        assert runtime.weights["chat"] == {"1": 9500, "2": 500}
        assert "version 2 gets no requests" not in caplog.text
    finally:
        await runtime.manager.aclose()


async def test_gateway_without_the_version_that_all_roll_out_sends_its_own_no_requests(
    tmp_path: Path,
) -> None:
    """Another gateway, loaded later, rolls out a version 3, and then stops."""
    runtime = Runtime(tmp_path)
    runtime.set_state(RolloutState("paused", 1, 1000))
    rollout = runtime.snapshot.config.models["chat"].rollout
    assert rollout is not None
    await runtime.manager.check()
    weights = [runtime.weights["chat"]]

    others = build_settings(replace(rollout, to="3"), [], 1001.0, 3600.0)
    runtime.store.put_gateway("chat", "other", others)
    await runtime.manager.check()
    weights.append(runtime.weights["chat"])
    statuses = dict(runtime.manager.statuses)
    runtime.store.remove_gateway("chat", "other")
    await runtime.manager.check()
    weights.append(runtime.weights["chat"])

    assert weights == [{"1": 9500, "2": 500}, {"1": 10000, "2": 0}, {"1": 9500, "2": 500}]
    assert statuses == {}


async def test_store_that_can_not_be_opened_is_logged_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(config: Config) -> SqliteRolloutStore:
        raise RuntimeError(f"no store for {len(config.models)} models")

    monkeypatch.setattr(runtime_rollout, "open_rollout_store", fail)
    await Runtime(tmp_path).manager.check()
    assert "no store for 1 models" in caplog.text


async def test_database_that_is_locked_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> RolloutState:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(SqliteRolloutStore, "load", fail)
    await Runtime(tmp_path).manager.check()
    assert "the database can't be used now: database is locked" in caplog.text


async def test_rollout_goes_on_when_its_database_is_lost(tmp_path: Path) -> None:
    """A version that was rolled back gets no requests from a rollout that begins anew."""
    runtime = Runtime(tmp_path)
    state = RolloutState("rolled back", 2, 1000, "errors")
    runtime.set_state(state)
    await runtime.manager.check()
    runtime.path.unlink()
    await runtime.manager.check()
    assert runtime.store.read("chat", runtime.plan) == state
    assert runtime.weights["chat"] == {"1": 10000, "2": 0}


async def test_step_from_before_the_clock_went_back_begins_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock shows 1000; the step began a day later, so that no request would count."""
    runtime = Runtime(tmp_path)
    runtime.set_state(RolloutState(step=1, step_at=1000 + 86400))
    await runtime.manager.check()
    assert runtime.store.read("chat", runtime.plan) == RolloutState(step=1, step_at=1000)
    assert "the step begins anew, since the clock went back" in caplog.text


async def test_all_requests_of_a_step_count(tmp_path: Path) -> None:
    """Of 400 requests half go to version 2: the 200 that end the step."""
    runtime = Runtime(tmp_path)
    runtime.set_state(RolloutState(step_at=100.0))
    recorder = SqliteUsageRecorder(str(runtime.path), 86400, lambda: 1000.0)
    for n in range(400):
        record = RequestRecord(f"r{n}", 200.0 + n, "openai", model="chat", version=str(1 + n % 2))
        record.split, record.outcome = "chat", "ok"
        recorder.record_usage(record)
    recorder.start()
    recorder.close(10)
    await runtime.manager.check()
    assert runtime.manager.statuses["chat"].state == RolloutState("running", 1, 1000.0)


@pytest.mark.parametrize(
    ("state", "reads"),
    [
        (RolloutState(), 1),
        (RolloutState("holding", reason="no proof within step_at_most"), 1),
        (RolloutState("holding", reason="errors", is_breached=True), 0),
        (RolloutState("paused"), 1),
        (RolloutState("rolled back"), 0),
        (RolloutState("completed", 3), 0),
    ],
)
async def test_requests_are_read_only_where_they_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RolloutState, reads: int
) -> None:
    runtime = Runtime(tmp_path)
    runtime.set_state(state)
    read_models = []

    def read(*arguments: object, is_shadow: bool) -> StepSamples:
        assert not is_shadow
        read_models.append(arguments)
        none = Tally(0, 0)
        return StepSamples((none, none), {}, {})

    monkeypatch.setattr(module, "read_samples", read)
    await runtime.manager.check()
    assert len(read_models) == reads


async def test_look_at_the_requests_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look from 100 to 105 s: none at 154 s, and one at 155 s."""
    runtime = Runtime(tmp_path)
    runtime.set_state(RolloutState())
    reads, none = [], Tally(0, 0)

    def read(*arguments: object, is_shadow: bool) -> StepSamples:
        reads.append(arguments)
        return StepSamples((none, none), {}, {})

    monkeypatch.setattr(module, "read_samples", read)
    runtime.clock = chain((100.0, 105.0, 154.0, 155.0), repeat(156.0))
    numbers = []
    for _ in range(3):
        await runtime.manager.check()
        numbers.append(len(reads))
    assert numbers == [1, 1, 2]
