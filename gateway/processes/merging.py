"""Many processes' figures as one's."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.admin import status
from gateway.measured import EVERY
from gateway.prometheus_text import MetricFamily, format_families, parse_families

_SUMMED: Final = frozenset({"in_flight", "limit"})
"""Of what is told of a worker; the rest is what the first process tells."""


_JOIN: Final[Mapping[str, Callable[[float, float], float]]] = {
    "sum": operator.add,
    "largest": max,
    "smallest": min,
}


class Page:
    """Metrics in Prometheus's text format, to which others' are added."""

    def __init__(self, text: str = "") -> None:
        self.families = parse_families(text)

    def merge(self, other: "Page") -> None:
        """Count another process's figures into these."""
        for name, theirs in other.families.items():
            merged = EVERY[name].merge_mode if name in EVERY else "sum"
            if merged == "supervisor":
                continue
            join = _JOIN[merged]
            family = self.families.setdefault(name, MetricFamily(theirs.comments, theirs.type))
            ours = family.samples
            for sample, value in theirs.samples.items():
                ours[sample] = join(ours[sample], value) if sample in ours else value

    def select_counters(self) -> "Page":
        """What of it only grows: counters and histograms."""
        page = Page()
        page.families = {name: one for name, one in self.families.items() if one.type != "gauge"}
        return page

    def render(self) -> str:
        """As Prometheus reads it."""
        return format_families(self.families.values())


def workers(told: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """What all processes tell of each backend's workers: what they have of it is added up."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for backends in told:
        for name, reports in backends.items():
            known = merged.setdefault(name, {})
            for report in reports:
                url = report["url"]
                known[url] = _joined(known[url], report) if url in known else dict(report)
    return {name: [*known.values()] for name, known in merged.items()}


def joined(path: str, bodies: Sequence[bytes]) -> object:
    """What several processes answer at this path of their admin listeners, as one's answer."""
    told = [msgspec.json.decode(one) for one in bodies]
    match path:
        case "/-/workers":
            return {"backends": workers(one["backends"] for one in told)}
        case "/-/requests":
            every = [running for one in told for running in one["requests"]]
            return {"requests": sorted(every, key=lambda one: -one["age"])}
        case _:
            statuses = msgspec.convert(told, list[status.Status])
            return status.merged(statuses, workers(one.workers for one in statuses))


def cancelled(bodies: Sequence[bytes]) -> object:
    """How many requests several processes ended."""
    return {"cancelled": sum(msgspec.json.decode(one)["cancelled"] for one in bodies)}


def _joined(known: dict[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    both = (name for name in _SUMMED if known[name] is not None and report[name] is not None)
    return known | {name: known[name] + report[name] for name in both}
