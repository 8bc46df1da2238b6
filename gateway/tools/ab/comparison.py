"""Two versions of a model, number by number, and the report of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import floor, log10
from typing import Any, Final, Literal

from msgspec import Struct

from gateway.observability.stats import RequestStats
from gateway.tools.ab.sources import Evidence, Outcomes, OutcomeSample, UsageQuery
from gateway.tools.ab.statistics import (
    Interval,
    Mean,
    Sample,
    chi_square_p_value,
    difference_interval,
    quantile_interval,
    required_for_sequential,
    required_per_version,
    sequential_interval,
    welch_interval,
    wilson_interval,
)

Unit = Literal["", "share", "seconds", "tokens", "value"]

_OUTCOMES: Final[Mapping[str, Sequence[str]]] = {
    "failed": ("worker_error", "gateway_error", "truncated"),
    "refused": ("client_error",),
    "cancelled by client": ("cancelled",),
}
_SAMPLES: Final[Sequence[tuple[str, Unit, Callable[[RequestStats[Any]], Sample]]]] = (
    ("time to first token", "seconds", lambda stats: stats.first_token),
    ("duration", "seconds", lambda stats: stats.duration),
    ("time per token", "seconds", lambda stats: stats.per_token),
    ("length", "tokens", lambda stats: stats.completion_tokens),
)
_QUANTILES: Final = (0.5, 0.95)
_MIN_P_VALUE: Final = 0.001
"""Counts that are less likely than this are not by chance."""

_UNITS: Final = {
    "share": (100.0, "%"),
    "seconds": (1.0, "s"),
    "tokens": (1.0, ""),
    "value": (1.0, ""),
    "": (1.0, ""),
}
_MILLISECONDS: Final = (1000.0, "ms")
_DIGITS: Final = 3
"""Significant digits of the larger number of a row."""


class ComparisonError(Exception):
    """There is nothing to compare, or too much; the message says what there is."""


class ComparisonRow(Struct, frozen=True):
    """One number of both versions, and the difference ``b - a``.

    Without a difference it is a plain count, or there are too few values for one.
    """

    figure: str
    unit: Unit
    a: float | None
    b: float | None
    difference: Interval | None = None
    method: str = ""
    variance: float | None = None
    """Of a single value of both versions together, if they are compared by their means."""
    n: int = 0
    """How many values the version with fewer of them has."""
    is_outcome: bool = False
    """Whether it is feedback; its interval is valid however often it is computed."""


class Verdict(Struct, frozen=True):
    """What a comparison says of one figure."""

    figure: str
    result: Literal["higher", "lower", "equal", "unknown"]
    """Of ``b`` beside ``a``; ``equal``: no difference as large as the one that matters."""
    text: str


class SplitRatio(Struct, frozen=True):
    """Whether the split sends requests to its versions as its weights say."""

    sent: Mapping[str, int]
    weights: Mapping[str, int]
    likelihood: float
    """The p-value of the counts, if the split works as its weights say."""

    @property
    def is_plausible(self) -> bool:
        """Whether chance explains the counts."""
        return self.likelihood >= _MIN_P_VALUE


class SegmentRow(Struct, frozen=True):
    """An outcome in one segment; ``a`` and ``b`` are the numbers of values."""

    segment: str
    a: int
    b: int
    row: ComparisonRow


class Comparison(Struct, frozen=True):
    """The version ``b`` compared with the version ``a``."""

    split: str
    a: str
    b: str
    confidence: float
    rows: tuple[ComparisonRow, ...]
    ratio: SplitRatio | None = None
    segments: tuple["SegmentRow", ...] = ()
    """The outcomes in each segment."""

    @property
    def intervals(self) -> int:
        """The number of differences: one in so many misses the truth by chance."""
        return sum(row.difference is not None for row in self.rows)


def compare_versions(
    evidence: Evidence, split: str, versions: tuple[str, str], confidence: float
) -> Comparison:
    """Compare two versions to which a split sent requests. ``confidence`` is between 0 and 1."""
    a, b = (evidence.variants[split, version] for version in versions)
    suffix = "" if evidence.exact else ", from buckets"
    pair = _VersionPair(a, b, confidence, suffix, has_losses=evidence.has_losses)
    outcomes = (
        _compare_outcome(name, evidence.outcomes[name], split, versions, confidence)
        for name in evidence.outcomes
    )
    rows = (*pair.counts(), *outcomes, *pair.shares(), *pair.samples())
    if not evidence.has_losses:
        rows = tuple(
            row for row in rows if row.is_outcome or row.a is not None or row.b is not None
        )
    segments = _compare_segments(evidence, split, versions, confidence)
    return Comparison(split, *versions, confidence, rows, segments=segments)


_MAX_SEGMENTS: Final = 20
"""The segments with most values are compared."""


def _compare_outcome(
    name: str, samples: Outcomes, split: str, versions: tuple[str, str], confidence: float
) -> ComparisonRow:
    """Compare feedback by an interval that is valid whenever one looks."""
    found = [samples.get((split, version)) for version in versions]
    means = [None if sample is None else sample.mean() for sample in found]
    a, b = means
    is_share = all(sample is None or sample.is_share for sample in found)
    present = [mean for mean in means if mean is not None]
    difference = None
    if a is not None and b is not None and min(a.n, b.n) > 1:
        difference = sequential_interval(a, b, confidence)
    return ComparisonRow(
        figure=name,
        unit="share" if is_share else "value",
        a=_value(a),
        b=_value(b),
        difference=difference,
        method="sequential",
        variance=sum(mean.variance for mean in present) / len(present) if present else None,
        n=min((mean.n for mean in present), default=0) if len(present) == len(means) else 0,
        is_outcome=True,
    )


def _count_values(sample: OutcomeSample | None) -> int:
    mean = None if sample is None else sample.mean()
    return 0 if mean is None else mean.n


def _compare_segments(
    evidence: Evidence, split: str, versions: tuple[str, str], confidence: float
) -> tuple[SegmentRow, ...]:
    """Compare the largest segments, each at a level that holds for all of them together."""
    sizes = {
        key: tuple(_count_values(samples.get((split, version))) for version in versions)
        for key, samples in evidence.segments.items()
    }
    largest = sorted(sizes, key=lambda key: (-sum(sizes[key]), key))[:_MAX_SEGMENTS]
    level = 1 - (1 - confidence) / max(1, len(largest))
    return tuple(
        SegmentRow(
            segment or "-",
            sizes[name, segment][0],
            sizes[name, segment][1],
            _compare_outcome(name, evidence.segments[name, segment], split, versions, level),
        )
        for name, segment in largest
    )


def select_versions(
    evidence: Evidence, split: str | None, a: str | None, b: str | None
) -> tuple[str, str, str]:
    """The split and the versions that are named, or the only ones. Raises ComparisonError."""
    splits = evidence.splits()
    if split is None and len(splits) > 1:
        raise ComparisonError(f"it had the splits {', '.join(splits)}: name one with --split")
    split = "".join(splits) if split is None else split
    present = evidence.versions(split)
    for version in (a, b):
        if version is not None and version not in present:
            listed = ", ".join(present) or "nothing"
            raise ComparisonError(f"version {version!r} was sent no requests; there is {listed}")
    others = [version for version in present if version not in (a, b)]
    missing = (a, b).count(None)
    if a == b is not None or (missing and len(others) != missing):
        listed = ", ".join(present) or "none that was sent requests"
        raise ComparisonError(f"name two versions with --a and --b; there is {listed}")
    return split, a or others.pop(0), b or others.pop(0)


def check_split_ratio(evidence: Evidence, split: str, weights: Mapping[str, int]) -> SplitRatio:
    """Compare the users or requests of each version with the split's weights.

    Raises ComparisonError.
    """
    weights = {version: weight for version, weight in weights.items() if weight}
    for version in evidence.versions(split):
        if version not in weights:
            raise ComparisonError(f"version {version!r} was sent requests, and has no weight")
    requests = {version: evidence.count_units((split, version)) for version in weights}
    return SplitRatio(
        requests, weights, chi_square_p_value([*requests.values()], [*weights.values()])
    )


# --- verdicts -------------------------------------------------------------------------------------

_VERDICT_FIGURES: Final = (
    "failed",
    "time to first token, mean",
    "duration, mean",
    "time per token, mean",
)
"""The figures that decide about a version, of those that its requests have."""
_MIN_SHARE: Final = 0.01
"""A difference of a share that matters, at least: a relative one would be tiny for few errors."""


def judge_rows(comparison: Comparison, relative: float) -> Iterator[Verdict]:
    """What the rows that decide say of a ``relative`` difference, such as 0.1."""
    for row in comparison.rows:
        is_decisive = row.is_outcome or row.figure in _VERDICT_FIGURES
        if not is_decisive or row.a is None or row.b is None:
            continue
        smallest = find_relevant_difference(row, relative)
        interval = row.difference
        if interval is not None and interval.excludes_zero:
            result: Literal["higher", "lower"] = "higher" if interval.value > 0 else "lower"
            yield Verdict(row.figure, result, _describe_difference(comparison, row, interval))
        elif interval is not None and max(-interval.low, interval.high) <= smallest:
            text = f"no difference of {_format_relative(row, smallest)} or more"
            yield Verdict(row.figure, "equal", text)
        else:
            yield Verdict(
                row.figure, "unknown", _describe_lack(row, smallest, comparison.confidence)
            )


def find_relevant_difference(row: ComparisonRow, relative: float) -> float:
    """The smallest difference that matters, in the unit of the row."""
    difference = relative * (row.a or 0.0)
    return max(difference, _MIN_SHARE) if row.unit == "share" else difference


def _describe_difference(comparison: Comparison, row: ComparisonRow, interval: Interval) -> str:
    word = "higher" if interval.value > 0 else "lower"
    low, value, high = (
        _format_relative(row, size)
        for size in sorted(map(abs, (interval.low, interval.value, interval.high)))
    )
    return f"version {comparison.b} is {value} {word} ({low} to {high})"


def _describe_lack(row: ComparisonRow, smallest: float, confidence: float) -> str:
    goal = _format_relative(row, smallest)
    if row.variance is None or not smallest:
        return "not enough data"
    require = required_for_sequential if row.is_outcome else required_per_version
    missing = require(row.variance, smallest, confidence) - row.n
    if missing <= 0:
        return f"not enough data for a difference of {goal}"
    unit = "judgements" if row.is_outcome else "requests"
    return f"not enough data: about {missing:,} more {unit} per version for a difference of {goal}"


def _format_relative(row: ComparisonRow, size: float) -> str:
    """A difference in percent of the version ``a``, or in percentage points of a share."""
    if row.unit == "share":
        points = f"{100 * size:.2g}"
        return f"{points} percentage point{'' if points == '1' else 's'}"
    return f"{100 * size / row.a:.2g} %" if row.a else f"{size:.2g}"


class _VersionPair(Struct, frozen=True):
    """Builds the rows of two versions."""

    a: RequestStats[Any]
    b: RequestStats[Any]
    confidence: float
    suffix: str
    """Of the method, where values are not exact."""
    has_losses: bool = True

    def counts(self) -> Iterator[ComparisonRow]:
        yield ComparisonRow("requests", "", self.a.routed_requests, self.b.routed_requests)
        for direction, name in (("input", "prompt tokens"), ("output", "completion tokens")):
            a, b = (_count_tokens(stats, direction) for stats in (self.a, self.b))
            yield ComparisonRow(name, "", a, b)

    def shares(self) -> Iterator[ComparisonRow]:
        pair = (self.a, self.b)
        for name, outcomes in _OUTCOMES.items():
            yield self._share(
                name, [(_count_outcomes(stats, outcomes), stats.routed_requests) for stats in pair]
            )
        if self.has_losses:
            yield self._share(
                "answered by fallback",
                [(stats.answered_by_fallback, stats.routed_requests) for stats in pair],
            )
            yield self._share(
                "with a loss", [(stats.lossy_requests, stats.outcomes.total()) for stats in pair]
            )
        for reason in sorted({reason for stats in pair for (reason,) in stats.finish_reasons}):
            counts = [
                (stats.finish_reasons[reason,], stats.finish_reasons.total()) for stats in pair
            ]
            yield self._share(f"ended by {reason}", counts)

    def samples(self) -> Iterator[ComparisonRow]:
        for name, unit, get_sample in _SAMPLES:
            samples = get_sample(self.a), get_sample(self.b)
            yield self._mean(f"{name}, mean", unit, *samples)
            for p in _QUANTILES:
                yield self._quantile(f"{name}, p{p:.0%}".rstrip("%"), unit, p, *samples)

    def _share(self, name: str, counts: Sequence[tuple[int, int]]) -> ComparisonRow:
        """``counts`` are the hits and the total of each version."""
        a, b = (
            wilson_interval(n, total, self.confidence) if total else None for n, total in counts
        )
        difference = None if a is None or b is None else difference_interval(a, b)
        total = sum(total for _, total in counts)
        share = sum(n for n, _ in counts) / total if total else 0.0
        return ComparisonRow(
            figure=name,
            unit="share",
            a=_value(a),
            b=_value(b),
            difference=difference,
            method="Newcombe",
            variance=max(share * (1 - share), _MIN_SHARE * (1 - _MIN_SHARE)),
            n=min(total for _, total in counts),
        )

    def _mean(self, name: str, unit: Unit, a: Sample, b: Sample) -> ComparisonRow:
        mean_a, mean_b = a.mean(), b.mean()
        difference = welch_interval(mean_a, mean_b, self.confidence)
        method = f"Welch{self.suffix}"
        means = [mean for mean in (mean_a, mean_b) if mean is not None]
        return ComparisonRow(
            figure=name,
            unit=unit,
            a=_value(mean_a),
            b=_value(mean_b),
            difference=difference,
            method=method,
            variance=sum(mean.variance for mean in means) / len(means) if means else None,
            n=min((mean.n for mean in means), default=0),
        )

    def _quantile(self, name: str, unit: Unit, p: float, a: Sample, b: Sample) -> ComparisonRow:
        quantile_a, quantile_b = (
            quantile_interval(sample, p, self.confidence) for sample in (a, b)
        )
        difference = (
            None
            if quantile_a is None or quantile_b is None
            else difference_interval(quantile_a, quantile_b)
        )
        value_a, value_b = (sample.quantile(p) if sample.n else None for sample in (a, b))
        method = f"order statistics{self.suffix}"
        return ComparisonRow(name, unit, value_a, value_b, difference, method)


def _value(estimate: Interval | Mean | None) -> float | None:
    return None if estimate is None else estimate.value


def _count_tokens(stats: RequestStats[Any], name: str) -> int:
    return sum(count for (direction, _), count in stats.tokens.items() if direction == name)


def _count_outcomes(stats: RequestStats[Any], outcomes: Sequence[str]) -> int:
    return sum(count for (*_, outcome), count in stats.outcomes.items() if outcome in outcomes)


# --- report ---------------------------------------------------------------------------------------


class ComparisonReport(Struct, frozen=True):
    """What ``interlingua ab`` prints. ``source`` is what it read."""

    source: str
    model: str
    comparison: Comparison
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    def title(self) -> str:
        """What is compared with what."""
        comparison = self.comparison
        sender = f"sent by the split {comparison.split}" if comparison.split else "all requests"
        return (
            f"{self.model}: version {comparison.b} compared with version {comparison.a}, {sender}"
        )

    def headings(self) -> Sequence[str]:
        """The headings of the table."""
        versions = (f"version {name}" for name in (self.comparison.a, self.comparison.b))
        return ("", *versions, "difference", "from", "to", "", "method")

    def verdict_lines(self) -> Iterator[str]:
        """A line for each verdict."""
        for verdict in self.verdicts:
            yield f"{verdict.figure}: {verdict.text}"

    def table(self) -> list[Sequence[str]]:
        """The cells of each row: name, a, b, difference, its interval, a mark, the method."""
        return [_format_row(row) for row in self.comparison.rows]

    def segment_table(self) -> list[Sequence[str]]:
        """The cells of each segment: outcome, segment, numbers of values, then as ``table``."""
        rows: list[Sequence[str]] = []
        for one in self.comparison.segments:
            figure, *cells, _ = _format_row(one.row)
            rows.append((figure, one.segment, f"{one.a:,}", f"{one.b:,}", *cells))
        return rows


def build_report(
    source: str,
    query: UsageQuery,
    evidence: Evidence,
    comparison: Comparison,
    relative: float,
) -> ComparisonReport:
    """The comparison with its notes, and what it says of a ``relative`` difference."""
    notes = [_describe_intervals(comparison), *describe_excluded(evidence, query)]
    notes += _describe_outcomes(evidence, query)
    notes += _describe_limits(evidence)
    if comparison.ratio is not None:
        notes.append(_describe_ratio(comparison.ratio))
    verdicts = tuple(judge_rows(comparison, relative))
    return ComparisonReport(source, query.model, comparison, verdicts, tuple(notes))


def describe_excluded(evidence: Evidence, query: UsageQuery) -> Iterator[str]:
    """The requests that no split sent to the version that answered."""
    prefix = "Included, though not a random sample" if query.everything else "Left out"
    for reason, count in sorted(evidence.excluded.items()):
        yield f"{prefix}: {count} requests {reason}."


def _describe_intervals(comparison: Comparison) -> str:
    expected_misses = comparison.intervals * (1 - comparison.confidence)
    return (
        f"{comparison.intervals} intervals at {100 * comparison.confidence:g} %; a * marks those "
        f"that exclude 0, as about {expected_misses:.1f} of them would if nothing differed."
    )


def _describe_outcomes(evidence: Evidence, query: UsageQuery) -> Iterator[str]:
    """How feedback is compared."""
    if not query.outcomes:
        return
    yield (
        "The intervals of feedback, marked sequential, hold whenever and however often you look: "
        "the test may end as soon as one excludes 0. All others are for one look."
    )
    if query.by:
        yield (
            "The intervals of all segments together miss the truth as rarely as one alone would "
            "at the confidence level."
        )
    if evidence.repeated:
        yield (
            f"Each user counts once, by the first judgement: {evidence.repeated} further ones are "
            "left out. --unit request includes them."
        )
    elif evidence.without_user and not query.each_request:
        yield (
            "Each judged request counts, since the split is not sticky: if some users judge many, "
            "the intervals are too narrow."
        )


def _describe_limits(evidence: Evidence) -> Iterator[str]:
    """What makes the intervals less certain than they look, and what was not read."""
    if evidence.sticky:
        yield (
            "Users keep their version, so that their requests are not independent: where few users "
            "send most of them, the intervals are too narrow."
        )
    if not evidence.exact:
        yield (
            "A page of metrics has only the bucket of each value: quantiles and spreads are as "
            "precise as the buckets. It counts from the gateway's start."
        )
    if evidence.skipped:
        yield f"{evidence.skipped} of {evidence.lines} lines are not the record of a request."
    if evidence.early:
        yield f"{evidence.early} of {evidence.lines} lines are of requests before --since."


def _describe_ratio(ratio: SplitRatio) -> str:
    requests, weights = (
        " : ".join(map(str, numbers.values())) for numbers in (ratio.sent, ratio.weights)
    )
    versions = ", ".join(ratio.weights)
    text = f"split sent {requests} to the versions {versions} for the weights {weights}"
    if ratio.is_plausible:
        return f"The {text}, which fits (p = {ratio.likelihood:.2g})."
    return (
        f"WARNING: the {text}, which does not fit (p = {ratio.likelihood:.2g}): requests of a "
        "version are lost or sent elsewhere, or the weights were changed, or few users send most "
        "of the requests. Find the cause before you rely on these numbers."
    )


def _format_row(row: ComparisonRow) -> Sequence[str]:
    scale, unit = _UNITS[row.unit]
    values = [value for value in (row.a, row.b) if value is not None]
    if row.unit == "seconds" and max(values, default=0.0) < 1:
        scale, unit = _MILLISECONDS
    difference = row.difference
    interval = () if difference is None else (difference.value, difference.low, difference.high)
    largest = max(values, default=0.0) or max(map(abs, interval), default=0.0)
    digits = _count_decimals(largest * scale) if row.unit else 0
    a, b = (_format_number(value, scale, f".{digits}f", unit) for value in (row.a, row.b))
    if difference is None:
        return (row.figure, a, b, "unknown" if row.unit else "", "", "", "", "")
    cells = (_format_number(value, scale, f"+.{digits}f", unit) for value in interval)
    return (row.figure, a, b, *cells, "*" if difference.excludes_zero else "", row.method)


def _format_number(value: float | None, scale: float, spec: str, unit: str) -> str:
    return "-" if value is None else f"{value * scale:{spec}} {unit}".rstrip()


def _count_decimals(largest: float) -> int:
    integer_digits = floor(log10(largest)) + 1 if largest else _DIGITS
    return max(0, min(_DIGITS, _DIGITS - integer_digits))


# --- planning -------------------------------------------------------------------------------------


class PlannedFigure(Struct, frozen=True):
    """How many requests each version needs to tell a difference of a figure."""

    figure: str
    unit: Unit
    value: float
    """Of the version that has most requests so far."""
    difference: float
    """In the unit."""
    requests: int
    """Per version."""


class ComparisonPlan(Struct, frozen=True):
    """How many requests an A/B test of a model needs."""

    source: str
    model: str
    version: str
    """The version from which the figures are taken."""
    relative: float
    confidence: float
    figures: tuple[PlannedFigure, ...]

    def table(self) -> list[Sequence[str]]:
        """The cells of each row: figure, its value, the difference, requests per version."""
        rows: list[Sequence[str]] = []
        for figure in self.figures:
            row = ComparisonRow(figure.figure, figure.unit, figure.value, figure.difference)
            _, value, difference, *_ = _format_row(row)
            rows.append((figure.figure, value, difference, f"{figure.requests:,}"))
        return rows


def plan_test(
    source: str, query: UsageQuery, evidence: Evidence, relative: float, confidence: float
) -> ComparisonPlan:
    """Plan a test from the requests that a model had so far. Raises ComparisonError."""
    versions = {version: stats for (_, version), stats in evidence.variants.items()}
    if not versions:
        raise ComparisonError("it had no requests from which a test can be planned")
    version, stats = max(versions.items(), key=lambda item: item[1].routed_requests)
    pair = _VersionPair(stats, stats, confidence, "", has_losses=evidence.has_losses)
    outcomes = (
        _compare_outcome(name, samples, "", (version, version), confidence)
        for name, samples in evidence.outcomes.items()
    )
    figures = [
        PlannedFigure(
            row.figure,
            row.unit,
            row.a,
            difference,
            (required_for_sequential if row.is_outcome else required_per_version)(
                row.variance, difference, confidence
            ),
        )
        for row in (*outcomes, *pair.shares(), *pair.samples())
        if (row.is_outcome or row.figure in _VERDICT_FIGURES)
        and row.a is not None
        and row.variance is not None
        if (difference := find_relevant_difference(row, relative))
    ]
    return ComparisonPlan(source, query.model, version, relative, confidence, tuple(figures))
