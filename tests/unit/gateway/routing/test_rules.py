"""A rule matches if all its conditions do, and the first that matches is used."""

from typing import Any

import pytest

from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.rules import RouteRule, RuleMatch, find_matching_rule
from tests.unit.gateway.routing.compiled_rules import make_rule

TRAITS = RequestAttributes(
    protocol="openai",
    headers={"x-cohort": "beta", "x-more": "1"},
    body=b'{"user":"u","n":1,"yes":true,"text":"1"}',
    key="web",
    tags=frozenset({"paid"}),
    address="192.0.2.7",
)
HELD: list[dict[str, Any]] = [
    {},
    {"protocol": "openai"},
    {"key": "web"},
    {"tag": "paid"},
    {"header": {"x-cohort": "beta"}},
    {"header": {"x-cohort": "beta", "x-more": "1"}},
    {"body": {"user": "u"}},
    {"body": {"user": "u", "n": 1, "yes": True}},
    {"body": {"n": 1.0}},
    {
        "protocol": "openai",
        "header": {"x-more": "1"},
        "body": {"text": "1"},
        "key": "web",
        "tag": "paid",
    },
]
NOT_HELD: list[dict[str, Any]] = [
    {"protocol": "triton"},
    {"key": "app"},
    {"tag": "free"},
    {"header": {"x-cohort": "Beta"}},
    {"header": {"x-cohort": "beta", "x-none": "1"}},
    {"body": {"user": "v"}},
    {"body": {"n": True}},
    {"body": {"yes": 1}},
    {"body": {"n": "1"}},
    {"body": {"user": "u", "none": "1"}},
    {
        "protocol": "openai",
        "header": {"x-more": "1"},
        "body": {"text": "1"},
        "key": "web",
        "tag": "free",
    },
]


@pytest.mark.parametrize(
    ("when", "holds"), [(one, True) for one in HELD] + [(one, False) for one in NOT_HELD]
)
def test_rule_matches_if_all_conditions_hold(when: dict[str, Any], *, holds: bool) -> None:
    one = make_rule("r", **when)

    assert find_matching_rule([one], TRAITS, (), _fail_if_called) == (
        RuleMatch(one) if holds else None
    )


def test_body_is_parsed_only_if_the_other_conditions_hold() -> None:
    traits = RequestAttributes(body=b'{"user":"u"}')

    assert make_rule("r", protocol="triton", body={"user": "u"}).find_mismatch(traits) == "protocol"
    assert traits.parsed_fields is None


def test_first_matching_rule_is_selected() -> None:
    rules = [
        make_rule("a", key="app"),
        make_rule("b", key="web"),
        make_rule("c"),
    ]

    matching_rule = find_matching_rule(rules, TRAITS, (), _fail_if_called)

    assert matching_rule is not None
    assert matching_rule.rule.name == "b"
    assert find_matching_rule([], TRAITS, (), _fail_if_called) is None


def test_share_without_a_sticky_source_is_drawn_per_rule() -> None:
    draws = iter([0.3, 0.2, 0.3])
    rules = [
        make_rule("a", share=0.25),
        make_rule("b", share=0.25),
    ]

    assert find_matching_rule(rules, TRAITS, ("header:x-none",), draws.__next__) == RuleMatch(
        rules[1], position=0.2
    )
    assert find_matching_rule(rules[:1], TRAITS, (), draws.__next__) is None


def test_share_of_zero_never_matches_and_is_drawn_last() -> None:
    assert find_matching_rule([make_rule("a", share=0.0)], TRAITS, (), lambda: 0.0) is None
    assert (
        find_matching_rule([make_rule("a", key="x", share=0.5)], TRAITS, (), _fail_if_called)
        is None
    )


def test_sticky_share_is_stable_per_client_and_independent_per_rule() -> None:
    rules = [
        make_rule("a", share=0.5),
        make_rule("b", share=0.5),
    ]
    people = [RequestAttributes(address=f"192.0.2.{n}") for n in range(200)]

    def taken(one_rule: RouteRule) -> list[bool]:
        return [
            find_matching_rule([one_rule], one, ("key", "address"), _fail_if_called) is not None
            for one in people
        ]

    assert taken(rules[0]) == taken(rules[0])

    both = sum(map(all, zip(taken(rules[0]), taken(rules[1]), strict=True)))
    assert 20 < both < 80


def _fail_if_called() -> float:
    raise AssertionError("a random number was drawn")
