"""Statistics of the last 15 minutes in intervals, merged from several processes."""

from typing import Final

import msgspec
import pytest

from backends.histogram import Histogram
from gateway.admin.history import (
    MAX_INTERVALS,
    SAMPLE_INTERVAL,
    ErrorCount,
    HistoryRecorder,
    StatsHistory,
    merge_histories,
)
from gateway.observability.record import RequestOutcome, RequestRecord
from gateway.observability.stats import RequestStats, StatsKey
from protocols.core.events import Usage

SPLIT: Final = ("m", "1", "split")
PINNED: Final = ("m", "1", "")
UNKNOWN: Final = ("", "", "")


class FakeClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RecordedHistory:
    """A recorder, its clock, and the statistics that it samples."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.stats: dict[StatsKey, RequestStats[Histogram]] = {}
        self.recorder = HistoryRecorder(lambda: self.stats, self.clock)

    def add(self, key: StatsKey, error: str = "", first: float | None = 0.03) -> None:
        outcome: RequestOutcome = "client_error" if error else "ok"
        usage = None if error else Usage(5, 10)
        record = RequestRecord("x", outcome=outcome, error=error, usage=usage, first_token=first)
        self.stats.setdefault(key, RequestStats(Histogram)).add_records(record)

    def wait(self, intervals: int = 1) -> None:
        for _ in range(intervals):
            self.clock.now += SAMPLE_INTERVAL
            self.recorder.take_sample()


def test_each_interval_has_the_requests_that_ended_in_it() -> None:
    recorded = RecordedHistory()
    recorded.add(SPLIT)
    recorded.add(PINNED)
    recorded.wait(3)
    recorded.add(SPLIT, first=0.9)
    recorded.add(SPLIT, error="InvalidParameter", first=None)
    recorded.wait()
    history = recorded.recorder.build_history()

    assert (history.end, history.intervals, history.interval) == (104, 4, SAMPLE_INTERVAL)

    [version] = history.versions
    assert [(one.n, one.requests, one.errors, one.tokens) for one in version.points] == [
        (100, 2, 0, 20),
        (103, 2, 1, 10),
    ]
    assert version.points[0].first_token_p50 == pytest.approx(0.03)
    assert version.points[1].first_token_p50 == pytest.approx(0.875)
    assert (version.requests, version.split_requests) == (4, 3)
    assert version.errors == [ErrorCount("InvalidParameter", "client", 1)]


def test_totals_include_the_interval_that_has_not_ended() -> None:
    recorded = RecordedHistory()
    recorded.add(UNKNOWN, error="ModelNotFound", first=None)

    [version] = recorded.recorder.build_history().versions

    assert (version.model, version.requests, version.points) == ("", 1, [])
    assert version.errors == [ErrorCount("ModelNotFound", "client", 1)]


def test_history_is_bounded_and_drops_older_samples() -> None:
    recorded = RecordedHistory()
    recorded.add(PINNED)
    recorded.wait(1000)
    history = recorded.recorder.build_history()

    assert len(recorded.recorder._samples) == MAX_INTERVALS + 1
    assert history.intervals == MAX_INTERVALS

    [version] = history.versions
    assert (version.requests, version.points, version.first_token_p50) == (0, [], None)

    counts = {id(sample[1]["m", "1"]) for sample in recorded.recorder._samples}
    assert len(counts) == 1, "an idle version takes memory once"


def test_frequent_samples_add_no_intervals() -> None:
    recorded = RecordedHistory()
    for _ in range(100):
        recorded.recorder.take_sample()
    assert recorded.recorder.build_history().intervals == 0


def test_histories_of_several_processes_are_merged() -> None:
    first, second = RecordedHistory(), RecordedHistory()
    for one in (first, second):
        one.add(SPLIT)
        one.add(UNKNOWN, error="ModelNotFound", first=None)
        one.wait()
    second.add(SPLIT, first=0.9)
    second.add(SPLIT, error="WorkerFailed", first=0.9)
    second.wait()
    reports = [one.recorder.build_history() for one in (first, second)]
    sent = msgspec.json.decode(msgspec.json.encode(reports), type=list[StatsHistory])
    merged = merge_histories(sent)

    assert (merged.end, merged.intervals) == (102, 2)

    versions = {one.model: one for one in merged.versions}
    points = [(one.n, one.requests, one.errors) for one in versions["m"].points]
    assert points == [(100, 2, 0), (101, 2, 1)]
    assert (versions["m"].requests, versions["m"].split_requests) == (4, 4)
    assert versions["m"].first_token_p50 == pytest.approx(0.04)
    assert versions["m"].first_token_p95 == pytest.approx(0.975, abs=0.03)
    assert versions["m"].points[1].first_token_p50 == pytest.approx(0.875)
    assert versions[""].errors == [ErrorCount("ModelNotFound", "client", 2)]


def test_merged_history_forgets_the_points_of_a_late_process() -> None:
    first, second = RecordedHistory(), RecordedHistory()
    first.add(PINNED)
    first.wait()
    second.wait(MAX_INTERVALS + 1)

    merged = merge_histories([one.recorder.build_history() for one in (first, second)])

    assert [one.points for one in merged.versions] == [[]]
