"""Two versions of a model, measure by measure, and the report of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gateway.config.schema import JUDGE_FEEDBACK
from gateway.evidence.measures import (
    FAILED_OUTCOMES,
    REFUSED_OUTCOMES,
    Better,
    MeasureResult,
    Unit,
    build_headings,
    format_percent,
    format_rounded,
    format_value,
    judge,
    list_cells,
    summarize_verdicts,
)
from gateway.evidence.sequential import (
    Tally,
    rate_difference_interval,
    required_per_side,
    superiority_interval,
)
from gateway.evidence.sources import Evidence, Outcomes, OutcomeSample, UsageQuery
from gateway.evidence.statistics import (
    ExactSample,
    Interval,
    Mean,
    Sample,
    chi_square_p_value,
    difference_interval,
    quantile_interval,
    required_per_version,
    welch_interval,
    wilson_interval,
)
from gateway.observability.stats import RequestStats

_OUTCOMES: Final[Mapping[str, tuple[Sequence[str], Better]]] = {
    "failed": (FAILED_OUTCOMES, "lower"),
    "refused": (REFUSED_OUTCOMES, "lower"),
    "cancelled by client": (("cancelled",), "neither"),
}
_SAMPLES: Final[Sequence[tuple[str, Unit, Callable[[RequestStats[Any]], Sample]]]] = (
    ("time to first token", "seconds", lambda stats: stats.first_token),
    ("duration", "seconds", lambda stats: stats.duration),
    ("time per token", "seconds", lambda stats: stats.per_token),
    ("length", "tokens", lambda stats: stats.completion_tokens),
)
_QUANTILES: Final = (0.5, 0.95)
_TIMES: Final = tuple(name for name, unit, _ in _SAMPLES if unit == "seconds")
_DECISIVE_SHARES: Final = ("failed", "refused")
_DECISIVE: Final = frozenset({*_DECISIVE_SHARES, *_TIMES})
"""The measures that decide about a version, beside feedback, of those that its requests have."""
_DECISIVE_BUCKETS: Final = frozenset({*_DECISIVE_SHARES, *(f"{name}, mean" for name in _TIMES)})
"""The same where only buckets are known: times then have no order in which they could be paired."""
_BETTING: Final = "betting"
"""The method of intervals that hold at every moment, see ``gateway.evidence.sequential``."""
_PAIR_VARIANCE: Final = 0.25
"""Of a comparison of two values, which either is the higher one."""
_MIN_SHARE: Final = 0.01
"""A difference of a share that matters, at least: a relative one would be tiny for few errors."""
_EQUAL: Final = 0.5
"""The probability of a higher value, of equal versions."""
_RELEVANT_PROBABILITY: Final = 0.05
"""How far from 50 % the probability of a higher value is, if that matters."""
_MIN_P_VALUE: Final = 0.001
"""Counts that are less likely than this are not by chance."""


class ComparisonError(Exception):
    """There is nothing to compare, or too much; the message says what there is."""


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
    row: MeasureResult


class Comparison(Struct, frozen=True):
    """The version ``b`` compared with the version ``a``."""

    split: str
    a: str
    b: str
    confidence: float
    rows: tuple[MeasureResult, ...]
    ratio: SplitRatio | None = None
    segments: tuple["SegmentRow", ...] = ()
    """The outcomes in each segment."""

    @property
    def verdicts(self) -> list[MeasureResult]:
        """The measures that decide, each with its verdict; their intervals hold all together."""
        return [row for row in self.rows if row.verdict is not None]


def compare_versions(
    evidence: Evidence,
    split: str,
    versions: tuple[str, str],
    confidence: float,
    relative: float = 0.1,
) -> Comparison:
    """Compare two versions to which a split sent requests. ``confidence`` is between 0 and 1.

    The intervals of the measures that decide hold together with this confidence, each other one by
    itself. ``relative`` is the smallest difference that matters.
    """
    a, b = (evidence.variants[split, version] for version in versions)
    level = compute_level(evidence, (a, b), confidence)
    suffix = "" if evidence.exact else ", from buckets"
    pair = _VersionPair(
        a, b, confidence, level, suffix, is_exact=evidence.exact, has_losses=evidence.has_losses
    )
    outcomes = (
        _compare_outcome(name, evidence.outcomes[name], split, versions, level)
        for name in evidence.outcomes
    )
    rows = (*pair.counts(), *outcomes, *pair.shares(), *pair.samples())
    if not evidence.has_losses:
        rows = tuple(
            row for row in rows if row.is_feedback or row.a is not None or row.b is not None
        )
    for row in rows:
        if row.is_feedback or row.measure in pair.decisive:
            _judge(row, versions[1], relative, level)
    segments = _compare_segments(evidence, split, versions, confidence)
    return Comparison(split, *versions, confidence, rows, segments=segments)


def compute_level(
    evidence: Evidence, pair: tuple[RequestStats[Any], RequestStats[Any]], confidence: float
) -> float:
    """The confidence of each measure that decides, so that all hold together."""
    a, b = pair
    decisive = len(_DECISIVE_SHARES) + len(evidence.outcomes)
    decisive += sum(min(get_sample(a).n, get_sample(b).n) > 0 for _, _, get_sample in _SAMPLES[:3])
    return 1 - (1 - confidence) / decisive


_MAX_SEGMENTS: Final = 20
"""The segments with most values are compared."""


def _compare_outcome(
    name: str, samples: Outcomes, split: str, versions: tuple[str, str], confidence: float
) -> MeasureResult:
    """Compare feedback by an interval that is valid whenever one looks.

    Shares by their difference; numbers by the probability that the second version has the higher
    one, since their means have no such interval.
    """
    found = [samples.get((split, version)) for version in versions]
    is_share = all(sample is None or sample.is_share for sample in found)
    present = [sample for sample in found if sample is not None and sample.values]
    result = MeasureResult(
        measure=name,
        unit="share" if is_share else "value",
        a=_mean_of(found[0]),
        b=_mean_of(found[1]),
        scale="difference" if is_share else "probability",
        variance=sum(map(_variance_of, present)) / len(present) if present else None,
        is_feedback=True,
    )
    if len(present) < len(found):
        return result
    a, b = present
    result.n = min(len(a.values), len(b.values))
    if is_share:
        result.difference = rate_difference_interval(a.tally, b.tally, confidence)
        result.method = _BETTING
    else:
        result.difference = superiority_interval(a.values, b.values, confidence)
        result.method = f"{_BETTING}, pairs"
    return result


def _mean_of(sample: OutcomeSample | None) -> float | None:
    return None if sample is None or not sample.values else sample.tally.share


def _variance_of(sample: OutcomeSample) -> float:
    """Of a single value: of a share; of numbers, that of a comparison of two."""
    if not sample.is_share:
        return _PAIR_VARIANCE
    share = (sample.tally.hits + 1) / (sample.tally.n + 2)
    return share * (1 - share)


def _count_values(sample: OutcomeSample | None) -> int:
    return 0 if sample is None else len(sample.values)


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


def _judge(row: MeasureResult, version: str, relative: float, confidence: float) -> None:
    """Set the verdict of a row that decides, and say what it means or lacks."""
    if row.a is None or row.b is None:
        return
    smallest = find_relevant_difference(row, relative)
    judge(row, smallest)
    interval, goal = row.difference, _format_relative(row, smallest)
    if row.verdict == "not enough data":
        row.note = "not enough data"
        if row.variance is not None and smallest:
            row.missing = max(_require(row)(row.variance, smallest, confidence) - row.n, 0)
            unit = "judgements" if row.is_feedback else "requests"
            more = f": about {row.missing:,} more {unit} per version" if row.missing else ""
            row.note = f"not enough data{more} for a difference of {goal}"
    elif row.verdict == "no relevant difference" or interval is None:
        row.note = f"no difference of {goal} or more"
    elif row.scale == "probability":
        value, low, high = (
            f"{format_percent(end)} %" for end in (interval.value, interval.low, interval.high)
        )
        row.note = f"version {version} has the higher value with {value} ({low} to {high})"
    else:
        low, value, high = (
            _format_relative(row, size)
            for size in sorted(map(abs, (interval.low, interval.value, interval.high)))
        )
        word = "higher" if row.is_higher else "lower"
        row.note = f"version {version} is {value} {word} ({low} to {high})"


def _require(row: MeasureResult) -> Callable[[float, float, float], int]:
    return required_per_side if row.method.startswith(_BETTING) else required_per_version


def find_relevant_difference(row: MeasureResult, relative: float) -> float:
    """The smallest difference that matters, in the unit of the row."""
    if row.scale == "probability":
        return _RELEVANT_PROBABILITY
    difference = relative * (row.a or 0.0)
    return max(difference, _MIN_SHARE) if row.unit == "share" else difference


def _format_relative(row: MeasureResult, size: float) -> str:
    """A difference in percent of the version ``a``, or in percentage points of a share."""
    if row.scale == "probability":
        return f"{format_percent(size)} percentage points in the probability of a higher value"
    if row.unit == "share":
        points = format_percent(size)
        return f"{points} percentage point{'' if points == '1' else 's'}"
    return f"{format_percent(size / row.a)} %" if row.a else format_rounded(size)


class _VersionPair(Struct, frozen=True):
    """Builds the rows of two versions."""

    a: RequestStats[Any]
    b: RequestStats[Any]
    confidence: float
    level: float
    """The confidence level of each measure that decides."""
    suffix: str
    """Of the method, where values are not exact."""
    is_exact: bool = True
    has_losses: bool = True

    @property
    def decisive(self) -> frozenset[str]:
        """The measures that decide, beside feedback."""
        return _DECISIVE if self.is_exact else _DECISIVE_BUCKETS

    def counts(self) -> Iterator[MeasureResult]:
        yield MeasureResult("requests", "", self.a.routed_requests, self.b.routed_requests)
        for direction, name in (("input", "prompt tokens"), ("output", "completion tokens")):
            a, b = (_count_tokens(stats, direction) for stats in (self.a, self.b))
            yield MeasureResult(name, "", a, b)

    def shares(self) -> Iterator[MeasureResult]:
        pair = (self.a, self.b)
        for name, (outcomes, better) in _OUTCOMES.items():
            counts = [(_count_outcomes(stats, outcomes), stats.routed_requests) for stats in pair]
            yield self._share(name, counts, better)
        yield self._share(
            "answered by fallback",
            [(stats.answered_by_fallback, stats.routed_requests) for stats in pair],
            "lower",
        )
        if self.has_losses:
            yield self._share(
                "with a loss",
                [(stats.lossy_requests, stats.outcomes.total()) for stats in pair],
                "lower",
            )
        for reason in sorted({reason for stats in pair for (reason,) in stats.finish_reasons}):
            counts = [
                (stats.finish_reasons[reason,], stats.finish_reasons.total()) for stats in pair
            ]
            yield self._share(f"ended by {reason}", counts)

    def samples(self) -> Iterator[MeasureResult]:
        for name, unit, get_sample in _SAMPLES:
            samples = get_sample(self.a), get_sample(self.b)
            if self.is_exact and unit == "seconds":
                yield self._superiority(name, *samples)
            yield self._mean(f"{name}, mean", unit, *samples)
            for p in _QUANTILES:
                yield self._quantile(f"{name}, p{p:.0%}".rstrip("%"), unit, p, *samples)

    def _level_of(self, name: str) -> float:
        return self.level if name in self.decisive else self.confidence

    def _share(
        self, name: str, counts: Sequence[tuple[int, int]], better: Better = "neither"
    ) -> MeasureResult:
        """``counts`` are the hits and the total of each version."""
        level = self._level_of(name)
        a, b = (wilson_interval(n, total, level) if total else None for n, total in counts)
        if a is None or b is None:
            difference, method = None, ""
        elif name in self.decisive:
            tally_a, tally_b = (Tally(n, total) for n, total in counts)
            difference, method = rate_difference_interval(tally_a, tally_b, level), _BETTING
        else:
            difference, method = difference_interval(a, b), "Newcombe"
        total = sum(total for _, total in counts)
        share = sum(n for n, _ in counts) / total if total else 0.0
        return MeasureResult(
            measure=name,
            unit="share",
            better=better,
            a=_value(a),
            b=_value(b),
            difference=difference,
            method=method,
            variance=max(share * (1 - share), _MIN_SHARE * (1 - _MIN_SHARE)),
            n=min(total for _, total in counts),
        )

    def _superiority(self, name: str, a: Sample, b: Sample) -> MeasureResult:
        """Whether times are longer, by pairs in the order in which they came."""
        assert isinstance(a, ExactSample)  # noqa: S101 - as ``is_exact`` says
        assert isinstance(b, ExactSample)  # noqa: S101 - as above
        mean_a, mean_b = a.mean(), b.mean()
        return MeasureResult(
            measure=name,
            unit="seconds",
            scale="probability",
            better="lower",
            a=_value(mean_a),
            b=_value(mean_b),
            difference=superiority_interval(a.values, b.values, self.level),
            method=f"{_BETTING}, pairs",
            variance=_PAIR_VARIANCE,
            n=min(a.n, b.n),
        )

    def _mean(self, name: str, unit: Unit, a: Sample, b: Sample) -> MeasureResult:
        mean_a, mean_b = a.mean(), b.mean()
        difference = welch_interval(mean_a, mean_b, self._level_of(name))
        method = f"Welch{self.suffix}"
        means = [mean for mean in (mean_a, mean_b) if mean is not None]
        return MeasureResult(
            measure=name,
            unit=unit,
            better="lower" if unit == "seconds" else "neither",
            a=_value(mean_a),
            b=_value(mean_b),
            difference=difference,
            method=method,
            variance=sum(mean.variance for mean in means) / len(means) if means else None,
            n=min((mean.n for mean in means), default=0),
        )

    def _quantile(self, name: str, unit: Unit, p: float, a: Sample, b: Sample) -> MeasureResult:
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
        better: Better = "lower" if unit == "seconds" else "neither"
        return MeasureResult(
            name, unit, value_a, value_b, difference, method, n=min(a.n, b.n), better=better
        )


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
    summary: str
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
        return build_headings(f"version {self.comparison.a}", f"version {self.comparison.b}")

    def verdict_lines(self) -> Iterator[str]:
        """A line for each verdict."""
        for row in self.comparison.verdicts:
            yield f"{row.measure}: {row.note}"

    def table(self) -> list[Sequence[str]]:
        """The cells of each row, see ``list_cells``."""
        return [list_cells(row) for row in self.comparison.rows]

    def segment_table(self) -> list[Sequence[str]]:
        """The cells of each segment: outcome, segment, numbers of values, then as ``table``."""
        rows: list[Sequence[str]] = []
        for one in self.comparison.segments:
            measure, _, *cells = list_cells(one.row)
            rows.append((measure, one.segment, f"{one.a:,}", f"{one.b:,}", *cells[:-2]))
        return rows


def build_report(
    source: str, query: UsageQuery, evidence: Evidence, comparison: Comparison
) -> ComparisonReport:
    """The comparison with its notes, and what it says on the whole."""
    notes = [_describe_intervals(comparison), *describe_excluded(evidence, query)]
    notes += _describe_outcomes(evidence, query)
    notes += _describe_limits(evidence)
    if comparison.ratio is not None:
        notes.append(_describe_ratio(comparison.ratio))
    summary = summarize_verdicts(comparison.verdicts)
    return ComparisonReport(source, query.model, comparison, summary, tuple(notes))


def describe_excluded(evidence: Evidence, query: UsageQuery) -> Iterator[str]:
    """The requests that no split sent to the version that answered."""
    prefix = "Included, though not a random sample" if query.everything else "Left out"
    for reason, count in sorted(evidence.excluded.items()):
        yield f"{prefix}: {count} requests {reason}."


def _describe_intervals(comparison: Comparison) -> str:
    text = (
        f"The intervals of the {len(comparison.verdicts)} measures with a verdict hold all "
        f"together with a probability of {100 * comparison.confidence:g} %; each other one by "
        "itself."
    )
    if any(row.method.startswith(_BETTING) for row in comparison.rows):
        text += (
            " Those marked betting hold whenever and however often you look: the test may end as "
            "soon as one names a difference. All others are for one look."
        )
    return text


def _describe_outcomes(evidence: Evidence, query: UsageQuery) -> Iterator[str]:
    """Whose feedback is compared."""
    if not query.outcomes:
        return
    if query.by:
        yield (
            "The intervals of all segments together miss the truth as rarely as one alone would "
            "at the confidence level."
        )
    for one in evidence.agreements if JUDGE_FEEDBACK in query.outcomes else ():
        yield (
            f"The judge agrees with the feedback {one.name} on {one.agreeing:,} of "
            f"{one.requests:,} requests that have both."
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


# --- planning -------------------------------------------------------------------------------------


class PlannedMeasure(Struct, frozen=True):
    """How many requests each version needs to tell a difference of a measure."""

    measure: str
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
    """The version from which the values are taken."""
    relative: float
    confidence: float
    measures: tuple[PlannedMeasure, ...]

    def table(self) -> list[Sequence[str]]:
        """The cells of each row: measure, its value, the difference, requests per version."""
        return [
            (
                one.measure,
                *(
                    format_value(value, one.unit, max(one.value, one.difference))
                    for value in (one.value, one.difference)
                ),
                f"{one.requests:,}",
            )
            for one in self.measures
        ]


def plan_test(
    source: str, query: UsageQuery, evidence: Evidence, relative: float, confidence: float
) -> ComparisonPlan:
    """Plan a test from the requests that a model had so far. Raises ComparisonError."""
    versions = {version: stats for (_, version), stats in evidence.variants.items()}
    if not versions:
        raise ComparisonError("it had no requests from which a test can be planned")
    version, stats = max(versions.items(), key=lambda item: item[1].routed_requests)
    pair = _VersionPair(
        stats,
        stats,
        confidence,
        confidence,
        "",
        is_exact=evidence.exact,
        has_losses=evidence.has_losses,
    )
    outcomes = (
        _compare_outcome(name, samples, "", (version, version), confidence)
        for name, samples in evidence.outcomes.items()
    )
    measures = [
        _plan_measure(row, difference, confidence)
        for row in (*outcomes, *pair.shares(), *pair.samples())
        if (row.is_feedback or row.measure in pair.decisive) and row.a is not None
        if (difference := find_relevant_difference(row, relative))
    ]
    return ComparisonPlan(source, query.model, version, relative, confidence, tuple(measures))


def _plan_measure(row: MeasureResult, difference: float, confidence: float) -> PlannedMeasure:
    """``row`` has a value."""
    assert row.a is not None  # noqa: S101 - the caller has looked
    assert row.variance is not None  # noqa: S101 - as above
    requests = _require(row)(row.variance, difference, confidence)
    if row.scale == "probability" and not row.is_feedback:
        name = f"{row.measure}, probability of a higher value"
        return PlannedMeasure(name, "share", _EQUAL, difference, requests)
    return PlannedMeasure(row.measure, row.unit, row.a, difference, requests)
