"""Many processes' figures as one's."""

import pytest

from gateway.multiprocess.admin_proxy import MetricsPage, merge_workers

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


def test_counts_are_added_and_the_supervisors_own_left_alone() -> None:
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
def test_a_gauge_is_merged_as_it_is_documented(
    name: str, one: float, other: float, together: float | None
) -> None:
    page = MetricsPage()
    for value in (one, other):
        page.merge(
            MetricsPage(f"# HELP {name} Says nothing.\n# TYPE {name} gauge\n{name} {value}\n")
        )
    found = page.families.get(name)
    assert (found and found.samples[name]) == together


def test_each_metric_is_introduced_once_before_its_samples() -> None:
    page = MetricsPage()
    page.merge(MetricsPage(OTHER))
    page.merge(MetricsPage(OTHER))
    heads = [line for line in page.render().splitlines() if line.startswith("#")]
    assert heads == [line for line in OTHER.splitlines() if line.startswith("#")]


def test_adding_changes_neither_of_those_that_are_added() -> None:
    one, other = MetricsPage(ONE), MetricsPage(OTHER)
    before = one.render()
    page = MetricsPage()
    page.merge(one)
    page.merge(other)
    assert one.render() == before


def test_of_who_is_gone_only_counts_are_kept() -> None:
    kept = MetricsPage(ONE).select_counters().render()
    assert "interlingua_requests_total" in kept
    assert "duration_seconds_bucket" in kept
    assert "worker" not in kept


def test_a_workers_requests_and_places_are_those_of_all_processes() -> None:
    x = {"url": "x", "state": "up", "in_flight": 1, "limit": 2}
    y = {"url": "y", "state": "up", "in_flight": 1, "limit": None}
    told = [{"p": [x, y]}, {"p": [x | {"state": "out", "in_flight": 3}, y]}]
    assert merge_workers(told) == {
        "p": [x | {"in_flight": 4, "limit": 4}, y | {"in_flight": 2, "limit": None}]
    }
