"""The evidence of a page of metrics: values are known by their buckets, and by their sum."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.figures import Figures
from gateway.tools.ab.evidence import Asked, Evidence
from gateway.tools.ab.samples import Buckets

_PREFIX: Final = "interlingua_"
_COUNTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "requests_total": ("outcomes", ("dialect", "backend", "outcome")),
    "finishes_total": ("finishes", ("reason",)),
    "tokens_total": ("tokens", ("direction", "source")),
}
"""The counters by name: of which figure, and by which labels."""
_NUMBERS: Final = {"lossy_requests_total": "lossy", "diversions_total": "diversions"}
_MEASURES: Final = {
    "time_to_first_token_seconds": "first_token",
    "request_duration_seconds": "duration",
    "time_per_output_token_seconds": "per_token",
    "completion_tokens": "completion",
}
_SUMS: Final = {f"{name}_sum": figure for name, figure in _MEASURES.items()}
_BUCKETS: Final = {f"{name}_bucket": figure for name, figure in _MEASURES.items()}
_KNOWN: Final = {*_COUNTS, *_NUMBERS, *_SUMS, *_BUCKETS}

_Key = tuple[str, str]
"""Split and version."""
_Below = defaultdict[tuple[_Key, str], Counter[float]]
"""How many values lie up to each edge, by arm and figure."""


class Unreadable(Exception):
    """A page of metrics from which nothing can be concluded."""


def is_page(line: bytes) -> bool:
    """Whether a text is a page of metrics, by its first line."""
    return line.startswith(b"# HELP ")


def read_page(text: str, asked: Asked) -> Evidence:
    """What the page tells. Raises Unreadable where it is not the gateway's, or not all of it."""
    try:
        return _page(text, asked)
    except (ValueError, KeyError, OverflowError):
        raise Unreadable("this page of metrics is not the gateway's, or is cut") from None


def _page(text: str, asked: Asked) -> Evidence:
    seen = Evidence(exact=False)
    below: _Below = defaultdict(Counter)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            if name in _KNOWN and sample.labels["model"]:
                _take(seen, below, name, sample, asked)
    for (key, figure), upto in below.items():
        getattr(seen.arms[key], figure).take(upto)
    if any(one.lossy > one.outcomes.total() for one in seen.arms.values()):
        raise ValueError("more was lost than sent")
    return seen


def _take(seen: Evidence, below: _Below, name: str, sample: Sample, asked: Asked) -> None:
    labels, count = sample.labels, int(sample.value)
    if count < 0:
        raise ValueError("nothing is counted down")
    seen.models.add(labels["model"])
    if labels["model"] != asked.model:
        return
    split, version = labels["split"], labels["version"]
    if name == "requests_total" and not split:
        seen.apart["that no split sent there"] += count
    if not split and not asked.everything:
        return
    key = ("" if asked.everything else split, version)
    figures: Figures[Any] = seen.arms.setdefault(key, Figures(Buckets))
    if name in _BUCKETS:
        below[key, _BUCKETS[name]][float(labels["le"])] += count
    elif name in _SUMS:
        getattr(figures, _SUMS[name]).total += sample.value
    elif name in _NUMBERS:
        figure = _NUMBERS[name]
        setattr(figures, figure, getattr(figures, figure) + count)
    else:
        figure, by = _COUNTS[name]
        getattr(figures, figure)[tuple(labels[label] for label in by)] += count
