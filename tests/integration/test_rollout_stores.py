"""Gateways share a rollout: by one SQLite file, by a real PostgreSQL, by a real Redis."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import asyncpg  # type: ignore[import-untyped]
import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.config.schema import (
    CompareGuardrailsConfig,
    Config,
    DecreaseConfig,
    GuardrailsConfig,
    IncreaseConfig,
    RolloutConfig,
)
from gateway.evidence.quantiles import count_times
from gateway.evidence.rollout import RolloutState, hash_plan
from gateway.evidence.rollout_store import open_rollout_store
from gateway.evidence.sequential import Tally
from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import SqliteUsageRecorder, UsageRecorder
from gateway.observability.usage_postgres import create_postgres_recorder
from tests.conftest import Serve
from tests.fault.gateway_process import GatewayProcess
from tests.integration.test_rollout import BROKEN, CHAT, CONFIG, GOOD, send, send_until, show_status
from tests.support.fakes import ScriptedWorker
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

NOW: Final = 1_700_000_000.0


class SharedPlace:
    """Where gateways keep a rollout. Each gateway has a folder of its own."""

    def __init__(self, folder: Path, usage: str, settings: str = "") -> None:
        """``usage`` is the place of the usage rows, in which OWN is the gateway's folder."""
        self._folder = folder
        self._usage = usage
        self._more = settings

    def create_folder(self, gateway: str) -> Path:
        folder = self._folder / gateway
        folder.mkdir(exist_ok=True)
        return folder

    def build_config(self, gateway: str, old: str = "", new: str = "", settings: str = "") -> str:
        """The configuration of a gateway with these workers."""
        usage = self._usage.replace("OWN", str(self.create_folder(gateway)))
        old, new = old or "http://127.0.0.1:1", new or "http://127.0.0.1:2"
        return f"{CONFIG.format(old=old, new=new, file=usage, more=settings)}{self._more}\n"

    def load(self, gateway: str) -> Config:
        return load_text(self.build_config(gateway), "g.yaml", env={})


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> SharedPlace:
    match request.param:
        case "postgres":
            url = request.getfixturevalue("postgres").url
            asyncio.run(drop_tables(url))
            return SharedPlace(tmp_path, f'{{postgres: "{url}"}}')
        case "redis":
            server: RedisServer = request.getfixturevalue("redis")
            server.call("FLUSHALL")
            return SharedPlace(tmp_path, "OWN/u.sqlite", f'state: {{redis: "{server.url}"}}')
        case _:
            return SharedPlace(tmp_path, str(tmp_path / "u.sqlite"))


async def drop_tables(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "DROP TABLE IF EXISTS interlingua_usage, interlingua_rollout, interlingua_feedback"
        )
    finally:
        await connection.close()


def get_rollout(config: Config) -> tuple[RolloutConfig, str]:
    """The rollout of a configuration, and the hash of its plan."""
    rollout = config.models["chat"].rollout
    assert rollout is not None
    return rollout, hash_plan(rollout)


def write_requests(config: Config, count: int, failed: int) -> None:
    """Write usage rows: ``count`` of version 1, and as many of version 2, of which some failed.

    Half of the texts are JSON. Each user judges two requests of one version, first with thumbs up.
    """
    usage = config.observe.usage
    assert usage is not None
    recorder: UsageRecorder
    if usage.postgres is not None:
        recorder = create_postgres_recorder(
            usage.postgres.reveal(), 1e12, lambda: NOW, feedback=True
        )
    else:
        recorder = SqliteUsageRecorder(str(usage.sqlite), 1e12, lambda: NOW, feedback=True)
    for n in range(2 * count):
        record = RequestRecord(f"r{n}", NOW + n, "openai", model="chat", version=str(1 + n % 2))
        record.split, record.first_token = "chat", 0.1 + n % 2
        record.outcome = "worker_error" if n % 2 and n < 2 * failed else "ok"
        record.measures = {"json_valid": n % 4 < 2, "not_empty": True}
        record.user_hash = f"u{n // 4}, {n % 2}"
        recorder.record_usage(record)
        thumbs_up = float(n % 4 < 2)
        recorder.record_feedback(
            Feedback(NOW + 1000 + n, "", False, "id", f"r{n}", "up", "boolean", thumbs_up)
        )
    recorder.start()
    recorder.close(30)
    assert recorder.count_dropped() == 0


def test_all_gateways_see_one_state_and_one_of_them_decides(place: SharedPlace) -> None:
    """What a gateway decides on an old state is not written."""
    config = place.load("a")
    first, second = (open_rollout_store(place.load(name)) for name in ("a", "b"))
    _, plan = get_rollout(config)
    assert second.read("chat", plan) is None
    state = first.load("chat", plan, NOW)
    assert state == RolloutState(step_at=NOW)
    assert second.load("chat", plan, NOW + 9) == second.read("chat", plan) == state

    assert first.take_lease("chat", plan, "a", NOW, 600)
    assert not second.take_lease("chat", plan, "b", NOW, 600)
    assert first.take_lease("chat", plan, "a", NOW, 600)

    raised = replace(state, step=1)
    assert second.save("chat", plan, state, raised)
    assert not first.save("chat", plan, state, replace(state, phase="paused"))
    assert first.read("chat", plan) == raised
    assert first.read("chat", "another plan") is None
    first.close()
    second.close()


def test_lease_that_is_not_renewed_runs_out(place: SharedPlace) -> None:
    """Redis measures it by its own clock, the databases by that of the gateways."""
    store = open_rollout_store(place.load("a"))
    store.load("chat", "plan", NOW)
    assert store.take_lease("chat", "plan", "a", NOW, 0.01)
    end = time.monotonic() + 30
    while not store.take_lease("chat", "plan", "b", NOW + 1, 600):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not store.take_lease("chat", "plan", "a", NOW + 1, 600)
    store.close()


def test_requests_of_all_gateways_decide(place: SharedPlace) -> None:
    """One file or database has those of both; files of their own are added up."""
    configs = [place.load(name) for name in ("a", "b")]
    is_shared = configs[0].observe.usage == configs[1].observe.usage
    write_requests(configs[0], 100, 20)
    if not is_shared:
        write_requests(configs[1], 100, 10)
    rollout, _ = get_rollout(configs[0])
    rollout = replace(
        rollout,
        guardrails=GuardrailsConfig(
            errors=IncreaseConfig(max_increase=0.01),
            first_token_p50=IncreaseConfig(max_increase=0.1),
            first_token_p95=IncreaseConfig(max_increase=0.1),
            feedback={"up": DecreaseConfig(max_decrease=0.1)},
            compare=CompareGuardrailsConfig(json_valid=DecreaseConfig(max_decrease=0.1)),
        ),
    )
    first, second = map(open_rollout_store, configs)
    for _ in range(2):  # as two processes do
        second.publish_samples(rollout, "chat", "chat", RolloutState(step_at=NOW))
    samples = first.read_samples(rollout, "chat", "chat", RolloutState(step_at=NOW))
    expected = (Tally(0, 100), Tally(20, 100)) if is_shared else (Tally(0, 200), Tally(30, 200))
    assert samples.errors == expected
    later = RolloutState(step_at=NOW + 1000)
    n = expected[0].n
    assert samples.numbers == {"first_token": (count_times([0.1] * n), count_times([1.1] * n))}
    assert samples.feedback == {"up": (Tally(n / 2, n // 2), Tally(n / 2, n // 2))}
    assert samples.compare == {"json_valid": (Tally(n / 2, n), Tally(n / 2, n))}
    assert first.read_samples(rollout, "chat", "chat", later).requests == 0
    first.close()
    second.close()


def test_reading_a_rollout_in_redis_makes_no_file_of_usage_rows(
    redis: RedisServer, tmp_path: Path
) -> None:
    """As ``interlingua rollout status`` does before the gateway has written a row."""
    place = SharedPlace(tmp_path, "OWN/u.sqlite", f'state: {{redis: "{redis.url}"}}')
    redis.call("FLUSHALL")
    config = place.load("a")
    rollout, plan = get_rollout(config)
    store = open_rollout_store(config)
    state = store.load("chat", plan, NOW)
    assert store.read_samples(rollout, "chat", "chat", state).requests == 0
    assert [*place.create_folder("a").iterdir()] == []
    store.close()


async def read_versions(gateway: GatewayProcess, count: int = 40) -> Counter[str]:
    """Send requests of as many users; returns how many each version got."""
    versions = Counter[str]()
    for n in range(count):
        reply = await gateway.http.post(
            f"{gateway.urls[0]}/v1/chat/completions", json=CHAT, headers={"x-user-id": f"u{n}"}
        )
        versions[reply.headers.get("x-served-model", "2")] += 1
    return versions


async def wait_for_versions(
    gateway: GatewayProcess, is_done: Callable[[Counter[str]], bool]
) -> Counter[str]:
    async with asyncio.timeout(60):
        while not is_done(versions := await read_versions(gateway)):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.1)
    return versions


async def test_gateway_that_decides_rolls_back_by_the_requests_of_another(
    serve: Serve, place: SharedPlace
) -> None:
    """The first gateway has the lease and no requests; the worker of version 2 answers 500."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
        text = place.build_config("a", old.url, new.url)
        first = await serve(text)
        second = await serve(place.build_config("b", old.url, new.url))
        assert (await send(second))["2"] > 0
        await send_until(second, lambda versions: not versions["2"])
        code, printed = await show_status(place.create_folder("a"), text)
        sent = new.request_count
        await send_until(first, lambda versions: not versions["2"])
    assert (code, "chat@2: rolled back" in printed) == (0, True)
    assert sent >= 1


async def test_gateways_with_different_settings_make_one_decision_by_the_latest(
    serve: Serve, place: SharedPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """The first has 20 % and no guardrails, the second 45 %; version 2's worker answers 500."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
        latest = place.build_config("b", old.url, new.url).replace("[20, 50, 100]", "[45, 100]")
        stale = place.build_config("a", old.url, new.url, "step_at_most: 1h")
        stale = stale.replace("{errors: {max_increase: 5%}}", "{}")
        first = await serve(stale)
        share = await send(first, 10)
        second = await serve(latest)
        await send_until(second, lambda versions: not versions["2"])
        await send_until(first, lambda versions: not versions["2"])
        reports = [
            await show_status(place.create_folder(name), text)
            for name, text in (("a", stale), ("b", latest))
        ]
        await wait_until(lambda: "gateway processes with other settings" in caplog.text)
    assert share["1"] > 0
    expected = "(guardrails, step_at_most, steps): 1 of 2; all follow those that were loaded last"
    for code, printed in reports:
        assert code == 0
        assert printed.startswith("chat@2: rolled back\n  errors: 0.0% → 100.0%")
        assert f"gateway processes with other settings {expected}: to 2, steps 45, 100" in printed
    assert caplog.text.count("chat@2: rolled back at 0 %") == 2


async def test_operator_of_a_gateway_with_other_settings_steers_the_rollout_of_all(
    serve: Serve, place: SharedPlace
) -> None:
    async with ScriptedWorker(GOOD) as worker:
        stale = place.build_config("a", worker.url, worker.url).replace(
            "requests: 30", "requests: 99999"
        )
        latest = place.build_config("b", worker.url, worker.url).replace(
            "[20, 50, 100]", "[45, 90]"
        )
        latest = latest.replace("requests: 30", "requests: 99999")
        first, second = await serve(stale), await serve(latest)
        code, printed = await show_status(place.create_folder("a"), stale, "promote")
        assert (code, printed) == (0, "chat@2: running, 90 %\n")
        await send_until(second, lambda versions: versions["2"] > 30)
        raised = await send(second)  # the share may have risen amid the requests before
        await send_until(first, lambda versions: versions == raised)

        await show_status(place.create_folder("a"), stale, "abort")
        await send_until(first, lambda versions: not versions["2"])
        await send_until(second, lambda versions: not versions["2"])


async def test_rollout_goes_on_after_kill_9(place: SharedPlace) -> None:
    """The gateway is killed in the second step and started again."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(GOOD) as new:
        text = place.build_config("a", old.url, new.url).replace("requests: 30", "requests: 99999")
        folder = place.create_folder("a")
        async with GatewayProcess(folder, text) as gateway:
            before = await read_versions(gateway)
            code, printed = await show_status(folder, text, "promote")
            assert (code, printed) == (0, "chat@2: running, 50 %\n")
            await wait_for_versions(gateway, lambda one: one["2"] > before["2"])
            raised = await read_versions(gateway)  # the share may have risen amid those before
            await gateway.kill_and_restart()
            assert await read_versions(gateway) == raised
            code, printed = await show_status(folder, text)
    assert (code, printed.splitlines()[0]) == (0, "chat@2: running, 50 %")


@pytest.mark.parametrize("name", ["postgres", "redis"])
async def test_step_goes_on_when_a_store_that_was_killed_is_back(
    serve: Serve,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    """The server is killed in the step, and the worker of version 2 answers 500 all the time."""
    server: PostgresServer | RedisServer
    with PostgresServer() if name == "postgres" else RedisServer() as server:
        usage = f'{{postgres: "{server.url}"}}' if name == "postgres" else "OWN/u.sqlite"
        more = "" if name == "postgres" else f'state: {{redis: "{server.url}"}}'
        place = SharedPlace(tmp_path, usage, more)
        async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
            text = place.build_config("a", old.url, new.url)
            gateway = await serve(text)
            server.kill()
            await wait_until(lambda: "the database can't be used now" in caplog.text)
            during = await send(gateway)
            server.start()
            await send_until(gateway, lambda versions: not versions["2"])
            code, printed = await show_status(place.create_folder("a"), text)

    assert during["2"] > 0
    assert (code, "chat@2: rolled back\n  errors: 0.0% → 100.0%" in printed) == (0, True)


async def test_serving_processes_of_one_gateway_share_a_rollout(place: SharedPlace) -> None:
    """The worker of version 2 answers 500: no process sends it requests in the end."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
        text, folder = place.build_config("a", old.url, new.url), place.create_folder("a")
        async with GatewayProcess(folder, text, "--processes", "2") as gateway:
            await wait_for_versions(gateway, lambda versions: versions["2"] > 0)
            await wait_for_versions(gateway, lambda versions: not versions["2"])
            code, printed = await show_status(folder, text)
    assert (code, "chat@2: rolled back" in printed) == (0, True)
