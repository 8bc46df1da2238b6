"""Counters and histograms of requests, by model, version and traffic split. Pure.

A request that a fallback answered is counted as such for the version that it was sent to first.
All other numbers count it for the version that answered, with split "": it is not a fair sample of
either version.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from gateway.observability.record import RequestRecord
from protocols.core.errors import ClientDisconnected, ErrorOrigin, GatewayError
from protocols.core.loss import UnsupportedParameter

UNKNOWN_LABEL = "_unknown"
"""The label of a parameter that only the client knows: such names are unbounded."""

FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Upper edges in seconds: those of OpenTelemetry's gen_ai.server.time_to_first_token and more."""
PER_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5,
)  # fmt: skip
"""In seconds: those of OpenTelemetry's gen_ai.server.time_per_output_token and more."""
DURATION_BUCKETS: Final = (*(edge * 2**k for k in range(16) for edge in (0.01, 0.015)), 655.36)
"""In seconds: those of OpenTelemetry's gen_ai.server.request.duration and more, up to 655 s."""
OVERHEAD_BUCKETS: Final = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 1.0,
)  # fmt: skip
"""In seconds."""
TOKEN_COUNT_BUCKETS: Final = tuple(float(2**k) for k in range(19))
"""In tokens: OpenTelemetry's gen_ai.client.token.usage has every second of these."""

_INCOMPLETE_OUTCOMES: Final = frozenset({"cancelled", "truncated"})
_CLIENT_DISCONNECTED: Final = ClientDisconnected.__name__
"""The reason for clients that disconnect: their records have no error."""


def _list_error_origins(kind: type[GatewayError]) -> Iterator[tuple[str, ErrorOrigin]]:
    yield kind.__name__, kind.origin
    for child in kind.__subclasses__():
        yield from _list_error_origins(child)


_ERROR_ORIGINS: Final = dict(_list_error_origins(GatewayError))


def get_error_origin(error: str) -> ErrorOrigin:
    """Who caused errors of this class."""
    return _ERROR_ORIGINS.get(error, "gateway")


class CounterMap(dict[tuple[str, ...], int]):
    """Counts by key, 0 for missing keys; faster than ``collections.Counter``."""

    def __missing__(self, key: tuple[str, ...]) -> int:
        return 0

    def total(self) -> int:
        """The sum of all counts."""
        return sum(self.values())


StatsKey = tuple[str, str, str]
"""Model, version and traffic split; the split is "" for fallbacks or if no split chose."""


class Distribution(Protocol):
    """Collects measured values."""

    def extend(self, values: Sequence[float]) -> None:
        """Add values."""


DistributionT = TypeVar("DistributionT", bound=Distribution)


class RequestStats(Generic[DistributionT]):
    """The numbers of record ``StatsKey``."""

    def __init__(self, measure: Callable[[tuple[float, ...]], DistributionT]) -> None:
        """``measure`` makes a distribution with the given upper bucket edges."""
        self.outcomes = CounterMap()
        """By protocol, backend and outcome."""
        self.errors = CounterMap()
        self.finish_reasons = CounterMap()
        self.unsupported_parameters = CounterMap()
        """By internal field and loss reason."""
        self.lossy_requests = 0
        """Requests with at least one unsupported parameter."""
        self.answered_by_fallback = 0
        """Requests sent here that a fallback answered; the other numbers exclude them."""
        self.shadow_requests = 0
        """Copies of requests that were sent here as shadow traffic; no other number has them."""
        self.tokens = CounterMap()
        """By direction and source; input includes cached, output includes reasoning tokens."""
        self.aborts = CounterMap()
        """Streams that ended early, by the side that caused it and the reason."""
        self.wasted_tokens = 0
        """Tokens sent to clients in streams that ended early."""
        self.overhead = measure(OVERHEAD_BUCKETS)
        """Time until the gateway asked for a worker or a queue slot."""
        self.first_token = measure(FIRST_TOKEN_BUCKETS)
        """For every stream that has a first token."""
        self.duration = measure(DURATION_BUCKETS)
        """Of successful requests only, as are the next three."""
        self.per_token = measure(PER_TOKEN_BUCKETS)
        """Mean time per token after the first token, one value per stream."""
        self.completion_tokens = measure(TOKEN_COUNT_BUCKETS)
        self.prompt_tokens = measure(TOKEN_COUNT_BUCKETS)

    def add_records(self, *records: RequestRecord) -> None:
        """Count records. Several records must have equal labels: see ``group_by_labels``."""
        first, number = records[0], len(records)
        self.outcomes[first.protocol, first.backend, first.outcome] += number
        for reason in first.finish_reasons:
            self.finish_reasons[reason,] += number
        if first.outcome != "ok":
            self._add_failures(records)
        for record in records:
            if record.unsupported_parameters:
                self._add_losses(record.unsupported_parameters)
        self.overhead.extend([record.overhead for record in records if record.overhead is not None])
        self.first_token.extend(
            [record.first_token for record in records if record.first_token is not None]
        )
        if first.usage is not None:
            self._add_usage(records)

    @property
    def routed_requests(self) -> int:
        """Requests sent here, whichever target answered."""
        return self.outcomes.total() + self.answered_by_fallback

    def _add_usage(self, records: Sequence[RequestRecord]) -> None:
        """Count tokens and durations."""
        usages = [record.usage for record in records if record.usage is not None]
        source, prompts = usages[0].source, [usage.prompt_tokens for usage in usages]
        completions = [usage.completion_tokens for usage in usages]
        self.tokens["input", source] += sum(prompts)
        self.tokens["output", source] += sum(completions)
        if cached := sum([usage.cached_tokens for usage in usages if usage.cached_tokens]):
            self.tokens["cached", source] += cached
        if reasoning := sum([usage.reasoning_tokens for usage in usages if usage.reasoning_tokens]):
            self.tokens["reasoning", source] += reasoning
        if records[0].outcome != "ok":
            return
        self.duration.extend([record.duration for record in records])
        self.prompt_tokens.extend(prompts)
        if records[0].finish_reasons:
            self.completion_tokens.extend(completions)
            mean_times = [
                (record.duration - record.first_token) / (tokens - 1)
                for record, tokens in zip(records, completions, strict=True)
                if record.first_token is not None and tokens > 1
            ]
            self.per_token.extend(mean_times)

    def _add_failures(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            error = record.error
            if error:
                self.errors[error,] += 1
            if record.stream and record.outcome in _INCOMPLETE_OUTCOMES:
                self.aborts[_ERROR_ORIGINS.get(error, "client"), error or _CLIENT_DISCONNECTED] += 1
                self.wasted_tokens += record.tokens

    def _add_losses(self, losses: tuple[UnsupportedParameter, ...]) -> None:
        self.lossy_requests += 1
        for loss in losses:
            self.unsupported_parameters[loss.path or UNKNOWN_LABEL, loss.reason] += 1


def group_by_labels(records: Iterable[RequestRecord]) -> Collection[Sequence[RequestRecord]]:
    """Group records that are counted under the same labels."""
    groups: defaultdict[object, list[RequestRecord]] = defaultdict(list)
    for record in records:
        groups[
            record.model,
            record.version,
            record.split,
            record.fallback_from,
            record.protocol,
            record.backend,
            record.outcome,
            record.finish_reasons,
            None if record.usage is None else record.usage.source,
        ].append(record)
    return groups.values()


def build_stats_key(record: RequestRecord) -> StatsKey:
    """The key of the version that answered."""
    return record.model, record.version, "" if record.fallback_from else record.split


def build_fallback_key(record: RequestRecord) -> StatsKey:
    """The key of the first target of a request that a fallback answered."""
    model, _, version = record.fallback_from.rpartition("@")
    return model, version, record.split
