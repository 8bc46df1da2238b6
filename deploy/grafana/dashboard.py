"""Generates the Grafana dashboard.

Run: python deploy/grafana/dashboard.py > deploy/grafana/interlingua.json

A panel has a title, a unit and PromQL queries by legend. All panels share the other settings.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

WIDE: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
SCOPE: Final = 'job=~"$job",instance=~"$instance"'
MODEL: Final = f'{SCOPE},model=~"$model"'
BACKEND: Final = f'{SCOPE},backend=~"$backend"'
FAILED: Final = 'outcome=~"worker_error|gateway_error|truncated"'


class Panel(NamedTuple):
    """``queries`` maps legends to PromQL. ``description`` is the tooltip of the title."""

    title: str
    unit: str
    queries: Mapping[str, str]
    description: str = ""


def rate(name: str, where: str, by: str) -> str:
    """The rate of a counter per second, summed by these labels."""
    return f"sum by ({by}) (rate(interlingua_{name}{{{where}}}[$__rate_interval]))"


def quantiles(name: str, where: str) -> dict[str, str]:
    """The quantiles of a histogram, by legend."""
    increase = f"rate(interlingua_{name}_bucket{{{where}}}[$__rate_interval])"
    return {
        f"p{round(q * 100)}": f"histogram_quantile({q}, sum by (le) ({increase}))"
        for q in (0.5, 0.95, 0.99)
    }


ROWS: Final[Mapping[str, Sequence[Panel]]] = {
    "Requests and responses": (
        Panel("Requests", "reqps", {"{{outcome}}": rate("requests_total", MODEL, "outcome")}),
        Panel(
            "Errors",
            "percentunit",
            {
                "{{model}}": f"{rate('requests_total', f'{MODEL},{FAILED}', 'model')} / "
                f"{rate('requests_total', MODEL, 'model')}"
            },
            "Share of requests that fail because of the gateway or a worker.",
        ),
        Panel(
            "Requests in flight",
            "short",
            {"{{phase}}": f"sum by (phase) (interlingua_requests_in_flight{{{MODEL}}})"},
        ),
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds", MODEL)),
        Panel("Time per output token", "s", quantiles("time_per_output_token_seconds", MODEL)),
        Panel("Request duration", "s", quantiles("request_duration_seconds", MODEL)),
        Panel(
            "Tokens",
            "short",
            {"{{direction}}": rate("tokens_total", MODEL, "direction")},
            "Per second. Input includes cached tokens, output includes reasoning tokens.",
        ),
        Panel("Errors by class", "reqps", {"{{error}}": rate("errors_total", MODEL, "error")}),
        Panel(
            "Aborted streams",
            "reqps",
            {"{{side}} {{reason}}": rate("stream_aborts_total", MODEL, "side, reason")},
            "By the side that caused the abort.",
        ),
    ),
    "Versions": (
        Panel(
            "Requests by version",
            "reqps",
            {"{{model}}@{{version}}": rate("requests_total", MODEL, "model, version")},
        ),
        Panel(
            "Time to first token by version",
            "s",
            {
                "{{model}}@{{version}}": "histogram_quantile(0.95, sum by (le, model, version) "
                f"(rate(interlingua_time_to_first_token_seconds_bucket{{{MODEL}}}"
                "[$__rate_interval])))"
            },
            "The 95th percentile.",
        ),
        Panel(
            "Fallbacks",
            "reqps",
            {
                "answered instead of {{model}}@{{version}}": rate(
                    "requests_answered_by_fallback_total", MODEL, "model, version"
                ),
                "after failure of {{target}}": rate("fallbacks_total", SCOPE, "target"),
            },
        ),
        Panel(
            "Unsupported parameters",
            "reqps",
            {"{{field}} {{reason}}": rate("unsupported_parameters_total", MODEL, "field, reason")},
        ),
    ),
    "Pools": (
        Panel(
            "Workers in rotation",
            "percentunit",
            {"{{backend}}": f"avg by (backend) (interlingua_worker_up{{{BACKEND}}})"},
        ),
        Panel(
            "Requests in flight by worker",
            "short",
            {"{{worker}}": f"sum by (worker) (interlingua_worker_in_flight{{{BACKEND}}})"},
        ),
        Panel(
            "Queue length",
            "short",
            {"{{backend}}": f"sum by (backend) (interlingua_queue_length{{{BACKEND}}})"},
        ),
        Panel("Queue wait", "s", quantiles("queue_wait_seconds", BACKEND)),
        Panel(
            "Shed requests",
            "reqps",
            {"{{backend}} {{reason}}": rate("shed_total", BACKEND, "backend, reason")},
            "Requests rejected because no worker was available.",
        ),
        Panel(
            "Retries",
            "reqps",
            {
                "{{reason}}": rate("retries_total", BACKEND, "reason"),
                "budget exhausted": rate("retry_budget_exhausted_total", BACKEND, "backend"),
            },
        ),
        Panel(
            "Worker failures",
            "reqps",
            {"{{backend}} {{kind}}": rate("upstream_failures_total", BACKEND, "backend, kind")},
        ),
        Panel(
            "Upstream request duration",
            "s",
            quantiles("upstream_request_duration_seconds", BACKEND),
        ),
        Panel(
            "Largest gap between chunks of a stream",
            "s",
            quantiles("max_inter_chunk_gap_seconds", BACKEND),
        ),
        Panel(
            "Connections to workers",
            "short",
            {"{{state}}": f"sum by (state) (interlingua_upstream_connections{{{BACKEND}}})"},
        ),
        Panel(
            "Upstream cancellations",
            "reqps",
            {"{{backend}}": rate("upstream_cancellations_total", BACKEND, "backend")},
        ),
    ),
    "Gateway process": (
        Panel(
            "Gateway overhead",
            "s",
            quantiles("overhead_seconds", MODEL),
            "From the complete client request until a worker is requested.",
        ),
        Panel("Event loop lag", "s", quantiles("event_loop_lag_seconds", SCOPE)),
        Panel("CPU", "short", {"{{instance}}": rate("cpu_seconds_total", SCOPE, "instance")}),
        Panel("Memory", "bytes", {"{{instance}}": f"interlingua_memory_bytes{{{SCOPE}}}"}),
        Panel(
            "File descriptors",
            "percentunit",
            {"{{instance}}": f"interlingua_open_fds{{{SCOPE}}} / interlingua_max_fds{{{SCOPE}}}"},
        ),
        Panel(
            "Client connections",
            "short",
            {"{{listener}}": f"sum by (listener) (interlingua_open_client_connections{{{SCOPE}}})"},
        ),
        Panel(
            "Malformed requests",
            "reqps",
            {"{{kind}}": rate("malformed_requests_total", SCOPE, "kind")},
        ),
        Panel(
            "Dropped log lines, usage rows and traces",
            "cps",
            {
                "access log lines": rate("log_lines_dropped_total", SCOPE, "job"),
                "usage rows": rate("usage_rows_dropped_total", SCOPE, "job"),
                "traces": rate("traces_dropped_total", SCOPE, "job"),
            },
        ),
        Panel(
            "Configurations",
            "short",
            {"{{hash}}": f"sum by (hash) (interlingua_config_info{{{SCOPE}}})"},
            "Gateways by configuration hash.",
        ),
    ),
    "Rate limits": (
        Panel(
            "Rate limit decisions",
            "reqps",
            {"{{scope}} {{decision}}": rate("ratelimit_decisions_total", SCOPE, "scope, decision")},
        ),
        Panel(
            "Daily token budgets",
            "percentunit",
            {
                "{{key}} {{model}}": "sum by (key, model) "
                f"(interlingua_budget_spent_tokens{{{SCOPE}}})"
                f" / sum by (key, model) (interlingua_budget_tokens{{{SCOPE}}})"
            },
            "Used share of the daily budget.",
        ),
        Panel(
            "Shared rate limit store",
            "short",
            {
                "up {{instance}}": f"interlingua_ratelimit_store_up{{{SCOPE}}}",
                "errors {{instance}}": rate("ratelimit_store_errors_total", SCOPE, "instance"),
            },
        ),
    ),
}


def build_panels() -> Iterator[dict[str, Any]]:
    """All rows and panels with their positions, three panels per line."""
    ids = itertools.count(1)
    top, across = 0, WIDE // 3
    for title, row in ROWS.items():
        yield {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": WIDE, "h": 1},
            "panels": [],
        }
        top += 1
        for number, panel in enumerate(row):
            x, y = number % 3 * across, top + number // 3 * HEIGHT
            yield build_panel(panel, next(ids), {"x": x, "y": y, "w": across, "h": HEIGHT})
        top += -(-len(row) // 3) * HEIGHT


def build_panel(panel: Panel, number: int, position: Mapping[str, int]) -> dict[str, Any]:
    """A panel in Grafana's JSON model."""
    targets = [
        {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        for n, (legend, expr) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def variable(name: str, metric: str) -> dict[str, Any]:
    """A dashboard variable with the values of the label of the same name."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({metric}, {name})", "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def build_dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    variables = [
        variable("job", "interlingua_build_info"),
        variable("instance", "interlingua_build_info"),
        variable("model", "interlingua_requests_total"),
        variable("backend", "interlingua_worker_up"),
    ]
    return {
        "uid": "interlingua",
        "title": "Interlingua",
        "tags": ["interlingua"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "panels": [*build_panels()],
    }


if __name__ == "__main__":
    sys.stdout.write(
        msgspec.json.format(msgspec.json.encode(build_dashboard()), indent=1).decode() + "\n"
    )
