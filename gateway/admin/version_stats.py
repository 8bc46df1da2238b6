"""Statistics of each version over the last minute, and those of several processes as one's.

They are computed from cumulative counts when the status is read.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.admin.history import (
    GetStats,
    TargetKey,
    VersionCounts,
    add_counts,
    compute_quantile,
    count_by_version,
)
from protocols.core.interfaces import Clock

_WINDOW_SECONDS: Final = 60.0
"""Seconds that recent statistics cover, if the status was read then."""
_SAMPLE_INTERVAL: Final = 5.0
"""Minimum seconds between two kept samples."""


class VersionStats(Struct, kw_only=True):
    """Statistics of a version, over all splits.

    ``requests`` to ``completion_tokens`` are since the start; the rest is over the last
    ``GatewayStatus.recent_seconds``. ``requests`` are those that the version answered;
    ``answered_by_fallback`` were sent to it and answered by another target, and
    ``shadow_requests`` are copies. ``first_token_*`` are seconds, of streams; the counts are by
    the buckets of ``interlingua_time_to_first_token_seconds``, the last one for larger values, and
    the totals are since the start. Without a recent stream the quantiles are since the start.
    """

    model: str
    version: str
    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    answered_by_fallback: int = 0
    shadow_requests: int = 0
    requests_per_second: float = 0.0
    fallbacks_per_second: float = 0.0
    shadows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    first_token_counts: Sequence[int]
    first_token_totals: Sequence[int] = ()

    def compute_quantiles(self) -> "VersionStats":
        """Set the quantiles from the counts; returns the same object."""
        recent = self.first_token_counts
        counts = recent if any(recent) else self.first_token_totals
        self.first_token_p50 = compute_quantile(counts, 0.5)
        self.first_token_p95 = compute_quantile(counts, 0.95)
        return self


class RecentStats:
    """Recent statistics, from the cumulative ones that ``get_stats`` gives."""

    def __init__(self, get_stats: GetStats, clock: Clock) -> None:
        self._get_stats = get_stats
        self._clock = clock
        self._samples = deque[tuple[float, Mapping[TargetKey, VersionCounts]]]([(clock(), {})])

    def sample(self) -> tuple[float, list[VersionStats]]:
        """The seconds that recent statistics cover, and the statistics of each version."""
        now, counts = self._clock(), count_by_version(self._get_stats())
        while len(self._samples) > 1 and now - self._samples[1][0] >= _WINDOW_SECONDS:
            self._samples.popleft()
        then, baseline = self._samples[0]
        if now - self._samples[-1][0] >= _SAMPLE_INTERVAL:
            self._samples.append((now, counts))
        seconds = now - then
        none = VersionCounts()
        return seconds, [
            _build_version_stats(target, count, baseline.get(target, none), seconds)
            for target, count in counts.items()
        ]


def _build_version_stats(
    target: TargetKey, count: VersionCounts, baseline: VersionCounts, seconds: float
) -> VersionStats:
    recent = [now - then for now, then in zip(count.first_token, baseline.first_token, strict=True)]
    stats = VersionStats(
        model=target[0],
        version=target[1],
        requests=count.requests,
        errors=count.errors.total(),
        prompt_tokens=count.prompt_tokens,
        completion_tokens=count.completion_tokens,
        answered_by_fallback=count.answered_by_fallback,
        shadow_requests=count.shadow_requests,
        first_token_counts=recent,
        first_token_totals=count.first_token,
    )
    if seconds > 0:
        stats.requests_per_second = (count.requests - baseline.requests) / seconds
        stats.tokens_per_second = (count.completion_tokens - baseline.completion_tokens) / seconds
        fallbacks = count.answered_by_fallback - baseline.answered_by_fallback
        stats.fallbacks_per_second = fallbacks / seconds
        stats.shadows_per_second = (count.shadow_requests - baseline.shadow_requests) / seconds
    return stats.compute_quantiles()


def merge_version_stats(stats: Sequence[VersionStats]) -> Sequence[VersionStats]:
    """The statistics of each version, over all processes."""
    merged: dict[tuple[str, str], VersionStats] = {}
    for version_stats in stats:
        target = version_stats.model, version_stats.version
        merged[target] = (
            _add_stats(merged[target], version_stats) if target in merged else version_stats
        )
    return [*merged.values()]


def _add_stats(left: VersionStats, right: VersionStats) -> VersionStats:
    return replace(
        left,
        requests=left.requests + right.requests,
        errors=left.errors + right.errors,
        prompt_tokens=left.prompt_tokens + right.prompt_tokens,
        completion_tokens=left.completion_tokens + right.completion_tokens,
        answered_by_fallback=left.answered_by_fallback + right.answered_by_fallback,
        shadow_requests=left.shadow_requests + right.shadow_requests,
        fallbacks_per_second=left.fallbacks_per_second + right.fallbacks_per_second,
        shadows_per_second=left.shadows_per_second + right.shadows_per_second,
        requests_per_second=left.requests_per_second + right.requests_per_second,
        tokens_per_second=left.tokens_per_second + right.tokens_per_second,
        first_token_counts=add_counts(left.first_token_counts, right.first_token_counts),
        first_token_totals=add_counts(left.first_token_totals, right.first_token_totals),
    ).compute_quantiles()
