"""The experiments of a configuration: traffic splits, with the outcomes of their versions.

The admin listener shows them. They are computed from the newest usage rows of each model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from gateway.config.schema import Config, ModelConfig, TrafficSplitConfig, UsageConfig
from gateway.evidence.course import (
    Course,
    Decision,
    TimedValues,
    decide_comparison,
    trace_numbers,
    trace_shares,
)
from gateway.evidence.sequential import rate_interval
from gateway.evidence.sources import (
    Evidence,
    OutcomeSample,
    SegmentLabel,
    SourceError,
    UsageQuery,
    read_usage_rows,
)
from gateway.evidence.statistics import ExactSample, Interval, mean_interval
from gateway.evidence.versions import (
    Comparison,
    ComparisonError,
    ComparisonReport,
    SplitRatio,
    build_report,
    check_split_ratio,
    compare_versions,
    compute_level,
    find_relevant_difference,
)
from gateway.observability.usage import UsageExtract, read_sqlite_usage

_MAX_ROWS: Final = 100_000
"""The newest rows of each model that are read: some seconds of work."""
_MAX_OUTCOMES: Final = 10
_CONFIDENCE: Final = 0.95
FAILURES: Final = "failed, or answered by a fallback"
_DIFFERENCE: Final = 0.1
"""The smallest difference that matters, as that of ``interlingua ab``."""


class VersionOutcome(Struct, frozen=True):
    """An outcome of one version: the number of values, their mean and its interval.

    The interval of a share is valid at every moment, that of numbers for one look.
    """

    outcome: str
    is_share: bool
    n: int
    interval: Interval


class ExperimentVersion(Struct, frozen=True):
    """A version with its part of the split, wanted and actual, in users or requests."""

    version: str
    weight: int
    assigned: int
    outcomes: tuple[VersionOutcome, ...]


class Experiment(Struct, frozen=True):
    """A traffic split over several versions."""

    model: str
    split: str
    versions: tuple[ExperimentVersion, ...]
    unit: str
    """What ``assigned`` counts: users or requests."""
    ratio: SplitRatio | None
    is_plausible: bool
    """Whether the counts fit the weights."""
    reports: tuple["ExperimentReport", ...]
    """Each further version compared with the first."""
    problem: str = ""
    """Why there is nothing to compare."""


class ExperimentReport(ComparisonReport, frozen=True, kw_only=True):
    """A comparison with its course, and what it says to do."""

    decision: Decision
    courses: tuple[Course, ...]


def list_experiments(
    config: Config, model: str = "", since: float = 0.0, by: SegmentLabel | Literal[""] = ""
) -> list[Experiment]:
    """The experiments of a model, or of all. Raises OSError and the database's errors.

    ``by`` divides the feedback into segments.
    """
    usage = config.observe.usage
    if usage is None:
        return []
    return [
        _report_experiment(
            usage,
            UsageQuery(name, since=since, by=by, keeps_failures=True),
            split.name or name,
            weights,
            is_fixed=one.rollout is None,
        )
        for name, one in config.models.items()
        if (split := one.split) is not None
        and len(weights := _list_weights(one, split)) > 1
        and model in ("", name)
    ]


def _list_weights(model: ModelConfig, split: TrafficSplitConfig) -> Mapping[str, int]:
    """The versions that may be sent requests; a rollout changes the weights of all."""
    return {version: weight for version, weight in split.weights.items() if weight or model.rollout}


def _read_extract(usage: UsageConfig, model: str, since: float) -> UsageExtract:
    if usage.postgres is not None:
        from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
            read_postgres_usage,
        )

        return read_postgres_usage(usage.postgres.reveal(), model, since, _MAX_ROWS)
    assert usage.sqlite is not None  # noqa: S101 - the loader refuses rows without a place
    return read_sqlite_usage(usage.sqlite, model, since, _MAX_ROWS)


def _report_experiment(
    usage: UsageConfig,
    query: UsageQuery,
    split: str,
    weights: Mapping[str, int],
    *,
    is_fixed: bool,
) -> Experiment:
    """``is_fixed`` says whether the counts must fit the weights, which no rollout changes."""
    extract, problem = _read_extract(usage, query.model, query.since), ""
    query = replace(query, outcomes=_list_outcomes(extract))
    try:
        evidence = read_usage_rows(extract, query)
    except SourceError as error:
        query = replace(query, outcomes=())
        evidence, problem = read_usage_rows(extract, query), str(error)
    ratio = None
    try:
        if is_fixed and evidence.versions(split):
            ratio = check_split_ratio(evidence, split, weights)
    except ComparisonError as error:
        problem = str(error)
    reports = tuple(_compare_all(evidence, split, [*weights], query, ratio))
    if not reports:
        problem = problem or "fewer than two versions were sent requests"
    return Experiment(
        model=query.model,
        split=split,
        versions=tuple(
            ExperimentVersion(
                version,
                weight,
                evidence.count_units((split, version)),
                tuple(_describe_outcomes(evidence, (split, version))),
            )
            for version, weight in weights.items()
        ),
        unit="users" if evidence.users and not evidence.without_user else "requests",
        ratio=ratio,
        is_plausible=ratio is None or ratio.is_plausible,
        reports=reports,
        problem=problem,
    )


def _list_outcomes(extract: UsageExtract) -> tuple[str, ...]:
    """The names of feedback, with each category of those that have some."""
    names = {
        f"{row.name}={row.category}" if row.kind == "category" else row.name: None
        for row in extract.outcomes
    }
    return tuple(sorted(names))[:_MAX_OUTCOMES]


def _compare_all(
    evidence: Evidence,
    split: str,
    versions: Sequence[str],
    query: UsageQuery,
    ratio: SplitRatio | None,
) -> list[ExperimentReport]:
    present = [version for version in versions if (split, version) in evidence.variants]
    return [
        _compare_pair(evidence, split, (present[0], version), query, ratio)
        for version in present[1:]
    ]


def _compare_pair(
    evidence: Evidence,
    split: str,
    versions: tuple[str, str],
    query: UsageQuery,
    ratio: SplitRatio | None,
) -> ExperimentReport:
    comparison = compare_versions(evidence, split, versions, _CONFIDENCE, _DIFFERENCE)
    comparison = replace(comparison, ratio=ratio)
    a, b = (evidence.variants[split, version] for version in versions)
    return ExperimentReport(
        **asdict(build_report("usage", query, evidence, comparison)),
        decision=decide_comparison(comparison, a.routed_requests + b.routed_requests),
        courses=tuple(_trace_measures(evidence, split, comparison)),
    )


def _trace_measures(evidence: Evidence, split: str, comparison: Comparison) -> Iterator[Course]:
    """The courses of all feedback, and of failed requests."""
    pair = (split, comparison.a), (split, comparison.b)
    a, b = (evidence.variants[variant] for variant in pair)
    level = compute_level(evidence, (a, b), comparison.confidence)
    for row in comparison.rows:
        if not row.is_feedback or row.difference is None:
            continue
        samples = evidence.outcomes[row.measure]
        timed = [TimedValues(samples[one].times, samples[one].values) for one in pair]
        is_share = row.scale == "difference"
        yield Course(
            row.measure,
            "share" if is_share else "probability",
            row.neutral,
            find_relevant_difference(row, _DIFFERENCE),
            tuple((trace_shares if is_share else trace_numbers)(timed[0], timed[1], level)),
        )
    failures = [sorted(evidence.failures.get(variant, ())) for variant in pair]
    timed = [
        TimedValues([at for at, _ in side], [float(failed) for _, failed in side])
        for side in failures
    ]
    points = tuple(trace_shares(timed[0], timed[1], comparison.confidence))
    yield Course(FAILURES, "share", 0.0, 0.01, points)


def _describe_outcomes(evidence: Evidence, variant: tuple[str, str]) -> list[VersionOutcome]:
    outcomes = []
    for name, samples in evidence.outcomes.items():
        sample: OutcomeSample | None = samples.get(variant)
        if sample is None or not sample.values:
            continue
        if sample.is_share:
            interval = rate_interval(sample.tally, _CONFIDENCE)
        else:
            numbers = ExactSample()
            numbers.extend(sample.values)
            mean = numbers.mean()
            assert mean is not None  # noqa: S101 - there are values
            interval = mean_interval(mean, _CONFIDENCE)
        outcomes.append(VersionOutcome(name, sample.is_share, len(sample.values), interval))
    return outcomes
