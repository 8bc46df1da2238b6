"""What an access log or a page of metrics says of the versions of a model.

A log has each value. A page of metrics has the number of values in each bucket, and their sum.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from gateway.observability.prometheus_text import parse_families, parse_labels
from gateway.observability.record import RequestRecord
from gateway.observability.stats import RequestStats, StatsKey, group_by_labels
from gateway.observability.stats import build_fallback_key as fallback_key
from gateway.observability.stats import build_stats_key as answered_key
from gateway.tools.ab.statistics import BucketSample, ExactSample

_BATCH: Final = 500
"""Records that are counted together."""
_PREFIX: Final = "interlingua_"
_COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "requests_total": ("outcomes", ("protocol", "backend", "outcome")),
    "finish_reasons_total": ("finish_reasons", ("reason",)),
    "tokens_total": ("tokens", ("direction", "source")),
}
"""Counters by name: the attribute of RequestStats, and the labels that it is counted by."""
_TOTALS: Final = {
    "lossy_requests_total": "lossy_requests",
    "requests_answered_by_fallback_total": "answered_by_fallback",
}
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": "first_token",
    "request_duration_seconds": "duration",
    "time_per_output_token_seconds": "per_token",
    "completion_tokens": "completion_tokens",
}
_SUMS: Final = {f"{name}_sum": attribute for name, attribute in _HISTOGRAMS.items()}
_BUCKETS: Final = {f"{name}_bucket": attribute for name, attribute in _HISTOGRAMS.items()}
_NAMES: Final = {*_COUNTERS, *_TOTALS, *_SUMS, *_BUCKETS}

_Variant = tuple[str, str]
"""Split and version."""
_Cumulative = defaultdict[tuple[_Variant, str], Counter[float]]
"""The number of values up to each edge, by variant and attribute of RequestStats."""

_decode_record = msgspec.json.Decoder(RequestRecord).decode


class SourceError(Exception):
    """The source cannot be used; the message says why."""


class UsageQuery(Struct, frozen=True):
    """Which requests are compared."""

    model: str
    everything: bool = False
    """Include requests that no split sent; splits are not told apart then."""
    since: float = 0.0
    """In Unix seconds."""


class Evidence(Struct):
    """What a source says. Variants are a split and a version; the split is "" with ``everything``.

    ``exact`` says whether each value is known, and not only its bucket.
    """

    exact: bool
    variants: dict[tuple[str, str], RequestStats[Any]] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    """All models in the source."""
    excluded: Counter[str] = field(default_factory=Counter)
    """The model's requests that no split sent to the version that answered, by the reason."""
    sticky: int = 0
    """The model's requests of clients that are assigned to a version."""
    lines: int = 0
    skipped: int = 0
    """Lines that are not the record of a request."""
    early: int = 0
    """Requests before ``since``."""

    def splits(self) -> list[str]:
        """The splits that sent requests."""
        return sorted({split for split, _ in self.variants if split})

    def versions(self, split: str) -> list[str]:
        """The versions to which a split sent requests, in numerical order."""
        names = [version for owner, version in self.variants if owner == split]
        return sorted(names, key=lambda name: (not name.isdecimal(), name.zfill(20)))


def read_source(lines: Iterable[bytes], query: UsageQuery) -> Evidence:
    """Read an access log or a page of metrics, whichever the first line says it is.

    Raises SourceError.
    """
    remaining = iter(lines)
    first = next(remaining, b"")
    if not is_metrics_page(first):
        return read_access_log(chain([first], remaining), query)
    if query.since:
        raise SourceError("--since goes with a log: a page counts from the gateway's start")
    return read_metrics_page(b"".join((first, *remaining)).decode("utf-8", "replace"), query)


# --- access logs ----------------------------------------------------------------------------------


def read_access_log(lines: Iterable[bytes], query: UsageQuery) -> Evidence:
    """Read an access log. Lines that are not the record of a request are counted only."""
    evidence = Evidence(exact=True)
    records = _read_records(lines, query, evidence)
    while batch := [*islice(records, _BATCH)]:
        for group in group_by_labels(batch):
            _count_group(evidence, group, query)
    return evidence


def _read_records(
    lines: Iterable[bytes], query: UsageQuery, evidence: Evidence
) -> Iterator[RequestRecord]:
    for line in lines:
        evidence.lines += 1
        record = _parse_record(line)
        if record is None:
            evidence.skipped += 1
        elif record.started_at < query.since:
            evidence.early += 1
        else:
            yield record


def _parse_record(line: bytes) -> RequestRecord | None:
    """The record of a request, which has a path; other lines of a log have none."""
    try:
        record = _decode_record(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.path else None


def _count_group(evidence: Evidence, records: Sequence[RequestRecord], query: UsageQuery) -> None:
    """Count records with equal labels."""
    first = records[0]
    if first.model:
        evidence.models.add(first.model)
    key = answered_key(first)
    if first.model == query.model:
        evidence.sticky += sum(record.sticky not in ("", "pinned") for record in records)
        if not key[2]:
            evidence.excluded.update(map(_exclusion_reason, records))
        if key[2] or query.everything:
            _stats_of(evidence, key, query).add_records(*records)
    if first.fallback_from:
        key = fallback_key(first)
        if key[0] == query.model and (key[2] or query.everything):
            _stats_of(evidence, key, query).answered_by_fallback += len(records)


def _exclusion_reason(record: RequestRecord) -> str:
    if record.fallback_from:
        return "answered by a fallback"
    if record.sticky == "pinned":
        return "pinned by the client"
    return "sent by a rule" if record.rule else "of no split"


def _stats_of(evidence: Evidence, key: StatsKey, query: UsageQuery) -> RequestStats[ExactSample]:
    _, version, split = key
    variant = ("" if query.everything else split, version)
    return evidence.variants.setdefault(variant, RequestStats(ExactSample))


# --- pages of metrics -----------------------------------------------------------------------------


def is_metrics_page(line: bytes) -> bool:
    """Whether a text is a page of metrics, by its first line."""
    return line.startswith(b"# HELP ")


def read_metrics_page(text: str, query: UsageQuery) -> Evidence:
    """Read a page of metrics. Raises SourceError if it is not the gateway's, or is not complete."""
    reader = _PageReader(query)
    try:
        reader.read(text)
    except (ValueError, KeyError, OverflowError):
        message = "this page of metrics is not the gateway's, or is cut"
        raise SourceError(message) from None
    return reader.evidence


class _PageReader:
    """Counts the samples of a page that are about the model."""

    def __init__(self, query: UsageQuery) -> None:
        self.evidence = Evidence(exact=False)
        self._query = query
        self._cumulative: _Cumulative = defaultdict(Counter)

    def read(self, text: str) -> None:
        """Raises ValueError, KeyError or OverflowError for a page that cannot be."""
        variants = self.evidence.variants
        for family in parse_families(text).values():
            for sample, value in family.samples.items():
                name = sample.partition("{")[0].removeprefix(_PREFIX)
                if name in _NAMES and (labels := parse_labels(sample)[1])["model"]:
                    self._count(name, labels, value)
        for (variant, attribute), cumulative in self._cumulative.items():
            getattr(variants[variant], attribute).set_cumulative(cumulative)
        if any(stats.lossy_requests > stats.outcomes.total() for stats in variants.values()):
            raise ValueError("more requests with a loss than requests")

    def _count(self, name: str, labels: Mapping[str, str], value: float) -> None:
        count = int(value)
        if count < 0:
            raise ValueError("a counter is negative")
        evidence, query = self.evidence, self._query
        evidence.models.add(labels["model"])
        if labels["model"] != query.model:
            return
        split, version = labels["split"], labels["version"]
        if name == "requests_total" and not split:
            evidence.excluded["that no split sent there"] += count
        if not split and not query.everything:
            return
        variant = ("" if query.everything else split, version)
        stats: RequestStats[Any] = evidence.variants.setdefault(variant, RequestStats(BucketSample))
        if name in _BUCKETS:
            self._cumulative[variant, _BUCKETS[name]][float(labels["le"])] += count
        elif name in _SUMS:
            getattr(stats, _SUMS[name]).total += value
        elif name in _TOTALS:
            attribute = _TOTALS[name]
            setattr(stats, attribute, getattr(stats, attribute) + count)
        else:
            attribute, label_names = _COUNTERS[name]
            getattr(stats, attribute)[tuple(labels[label] for label in label_names)] += count
