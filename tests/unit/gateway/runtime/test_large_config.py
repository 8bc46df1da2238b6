"""10,000 models and 100,000 keys load with work proportional to their number."""

import hashlib
import json
import sys
from pathlib import Path
from types import FrameType

import pytest

from gateway.config.loader import LoadedConfig, load_file
from gateway.runtime.build import build_principals
from gateway.runtime.gateway import build_services
from gateway.runtime.snapshot import ConfigSnapshot

LIMITS = {"requests": "100/min", "tokens": "1M/h", "budget": "5M/day"}


def write_config(folder: Path, models: int, keys: int, models_per_pool: int = 10) -> Path:
    """Write a configuration with one model for each key."""
    pools = [
        f"  pool-{n}: {{protocol: openai, workers: ['http://10.0.0.1:{n + 1}']}}"
        for n in range(models // models_per_pool)
    ]
    lines = [
        f"  model-{n}: {{backend: pool-{n // models_per_pool}, aliases: [alias-{n}]"
        + (f", fallback: [model-{n + 1}]}}" if n + 1 < models else "}")
        for n in range(models)
    ]
    entries = [
        {
            "name": f"key-{n}",
            "sha256": hashlib.sha256(b"%d" % n).hexdigest(),
            "models": [f"alias-{n % models}"],
            "tags": [f"tag-{n % 10}"],
            "limits": LIMITS,
        }
        for n in range(keys)
    ]
    routes = [
        f"  - {{name: r{n}, when: {{tag: tag-{n}, model: model-{n}}}, to: {{model: model-1}}}}"
        for n in range(10)
    ]
    path = folder / "gateway.yaml"
    (folder / "keys.jsonl").write_text("\n".join(map(json.dumps, entries)))
    sections = ["keys_file: keys.jsonl", "backends:", *pools, "models:", *lines, "routes:", *routes]
    path.write_text("\n".join(sections))
    return path


def build_snapshot(path: Path) -> tuple[LoadedConfig, ConfigSnapshot]:
    loaded = load_file(str(path), env={})
    return loaded, ConfigSnapshot(loaded.config, build_services())


def count_calls(path: Path) -> int:
    """Return the number of calls of Python and C functions during a start."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        del frame, argument
        calls += event.endswith("call")

    sys.setprofile(count)
    try:
        build_snapshot(path)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow
def test_ten_thousand_models_and_a_hundred_thousand_keys_load(tmp_path: Path) -> None:
    loaded, snapshot = build_snapshot(write_config(tmp_path, 10_000, 100_000))
    config = loaded.config
    assert (len(config.models), len(config.keys)) == (10_000, 100_000)
    assert snapshot.router.find_model("alias-9999").name == "model-9999"

    principals = build_principals(config)
    assert principals[99_999].models == frozenset({"model-9999"})
    assert principals[99_999].models is principals[9_999].models  # equal lists share one object
    assert snapshot.rate_limiter is not None
    assert not snapshot.rate_limiter.daily_budgets  # no key has been used


def test_work_at_start_is_in_proportion_to_models_and_keys(tmp_path: Path) -> None:
    build_snapshot(write_config(tmp_path, 20, 200))  # fills imports and caches
    small = count_calls(write_config(tmp_path, 100, 1_000, 2))

    large = count_calls(write_config(tmp_path, 1_000, 10_000, 2))

    assert large < 11 * small


@pytest.mark.parametrize("size", [100, 1_000])
def test_a_chain_of_fallbacks_is_checked_once(tmp_path: Path, size: int) -> None:
    loaded = load_file(str(write_config(tmp_path, size, 10)), env={})
    assert loaded.config.models["model-0"].fallback == ("model-1",)
