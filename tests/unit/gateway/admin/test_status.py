"""Statistics of the last minute, merged from several processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import gateway.admin
from backends.histogram import Histogram
from gateway.admin.config_view import describe_config
from gateway.admin.status import GatewayStatus, _list_models, merge_statuses
from gateway.admin.version_stats import RecentStats
from gateway.admin.version_stats import VersionStats as AdminVersionStats
from gateway.config.loader import load_text
from gateway.memory import MemoryStatus
from gateway.observability.record import RequestOutcome, RequestRecord
from gateway.observability.stats import FIRST_TOKEN_BUCKETS, RequestStats, StatsKey
from protocols.core.catalog import ModelFeatures, ModelInfo, ModelState, VersionInfo
from protocols.core.events import Usage

STATIC = Path(gateway.admin.__file__).parent / "static"
EDGES = len(FIRST_TOKEN_BUCKETS)
SPLIT_VERSION = ("m", "1", "split")


class FakeClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_record(
    first: float | None = 0.03, tokens: int = 10, outcome: RequestOutcome = "ok"
) -> RequestRecord:
    error = "" if outcome == "ok" else "WorkerFailed"
    usage = Usage(5, tokens, cached_tokens=3)
    return RequestRecord("x", first_token=first, usage=usage, outcome=outcome, error=error)


def make_bucket_counts(*at: int) -> list[int]:
    return [at.count(n) for n in range(EDGES + 1)]


def test_rates_cover_the_last_minute_and_totals_cover_the_time_since_start() -> None:
    clock = FakeClock()
    arms: dict[StatsKey, RequestStats[Histogram]] = {SPLIT_VERSION: RequestStats(Histogram)}
    window = RecentStats(lambda: arms, clock)

    assert window.sample()[0] == 0

    arms[SPLIT_VERSION].add_records(make_record(first=0.9))
    clock.now += 50
    [seconds, [then]] = window.sample()

    assert (seconds, then.requests, then.requests_per_second) == (50, 1, 0.02)
    assert then.first_token_p50 == pytest.approx(0.875)

    clock.now += 60
    arms[SPLIT_VERSION].add_records(make_record())
    pinned = arms["m", "1", ""] = RequestStats(Histogram)
    pinned.add_records(make_record(outcome="worker_error"))
    [seconds, [now]] = window.sample()

    assert seconds == 60
    assert (now.requests, now.errors) == (3, 1)
    assert (now.prompt_tokens, now.completion_tokens) == (15, 30)
    assert now.requests_per_second == pytest.approx(2 / 60)
    assert now.tokens_per_second == pytest.approx(20 / 60)
    assert now.first_token_p50 == pytest.approx(0.03)


def test_frequent_samples_are_thinned_out() -> None:
    clock = FakeClock()
    arms: dict[StatsKey, RequestStats[Histogram]] = {}
    window = RecentStats(lambda: arms, clock)

    for _ in range(1000):
        clock.now += 0.5
        window.sample()

    assert len(window._samples) <= 14
    assert 60 <= window.sample()[0] < 65


FIRST = AdminVersionStats(
    model="m",
    version="1",
    requests=4,
    errors=1,
    prompt_tokens=10,
    completion_tokens=20,
    requests_per_second=0.5,
    tokens_per_second=2.0,
    first_token_counts=make_bucket_counts(0, 0),
)
STATUS = GatewayStatus(
    version="1",
    python="3",
    config_hash="abc",
    uptime=5.0,
    draining=True,
    running=1,
    recent_seconds=30.0,
    listeners=(),
    models=(),
    stats=[FIRST],
    failures={},
    backends={"a": False, "b": False},
    workers={},
    memory=MemoryStatus(limit=100, used=9, uses={"bodies": 9}, refused=1, closed=2),
)


def test_statuses_of_several_processes_are_merged() -> None:
    second = replace(
        FIRST, requests=1, first_token_counts=make_bucket_counts(3, 3), first_token_p50=9.0
    )
    third = replace(FIRST, version="2")
    other = replace(
        STATUS,
        uptime=7.0,
        draining=False,
        running=2,
        recent_seconds=20.0,
        stats=[second, third],
        backends={"a": True},
        failures={"b": "no such model"},
    )
    merged = merge_statuses([STATUS, other], {"pool": []})

    assert (merged.uptime, merged.draining, merged.running, merged.recent_seconds) == (
        7.0,
        False,
        3,
        30.0,
    )
    assert merged.processes == 2
    assert merged.memory == MemoryStatus(
        limit=200, used=18, uses={"bodies": 18}, refused=2, closed=4
    )
    assert merged.backends == {"a": True, "b": False}
    assert merged.failures == {"b": "no such model"}
    assert merged.workers == {"pool": []}

    one, two = merged.stats
    assert (one.requests, one.errors, one.completion_tokens) == (5, 2, 40)
    assert (one.requests_per_second, one.tokens_per_second) == (1.0, 4.0)
    assert one.first_token_p50 == pytest.approx(0.001)
    assert one.first_token_counts == make_bucket_counts(0, 0, 3, 3)
    assert (two.version, two.requests) == ("2", 4)


async def test_digest_and_watermark_key_are_masked_in_the_shown_configuration() -> None:
    text = """
    admin: {address: "127.0.0.1:0", sha256: DIGEST}
    backends: {own: {kind: torch, path: "package:weights", watermark: {key: 987654321}}}
    models: {m: {backend: own}}
    """
    config = load_text(text.replace("DIGEST", "ab" * 32), "<built in>", env={})
    description = await describe_config(config, "abc", "<built in>")

    admin = {"address": "127.0.0.1:0", "sha256": "***", "key_for": "all"}
    assert description["config"]["admin"] == admin
    assert description["config"]["backends"]["own"]["watermark"] == "***"
    assert description["file"] == {"name": "<built in>", "hash": None, "differs": False}


def test_web_ui_shows_what_is_known_of_a_local_model() -> None:
    """In the words of the log and of ``interlingua models show``; nothing of remote models."""
    features = ModelFeatures(chat=True, problem="no marks")
    versions = (
        VersionInfo("1", "m", 50, state=ModelState(loaded=True, features=features)),
        VersionInfo("2", "m", 50),
    )
    targets = {one.name: SimpleNamespace(backend="local") for one in versions}
    model = SimpleNamespace(resolve_targets=lambda: targets)
    snapshot: Any = SimpleNamespace(
        router=SimpleNamespace(list_models=lambda: [ModelInfo("chat", versions)]),
        config=SimpleNamespace(models={"chat": model}),
    )
    (status,) = _list_models(snapshot)
    assert [one.description for one in status.versions] == [dict(features.describe()), {}]
    page = (STATIC / "status.js").read_text()
    encoder = ModelState(loaded=True, features=ModelFeatures(task="embedding"))
    unloaded = ModelState(loaded=False)
    for one in (versions[0].state, encoder, unloaded):
        assert one is not None
        for subject, _ in one.describe():
            assert f'"{subject}"' in page
