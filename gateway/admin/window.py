"""Figures of the last minute, from counts that only grow. Nothing is done unless somebody looks."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from backends.histogram import Histogram
from gateway.admin.status import VersionStats as Told
from gateway.admin.status import add_counts
from gateway.observability.stats import FIRST_TOKEN_BUCKETS, RequestStats, StatsKey
from protocols.core.interfaces import Clock

_WINDOW_SECONDS: Final = 60.0
"""Seconds that are looked back over, if somebody looked then."""
_SAMPLE_INTERVAL: Final = 5.0
"""Seconds between two looks of which both are kept."""

TargetKey = tuple[str, str]
"""Model and version."""


class _VersionCounts(Struct):
    """What one version's arms came to."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: Sequence[int] = (0,) * (len(FIRST_TOKEN_BUCKETS) + 1)


class RecentStats:
    """Over the figures that ``arms`` gives, which were all 0 when it was made."""

    def __init__(
        self, arms: Callable[[], Mapping[StatsKey, RequestStats[Histogram]]], clock: Clock
    ) -> None:
        self._get_stats = arms
        self._clock = clock
        self._samples = deque[tuple[float, Mapping[TargetKey, _VersionCounts]]]([(clock(), {})])

    def sample(self) -> tuple[float, list[Told]]:
        """Each version's figures, and the seconds over which what is recent was counted."""
        now, counts = self._clock(), _count_by_version(self._get_stats())
        while len(self._samples) > 1 and now - self._samples[1][0] >= _WINDOW_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - self._samples[-1][0] >= _SAMPLE_INTERVAL:
            self._samples.append((now, counts))
        seconds = now - then
        none = _VersionCounts()
        return seconds, [
            _build_version_stats(target, count, before.get(target, none), seconds)
            for target, count in counts.items()
        ]


def _count_by_version(
    arms: Mapping[StatsKey, RequestStats[Histogram]],
) -> Mapping[TargetKey, _VersionCounts]:
    found: dict[TargetKey, _VersionCounts] = {}
    for (model, version, _), figures in arms.items():
        one = found.setdefault((model, version), _VersionCounts())
        one.requests += figures.outcomes.total()
        one.errors += figures.errors.total()
        for (direction, _), tokens in figures.tokens.items():
            if direction == "input":
                one.prompt_tokens += tokens
            elif direction == "output":
                one.completion_tokens += tokens
        one.first_token = add_counts(one.first_token, figures.first_token.counts)
    return found


def _build_version_stats(
    target: TargetKey, count: _VersionCounts, before: _VersionCounts, seconds: float
) -> Told:
    recent = [now - then for now, then in zip(count.first_token, before.first_token, strict=True)]
    told = Told(
        model=target[0],
        version=target[1],
        requests=count.requests,
        errors=count.errors,
        prompt_tokens=count.prompt_tokens,
        completion_tokens=count.completion_tokens,
        first_token_counts=recent,
    )
    if seconds > 0:
        told.requests_per_second = (count.requests - before.requests) / seconds
        told.tokens_per_second = (count.completion_tokens - before.completion_tokens) / seconds
    return told.compute_quantiles()
