"""A rule holds where all of it does, and the first that holds is followed."""

import pytest

from gateway.rules import Match, Rule, When, first
from gateway.traits import Traits

TRAITS = Traits(
    protocol="openai",
    headers={"x-cohort": "beta", "x-more": "1"},
    body=b'{"user":"u","n":1,"yes":true,"text":"1"}',
    key="web",
    tags=frozenset({"paid"}),
    address="192.0.2.7",
)
HELD = [
    When(),
    When(protocol="openai"),
    When(key="web"),
    When(tag="paid"),
    When(headers={"x-cohort": "beta"}),
    When(headers={"x-cohort": "beta", "x-more": "1"}),
    When(body={"user": "u"}),
    When(body={"user": "u", "n": 1, "yes": True}),
    When(body={"n": 1.0}),
    When("openai", {"x-more": "1"}, {"text": "1"}, "web", "paid"),
]
NOT_HELD = [
    When(protocol="triton"),
    When(key="app"),
    When(tag="free"),
    When(headers={"x-cohort": "Beta"}),
    When(headers={"x-cohort": "beta", "x-none": "1"}),
    When(body={"user": "v"}),
    When(body={"n": True}),
    When(body={"yes": 1}),
    When(body={"n": "1"}),
    When(body={"user": "u", "none": "1"}),
    When("openai", {"x-more": "1"}, {"text": "1"}, "web", "free"),
]


@pytest.mark.parametrize(
    ("when", "holds"), [(one, True) for one in HELD] + [(one, False) for one in NOT_HELD]
)
def test_all_of_it_has_to_hold(when: When, *, holds: bool) -> None:
    rule = Rule("r", conditions=when)

    assert first([rule], TRAITS, (), _never) == (Match(rule) if holds else None)


def test_the_body_is_read_only_where_the_rest_holds() -> None:
    traits = Traits(body=b'{"user":"u"}')

    assert When(protocol="triton", body={"user": "u"}).find_mismatch(traits) == "dialect"
    assert traits.parsed_fields is None


def test_the_first_that_holds_is_followed() -> None:
    rules = [
        Rule("a", conditions=When(key="app")),
        Rule("b", conditions=When(key="web")),
        Rule("c"),
    ]

    found = first(rules, TRAITS, (), _never)

    assert found is not None
    assert found.rule.name == "b"
    assert first([], TRAITS, (), _never) is None


def test_a_share_is_taken_by_luck_anew_for_each_rule_where_nobody_is_told() -> None:
    draws = iter([0.3, 0.2, 0.3])
    rules = [Rule("a", conditions=When(share=0.25)), Rule("b", conditions=When(share=0.25))]

    assert first(rules, TRAITS, ("header:x-none",), draws.__next__) == Match(rules[1], position=0.2)
    assert first(rules[:1], TRAITS, (), draws.__next__) is None


def test_a_share_of_nothing_is_for_nobody_and_asks_only_where_the_rest_holds() -> None:
    assert first([Rule("a", conditions=When(share=0.0))], TRAITS, (), lambda: 0.0) is None
    assert first([Rule("a", conditions=When(key="x", share=0.5))], TRAITS, (), _never) is None


def test_a_share_is_of_the_same_people_each_time_and_each_rules_own() -> None:
    rules = [Rule("a", conditions=When(share=0.5)), Rule("b", conditions=When(share=0.5))]
    people = [Traits(address=f"192.0.2.{n}") for n in range(200)]

    def taken(rule: Rule) -> list[bool]:
        return [first([rule], one, ("key", "address"), _never) is not None for one in people]

    assert taken(rules[0]) == taken(rules[0])
    both = sum(map(all, zip(taken(rules[0]), taken(rules[1]), strict=True)))
    assert 20 < both < 80


def _never() -> float:
    raise AssertionError("luck was asked")
