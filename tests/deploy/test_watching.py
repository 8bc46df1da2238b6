"""The dashboard and the alerts query existing metrics with valid expressions."""

import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.observability.metrics.catalog import METRICS_BY_NAME
from gateway.observability.metrics.definition import MetricDefinition
from tests.deploy.tools import DEPLOY, read_yaml, run_tool, run_tool_successfully
from tests.deploy.watched import (
    BOARD,
    CASES,
    RULES,
    list_expressions,
    list_labels,
    list_panels,
    list_rules,
    list_samples,
)


def get_metric(sample: str) -> MetricDefinition:
    """Return the metric of a sample's name."""
    for end in ("", "_bucket", "_sum", "_count"):
        if (
            metric := METRICS_BY_NAME.get(sample.removesuffix(end))
        ) is not None and sample.endswith(end):
            assert (metric.kind == "histogram") == bool(end), sample
            return metric
    raise AssertionError(f"no metric {sample}")


@pytest.mark.parametrize(("who", "expr"), list_expressions().items(), ids=list(list_expressions()))
def test_every_queried_metric_and_label_exists(who: str, expr: str) -> None:
    names = list_samples(expr)
    assert names or "model:interlingua" in expr or expr.startswith("up{"), who

    labels = {label for name in names for label in get_metric(name).label_names}
    if names:
        assert list_labels(expr) <= labels


def test_dashboard_matches_its_script() -> None:
    dashboard = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))["build_dashboard"]()
    assert msgspec.json.decode(BOARD.read_bytes()) == dashboard


def test_dashboard_panels_have_unique_ids_titles_and_positions() -> None:
    board = msgspec.json.decode(BOARD.read_bytes())
    every = board["panels"]
    assert len({one["id"] for one in every}) == len(every)

    taken = [place for one in every for place in list_grid_cells(one["gridPos"])]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24

    for panel in list_panels():
        references = [one["refId"] for one in panel["targets"]]
        assert len(references) == len(set(references)) > 0
    titles = [one["title"] for one in every]
    assert len(titles) == len(set(titles))


def list_grid_cells(place: dict[str, int]) -> list[tuple[int, int]]:
    across = range(place["x"], place["x"] + place["w"])
    return [(x, y) for x in across for y in range(place["y"], place["y"] + place["h"])]


def test_dashboard_queries_are_valid_promql(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": expr}
        for number, expr in enumerate(list_expressions().values())
    ]
    file = tmp_path / "board.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))

    assert f"{len(recorded)} rules found" in run_tool_successfully(
        "promtool", "check", "rules", file
    )

    recorded[0]["expr"] += " )"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))
    assert run_tool("promtool", "check", "rules", file).returncode


def test_alert_rules_pass_their_test_cases(tmp_path: Path) -> None:
    run_tool_successfully("promtool", "check", "rules", RULES)
    run_tool_successfully("promtool", "test", "rules", CASES)
    deaf = RULES.read_text("utf-8").replace("> 0.1\n", "> 0.9\n").replace("<= 0.5", "<= 0.1")
    (tmp_path / RULES.name).write_text(deaf)
    (tmp_path / CASES.name).write_text(CASES.read_text("utf-8"))

    result = run_tool("promtool", "test", "rules", tmp_path / CASES.name)

    assert result.returncode
    assert "InterlinguaEventLoopLag" in result.stdout + result.stderr
    assert "InterlinguaWorkersDown" in result.stdout + result.stderr


def test_every_alert_has_a_firing_test_case() -> None:
    cases: list[dict[str, Any]] = [
        case for test in read_yaml(CASES)["tests"] for case in test.get("alert_rule_test", ())
    ]
    alerts = {one["alert"] for one in list_rules() if "alert" in one}

    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    for one in list_rules():
        assert "alert" not in one or one["labels"]["severity"] in ("page", "ticket")


def test_compose_file_mounts_dashboard_and_alert_rules() -> None:
    compose = DEPLOY / "compose"
    services = read_yaml(compose / "compose.yaml")["services"]

    def mounted(service: str, folder: str) -> str:
        [volume] = [one for one in services[service]["volumes"] if one.startswith(f"{folder}:")]
        return str(volume).split(":")[1]

    [board] = read_yaml(compose / "grafana" / "dashboards" / "interlingua.yaml")["providers"]
    assert board["options"]["path"] == mounted("grafana", "../grafana")
    assert mounted("grafana", "./grafana/dashboards") == "/etc/grafana/provisioning/dashboards"

    [glob] = read_yaml(compose / "prometheus" / "prometheus.yml")["rule_files"]
    folder, _, pattern = str(glob).rpartition("/")
    assert folder == mounted("prometheus", "../prometheus")
    assert [one.name for one in (DEPLOY / "prometheus").glob(pattern)] == [RULES.name]
