"""Properties of traffic splits: shares follow the weights, and no user moves unnecessarily."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.rules import find_matching_rule
from gateway.routing.traffic_split import TrafficSplit
from tests.unit.gateway.routing.compiled_rules import make_rule

USERS = [f"user-{n}" for n in range(100_000)]

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-_", min_size=1, max_size=8)
weights = st.dictionaries(names, st.integers(1, 100), min_size=1, max_size=5)
people = st.lists(st.text(max_size=20), min_size=1, max_size=40, unique=True)
laws = settings(max_examples=100)  # each example has many users


def assign_versions(split: TrafficSplit, users: Sequence[str]) -> Mapping[str, str]:
    return {user: split.assign_version(user).version for user in users}


def count_moves(
    before: TrafficSplit, after: TrafficSplit, users: Sequence[str]
) -> Counter[tuple[str, str]]:
    """Return the number of users moved from one version to another."""
    was, now = assign_versions(before, users), assign_versions(after, users)
    return Counter((was[user], now[user]) for user in users if was[user] != now[user])


# --- one hundred thousand users -------------------------------------------------------------------


@pytest.mark.parametrize("weights", [{"1": 90, "2": 10}, {"a": 3, "b": 2, "c": 1, "d": 0}])
def test_version_shares_match_the_weights(weights: Mapping[str, int]) -> None:
    counts = Counter(assign_versions(TrafficSplit(weights, "rollout"), USERS).values())

    total = sum(weights.values())
    for version, weight in weights.items():
        assert abs(counts[version] / len(USERS) - weight / total) < 0.01, (version, counts)


def test_share_condition_matches_that_share_of_users() -> None:
    share = make_rule("few", share=0.05)
    sticky = ("key",)

    taken = sum(
        find_matching_rule([share], RequestAttributes(key=user), sticky, reject_random_draw)
        is not None
        for user in USERS
    )

    assert abs(taken / len(USERS) - 0.05) < 0.01


def test_two_splits_assign_users_independently() -> None:
    one, other = (
        assign_versions(TrafficSplit({"1": 1, "2": 1}, "one"), USERS),
        assign_versions(TrafficSplit({"1": 1, "2": 1}), USERS),
    )

    both = Counter((one[user], other[user]) for user in USERS)

    assert all(abs(count / len(USERS) - 0.25) < 0.01 for count in both.values())
    assert len(both) == 4


def test_weight_change_from_10_to_20_moves_only_10_percent_of_users() -> None:
    moved = count_moves(
        TrafficSplit({"1": 90, "2": 10}, "s"), TrafficSplit({"1": 80, "2": 20}, "s"), USERS
    )

    assert set(moved) == {("1", "2")}
    assert abs(moved.total() / len(USERS) - 0.10) < 0.01


def test_added_version_takes_users_from_each_version_in_proportion() -> None:
    moved = count_moves(
        TrafficSplit({"1": 60, "2": 30}, "s"), TrafficSplit({"1": 60, "2": 30, "3": 10}, "s"), USERS
    )

    assert set(moved) == {("1", "3"), ("2", "3")}
    assert abs(moved.total() / len(USERS) - 0.10) < 0.01
    assert abs(moved["1", "3"] / moved["2", "3"] - 2) < 0.2


# --- any weights ----------------------------------------------------------------------------------


@laws
@given(weights=weights, name=names, users=people, data=st.data())
def test_version_with_increased_weight_loses_no_users(
    weights: dict[str, int], name: str, users: list[str], data: st.DataObject
) -> None:
    grown = data.draw(st.sampled_from(sorted(weights)))
    increased = weights | {grown: weights[grown] + data.draw(st.integers(1, 100))}

    assert {
        now
        for _, now in count_moves(TrafficSplit(weights, name), TrafficSplit(increased, name), users)
    } <= {grown}


@laws
@given(weights=weights, name=names, users=people, added=names, weight=st.integers(1, 100))
def test_new_version_receives_all_moved_users(
    weights: dict[str, int], name: str, users: list[str], added: str, weight: int
) -> None:
    weights = {version: one for version, one in weights.items() if version != added} or {
        "other" + added: 1
    }

    moved = count_moves(
        TrafficSplit(weights, name), TrafficSplit({**weights, added: weight}, name), users
    )

    assert {now for _, now in moved} <= {added}


@laws
@given(weights=weights, name=names, users=people, factor=st.integers(2, 50))
def test_order_and_scale_of_weights_move_no_users(
    weights: dict[str, int], name: str, users: list[str], factor: int
) -> None:
    turned = {version: factor * weights[version] for version in reversed(weights)}
    idle = {**turned, "~": 0}

    assert not count_moves(TrafficSplit(weights, name), TrafficSplit(turned, name), users)
    assert not count_moves(TrafficSplit(weights, name), TrafficSplit(idle, name), users)


@laws
@given(small=st.floats(0, 1), large=st.floats(0, 1), name=names, users=people)
def test_larger_share_condition_keeps_all_matched_users(
    small: float, large: float, name: str, users: list[str]
) -> None:
    small, large = sorted((small, large))

    def taken(share: float) -> set[str]:
        rule = make_rule(name, share=share)
        everybody = [(user, RequestAttributes(headers={"x": user})) for user in users if user]
        return {
            u
            for u, traits in everybody
            if find_matching_rule([rule], traits, ("header:x",), reject_random_draw)
        }

    assert taken(small) <= taken(large)


@laws
@given(weights=weights, draw=st.floats(0, 1, exclude_max=True))
def test_random_pick_never_selects_a_version_of_weight_zero(
    weights: dict[str, int], draw: float
) -> None:
    assert (
        TrafficSplit(
            {"none": 0, **{f"~{version}": one for version, one in weights.items()}}
        ).pick_version(draw)
        != "none"
    )


def reject_random_draw() -> float:
    raise AssertionError("a random number was drawn")
