"""How the gateway is, as JSON; and how several processes are, as one. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from backends.histogram import bucket_quantile
from gateway.observability.stats import FIRST_TOKEN_BUCKETS


class ListenerProtocolStatus(Struct, frozen=True):
    """A dialect on a listener."""

    name: str
    profile: str = ""
    prefix: str = ""


class ListenerStatus(Struct, frozen=True):
    """Where clients may ask."""

    url: str
    dialects: Sequence[ListenerProtocolStatus]


class VersionStatus(Struct, frozen=True):
    """A target of a model; ``share`` is its part of the split in percent."""

    name: str
    backend: str
    served_model: str
    share: int
    ready: bool


class ModelStatus(Struct, frozen=True):
    """A public model."""

    name: str
    task: str
    aliases: Sequence[str]
    versions: Sequence[VersionStatus]


class VersionStats(Struct, kw_only=True):
    """What a version's exchanges came to, those of all who sent there.

    ``requests`` to ``completion_tokens`` are since the start; the rest is of the last
    ``Status.recent`` seconds. ``first_token_*`` are of streams, in seconds; the counts are by the
    edges of ``interlingua_time_to_first_token_seconds``, the last for what is above.
    """

    model: str
    version: str
    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    first_token_counts: Sequence[int]

    def compute_quantiles(self) -> "VersionStats":
        """With the times that the counts come to."""
        self.first_token_p50 = bucket_quantile(FIRST_TOKEN_BUCKETS, self.first_token_counts, 0.5)
        self.first_token_p95 = bucket_quantile(FIRST_TOKEN_BUCKETS, self.first_token_counts, 0.95)
        return self


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """How everything is. ``workers`` are those of each backend that has some."""

    version: str
    python: str
    config: str
    uptime: float
    """Seconds; of several processes, of the one that runs longest."""
    processes: int = 1
    draining: bool
    running: int
    """Exchanges, now."""
    recent: float
    listeners: Sequence[ListenerStatus]
    models: Sequence[ModelStatus]
    figures: Sequence[VersionStats]
    backends: Mapping[str, bool]
    """Whether each could answer now, as far as is known."""
    workers: Mapping[str, Any]


def add_counts(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """Both counts together."""
    return [a + b for a, b in zip(one, other, strict=True)]


def merge_statuses(told: Sequence[GatewayStatus], workers: Mapping[str, Any]) -> GatewayStatus:
    """What several processes tell, at least one, as one tells it. ``workers`` are theirs."""
    first = told[0]
    return replace(
        first,
        uptime=max(one.uptime for one in told),
        processes=len(told),
        draining=all(one.draining for one in told),
        running=sum(one.running for one in told),
        recent=max(one.recent for one in told),
        figures=_merge_stats([figures for one in told for figures in one.figures]),
        backends={
            name: any(one.backends.get(name, False) for one in told) for name in first.backends
        },
        workers=workers,
    )


def _merge_stats(every: Sequence[VersionStats]) -> Sequence[VersionStats]:
    known: dict[tuple[str, str], VersionStats] = {}
    for one in every:
        target = one.model, one.version
        known[target] = _add_stats(known[target], one) if target in known else one
    return [*known.values()]


def _add_stats(one: VersionStats, other: VersionStats) -> VersionStats:
    return replace(
        one,
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        requests_per_second=one.requests_per_second + other.requests_per_second,
        tokens_per_second=one.tokens_per_second + other.tokens_per_second,
        first_token_counts=add_counts(one.first_token_counts, other.first_token_counts),
    ).compute_quantiles()
