"""Makes the Grafana board: python deploy/grafana/board.py > deploy/grafana/interlingua.json.

A panel is a title, a unit and what it asks Prometheus, each with the name of its lines. Everything
else is the same for all of them.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

WIDE: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
OF: Final = 'job=~"$job",instance=~"$instance"'
MODEL: Final = f'{OF},model=~"$model"'
BACKEND: Final = f'{OF},backend=~"$backend"'
FAILED: Final = 'outcome=~"worker_error|gateway_error|truncated"'


class Panel(NamedTuple):
    """``asks`` gives PromQL by what its lines are called. ``about`` is shown beside the title."""

    title: str
    unit: str
    asks: Mapping[str, str]
    about: str = ""


def rate(name: str, where: str, by: str) -> str:
    """What a counter grows by in a second."""
    return f"sum by ({by}) (rate(interlingua_{name}{{{where}}}[$__rate_interval]))"


def quantiles(name: str, where: str, by: str = "") -> dict[str, str]:
    """Of a histogram, by what lines are called."""
    grown = f"rate(interlingua_{name}_bucket{{{where}}}[$__rate_interval])"
    labels = f"le, {by}" if by else "le"
    called = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{round(q * 100)}{called}": f"histogram_quantile({q}, sum by ({labels}) ({grown}))"
        for q in (0.5, 0.95, 0.99)
    }


ROWS: Final[Mapping[str, Sequence[Panel]]] = {
    "Exchanges": (
        Panel("Requests", "reqps", {"{{outcome}}": rate("requests_total", MODEL, "outcome")}),
        Panel(
            "Errors",
            "percentunit",
            {
                "{{model}}": f"{rate('requests_total', f'{MODEL},{FAILED}', 'model')} / "
                f"{rate('requests_total', MODEL, 'model')}"
            },
            "Of all requests, what the gateway or a worker is to blame for.",
        ),
        Panel(
            "In flight",
            "short",
            {"{{phase}}": f"sum by (phase) (interlingua_requests_in_flight{{{MODEL}}})"},
        ),
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds", MODEL)),
        Panel("Time per output token", "s", quantiles("time_per_output_token_seconds", MODEL)),
        Panel("Duration", "s", quantiles("request_duration_seconds", MODEL)),
        Panel(
            "Tokens",
            "short",
            {"{{direction}}": rate("tokens_total", MODEL, "direction")},
            "In a second. Cached tokens are part of the input, reasoning of the output.",
        ),
        Panel("Errors by class", "reqps", {"{{error}}": rate("errors_total", MODEL, "error")}),
        Panel(
            "Streams that were cut",
            "reqps",
            {"{{side}} {{reason}}": rate("stream_aborts_total", MODEL, "side, reason")},
            "By the side that is to blame.",
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
            "Answered elsewhere",
            "reqps",
            {
                "from {{model}}@{{version}}": rate("diversions_total", MODEL, "model, version"),
                "in the stead of {{target}}": rate("fallbacks_total", OF, "target"),
            },
        ),
        Panel(
            "Lost in translation",
            "reqps",
            {"{{field}} {{reason}}": rate("losses_total", MODEL, "field, reason")},
        ),
    ),
    "Pools": (
        Panel(
            "Workers that are asked",
            "percentunit",
            {"{{backend}}": f"avg by (backend) (interlingua_worker_up{{{BACKEND}}})"},
        ),
        Panel(
            "Requests at workers",
            "short",
            {"{{worker}}": f"sum by (worker) (interlingua_worker_in_flight{{{BACKEND}}})"},
        ),
        Panel(
            "Waiting for a worker",
            "short",
            {"{{backend}}": f"sum by (backend) (interlingua_queue_length{{{BACKEND}}})"},
        ),
        Panel("Time in the queue", "s", quantiles("queue_wait_seconds", BACKEND)),
        Panel(
            "Sent away",
            "reqps",
            {"{{backend}} {{reason}}": rate("shed_total", BACKEND, "backend, reason")},
            "Requests that got no worker.",
        ),
        Panel(
            "Tried again",
            "reqps",
            {
                "{{reason}}": rate("retries_total", BACKEND, "reason"),
                "no more": rate("retry_budget_exhausted_total", BACKEND, "backend"),
            },
        ),
        Panel(
            "What workers failed with",
            "reqps",
            {"{{backend}} {{kind}}": rate("upstream_failures_total", BACKEND, "backend, kind")},
        ),
        Panel("Time at a worker", "s", quantiles("upstream_request_duration_seconds", BACKEND)),
        Panel("The longest pause of a stream", "s", quantiles("longest_pause_seconds", BACKEND)),
        Panel(
            "Connections to workers",
            "short",
            {"{{state}}": f"sum by (state) (interlingua_upstream_connections{{{BACKEND}}})"},
        ),
        Panel(
            "Answers that nobody waited for",
            "reqps",
            {"{{backend}}": rate("cancelled_upstream_total", BACKEND, "backend")},
        ),
    ),
    "The gateway itself": (
        Panel(
            "Its own time",
            "s",
            quantiles("overhead_seconds", MODEL),
            "From a whole request until a worker was asked for.",
        ),
        Panel("Lag of the event loop", "s", quantiles("event_loop_lag_seconds", OF)),
        Panel("Processor", "short", {"{{instance}}": rate("cpu_seconds_total", OF, "instance")}),
        Panel("Memory", "bytes", {"{{instance}}": f"interlingua_memory_bytes{{{OF}}}"}),
        Panel(
            "File descriptors",
            "percentunit",
            {"{{instance}}": f"interlingua_open_fds{{{OF}}} / interlingua_max_fds{{{OF}}}"},
        ),
        Panel(
            "Connections of clients",
            "short",
            {"{{listener}}": f"sum by (listener) (interlingua_open_client_connections{{{OF}}})"},
        ),
        Panel(
            "What was no request",
            "reqps",
            {"{{kind}}": rate("malformed_requests_total", OF, "kind")},
        ),
        Panel(
            "What was to be kept and is lost",
            "cps",
            {
                "lines of the log": rate("log_lines_lost_total", OF, "job"),
                "rows of usage": rate("usage_rows_lost_total", OF, "job"),
                "traces": rate("traces_lost_total", OF, "job"),
            },
        ),
        Panel(
            "Configuration",
            "short",
            {"{{hash}}": f"sum by (hash) (interlingua_config_info{{{OF}}})"},
            "How many gateways serve each.",
        ),
    ),
    "Limits": (
        Panel(
            "Requests held to limits",
            "reqps",
            {"{{scope}} {{decision}}": rate("ratelimit_decisions_total", OF, "scope, decision")},
        ),
        Panel(
            "Budgets",
            "percentunit",
            {
                "{{key}} {{model}}": "sum by (key, model) "
                f"(interlingua_budget_spent_tokens{{{OF}}})"
                f" / sum by (key, model) (interlingua_budget_tokens{{{OF}}})"
            },
            "What is used of a day's.",
        ),
        Panel(
            "The store of shared limits",
            "short",
            {
                "up {{instance}}": f"interlingua_ratelimit_store_up{{{OF}}}",
                "asked in vain {{instance}}": rate("ratelimit_store_errors_total", OF, "instance"),
            },
        ),
    ),
}


def panels() -> Iterator[dict[str, Any]]:
    """All of them, each in its place: three in a line."""
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
            yield drawn(panel, next(ids), {"x": x, "y": y, "w": across, "h": HEIGHT})
        top += -(-len(row) // 3) * HEIGHT


def drawn(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    """A panel, as Grafana has it."""
    targets = [
        {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": called}
        for n, (called, expr) in enumerate(panel.asks.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def variable(name: str, of: str) -> dict[str, Any]:
    """A choice among the values of the label that is called the same."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({of}, {name})", "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def board() -> dict[str, Any]:
    """The whole."""
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    choices = [
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
        "templating": {"list": [source, *choices]},
        "annotations": {"list": []},
        "panels": [*panels()],
    }


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(board()), indent=1).decode() + "\n")
