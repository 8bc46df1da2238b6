"""A user's version follows the documented hash."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.rules import RuleMatch, find_matching_rule
from gateway.routing.traffic_split import TrafficSplit, bucket_to_fraction, compute_bucket
from tests.unit.gateway.routing.compiled_rules import make_rule

TEXT = (Path(__file__).parents[4] / "docs" / "howto" / "ab-test.md").read_text("utf-8")
ROW = r"^\| `([^`]+)` \| (\d+) \| (\d+) \| `(.)` \| `(.)` \| `(.)` \|$"
SHARE_ROW = r"^\| `([^`]+)` \| (\d+) \| (yes|no) \|$"
NAME = "llama31-rollout"
WEIGHTS = [{"1": 90, "2": 10}, {"1": 80, "2": 20}, {"1": 80, "2": 20, "3": 10}]


def test_documented_version_assignments_match_the_code() -> None:
    rows = re.findall(ROW, TEXT, re.MULTILINE)

    assert len(rows) == 8

    for who, *numbers, one, two, three in rows:
        assert [str(compute_bucket(NAME, version, who)) for version in "12"] == numbers
        held = [TrafficSplit(weights, NAME).assign_version(who) for weights in WEIGHTS]
        assert [version.version for version in held] == [one, two, three]
        assert [version.bucket for version in held] == [
            compute_bucket(NAME, version.version, who) for version in held
        ]


def test_documented_program_assigns_the_same_versions() -> None:
    [program] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    scope: dict[str, object] = {}
    exec(program, scope)  # noqa: S102 - the document's own
    assign_version = scope["assign_version"]

    assert callable(assign_version)

    for who in (f"user-{n}" for n in range(500)):
        for weights in [*WEIGHTS, {"1": 0, "2": 5}]:
            assert (
                assign_version(NAME, weights, who)
                == TrafficSplit(weights, NAME).assign_version(who).version
            )


def test_documented_rule_shares_match_the_code() -> None:
    rows = re.findall(SHARE_ROW, TEXT, re.MULTILINE)
    share = make_rule("early", share=0.05)

    assert len(rows) == 4

    for who, number, taken in rows:
        matching_rule = find_matching_rule(
            [share], RequestAttributes(key=who), ("key",), lambda: 0.99
        )
        n = int(number)
        assert matching_rule == (
            RuleMatch(share, "key", n, bucket_to_fraction(n)) if taken == "yes" else None
        )


@pytest.mark.parametrize(
    ("draw", "version"), [(0.0, "1"), (0.89, "1"), (0.9, "2"), (0.999999, "2")]
)
def test_random_assignment_follows_the_weights(draw: float, version: str) -> None:
    assert TrafficSplit({"0": 0, "1": 90, "2": 10}, "s").pick_version(draw) == version


@pytest.mark.parametrize("weights", [{"a": 0, "b": 3}, {"b": 3}])
def test_version_without_weight_gets_no_users(weights: Mapping[str, int]) -> None:
    assert {TrafficSplit(weights, "s").assign_version(f"{n}").version for n in range(100)} == {"b"}


def test_invalid_utf_8_identifier_has_its_own_bucket() -> None:
    assert compute_bucket("s", "1", "\udcff") != compute_bucket("s", "1", "\udcfe")
