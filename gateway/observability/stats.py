"""What the exchanges of one arm come to: counts and histograms, kept as plain numbers. Pure.

An arm is a version of a model, as one split or something else sends to it. Who was diverted from an
arm is counted there as such, and by all else where the answer came from, as sent by no split: it is
no fair sample of either.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from gateway.observability.record import RequestRecord
from protocols.core.errors import ClientDisconnected, ErrorOrigin, GatewayError
from protocols.core.loss import UnsupportedParameter

UNKNOWN_LABEL = "_unknown"
"""Stands for a field that only the client knows: its names are without end."""

FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Upper edges in seconds: those of OpenTelemetry's gen_ai.server.time_to_first_token, and more."""
PER_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5,
)  # fmt: skip
"""In seconds: those of OpenTelemetry's gen_ai.server.time_per_output_token, and more."""
DURATION_BUCKETS: Final = (*(edge * 2**k for k in range(16) for edge in (0.01, 0.015)), 655.36)
"""In seconds: those of OpenTelemetry's gen_ai.server.request.duration, and more, to 10 minutes."""
OVERHEAD_BUCKETS: Final = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 1.0,
)  # fmt: skip
"""In seconds."""
TOKEN_COUNT_BUCKETS: Final = tuple(float(2**k) for k in range(19))
"""In tokens: OpenTelemetry's gen_ai.client.token.usage has every second of these."""

_INCOMPLETE_OUTCOMES: Final = frozenset({"cancelled", "truncated"})
_CLIENT_DISCONNECTED: Final = ClientDisconnected.__name__
"""Of who went without a word: no error is told of that."""


def _list_error_origins(kind: type[GatewayError]) -> Iterator[tuple[str, ErrorOrigin]]:
    yield kind.__name__, kind.origin
    for child in kind.__subclasses__():
        yield from _list_error_origins(child)


_ERROR_ORIGINS: Final = dict(_list_error_origins(GatewayError))


class CounterMap(dict[tuple[str, ...], int]):
    """How often each came, 0 for all others. A Counter does that, too, but counts by Python."""

    def __missing__(self, key: tuple[str, ...]) -> int:
        return 0

    def total(self) -> int:
        """Of all together."""
        return sum(self.values())


StatsKey = tuple[str, str, str]
"""Model, version, and the split; "" for what none sent there, or what came in another's stead."""


class Distribution(Protocol):
    """What becomes of measured values."""

    def extend(self, values: Sequence[float]) -> None:
        """Take these in."""


DistributionT = TypeVar("DistributionT", bound=Distribution)


class RequestStats(Generic[DistributionT]):
    """Those of one arm."""

    def __init__(self, measure: Callable[[tuple[float, ...]], DistributionT]) -> None:
        """``measure`` makes what takes in values, of the upper edges that suit them."""
        self.outcomes = CounterMap()
        """By dialect, backend and outcome."""
        self.errors = CounterMap()
        self.finish_reasons = CounterMap()
        self.unsupported_parameters = CounterMap()
        """By internal field and reason."""
        self.lossy_requests = 0
        """Exchanges of which something was lost."""
        self.answered_by_fallback = 0
        """Exchanges that were sent here and answered elsewhere; they are no part of the rest."""
        self.tokens = CounterMap()
        """By direction and source; what is cached is part of the input, reasoning of the output."""
        self.aborts = CounterMap()
        """Streams that were cut, by the side that is to blame and why."""
        self.wasted_tokens = 0
        """Tokens passed on of answers that did not come to their end."""
        self.overhead = measure(OVERHEAD_BUCKETS)
        """From a whole request until a worker, or a place at one, was asked for."""
        self.first_token = measure(FIRST_TOKEN_BUCKETS)
        """Of every stream in which something was said."""
        self.duration = measure(DURATION_BUCKETS)
        """Of answers that came to their end, as are the next three."""
        self.per_token = measure(PER_TOKEN_BUCKETS)
        """Of a stream: the time after its first token, by the number of tokens that it took."""
        self.completion_tokens = measure(TOKEN_COUNT_BUCKETS)
        self.prompt_tokens = measure(TOKEN_COUNT_BUCKETS)

    def add_records(self, *records: RequestRecord) -> None:
        """Count exchanges. If there are several, they are ``alike``."""
        any_, many = records[0], len(records)
        self.outcomes[any_.protocol, any_.backend, any_.outcome] += many
        for reason in any_.finish_reasons:
            self.finish_reasons[reason,] += many
        if any_.outcome != "ok":
            self._add_failures(records)
        for losses in [one.unsupported_parameters for one in records if one.unsupported_parameters]:
            self._add_losses(losses)
        self.overhead.extend([one.overhead for one in records if one.overhead is not None])
        self.first_token.extend([one.first_token for one in records if one.first_token is not None])
        if any_.usage is not None:
            self._add_usage(records)

    @property
    def routed_requests(self) -> int:
        """Exchanges that were sent here, whoever answered."""
        return self.outcomes.total() + self.answered_by_fallback

    def _add_usage(self, records: Sequence[RequestRecord]) -> None:
        """Count what was used, and how long that took."""
        used = [one.usage for one in records if one.usage is not None]
        source, prompts = used[0].source, [one.prompt_tokens for one in used]
        said = [one.completion_tokens for one in used]
        self.tokens["input", source] += sum(prompts)
        self.tokens["output", source] += sum(said)
        if cached := sum([one.cached_tokens for one in used if one.cached_tokens]):
            self.tokens["cached", source] += cached
        if reasoning := sum([one.reasoning_tokens for one in used if one.reasoning_tokens]):
            self.tokens["reasoning", source] += reasoning
        if records[0].outcome != "ok":
            return
        self.duration.extend([one.duration for one in records])
        self.prompt_tokens.extend(prompts)
        if records[0].finish_reasons:
            self.completion_tokens.extend(said)
            means = [
                (one.duration - one.first_token) / (tokens - 1)
                for one, tokens in zip(records, said, strict=True)
                if one.first_token is not None and tokens > 1
            ]
            self.per_token.extend(means)

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
    """Those together whose arms and whose counts are the same; the rest of each is measured."""
    found: defaultdict[object, list[RequestRecord]] = defaultdict(list)
    for one in records:
        found[
            one.model,
            one.version,
            one.split,
            one.fallback_from,
            one.protocol,
            one.backend,
            one.outcome,
            one.finish_reasons,
            None if one.usage is None else one.usage.source,
        ].append(one)
    return found.values()


def build_stats_key(record: RequestRecord) -> StatsKey:
    """Where an exchange was answered."""
    return record.model, record.version, "" if record.fallback_from else record.split


def build_diverted_key(record: RequestRecord) -> StatsKey:
    """The arm that a diverted exchange was sent to."""
    model, _, version = record.fallback_from.rpartition("@")
    return model, version, record.split
