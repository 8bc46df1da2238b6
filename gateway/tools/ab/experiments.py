"""The experiments of a configuration: traffic splits, with the outcomes of their versions.

The admin listener shows them. They are computed from the newest usage rows of each model.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.schema import Config, UsageConfig
from gateway.observability.usage import UsageExtract, read_sqlite_usage
from gateway.tools.ab.comparison import (
    ComparisonError,
    ComparisonReport,
    SplitRatio,
    build_report,
    check_split_ratio,
    compare_versions,
)
from gateway.tools.ab.sources import (
    Evidence,
    OutcomeSample,
    SourceError,
    UsageQuery,
    read_usage_rows,
)
from gateway.tools.ab.statistics import Interval, mean_interval, wilson_interval

_MAX_ROWS: Final = 100_000
"""The newest rows of each model that are read: some seconds of work."""
_MAX_OUTCOMES: Final = 10
_CONFIDENCE: Final = 0.95
_DIFFERENCE: Final = 0.1
"""The smallest difference that matters, as that of ``interlingua ab``."""


class VersionOutcome(Struct, frozen=True):
    """An outcome of one version: the number of values, their mean and its interval for one look."""

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
    reports: tuple[ComparisonReport, ...]
    """Each further version compared with the first."""
    problem: str = ""
    """Why there is nothing to compare."""


def list_experiments(config: Config, model: str = "", since: float = 0.0) -> list[Experiment]:
    """The experiments of a model, or of all. Raises OSError and the database's errors."""
    usage = config.observe.usage
    if usage is None:
        return []
    return [
        _report_experiment(usage, name, split.name or name, split.weights, since)
        for name, one in config.models.items()
        if (split := one.split) is not None
        and sum(weight > 0 for weight in split.weights.values()) > 1
        and model in ("", name)
    ]


def _read_extract(usage: UsageConfig, model: str, since: float) -> UsageExtract:
    if usage.postgres is not None:
        from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
            read_postgres_usage,
        )

        return read_postgres_usage(usage.postgres.reveal(), model, since, _MAX_ROWS)
    assert usage.sqlite is not None  # noqa: S101 - the loader refuses rows without a place
    return read_sqlite_usage(usage.sqlite, model, since, _MAX_ROWS)


def _report_experiment(
    usage: UsageConfig, model: str, split: str, weights: Mapping[str, int], since: float
) -> Experiment:
    extract = _read_extract(usage, model, since)
    weights = {version: weight for version, weight in weights.items() if weight}
    outcomes, problem = _list_outcomes(extract), ""
    query = UsageQuery(model, since=since, outcomes=outcomes)
    try:
        evidence = read_usage_rows(extract, query)
    except SourceError as error:
        query = replace(query, outcomes=())
        evidence, problem = read_usage_rows(extract, query), str(error)
    ratio = None
    try:
        ratio = check_split_ratio(evidence, split, weights) if evidence.versions(split) else None
    except ComparisonError as error:
        problem = str(error)
    reports = tuple(_compare_all(evidence, split, [*weights], query, ratio))
    if not reports:
        problem = problem or "fewer than two versions were sent requests"
    return Experiment(
        model=model,
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
) -> list[ComparisonReport]:
    present = [version for version in versions if (split, version) in evidence.variants]
    return [
        build_report(
            "usage",
            query,
            evidence,
            replace(
                compare_versions(evidence, split, (present[0], version), _CONFIDENCE), ratio=ratio
            ),
            _DIFFERENCE,
        )
        for version in present[1:]
    ]


def _describe_outcomes(evidence: Evidence, variant: tuple[str, str]) -> list[VersionOutcome]:
    outcomes = []
    for name, samples in evidence.outcomes.items():
        sample: OutcomeSample | None = samples.get(variant)
        mean = None if sample is None else sample.mean()
        if sample is None or mean is None:
            continue
        interval = (
            wilson_interval(round(mean.value * mean.n), mean.n, _CONFIDENCE)
            if sample.is_share
            else mean_interval(mean, _CONFIDENCE)
        )
        outcomes.append(VersionOutcome(name, sample.is_share, mean.n, interval))
    return outcomes
