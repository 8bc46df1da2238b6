"""A profile shows the gateway's functions under a real load, with their shares."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.bench import profiles, runner
from tests.bench.gateways import OPENAI
from tests.bench.loads import Load, Traffic
from tests.bench.traffic import repeated_chat

ROOT = Path(__file__).parents[2]
LOAD = Load(name="unary", clients=4, count=2_000, seconds=5.0)


@pytest.fixture(autouse=True)
def isolate_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a lock of the test's own, and measure no other load."""
    monkeypatch.setattr(runner, "CACHE", tmp_path)
    monkeypatch.setattr(runner, "_WATCH_TIME", 0.01)


def test_profile_contains_request_functions_but_no_runner() -> None:
    entries = {entry for stack, _ in profiles.record_profile(LOAD, OPENAI) for entry in stack}

    assert any(entry.endswith(":RequestHandler.handle") for entry in entries)
    assert not any(
        "gateway/cli/__init__.py" in entry or ":Runner.run" in entry for entry in entries
    )


def test_failed_load_has_no_profile() -> None:
    requests = repeated_chat(Traffic(), "unary", "no-such-model")
    pair = replace(OPENAI, make_requests=lambda traffic, form: requests)
    with pytest.raises(RuntimeError, match="no profile: does not run here"):
        profiles.record_profile(LOAD, pair)


def test_profile_shares_are_relative_to_all_samples() -> None:
    serve, send = (
        f"{ROOT}/gateway/pipeline/handler.py:RequestHandler.handle",
        f"{ROOT}/backends/write_batching.py:send",
    )
    stacks = [([send, serve], 5), (["/lib/tasks.py:current_task", serve], 3), ([], 2)]

    assert [*profiles.format_profile(stacks)] == [
        "10 samples",
        "\n  share  package",
        "  50.0%  backends/write_batching.py",
        "  30.0%  gateway/pipeline",
        "  20.0%  the event loop",
        "\n  share  function",
        "  50.0%  backends/write_batching.py:send",
        "  30.0%  tasks.py:current_task",
        "  20.0%  the event loop",
    ]
