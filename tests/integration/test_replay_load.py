"""A replay sheds no load: each failure is the target's, or is counted separately."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from backends.pool.settings import PoolSettings
from gateway.config.loader import load_text
from gateway.observability.recording import RecordedTiming, read_recordings
from gateway.tools.replay.target import WorkerOptions, build_config_target, build_worker_target
from tests.conftest import Serve
from tests.integration.test_replay import CHAT, CONFIG, DAWN, send_all, wait_for
from tests.support.commands import run_command
from tests.support.fakes import Reply, ScriptedWorker, make_reply
from tests.support.waiting import wait_until

FAILURES = 30


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable"])
async def test_every_failure_is_the_workers_and_none_is_ejected(
    serve: Serve, recordings: Path, tmp_path: Path, status: str
) -> None:
    config = tmp_path / "gateway.yaml"
    async with ScriptedWorker([make_reply(b"{}", status=status)]) as worker:
        text = CONFIG.replace("FOLDER", str(recordings)).replace("http://127.0.0.1:9", worker.url)
        config.write_text(text + "defaults: {retries: {max: 0}}\n")
        await send_all(await serve(text), [("/v1/chat/completions", CHAT)] * FAILURES)
        await wait_for(recordings, FAILURES)
        code, printed = await run_command(
            "replay", recordings, "--config", config, "--to", "chat@4", "--out", tmp_path / "out"
        )

    results = list(read_recordings(tmp_path / "out"))
    assert code == 0
    assert {result.status >= 500 for result in results} == {True}
    assert len(results) == FAILURES
    assert f"{FAILURES} of {FAILURES} requests were sent, {FAILURES} of them failed" in printed
    assert "could not be sent" not in printed


@pytest.mark.parametrize(("is_always_busy", "failed"), [(False, 0), (True, 6)])
async def test_a_busy_worker_gets_the_request_again_and_only_that_result_counts(
    serve: Serve, recordings: Path, tmp_path: Path, *, is_always_busy: bool, failed: int
) -> None:
    """The worker answers 429 while requests run side by side, or to each one."""
    config, count = tmp_path / "gateway.yaml", 6
    busy = [make_reply(b"{}", status="429 Too Many Requests")]
    good = [make_reply(json.dumps(DAWN).encode())]
    answers = [busy] if is_always_busy else [*[busy] * count, good]
    async with ScriptedWorker(*answers) as worker:
        text = CONFIG.replace("FOLDER", str(recordings)).replace("http://127.0.0.1:9", worker.url)
        config.write_text(text + "defaults: {retries: {max: 0}}\n")
        await send_all(await serve(text), [("/v1/chat/completions", CHAT)] * count)
        await wait_for(recordings, count)
        _, printed = await run_command(
            "replay", recordings, "--config", config, "--to", "chat@4", "--out", tmp_path / "out"
        )

    results = list(read_recordings(tmp_path / "out"))
    assert len(results) == count
    assert sum(result.status == 429 for result in results) == failed
    assert f"{count} of {count} requests were sent, {failed} of them failed" in printed
    pattern = r"(\d+) were sent once more, one at a time, since the worker answered 429"
    repeated = re.search(pattern, printed)
    assert repeated is not None
    without_times = [result for result in results if result.timing == RecordedTiming()]
    assert len(without_times) == int(repeated[1]), "times of another load"


async def test_bursts_of_429s_do_not_lower_the_concurrency(
    serve: Serve, recordings: Path, tmp_path: Path
) -> None:
    """The worker answers 429 to eight requests, and then only once it has eight at a time."""
    config, concurrency = tmp_path / "gateway.yaml", 8
    all_are_there = asyncio.Event()
    busy = [make_reply(b"{}", status="429 Too Many Requests")]
    good: Reply = [all_are_there, make_reply(json.dumps(DAWN).encode())]
    healthy = make_reply(b"{}")
    async with ScriptedWorker(*[busy] * concurrency, good, probed=healthy) as worker:
        text = CONFIG.replace("FOLDER", str(recordings)).replace("http://127.0.0.1:9", worker.url)
        config.write_text(text + "defaults: {retries: {max: 0}}\n")
        requests = [("/v1/chat/completions", CHAT)] * 2 * concurrency
        await send_all(await serve(text), requests)
        await wait_for(recordings, 2 * concurrency)
        replay = asyncio.create_task(
            run_command(
                "replay", recordings, "--config", config, "--to", "chat@4",
                "--concurrency", concurrency, "--out", tmp_path / "out",
            )
        )  # fmt: skip

        await wait_until(lambda: worker.active == concurrency)

        all_are_there.set()
        code, printed = await replay
    assert code == 0
    assert f"{2 * concurrency} of {2 * concurrency} requests were sent, 0 of them failed" in printed


async def test_requests_that_reach_no_worker_are_counted_apart_and_sent_again(
    serve: Serve, recordings: Path, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.yaml"
    text = CONFIG.replace("FOLDER", str(recordings))
    config.write_text(text)
    await send_all(await serve(text), [("/v1/chat/completions", CHAT)] * 3)
    await wait_for(recordings, 3)
    options = ("--config", config, "--to", "chat@4", "--out", tmp_path / "out")

    code, printed = await run_command("replay", recordings, *options)
    assert code == 1
    assert "0 of 3 requests were sent, 0 of them failed" in printed
    assert "3 could not be sent, since no worker was free or could be reached" in printed
    assert not list(read_recordings(tmp_path / "out"))

    _, again = await run_command("replay", recordings, *options)
    assert "3 could not be sent" in again


def test_pools_of_both_kinds_of_target_shed_no_load() -> None:
    config = load_text(CONFIG.replace("FOLDER", "recordings"), "g.yaml", env={})
    targets = (
        build_config_target(config, "g.yaml", "chat@4", ["chat"], "out"),
        build_worker_target(WorkerOptions("http://127.0.0.1:9", "openai"), ["chat"], "out"),
    )

    for target in targets:
        [pool] = target.config.backends.values()
        assert isinstance(pool, PoolSettings)
        assert pool.timeouts is not None
        assert min(pool.breaker.consecutive_failures, pool.breaker.min_requests) > 10**6
        assert pool.health.fall > 10**6
        assert not pool.breaker.adaptive_concurrency
        assert (pool.queue.max, pool.timeouts.connect) == (100_000, 60.0)
