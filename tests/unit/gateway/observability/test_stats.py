"""The statistics of a version: which requests count, and which are excluded."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.histogram import Histogram
from gateway.observability.record import RequestRecord
from gateway.observability.stats import (
    DURATION_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    PER_TOKEN_BUCKETS,
    TOKEN_COUNT_BUCKETS,
    RequestStats,
    StatsKey,
    build_stats_key,
    group_by_labels,
)
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter

STREAM = RequestRecord(
    "r", first_token=0.5, duration=2.5, usage=Usage(3, 5), finish_reasons=("eos",)
)


def count_measurements(record: RequestRecord) -> tuple[int, int, int, int]:
    """Return the sample counts of first token, duration, time per token and length."""
    figures = RequestStats(Histogram)
    figures.add_records(record)
    histograms = (
        figures.first_token,
        figures.duration,
        figures.per_token,
        figures.completion_tokens,
    )
    first, duration, per_token, length = (sum(one.counts) for one in histograms)
    return first, duration, per_token, length


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        pytest.param(STREAM, (1, 1, 1, 1), id="a stream"),
        pytest.param(replace(STREAM, outcome="cancelled"), (1, 0, 0, 0), id="left in its midst"),
        pytest.param(replace(STREAM, first_token=None), (0, 1, 0, 1), id="in one piece"),
        pytest.param(replace(STREAM, usage=Usage(3, 1)), (1, 1, 0, 1), id="a single token"),
        pytest.param(
            replace(STREAM, first_token=None, finish_reasons=()), (0, 1, 0, 0), id="vectors"
        ),
        pytest.param(RequestRecord("r", duration=1.0), (0, 0, 0, 0), id="no answer of a model"),
    ],
)
def test_each_request_kind_adds_only_its_measurements(
    record: RequestRecord, wanted: tuple[int, int, int, int]
) -> None:
    assert count_measurements(record) == wanted


def test_time_per_token_excludes_the_first_token() -> None:
    figures = RequestStats(Histogram)
    figures.add_records(STREAM)
    assert figures.per_token.total == pytest.approx(0.5)


SECONDS = st.floats(0.0, 700.0)
TOKENS = st.integers(0, 9)
RECORDS = st.lists(
    st.builds(
        RequestRecord,
        id=st.just("r"),
        protocol=st.sampled_from(["openai", "triton"]),
        version=st.sampled_from("12"),
        backend=st.sampled_from(["", "gpu"]),
        stream=st.booleans(),
        outcome=st.sampled_from(["ok", "worker_error", "cancelled", "truncated"]),
        error=st.sampled_from(["", "StreamBroken", "Overloaded"]),
        first_token=st.none() | SECONDS,
        duration=SECONDS,
        overhead=st.none() | SECONDS,
        usage=st.none()
        | st.builds(
            Usage,
            TOKENS,
            TOKENS,
            st.none() | TOKENS,
            st.none() | TOKENS,
            st.sampled_from(["worker", "counted"]),
        ),
        tokens=TOKENS,
        finish_reasons=st.sampled_from([(), ("eos",), ("eos", "length")]),
        split=st.sampled_from(["", "rollout"]),
        fallback_from=st.sampled_from(["", "m@3"]),
        unsupported_parameters=st.sampled_from([(), (UnsupportedParameter("top_k", "dropped"),)]),
    ),
    max_size=30,
)


def get_counts(figures: RequestStats[Histogram]) -> dict[str, Any]:
    """Return all counts without sums, whose last bits depend on the order of addition."""
    return {
        name: one.counts if isinstance(one, Histogram) else one
        for name, one in vars(figures).items()
    }


def get_sums(figures: RequestStats[Histogram]) -> list[float]:
    return [one.total for one in vars(figures).values() if isinstance(one, Histogram)]


@given(RECORDS)
def test_grouped_records_give_the_same_stats_as_single_records(
    records: list[RequestRecord],
) -> None:
    alone: dict[StatsKey, RequestStats[Histogram]] = defaultdict(lambda: RequestStats(Histogram))
    together: dict[StatsKey, RequestStats[Histogram]] = defaultdict(lambda: RequestStats(Histogram))
    for record in records:
        alone[build_stats_key(record)].add_records(record)

    for some in group_by_labels(records):
        together[build_stats_key(some[0])].add_records(*some)

    assert [*together] == [*alone]
    for version, figures in alone.items():
        assert get_counts(together[version]) == get_counts(figures)
        assert get_sums(together[version]) == pytest.approx(get_sums(figures))


def test_histogram_bucket_includes_its_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        histogram.add(value)

    assert histogram.counts == [1, 2, 1]
    assert histogram.total == 7.5


@pytest.mark.parametrize(
    ("edges", "standard"),
    [
        (
            FIRST_TOKEN_BUCKETS,
            "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0",
        ),
        (PER_TOKEN_BUCKETS, "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5"),
        (
            DURATION_BUCKETS,
            "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92",
        ),
        (TOKEN_COUNT_BUCKETS, "1 4 16 64 256 1024 4096 16384 65536 262144"),
    ],
)
def test_buckets_include_all_standard_bounds(edges: tuple[float, ...], standard: str) -> None:
    assert list(edges) == sorted(edges)
    assert set(edges) >= set(map(float, standard.split()))
