"""The performance goals and the measurements that they are compared with."""

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from tests.bench.interlingua import ALL_FEATURES, DIRECT, INTERLINGUA
from tests.bench.load_generator import Spread
from tests.bench.loads import (
    FROM_MINDIE_PAIR,
    FROM_TRITON_PAIR,
    LARGEST,
    OPENAI_PAIR,
    PACED,
    RATE,
    REPEATED_BURST,
    REPEATED_UNARY,
    STREAM_RATE,
    STYLE_BURSTS,
    TO_TRITON_PAIR,
    TOOLS,
    UNARY,
    Load,
)
from tests.bench.results import Key, Results, Sample, format_number

Measure = Literal["ratio", "p99", "token p99", "stream memory", "processes"]
_MILLISECOND: Final = 1_000


class Goal(Struct, frozen=True, kw_only=True):
    """A row of the table. ``before`` is for revision dd09c6b; the numbers are upper limits.

    ``ratio``: CPU time divided by the baseline's. ``p99`` and ``token p99``: milliseconds added to
    the time without a gateway. ``stream memory``: kB for each open stream. ``processes``: requests
    per second of two processes divided by those of one, where the numbers are lower limits.
    """

    name: str
    before: str
    minimum: float | None = None
    goal: float | None = None
    measure: Measure = "ratio"
    keys: Sequence[Key] = ()


def _keys(*loads: Load, gateway: str = INTERLINGUA.name, pair: str = OPENAI_PAIR) -> list[Key]:
    return [(gateway, pair, load.name) for load in loads]


def _translated(load: Load) -> list[Key]:
    return [(INTERLINGUA.name, pair, load.name) for pair in (FROM_TRITON_PAIR, TO_TRITON_PAIR)]


GOALS: Final = (
    Goal(
        name="non-streaming, passed through, 32 clients",
        before="5.8",
        minimum=4.0,
        goal=3.0,
        keys=_keys(UNARY),
    ),
    Goal(
        name="non-streaming, translated (Triton client, Triton worker)",
        before="8.8, 7.7",
        minimum=6.0,
        goal=4.5,
        keys=_translated(UNARY),
    ),
    Goal(
        name="tools and tool turns, passed through",
        before="12.9",
        minimum=5.0,
        goal=3.5,
        keys=_keys(TOOLS),
    ),
    Goal(
        name="all features on, passed through",
        before="7.2",
        minimum=5.0,
        goal=4.0,
        keys=_keys(UNARY, gateway=ALL_FEATURES.name),
    ),
    Goal(
        name="burst of 100 tokens, passed through, each worker style",
        before="2.3 to 11.8",
        minimum=3.0,
        goal=2.0,
        keys=_keys(*STYLE_BURSTS),
    ),
    Goal(
        name="token at 20/s, 256 streams, passed through",
        before="1.51",
        minimum=1.45,
        goal=1.3,
        keys=_keys(PACED),
    ),
    Goal(
        name="token at 20/s, 256 streams, translated",
        before="1.77",
        minimum=1.6,
        goal=1.4,
        keys=_translated(PACED),
    ),
    Goal(name="10 MB body with images", before="4.1", minimum=3.0, goal=2.0, keys=_keys(LARGEST)),
    Goal(
        name="p99 added at 200 requests/s, ms (nginx {nginx})",
        before="0.9",
        minimum=0.8,
        goal=0.6,
        measure="p99",
        keys=_keys(RATE),
    ),
    Goal(
        name="p99 added for a token, ms (nginx {nginx})",
        before="0.30",
        minimum=0.25,
        goal=0.2,
        measure="token p99",
        keys=_keys(STREAM_RATE),
    ),
    Goal(
        name="MindIE client, OpenAI worker",
        before="17",
        keys=_keys(UNARY, pair=FROM_MINDIE_PAIR),
    ),
    Goal(
        name="repeated bytes: non-streaming, passed through",
        before="3.2",
        goal=3.0,
        keys=_keys(REPEATED_UNARY),
    ),
    Goal(
        name="repeated bytes: burst of 100 tokens, passed through",
        before="1.8",
        goal=2.0,
        keys=_keys(REPEATED_BURST),
    ),
    Goal(
        name="memory for each of 5,000 open streams, kB (nginx {nginx})",
        before="28 to 36",
        goal=20.0,
        measure="stream memory",
    ),
    Goal(
        name="two processes, requests per second of one = 1",
        before="1.93",
        minimum=1.93,
        measure="processes",
    ),
)


def measure_goal(results: Results, goal: Goal) -> list[float]:
    """Return the medians of a goal's measurements, or nothing."""
    return _measure(results, goal, [key for key in goal.keys if key in results.list_keys()])


def measure_baseline(results: Results, goal: Goal) -> float | None:
    """Return the baseline's number, unless the goal is a ratio to it."""
    if goal.measure == "stream memory":
        return next(
            (one.per_stream for one in results.open_streams if one.gateway == results.baseline),
            None,
        )
    keys = [(results.baseline, *key[1:]) for key in goal.keys]
    return next(iter(_measure(results, goal, keys)), None)


def _measure(results: Results, goal: Goal, keys: Sequence[Key]) -> list[float]:
    match goal.measure:
        case "ratio":
            ratios = [results.ratio(key) for key in keys]
            return [spread.median for spread in ratios if spread is not None]
        case "stream memory":
            value = results.open_streams
            return [one.per_stream for one in value if one.gateway == INTERLINGUA.name]
        case "processes":
            factor = results.compute_scaling()
            return [] if factor is None else [factor]
        case kind:
            of = read_p99 if kind == "p99" else read_token_p99
            added = [results.added(DIRECT.name, key, of) for key in keys]
            return [spread.median / _MILLISECOND for spread in added if spread is not None]


def read_p99(sample: Sample) -> float | None:
    """Return the 99th percentile of the time to a complete response, in microseconds."""
    return _read_p99(sample.outcome.latency)


def read_token_p99(sample: Sample) -> float | None:
    """Return the 99th percentile of a token's time from worker to client, in microseconds."""
    return _read_p99(sample.outcome.token)


def _read_p99(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p99


def render_goal(results: Results, goal: Goal) -> list[str]:
    """Render a row: name, before, floor, goal, measured, and whether it is met."""
    value = measure_goal(results, goal)
    nginx = measure_baseline(results, goal)
    name = goal.name.replace("{nginx}", "-" if nginx is None else format_number(nginx))
    text = ", ".join(map(format_number, value)) or "-"
    if len(value) > 2:
        text = f"{format_number(min(value))} to {format_number(max(value))}"
    limits = ["" if limit is None else format_number(limit) for limit in (goal.minimum, goal.goal)]
    return [name, goal.before, *limits, text, _judge(goal, value)]


def _judge(goal: Goal, values: Sequence[float]) -> str:
    if not values or (goal.minimum is None and goal.goal is None):
        return ""
    if goal.measure == "processes":
        return "goal" if min(values) >= (goal.minimum or 0) else "missed"
    worst = max(values)
    if goal.goal is not None and worst <= goal.goal:
        return "goal"
    if goal.minimum is not None and worst <= goal.minimum:
        return "floor"
    return "missed"
