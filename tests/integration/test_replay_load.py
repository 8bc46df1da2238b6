"""A replay sheds no load: whatever fails is the target's failure, or is counted apart."""

from pathlib import Path

import pytest

from backends.pool.settings import PoolSettings
from gateway.config.loader import load_text
from gateway.observability.recording import read_recordings
from gateway.tools.replay.target import WorkerOptions, build_config_target, build_worker_target
from tests.conftest import Serve
from tests.integration.test_replay import CHAT, CONFIG, send_all, wait_for
from tests.support.commands import run_command
from tests.support.fakes import ScriptedWorker, make_reply

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


async def test_requests_that_reach_no_worker_are_counted_apart_and_sent_again(
    serve: Serve, recordings: Path, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.yaml"
    text = CONFIG.replace("FOLDER", str(recordings))
    config.write_text(text)
    await send_all(await serve(text), [("/v1/chat/completions", CHAT)] * 3)
    await wait_for(recordings, 3)
    options = ("--config", config, "--to", "chat@4", "--out", tmp_path / "out")

    _, printed = await run_command("replay", recordings, *options)
    assert "0 of 3 requests were sent, 0 of them failed" in printed
    assert "3 could not be sent, since no worker could be reached" in printed
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
        assert (pool.queue.max, pool.timeouts.connect) == (100_000, 60.0)
