"""The computed share of users that a change of weights moves equals that of the splits' hash."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from gateway.config.diff import diff_configs, moved_share
from gateway.config.listeners import listener_name, listeners_by_id
from gateway.config.loader import load_text
from gateway.routing.traffic_split import TrafficSplit

Weights = Mapping[str, int]

USERS = 20_000
DEVIATIONS = 4.5

PAIRS: list[tuple[Weights, Weights]] = [
    ({"1": 90, "2": 10}, {"1": 60, "2": 20, "3": 20}),
    ({"1": 1, "2": 1}, {"1": 1, "2": 3}),
    ({"1": 1, "2": 2, "3": 3}, {"1": 3, "2": 2, "3": 1}),
    ({"1": 5, "2": 5}, {"2": 5, "3": 5}),
    ({"1": 3, "2": 1}, {"2": 1}),
    ({"1": 1}, {"1": 1, "2": 1000}),
]


def draw_weights(seed: int) -> tuple[Weights, Weights]:
    """Weights of up to five versions before and after a change."""
    draw = random.Random(seed)
    versions = [str(number) for number in range(1, draw.randint(2, 5) + 1)]
    before, after = (
        {one: draw.randint(1, 100) for one in draw.sample(versions, draw.randint(1, len(versions)))}
        for _ in range(2)
    )
    return before, after


def count_moves(before: Weights, after: Weights, seed: int) -> Counter[tuple[str, str]]:
    """Return the number of users moved from each version to each other by the gateway's hash."""
    draw = random.Random(seed)
    splits = TrafficSplit(before, f"split-{seed}"), TrafficSplit(after, f"split-{seed}")
    users = (f"{draw.getrandbits(64):x}" for _ in range(USERS))
    return Counter(
        (splits[0].assign_version(who).version, splits[1].assign_version(who).version)
        for who in users
    )


@pytest.mark.parametrize(("seed", "pair"), [*enumerate([*PAIRS, *map(draw_weights, range(12))])])
def test_computed_moved_share_matches_the_assignment_hash(
    seed: int, pair: tuple[Weights, Weights]
) -> None:
    share = moved_share(*pair)
    pairs = count_moves(*pair, seed)
    moved = sum(count for (before, after), count in pairs.items() if before != after)
    deviation = (share * (1 - share) / USERS) ** 0.5

    assert abs(moved / USERS - share) <= DEVIATIONS * deviation + 1e-9


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ({"1": 1, "2": 1}, {"1": 7, "2": 7}, 0),
        ({"1": 1}, {"2": 1}, 1),
        ({"1": 3, "2": 1}, {"2": 9}, 0.75),
        ({"1": 1, "2": 1}, {"1": 1, "2": 1, "3": 2}, 0.5),
        ({"1": 90, "2": 10}, {"1": 60, "2": 20, "3": 20}, 1 - 3 / 5 - 1 / 11),
    ],
)
def test_moved_share_matches_known_values(before: Weights, after: Weights, share: float) -> None:
    assert moved_share(before, after) == pytest.approx(share, abs=1e-12)
    assert moved_share(after, before) == pytest.approx(share, abs=1e-12)


def test_raised_weight_moves_users_only_to_its_version() -> None:
    """From 90:10 to 60:20:20 no user moves to version 1, and none leaves version 3."""
    pairs = count_moves({"1": 90, "2": 10}, {"1": 60, "2": 20, "3": 20}, 1)
    assert {(before, after) for before, after in pairs if before != after} == {
        ("1", "2"),
        ("1", "3"),
        ("2", "3"),
    }

    came = sum(count for (before, after), count in pairs.items() if before != after == "3")
    assert abs(came / USERS - 0.2) < 0.01


SPLIT = """
backends: {{one: {{kind: echo}}}}
models:
  m:
    versions: {{"1": {{backend: one}}, "2": {{backend: one}}}}
    split: {{name: {name}, weights: {weights}, sticky: [key]}}
"""


def test_renamed_split_reassigns_all_users() -> None:
    configs = [
        load_text(SPLIT.format(name=name, weights=weights), "g.yaml", env={})
        for name, weights in (("a", '{"1": 3, "2": 1}'), ("b", '{"1": 1, "2": 1}'))
    ]
    [shift] = diff_configs(*configs).traffic
    assert (shift.assignment, shift.moved) == ("sticky", 50.0)


def test_listeners_with_equal_addresses_are_numbered() -> None:
    config = load_text(
        """
listeners:
  - {address: "127.0.0.1:0", protocols: [openai]}
  - {address: "127.0.0.1:8001", protocols: [openai]}
  - {address: "127.0.0.1:0", protocols: [triton]}
backends: {one: {kind: echo}}
models: {m: {backend: one}}
""",
        "g.yaml",
        env={},
    )
    listeners = listeners_by_id(config)

    assert [*listeners] == [("127.0.0.1:0", 0), ("127.0.0.1:8001", 0), ("127.0.0.1:0", 1)]
    assert [listener_name(one) for one in listeners] == [
        "127.0.0.1:0",
        "127.0.0.1:8001",
        "127.0.0.1:0 (2)",
    ]
    assert listeners["127.0.0.1:0", 1].protocols[0].name == "triton"
