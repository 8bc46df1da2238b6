"""Two arms, figure by figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from gateway.figures import Figures
from gateway.tools.ab.evidence import Evidence
from gateway.tools.ab.intervals import Interval, apart, by_order, unlikely, welch, wilson
from gateway.tools.ab.samples import Mean, Sample

Unit = Literal["", "share", "seconds", "tokens"]

_OUTCOMES: Final[Mapping[str, Sequence[str]]] = {
    "failed": ("worker_error", "gateway_error", "truncated"),
    "refused": ("client_error",),
    "left by the client": ("cancelled",),
}
_MEASURES: Final[Sequence[tuple[str, Unit, Callable[[Figures[Any]], Sample]]]] = (
    ("time to first token", "seconds", lambda arm: arm.first_token),
    ("duration", "seconds", lambda arm: arm.duration),
    ("time per token", "seconds", lambda arm: arm.per_token),
    ("length", "tokens", lambda arm: arm.completion),
)
_QUANTILES: Final = (0.5, 0.95)
_UNFIT: Final = 0.001
"""Shares of so little likelihood are not by chance."""


class Mismatch(Exception):
    """There is nothing to compare, or too much; the message says what there is."""


class Row(Struct, frozen=True):
    """One figure of both arms, and how far that of ``b`` lies above that of ``a``.

    Without a difference it is a plain count, or there are too few values for one.
    """

    figure: str
    unit: Unit
    a: float | None
    b: float | None
    difference: Interval | None = None
    method: str = ""


class Ratio(Struct, frozen=True):
    """Whether the split sends as many to each arm as its weights say."""

    sent: Mapping[str, int]
    weights: Mapping[str, int]
    likelihood: float
    """Of counts as far from the weights as these, or farther, if nothing is amiss."""

    @property
    def fits(self) -> bool:
        """Whether chance explains the counts."""
        return self.likelihood >= _UNFIT


class Comparison(Struct, frozen=True):
    """The version ``b`` against the version ``a``."""

    split: str
    a: str
    b: str
    confidence: float
    rows: tuple[Row, ...]
    ratio: Ratio | None = None

    @property
    def intervals(self) -> int:
        """How many differences there are: one in so many misses by chance alone."""
        return sum(row.difference is not None for row in self.rows)


def compare(seen: Evidence, split: str, versions: tuple[str, str], confidence: float) -> Comparison:
    """Both versions as the split sent to them. ``confidence`` is between 0 and 1."""
    a, b = (seen.arms[split, version] for version in versions)
    both = _Both(a, b, confidence, "" if seen.exact else ", from buckets")
    rows = (*both.counts(), *both.shares(), *both.measures())
    return Comparison(split, *versions, confidence, rows)


def choose(seen: Evidence, split: str | None, a: str | None, b: str | None) -> tuple[str, str, str]:
    """Split and versions: those that are named, or else the only ones. Raises Mismatch."""
    splits = seen.splits()
    if split is None and len(splits) > 1:
        raise Mismatch(f"it had the splits {', '.join(splits)}: name one of them with --split")
    split = "".join(splits) if split is None else split
    there = seen.versions(split)
    for version in (a, b):
        if version is not None and version not in there:
            listed = ", ".join(there) or "nothing"
            raise Mismatch(f"version {version!r} was sent nothing; there is {listed}")
    rest = [version for version in there if version not in (a, b)]
    missing = (a, b).count(None)
    if a == b is not None or (missing and len(rest) != missing):
        listed = ", ".join(there) or "none that was sent anything"
        raise Mismatch(f"name two versions with --a and --b; there is {listed}")
    return split, a or rest.pop(0), b or rest.pop(0)


def ratio(seen: Evidence, split: str, weights: Mapping[str, int]) -> Ratio:
    """How the split's exchanges lie with its weights. Raises Mismatch."""
    weights = {version: weight for version, weight in weights.items() if weight}
    for version in seen.versions(split):
        if version not in weights:
            raise Mismatch(f"version {version!r} was sent something, and has no weight there")
    arms = {version: seen.arms.get((split, version)) for version in weights}
    sent = {version: 0 if arm is None else arm.sent for version, arm in arms.items()}
    return Ratio(sent, weights, unlikely(list(sent.values()), list(weights.values())))


class _Both(Struct, frozen=True):
    """Makes the rows of two arms."""

    a: Figures[Any]
    b: Figures[Any]
    confidence: float
    note: str
    """On how measured values are known."""

    def counts(self) -> Iterator[Row]:
        yield Row("requests", "", self.a.sent, self.b.sent)
        for direction, name in (("input", "prompt tokens"), ("output", "completion tokens")):
            yield Row(name, "", _tokens(self.a, direction), _tokens(self.b, direction))

    def shares(self) -> Iterator[Row]:
        arms = (self.a, self.b)
        for name, outcomes in _OUTCOMES.items():
            yield self._share(name, [(_ended(arm, outcomes), arm.sent) for arm in arms])
        yield self._share("answered elsewhere", [(arm.diversions, arm.sent) for arm in arms])
        lossy = [(arm.lossy, arm.outcomes.total()) for arm in arms]
        yield self._share("something lost", lossy)
        for reason in sorted({reason for arm in arms for (reason,) in arm.finishes}):
            ended = [(arm.finishes[reason,], arm.finishes.total()) for arm in arms]
            yield self._share(f"ended by {reason}", ended)

    def measures(self) -> Iterator[Row]:
        for name, unit, of in _MEASURES:
            samples = of(self.a), of(self.b)
            yield self._mean(f"{name}, mean", unit, *samples)
            for p in _QUANTILES:
                yield self._quantile(f"{name}, p{p:.0%}".rstrip("%"), unit, p, *samples)

    def _share(self, name: str, counts: Sequence[tuple[int, int]]) -> Row:
        """Of hits and what they are part of, for each arm."""
        a, b = (wilson(hits, of, self.confidence) if of else None for hits, of in counts)
        difference = None if a is None or b is None else apart(a, b)
        return Row(name, "share", _value(a), _value(b), difference, "Newcombe")

    def _mean(self, name: str, unit: Unit, a: Sample, b: Sample) -> Row:
        one, other = a.mean(), b.mean()
        difference = welch(one, other, self.confidence)
        return Row(name, unit, _value(one), _value(other), difference, f"Welch{self.note}")

    def _quantile(self, name: str, unit: Unit, p: float, a: Sample, b: Sample) -> Row:
        one, other = (by_order(sample, p, self.confidence) for sample in (a, b))
        difference = None if one is None or other is None else apart(one, other)
        left, right = (sample.quantile(p) if sample.n else None for sample in (a, b))
        return Row(name, unit, left, right, difference, f"order statistics{self.note}")


def _value(found: Interval | Mean | None) -> float | None:
    return None if found is None else found.value


def _tokens(arm: Figures[Any], wanted: str) -> int:
    return sum(count for (direction, _), count in arm.tokens.items() if direction == wanted)


def _ended(arm: Figures[Any], outcomes: Sequence[str]) -> int:
    return sum(count for (*_, outcome), count in arm.outcomes.items() if outcome in outcomes)
