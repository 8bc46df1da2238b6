"""What the exchanges of one arm come to: counts and histograms, kept as plain numbers. Pure.

An arm is a version of a model, as one split or something else sends to it. Who was diverted from an
arm is counted there as such, and by all else where the answer came from, as sent by no split: it is
no fair sample of either.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from gateway.core.errors import Blame, ClientGone, GatewayError
from gateway.core.loss import Loss
from gateway.telemetry import Record

UNKNOWN = "_unknown"
"""Stands for a field that only the client knows: its names are without end."""

FIRST_TOKEN: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Upper edges in seconds: those of OpenTelemetry's gen_ai.server.time_to_first_token, and more."""
PER_TOKEN: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5,
)  # fmt: skip
"""In seconds: those of OpenTelemetry's gen_ai.server.time_per_output_token, and more."""
DURATION: Final = (*(edge * 2**k for k in range(16) for edge in (0.01, 0.015)), 655.36)
"""In seconds: those of OpenTelemetry's gen_ai.server.request.duration, and more, to 10 minutes."""
OVERHEAD: Final = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 1.0,
)  # fmt: skip
"""In seconds."""
LENGTH: Final = tuple(float(2**k) for k in range(19))
"""In tokens: OpenTelemetry's gen_ai.client.token.usage has every second of these."""

_CUT: Final = frozenset({"cancelled", "truncated"})
_GONE: Final = ClientGone.__name__
"""Of who went without a word: no error is told of that."""


def _blames(kind: type[GatewayError]) -> Iterator[tuple[str, Blame]]:
    yield kind.__name__, kind.origin
    for child in kind.__subclasses__():
        yield from _blames(child)


_BLAMES: Final = dict(_blames(GatewayError))


class Counts(dict[tuple[str, ...], int]):
    """How often each came, 0 for all others. A Counter does that, too, but counts by Python."""

    def __missing__(self, key: tuple[str, ...]) -> int:
        return 0

    def total(self) -> int:
        """Of all together."""
        return sum(self.values())


Arm = tuple[str, str, str]
"""Model, version, and the split; "" for what none sent there, or what came in another's stead."""


class Measure(Protocol):
    """What becomes of measured values."""

    def extend(self, values: Sequence[float]) -> None:
        """Take these in."""


MeasureT = TypeVar("MeasureT", bound=Measure)


class Figures(Generic[MeasureT]):
    """Those of one arm."""

    def __init__(self, measure: Callable[[tuple[float, ...]], MeasureT]) -> None:
        """``measure`` makes what takes in values, of the upper edges that suit them."""
        self.outcomes = Counts()
        """By dialect, backend and outcome."""
        self.errors = Counts()
        self.finishes = Counts()
        self.unsupported_parameters = Counts()
        """By internal field and reason."""
        self.lossy_requests = 0
        """Exchanges of which something was lost."""
        self.diversions = 0
        """Exchanges that were sent here and answered elsewhere; they are no part of the rest."""
        self.tokens = Counts()
        """By direction and source; what is cached is part of the input, reasoning of the output."""
        self.aborts = Counts()
        """Streams that were cut, by the side that is to blame and why."""
        self.wasted_tokens = 0
        """Tokens passed on of answers that did not come to their end."""
        self.overhead = measure(OVERHEAD)
        """From a whole request until a worker, or a place at one, was asked for."""
        self.first_token = measure(FIRST_TOKEN)
        """Of every stream in which something was said."""
        self.duration = measure(DURATION)
        """Of answers that came to their end, as are the next three."""
        self.per_token = measure(PER_TOKEN)
        """Of a stream: the time after its first token, by the number of tokens that it took."""
        self.completion_tokens = measure(LENGTH)
        self.prompt_tokens = measure(LENGTH)

    def add_records(self, *records: Record) -> None:
        """Count exchanges. If there are several, they are ``alike``."""
        any_, many = records[0], len(records)
        self.outcomes[any_.dialect, any_.backend, any_.outcome] += many
        for reason in any_.finish:
            self.finishes[reason,] += many
        if any_.outcome != "ok":
            self._add_failures(records)
        for losses in [one.losses for one in records if one.losses]:
            self._add_losses(losses)
        self.overhead.extend([one.overhead for one in records if one.overhead is not None])
        self.first_token.extend([one.first_token for one in records if one.first_token is not None])
        if any_.usage is not None:
            self._add_usage(records)

    @property
    def routed_requests(self) -> int:
        """Exchanges that were sent here, whoever answered."""
        return self.outcomes.total() + self.diversions

    def _add_usage(self, records: Sequence[Record]) -> None:
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
        if records[0].finish:
            self.completion_tokens.extend(said)
            means = [
                (one.duration - one.first_token) / (tokens - 1)
                for one, tokens in zip(records, said, strict=True)
                if one.first_token is not None and tokens > 1
            ]
            self.per_token.extend(means)

    def _add_failures(self, records: Sequence[Record]) -> None:
        for record in records:
            error = record.error
            if error:
                self.errors[error,] += 1
            if record.stream and record.outcome in _CUT:
                self.aborts[_BLAMES.get(error, "client"), error or _GONE] += 1
                self.wasted_tokens += record.tokens

    def _add_losses(self, losses: tuple[Loss, ...]) -> None:
        self.lossy_requests += 1
        for loss in losses:
            self.unsupported_parameters[loss.path or UNKNOWN, loss.reason] += 1


def alike(records: Iterable[Record]) -> Collection[Sequence[Record]]:
    """Those together whose arms and whose counts are the same; the rest of each is measured."""
    found: defaultdict[object, list[Record]] = defaultdict(list)
    for one in records:
        found[
            one.model,
            one.version,
            one.split,
            one.diverted,
            one.dialect,
            one.backend,
            one.outcome,
            one.finish,
            None if one.usage is None else one.usage.source,
        ].append(one)
    return found.values()


def answered(record: Record) -> Arm:
    """Where an exchange was answered."""
    return record.model, record.version, "" if record.diverted else record.split


def left(record: Record) -> Arm:
    """The arm that a diverted exchange was sent to."""
    model, _, version = record.diverted.rpartition("@")
    return model, version, record.split
