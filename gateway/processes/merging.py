"""Many processes' figures as one's."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.admin import status
from gateway.observability.metrics.catalog import METRICS_BY_NAME
from gateway.observability.prometheus_text import MetricFamily, format_families, parse_families

_SUMMED_FIELDS: Final = frozenset({"in_flight", "limit"})
"""Of what is told of a worker; the rest is what the first process tells."""


_MERGE_FUNCTIONS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "sum": operator.add,
    "largest": max,
    "smallest": min,
}


class MetricsPage:
    """Metrics in Prometheus's text format, to which others' are added."""

    def __init__(self, text: str = "") -> None:
        self.families = parse_families(text)

    def merge(self, other: "MetricsPage") -> None:
        """Count another process's figures into these."""
        for name, theirs in other.families.items():
            merged = METRICS_BY_NAME[name].merge_mode if name in METRICS_BY_NAME else "sum"
            if merged == "supervisor":
                continue
            join = _MERGE_FUNCTIONS[merged]
            family = self.families.setdefault(name, MetricFamily(theirs.comments, theirs.type))
            ours = family.samples
            for sample, value in theirs.samples.items():
                ours[sample] = join(ours[sample], value) if sample in ours else value

    def select_counters(self) -> "MetricsPage":
        """What of it only grows: counters and histograms."""
        page = MetricsPage()
        page.families = {name: one for name, one in self.families.items() if one.type != "gauge"}
        return page

    def render(self) -> str:
        """As Prometheus reads it."""
        return format_families(self.families.values())


def merge_workers(told: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """What all processes tell of each backend's workers: what they have of it is added up."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for backends in told:
        for name, reports in backends.items():
            known = merged.setdefault(name, {})
            for report in reports:
                url = report["url"]
                known[url] = _merge_worker(known[url], report) if url in known else dict(report)
    return {name: [*known.values()] for name, known in merged.items()}


def merge_responses(path: str, bodies: Sequence[bytes]) -> object:
    """What several processes answer at this path of their admin listeners, as one's answer."""
    told = [msgspec.json.decode(one) for one in bodies]
    match path:
        case "/-/workers":
            return {"backends": merge_workers(one["backends"] for one in told)}
        case "/-/requests":
            every = [running for one in told for running in one["requests"]]
            return {"requests": sorted(every, key=lambda one: -one["age"])}
        case _:
            statuses = msgspec.convert(told, list[status.GatewayStatus])
            return status.merge_statuses(statuses, merge_workers(one.workers for one in statuses))


def merge_cancelled(bodies: Sequence[bytes]) -> object:
    """How many requests several processes ended."""
    return {"cancelled": sum(msgspec.json.decode(one)["cancelled"] for one in bodies)}


def _merge_worker(known: dict[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    both = (name for name in _SUMMED_FIELDS if known[name] is not None and report[name] is not None)
    return known | {name: known[name] + report[name] for name in both}
