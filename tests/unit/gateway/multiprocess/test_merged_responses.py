"""The metrics of several processes are merged into those of one gateway."""

import pytest

from gateway.multiprocess.merged_responses import MetricsPage, merge_workers

ONE = """\
# HELP interlingua_requests_total Exchanges.
# TYPE interlingua_requests_total counter
interlingua_requests_total{model="a b"} 3.0
# HELP interlingua_worker_up Whether it is asked.
# TYPE interlingua_worker_up gauge
interlingua_worker_up{worker="x"} 1.0
# HELP interlingua_worker_in_flight The requests that it has.
# TYPE interlingua_worker_in_flight gauge
interlingua_worker_in_flight{worker="x"} 2.0
# HELP interlingua_config_info The configuration.
# TYPE interlingua_config_info gauge
interlingua_config_info{hash="h"} 1.0
# HELP interlingua_request_duration_seconds Long.
# TYPE interlingua_request_duration_seconds histogram
interlingua_request_duration_seconds_bucket{le="1"} 1
interlingua_request_duration_seconds_sum 0.5
"""
OTHER = """\
# HELP interlingua_requests_total Exchanges.
# TYPE interlingua_requests_total counter
interlingua_requests_total{model="a b"} 4.0
interlingua_requests_total{model="c"} 1.0
# HELP interlingua_worker_up Whether it is asked.
# TYPE interlingua_worker_up gauge
interlingua_worker_up{worker="x"} 0.0
# HELP interlingua_worker_in_flight The requests that it has.
# TYPE interlingua_worker_in_flight gauge
interlingua_worker_in_flight{worker="x"} 5.0
# HELP interlingua_request_duration_seconds Long.
# TYPE interlingua_request_duration_seconds histogram
interlingua_request_duration_seconds_bucket{le="1"} 2
interlingua_request_duration_seconds_sum 0.25
"""


def test_counters_are_summed_and_supervisor_metrics_are_kept() -> None:
    page = MetricsPage("# HELP own Mine.\n# TYPE own gauge\nown 2.0\n")
    page.merge(MetricsPage(ONE))
    page.merge(MetricsPage(OTHER))

    samples = [line for line in page.render().splitlines() if not line.startswith("#")]

    assert samples == [
        "own 2.0",
        'interlingua_requests_total{model="a b"} 7.0',
        'interlingua_requests_total{model="c"} 1.0',
        'interlingua_worker_up{worker="x"} 1.0',
        'interlingua_worker_in_flight{worker="x"} 7.0',
        'interlingua_request_duration_seconds_bucket{le="1"} 3.0',
        "interlingua_request_duration_seconds_sum 0.75",
    ]


@pytest.mark.parametrize(
    ("name", "one", "other", "together"),
    [
        ("interlingua_worker_up", 0, 1, 1),
        ("interlingua_worker_latency_seconds", 0.5, 0.25, 0.5),
        ("interlingua_ratelimit_store_up", 1, 0, 0),
        ("interlingua_open_fds", 3, 4, 7),
        ("of_somebody_else", 3, 4, 7),
        ("interlingua_config_last_reload_successful", 1, 1, None),
    ],
)
def test_gauges_are_merged_by_their_documented_function(
    name: str, one: float, other: float, together: float | None
) -> None:
    page = MetricsPage()
    for value in (one, other):
        page.merge(
            MetricsPage(f"# HELP {name} Says nothing.\n# TYPE {name} gauge\n{name} {value}\n")
        )

    family = page.families.get(name)

    assert (family and family.samples[name]) == together


def test_help_and_type_appear_once_per_metric() -> None:
    page = MetricsPage()
    page.merge(MetricsPage(OTHER))
    page.merge(MetricsPage(OTHER))

    heads = [line for line in page.render().splitlines() if line.startswith("#")]

    assert heads == [line for line in OTHER.splitlines() if line.startswith("#")]


def test_merge_does_not_modify_the_merged_pages() -> None:
    one, other = MetricsPage(ONE), MetricsPage(OTHER)
    before = one.render()
    page = MetricsPage()
    page.merge(one)

    page.merge(other)

    assert one.render() == before


def test_only_counters_are_kept_of_an_exited_process() -> None:
    counters = MetricsPage(ONE).select_counters().render()
    assert "interlingua_requests_total" in counters
    assert "duration_seconds_bucket" in counters
    assert "worker" not in counters


def test_in_flight_requests_and_limits_of_workers_are_summed() -> None:
    x = {"url": "x", "state": "up", "in_flight": 1, "limit": 2}
    y = {"url": "y", "state": "up", "in_flight": 1, "limit": None}
    reports = [{"p": [x, y]}, {"p": [x | {"state": "out", "in_flight": 3}, y]}]

    assert merge_workers(reports) == {
        "p": [x | {"in_flight": 4, "limit": 4}, y | {"in_flight": 2, "limit": None}]
    }
