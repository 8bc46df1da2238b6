"""The board and the alerts: they ask for what there is, in words that Prometheus understands."""

import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.observability.metrics.catalog import METRICS_BY_NAME
from gateway.observability.metrics.definition import MetricDefinition
from tests.deploy.tools import DEPLOY, good, read, run
from tests.deploy.watched import BOARD, CASES, RULES, asked, labelled, named, panels, rules


def metric(sample: str) -> MetricDefinition:
    """What a sample is one of."""
    for end in ("", "_bucket", "_sum", "_count"):
        if (found := METRICS_BY_NAME.get(sample.removesuffix(end))) is not None and sample.endswith(
            end
        ):
            assert (found.kind == "histogram") == bool(end), sample
            return found
    raise AssertionError(f"there is no {sample}")


@pytest.mark.parametrize(("who", "expr"), asked().items(), ids=list(asked()))
def test_what_is_asked_for_is_told_with_these_labels(who: str, expr: str) -> None:
    names = named(expr)
    assert names or "model:interlingua" in expr or expr.startswith("up{"), who
    known = {label for name in names for label in metric(name).label_names}
    if names:
        assert labelled(expr) <= known


def test_the_board_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))["build_dashboard"]()
    assert msgspec.json.decode(BOARD.read_bytes()) == made


def test_panels_have_their_own_ids_and_places() -> None:
    board = msgspec.json.decode(BOARD.read_bytes())
    every = board["panels"]
    assert len({one["id"] for one in every}) == len(every)
    taken = [place for one in every for place in squares(one["gridPos"])]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    for panel in panels():
        references = [one["refId"] for one in panel["targets"]]
        assert len(references) == len(set(references)) > 0
    titles = [one["title"] for one in every]
    assert len(titles) == len(set(titles))


def squares(place: dict[str, int]) -> list[tuple[int, int]]:
    across = range(place["x"], place["x"] + place["w"])
    return [(x, y) for x in across for y in range(place["y"], place["y"] + place["h"])]


def test_prometheus_reads_what_the_board_asks(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(asked().values())
    ]
    file = tmp_path / "board.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in good("promtool", "check", "rules", file)
    recorded[0]["expr"] += " )"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))
    assert run("promtool", "check", "rules", file).returncode


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    good("promtool", "check", "rules", RULES)
    good("promtool", "test", "rules", CASES)
    deaf = RULES.read_text("utf-8").replace("> 0.1\n", "> 0.9\n").replace("<= 0.5", "<= 0.1")
    (tmp_path / RULES.name).write_text(deaf)
    (tmp_path / CASES.name).write_text(CASES.read_text("utf-8"))
    said = run("promtool", "test", "rules", tmp_path / CASES.name)
    assert said.returncode
    assert "InterlinguaEventLoopLag" in said.stdout + said.stderr
    assert "InterlinguaWorkersDown" in said.stdout + said.stderr


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases: list[dict[str, Any]] = [
        case for test in read(CASES)["tests"] for case in test.get("alert_rule_test", ())
    ]
    alerts = {one["alert"] for one in rules() if "alert" in one}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    for one in rules():
        assert "alert" not in one or one["labels"]["severity"] in ("page", "ticket")


def test_the_composition_has_the_board_and_the_alerts() -> None:
    compose = DEPLOY / "compose"
    services = read(compose / "compose.yaml")["services"]

    def mounted(service: str, folder: str) -> str:
        [found] = [one for one in services[service]["volumes"] if one.startswith(f"{folder}:")]
        return str(found).split(":")[1]

    [board] = read(compose / "grafana" / "dashboards" / "interlingua.yaml")["providers"]
    assert board["options"]["path"] == mounted("grafana", "../grafana")
    assert mounted("grafana", "./grafana/dashboards") == "/etc/grafana/provisioning/dashboards"
    [glob] = read(compose / "prometheus" / "prometheus.yml")["rule_files"]
    folder, _, pattern = str(glob).rpartition("/")
    assert folder == mounted("prometheus", "../prometheus")
    assert [one.name for one in (DEPLOY / "prometheus").glob(pattern)] == [RULES.name]
