"""Metrics and status of several processes as one gateway's."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.admin import history as admin_history
from gateway.admin import status as admin_status
from gateway.observability.metrics.catalog import METRICS_BY_NAME
from gateway.observability.metrics.requests import MAX_FINISHED_REQUESTS
from gateway.observability.prometheus_text import MetricFamily, format_families, parse_families
from protocols.core.json_text import decode_json

_SUMMED_FIELDS: Final = frozenset({"in_flight", "limit"})
"""Fields of a worker report that are added up; others are those of the first process."""
_MERGE_FUNCTIONS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "sum": operator.add,
    "largest": max,
    "smallest": min,
}


class MetricsPage:
    """Metrics in the Prometheus text format, which can be merged."""

    def __init__(self, text: str = "") -> None:
        self.families = parse_families(text)

    def merge(self, other: "MetricsPage") -> None:
        """Add the metrics of another process."""
        for name, family in other.families.items():
            mode = METRICS_BY_NAME[name].merge_mode if name in METRICS_BY_NAME else "sum"
            if mode == "supervisor":
                continue
            combine = _MERGE_FUNCTIONS[mode]
            merged = self.families.setdefault(name, MetricFamily(family.comments, family.type))
            samples = merged.samples
            for sample, value in family.samples.items():
                samples[sample] = combine(samples[sample], value) if sample in samples else value

    def select_counters(self) -> "MetricsPage":
        """The counters and histograms, without gauges."""
        page = MetricsPage()
        page.families = {
            name: family for name, family in self.families.items() if family.type != "gauge"
        }
        return page

    def render(self) -> str:
        """The page in the Prometheus text format."""
        return format_families(self.families.values())


def merge_workers(
    reports_by_process: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]],
) -> dict[str, Any]:
    """Merge the worker reports of all processes, by backend."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for backends in reports_by_process:
        for name, reports in backends.items():
            workers = merged.setdefault(name, {})
            for report in reports:
                url = report["url"]
                workers[url] = (
                    _merge_worker(workers[url], report) if url in workers else dict(report)
                )
    return {name: [*workers.values()] for name, workers in merged.items()}


def merge_responses(path: str, bodies: Sequence[bytes]) -> object:
    """Merge the responses of several processes to a GET of this path."""
    responses = [decode_json(body) for body in bodies]
    match path:
        case "/-/workers":
            return {"backends": merge_workers(response["backends"] for response in responses)}
        case "/-/requests":
            requests = [request for response in responses for request in response["requests"]]
            return {"requests": sorted(requests, key=lambda request: -request["age"])}
        case "/-/requests/finished":
            records = [record for response in responses for record in response["requests"]]
            records.sort(key=lambda one: -one["started_at"] - one.get("duration", 0.0))
            return {"requests": records[:MAX_FINISHED_REQUESTS]}
        case "/-/history":
            histories = msgspec.convert(responses, list[admin_history.StatsHistory])
            return admin_history.merge_histories(histories)
        case _:
            statuses = msgspec.convert(responses, list[admin_status.GatewayStatus])
            return admin_status.merge_statuses(
                statuses, merge_workers(status.workers for status in statuses)
            )


def merge_cancelled(bodies: Sequence[bytes]) -> object:
    """Add up how many requests the processes cancelled."""
    return {"cancelled": sum(decode_json(body)["cancelled"] for body in bodies)}


def _merge_worker(merged: dict[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    summable = (
        name for name in _SUMMED_FIELDS if merged[name] is not None and report[name] is not None
    )
    return merged | {name: merged[name] + report[name] for name in summable}
