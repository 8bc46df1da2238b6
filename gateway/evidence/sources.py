"""What usage rows, an access log or a page of metrics say of the versions of a model.

Rows and a log have each value. A page of metrics has the number of values in each bucket, and their
sum. Only the database of usage rows has feedback.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Struct, field

from gateway.config.schema import JUDGE_FEEDBACK
from gateway.evidence.measures import FAILED_OUTCOMES
from gateway.evidence.sequential import Tally
from gateway.evidence.statistics import BucketSample, ExactSample
from gateway.observability.prometheus_text import parse_families, parse_labels
from gateway.observability.record import FeedbackKind, RequestRecord
from gateway.observability.stats import RequestStats, StatsKey, group_by_labels
from gateway.observability.stats import build_fallback_key as fallback_key
from gateway.observability.stats import build_stats_key as answered_key
from gateway.observability.usage import USAGE_COLUMNS, OutcomeRow, UsageExtract
from protocols.core.events import Usage
from protocols.core.json_text import JsonDecoder, decode_json

_BATCH: Final = 500
"""Records that are counted together."""
_UNDECIDED: Final = 0.5
"""The feedback that is neither good nor bad."""
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

SegmentLabel = Literal["key", "rule", "protocol"]
SEGMENT_LABELS: Final[tuple[SegmentLabel, ...]] = get_args(SegmentLabel)

_decode_record = JsonDecoder(RequestRecord).decode


class SourceError(Exception):
    """The source cannot be used; the message says why."""


class UsageQuery(Struct, frozen=True):
    """Which requests are compared."""

    model: str
    everything: bool = False
    """Include requests that no split sent; splits are not told apart then."""
    since: float = 0.0
    """In Unix seconds."""
    outcomes: tuple[str, ...] = ()
    """The outcomes to compare: names of feedback, or ``NAME=CATEGORY``."""
    by: SegmentLabel | Literal[""] = ""
    """What divides the requests into segments, if anything does."""
    each_request: bool = False
    """Whether each judged request counts, also several of one user."""
    keeps_failures: bool = False
    """Whether ``Evidence.failures`` is kept."""


class OutcomeSample:
    """The values of an outcome, of which each user counts once."""

    def __init__(self, *, is_share: bool) -> None:
        """``is_share``: the values are 0 and 1."""
        self.is_share = is_share
        self._units = set[object]()
        self.values: list[float] = []
        """In the order in which their requests came."""
        self.times: list[float] = []
        """Of these requests, in Unix seconds."""

    def add(self, unit: object, value: float, at: float) -> bool:
        """Add the value of a user or request at a time; False if it has one already."""
        if unit in self._units:
            return False
        self._units.add(unit)
        self.values.append(value)
        self.times.append(at)
        return True

    @property
    def tally(self) -> Tally:
        """The number of values and their sum."""
        return Tally(sum(self.values), len(self.values))


Outcomes = dict[tuple[str, str], OutcomeSample]
"""By split and version."""


class JudgeAgreement(Struct):
    """How often a judge finds an answer good that its user likes, and not the others."""

    name: str
    """That of the users' feedback."""
    requests: int = 0
    """Those with both."""
    agreeing: int = 0


class Evidence(Struct):
    """What a source says. Variants are a split and a version; the split is "" with ``everything``.

    ``exact`` says whether each value is known, and not only its bucket.
    """

    exact: bool
    has_losses: bool = True
    """Whether losses and finish reasons are known; usage rows do not have them."""
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
    outcomes: dict[str, Outcomes] = field(default_factory=dict)
    """By the outcome's name."""
    segments: dict[tuple[str, str], Outcomes] = field(default_factory=dict)
    """By the outcome's name and the segment."""
    users: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """The hashes of the users of each variant, in usage rows."""
    without_user: set[tuple[str, str]] = field(default_factory=set)
    """The variants with a request whose user is not known."""
    failures: dict[tuple[str, str], list[tuple[float, bool]]] = field(default_factory=dict)
    """The time of each request, and whether it failed or a fallback answered it."""
    repeated: int = 0
    """Judgements that are left out, since their user counts already."""
    feedback_names: set[str] = field(default_factory=set)
    """All names of feedback of the model."""
    agreements: Sequence[JudgeAgreement] = ()
    """Of the model's judge, with each feedback of users."""

    def count_units(self, variant: tuple[str, str]) -> int:
        """The users whom the split assigned to a variant if all are known, else its requests."""
        if self.users and not self.without_user:
            return len(self.users.get(variant, ()))
        stats = self.variants.get(variant)
        return 0 if stats is None else stats.routed_requests

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


# --- usage rows -----------------------------------------------------------------------------------


def read_usage_rows(extract: UsageExtract, query: UsageQuery) -> Evidence:
    """Read the usage rows of a model, and the feedback on its requests. Raises SourceError."""
    evidence = Evidence(
        exact=True, has_losses=False, models=set(extract.models), lines=len(extract.rows)
    )
    records = map(_build_record, extract.rows)
    while batch := [*islice(records, _BATCH)]:
        for record in batch:
            model, version, split = (fallback_key if record.fallback_from else answered_key)(record)
            if model == query.model and (split or query.everything):
                variant = _variant_of(split, version, query)
                if record.user_hash:
                    evidence.users.setdefault(variant, set()).add(record.user_hash)
                else:
                    evidence.without_user.add(variant)
                if query.keeps_failures:
                    has_failed = bool(record.fallback_from) or record.outcome in FAILED_OUTCOMES
                    failures = evidence.failures.setdefault(variant, [])
                    failures.append((record.started_at, has_failed))
        for group in group_by_labels(batch):
            _count_group(evidence, group, query)
    evidence.feedback_names = {row.name for row in extract.outcomes}
    evidence.agreements = _compare_with_judge(extract.outcomes)
    for name in query.outcomes:
        _add_outcome(evidence, name, extract.outcomes, query)
    return evidence


_ROW_FIELDS: Final = tuple(name for name, _ in USAGE_COLUMNS)
_FAILED_FIELDS: Final = ("model", "version", "split", "outcome")


def _build_record(row: Sequence[Any]) -> RequestRecord:
    """The record of a usage row; if a fallback was asked, with the first split."""
    values = dict(zip(_ROW_FIELDS, row, strict=True))
    model, version, split, _ = (values.pop(f"failed_{name}") for name in _FAILED_FIELDS)
    del values["shadow_of"]  # only rollouts read copies
    values["measures"] = decode_json(values["measures"] or "{}")
    if model:
        values |= {"split": split, "fallback_from": f"{model}@{version}"}
    source, prompt, completion = (
        values.pop(name) for name in ("source", "prompt_tokens", "completion_tokens")
    )
    has_usage = source and (source != "estimated" or values["outcome"] == "ok")
    usage = Usage(prompt, completion, source=source) if has_usage else None
    sticky = "user" if values["user_hash"] else ""
    return RequestRecord(
        started_at=values.pop("at"), path="-", sticky=sticky, usage=usage, **values
    )


def _add_outcome(
    evidence: Evidence, name: str, rows: Sequence[OutcomeRow], query: UsageQuery
) -> None:
    """Add the feedback of one name. Raises SourceError."""
    feedback_name, _, category = name.partition("=")
    rows = sorted(
        (row for row in rows if row.name == feedback_name), key=lambda row: row.request_at
    )
    kinds: set[FeedbackKind] = {row.kind for row in rows}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        raise SourceError(f"the feedback {feedback_name!r} has values of several kinds: {listed}")
    if bool(category) != (kinds == {"category"}) and kinds:
        hint = (
            f"name one of its categories: --outcome {feedback_name}=CATEGORY"
            if kinds == {"category"}
            else "it has no categories"
        )
        raise SourceError(f"the feedback {feedback_name!r} can't be compared like this; {hint}")
    is_share = kinds != {"number"}
    total = evidence.outcomes.setdefault(name, {})
    for row in rows:
        if not row.split and not query.everything:
            continue
        variant = _variant_of(row.split, row.version, query)
        unit: object = row.user_hash
        if query.each_request or not row.user_hash:
            unit = row.request_at, row.id
        value = float(row.category == category) if category else row.number or 0.0
        sample = total.setdefault(variant, OutcomeSample(is_share=is_share))
        if not sample.add(unit, value, row.request_at):
            evidence.repeated += 1
        elif query.by:
            segment = evidence.segments.setdefault((name, getattr(row, query.by)), {})
            part = segment.setdefault(variant, OutcomeSample(is_share=is_share))
            part.add(unit, value, row.request_at)


def _compare_with_judge(rows: Sequence[OutcomeRow]) -> list[JudgeAgreement]:
    """The agreement with each feedback whose values are from 0 (bad) to 1 (good)."""
    verdicts = {(row.request_at, row.id): row.number for row in rows if row.name == JUDGE_FEEDBACK}
    agreements = {row.name: JudgeAgreement(row.name) for row in rows}
    for row in rows:
        if row.number is None or not 0 <= row.number <= 1:
            agreements.pop(row.name, None)
    for row in rows:
        agreement, verdict = agreements.get(row.name), verdicts.get((row.request_at, row.id))
        if agreement is not None and verdict is not None and row.number != _UNDECIDED:
            agreement.requests += 1
            agreement.agreeing += (verdict > _UNDECIDED) == ((row.number or 0.0) > _UNDECIDED)
    agreements.pop(JUDGE_FEEDBACK, None)
    return [agreements[name] for name in sorted(agreements) if agreements[name].requests]


def _variant_of(split: str, version: str, query: UsageQuery) -> tuple[str, str]:
    return "" if query.everything else split, version


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
    except (msgspec.DecodeError, UnicodeDecodeError):
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
    variant = _variant_of(split, version, query)
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
