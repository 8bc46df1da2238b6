"""Statistics of the last 15 minutes, and those of several processes as one's.

A timer of the admin listener samples the cumulative statistics, which the data path counts anyway.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from backends.histogram import Histogram, bucket_quantile
from gateway.observability.stats import (
    FIRST_TOKEN_BUCKETS,
    RequestStats,
    StatsKey,
    get_error_origin,
)
from protocols.core.errors import ErrorOrigin
from protocols.core.interfaces import Clock

SAMPLE_INTERVAL: Final = 10.0
"""Seconds. Samples are taken at multiples of it, so that those of several processes agree."""
MAX_INTERVALS: Final = 90

GetStats = Callable[[], Mapping[StatsKey, RequestStats[Histogram]]]
TargetKey = tuple[str, str]
"""Model and version."""


class VersionCounts(Struct):
    """Cumulative counts of a version, over all splits.

    ``errors`` are by class; ``split_requests`` those that a traffic split sent here.
    """

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    split_requests: int = 0
    answered_by_fallback: int = 0
    """Requests sent here that another target answered; ``requests`` are those answered here."""
    shadow_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: Sequence[int] = (0,) * (len(FIRST_TOKEN_BUCKETS) + 1)


def count_by_version(
    stats: Mapping[StatsKey, RequestStats[Histogram]],
) -> Mapping[TargetKey, VersionCounts]:
    """The counts of each version."""
    counts: dict[TargetKey, VersionCounts] = {}
    for (model, version, split), request_stats in stats.items():
        count = counts.setdefault((model, version), VersionCounts())
        count.requests += request_stats.outcomes.total()
        count.answered_by_fallback += request_stats.answered_by_fallback
        count.shadow_requests += request_stats.shadow_requests
        if split:
            count.split_requests += request_stats.routed_requests
        for (error,), number in request_stats.errors.items():
            count.errors[error] += number
        for (direction, _), tokens in request_stats.tokens.items():
            if direction == "input":
                count.prompt_tokens += tokens
            elif direction == "output":
                count.completion_tokens += tokens
        count.first_token = add_counts(count.first_token, request_stats.first_token.counts)
    return counts


def add_counts(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    """The sums of two lists of counts."""
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _subtract_counts(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    """The differences of two lists of counts; zeros at the end are left out."""
    counts = [a - b for a, b in zip(left, right, strict=True)]
    while counts and not counts[-1]:
        counts.pop()
    return counts


def compute_quantile(counts: Sequence[int], share: float) -> float | None:
    """The quantile of times to the first token; zeros at the end of ``counts`` may be missing."""
    return bucket_quantile(FIRST_TOKEN_BUCKETS, counts, share)


class HistoryPoint(Struct, kw_only=True, omit_defaults=True):
    """The requests of a version that ended in one interval, by its number ``n``.

    ``first_token_counts`` are by bucket, without zeros at the end.
    """

    n: int
    requests: int = 0
    errors: int = 0
    tokens: int = 0
    first_token_counts: Sequence[int] = ()
    first_token_p50: float | None = None


class ErrorCount(Struct, frozen=True):
    """How often a class of errors occurred, and who caused it."""

    error: str
    origin: ErrorOrigin
    count: int


class VersionHistory(Struct, kw_only=True):
    """The last 15 minutes of a version. Intervals without requests have no point.

    All numbers beside ``points`` include the interval that has not ended yet. Requests that no
    version answered, such as those for an unknown model, have the model "".
    """

    model: str
    version: str
    requests: int
    split_requests: int
    errors: Sequence[ErrorCount]
    first_token_counts: Sequence[int]
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    points: Sequence[HistoryPoint]

    def compute_quantiles(self) -> "VersionHistory":
        """Set the quantiles from the counts; returns the same object."""
        self.first_token_p50 = compute_quantile(self.first_token_counts, 0.5)
        self.first_token_p95 = compute_quantile(self.first_token_counts, 0.95)
        for point in self.points:
            point.first_token_p50 = compute_quantile(point.first_token_counts, 0.5)
        return self


class StatsHistory(Struct, kw_only=True):
    """The last intervals of ``interval`` seconds, of which ``end`` is the first to come.

    ``intervals`` is how many of them the gateway has seen.
    """

    interval: float
    end: int
    intervals: int
    versions: Sequence[VersionHistory]


class HistoryRecorder:
    """Keeps samples of the statistics that ``get_stats`` gives."""

    def __init__(self, get_stats: GetStats, clock: Clock) -> None:
        self._get_stats = get_stats
        self._clock = clock
        self._samples = deque[tuple[int, Mapping[TargetKey, VersionCounts]]](
            [(self._get_interval(), {})], maxlen=MAX_INTERVALS + 1
        )
        """Each with the number of the interval that it begins."""

    def take_sample(self) -> None:
        """Sample, if the last interval has ended."""
        now, (then, last) = self._get_interval(), self._samples[-1]
        if now <= then:
            return
        counts = count_by_version(self._get_stats())
        self._samples.append(
            # Counts that are equal take memory once.
            (now, {key: last[key] if last.get(key) == one else one for key, one in counts.items()})
        )

    def build_history(self) -> StatsHistory:
        """The history as of now."""
        self.take_sample()
        (start, oldest), end = self._samples[0], self._samples[-1][0]
        points: defaultdict[TargetKey, list[HistoryPoint]] = defaultdict(list)
        for (_, before), (n, after) in pairwise(self._samples):
            for key, one in after.items():
                if one is not (previous := before.get(key, _NO_COUNTS)):
                    points[key].append(_build_point(n - 1, previous, one))
        counts = count_by_version(self._get_stats())
        return StatsHistory(
            interval=SAMPLE_INTERVAL,
            end=end,
            intervals=min(end - start, MAX_INTERVALS),
            versions=[
                _build_version_history(key, oldest.get(key, _NO_COUNTS), one, points[key])
                for key, one in counts.items()
            ],
        )

    def _get_interval(self) -> int:
        return int(self._clock() // SAMPLE_INTERVAL)


_NO_COUNTS: Final = VersionCounts()


def _build_point(n: int, before: VersionCounts, after: VersionCounts) -> HistoryPoint:
    counts = _subtract_counts(after.first_token, before.first_token)
    return HistoryPoint(
        n=n,
        requests=after.requests - before.requests,
        errors=after.errors.total() - before.errors.total(),
        tokens=after.completion_tokens - before.completion_tokens,
        first_token_counts=counts,
        first_token_p50=compute_quantile(counts, 0.5),
    )


def _build_version_history(
    key: TargetKey, before: VersionCounts, after: VersionCounts, points: Sequence[HistoryPoint]
) -> VersionHistory:
    return VersionHistory(
        model=key[0],
        version=key[1],
        requests=after.requests - before.requests,
        split_requests=after.split_requests - before.split_requests,
        errors=[*_list_errors(after.errors - before.errors)],
        first_token_counts=_subtract_counts(after.first_token, before.first_token),
        points=points,
    ).compute_quantiles()


def _list_errors(errors: Counter[str]) -> Iterator[ErrorCount]:
    for error, count in errors.most_common():
        yield ErrorCount(error, get_error_origin(error), count)


def merge_histories(histories: Sequence[StatsHistory]) -> StatsHistory:
    """Merge the histories of one or more processes."""
    end = max(one.end for one in histories)
    merged: dict[TargetKey, VersionHistory] = {}
    for history in histories:
        for version in history.versions:
            key = version.model, version.version
            merged[key] = _add_versions(merged[key], version) if key in merged else version
    for version in merged.values():
        version.points = [one for one in version.points if one.n >= end - MAX_INTERVALS]
    return StatsHistory(
        interval=histories[0].interval,
        end=end,
        intervals=max(one.intervals for one in histories),
        versions=[version.compute_quantiles() for version in merged.values()],
    )


def _add_versions(left: VersionHistory, right: VersionHistory) -> VersionHistory:
    points = {one.n: one for one in left.points}
    for one in right.points:
        points[one.n] = _add_points(points[one.n], one) if one.n in points else one
    errors = Counter[str]()
    for error in (*left.errors, *right.errors):
        errors[error.error] += error.count
    return replace(
        left,
        requests=left.requests + right.requests,
        split_requests=left.split_requests + right.split_requests,
        errors=[*_list_errors(errors)],
        first_token_counts=add_counts(left.first_token_counts, right.first_token_counts),
        points=[points[n] for n in sorted(points)],
    )


def _add_points(left: HistoryPoint, right: HistoryPoint) -> HistoryPoint:
    return replace(
        left,
        requests=left.requests + right.requests,
        errors=left.errors + right.errors,
        tokens=left.tokens + right.tokens,
        first_token_counts=add_counts(left.first_token_counts, right.first_token_counts),
    )
