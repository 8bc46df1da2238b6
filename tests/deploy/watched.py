"""The expressions of the dashboard and the alerts, and the metrics in them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from tests.deploy.tools import DEPLOY, read_yaml

BOARD: Final = DEPLOY / "grafana" / "interlingua.json"
RULES: Final = DEPLOY / "prometheus" / "interlingua.rules.yaml"
CASES: Final = DEPLOY / "prometheus" / "interlingua.test.yaml"
_NAME: Final = re.compile(r"\b(interlingua_[a-z_]+|vllm:[a-z_]+)(\{[^}]*\})?")
_BY: Final = re.compile(r"\bby \(([^)]*)\)")
_MATCHED: Final = re.compile(r"(\w+)(?:=~|!=|=)")
_PROMETHEUS_LABELS: Final = frozenset({"job", "instance", "le"})
"""Labels that Prometheus adds, or that histograms have."""


def list_panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels."""
    board = msgspec.json.decode(BOARD.read_bytes())
    return [one for one in board["panels"] if one["type"] != "row"]


def list_rules() -> Iterator[dict[str, Any]]:
    """Return the alerting and recording rules."""
    for group in read_yaml(RULES)["groups"]:
        yield from group["rules"]


def list_expressions() -> Mapping[str, str]:
    """Return every expression by its panel or rule, with Grafana's variables replaced."""
    of_panels = {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m")
        for panel in list_panels()
        for target in panel["targets"]
    }
    return of_panels | {one.get("alert") or one["record"]: one["expr"] for one in list_rules()}


def list_samples(expr: str) -> set[str]:
    """Return the sample names in an expression."""
    return {match[1] for match in _NAME.finditer(expr)} - _list_recorded_names()


def list_labels(expr: str) -> set[str]:
    """Return the labels in an expression, without Prometheus's own."""
    matched = {one for match in _NAME.finditer(expr) for one in _MATCHED.findall(match[2] or "")}
    grouped = {one.strip() for match in _BY.findall(expr) for one in match.split(",")}
    return (matched | grouped) - _PROMETHEUS_LABELS


def _list_recorded_names() -> set[str]:
    """Return the names of recording rules, such as ``model:interlingua_…``."""
    return {
        match[1]
        for one in list_rules()
        if "record" in one
        for match in _NAME.finditer(one["record"])
    }
