"""What a guarded rollout decides from the requests of its current step. Pure.

A step goes on to the next one when it has lasted and has had the requests that it needs, and no
guardrail is breached: that is, none is known to be worse than it may be. All guardrails of all
steps together are breached by an equal version with a probability of at most 5 %, however often
they are looked at (``gateway.evidence.sequential``).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.config.schema import JUDGE_FEEDBACK, GuardrailsConfig, RolloutConfig
from gateway.evidence.quantiles import TimeCounts, compare_quantiles, find_quantile
from gateway.evidence.sequential import Tally, rate_difference_interval

_ERROR_RATE: Final = 0.05
_ALL: Final = 100

RolloutPhase = Literal["running", "paused", "holding", "rolled back", "completed"]
RolloutCommand = Literal["pause", "resume", "abort", "promote"]


class RolloutState(Struct, frozen=True):
    """How far a rollout is; all gateways share it."""

    phase: RolloutPhase = "running"
    step: int = 0
    """The number of the current step; that before the first one is of shadow traffic."""
    step_at: float = 0.0
    """When it began, in Unix seconds."""
    reason: str = ""
    """Why the phase is what it is."""
    is_breached: bool = False
    """Whether a breach of a guardrail holds it: then only an operator lets it go on."""

    @property
    def is_shadow(self) -> bool:
        """Whether shadow traffic decides, before the first step."""
        return self.step < 0

    @property
    def is_open(self) -> bool:
        """Whether the requests of the step are looked at: a breach acts also in a pause."""
        return self.phase in ("running", "holding", "paused") and not self.is_breached


class GuardrailResult(Struct, frozen=True):
    """A guardrail in the current step: by how much the version may be worse, and is.

    Of a share, in its unit; of a time, relative to the others'.
    """

    name: str
    low: float
    """The version is known to be worse by at least this."""
    high: float
    """The version is known to be worse by at most this."""
    allowed: float
    text: str
    lacks_values: bool = False
    """Whether the version has none and the others have: nothing is known of a version that hangs.
    """
    has_values: bool = True

    @property
    def is_breached(self) -> bool:
        """Whether it is known that the version is worse than it may be."""
        return self.low > self.allowed

    @property
    def is_proven(self) -> bool:
        """Whether it is known that the version is not worse than it may be."""
        return self.high <= self.allowed

    @property
    def verdict(self) -> str:
        """What the interval says."""
        return "breached" if self.is_breached else "proven" if self.is_proven else "holds"


class StepSamples(Struct):
    """The requests of a step: of all others, and of the version that is rolled out."""

    errors: tuple[Tally, Tally]
    numbers: Mapping[str, tuple[TimeCounts, TimeCounts]]
    """Times and tokens, by the name of the usage rows' column."""
    feedback: Mapping[str, tuple[Tally, Tally]]
    compare: Mapping[str, tuple[Tally, Tally]] = {}
    """The share of good responses by each measure."""

    @property
    def requests(self) -> int:
        """Of the version that is rolled out."""
        return self.errors[1].n


def merge_samples(parts: Sequence[StepSamples]) -> StepSamples:
    """The requests of several gateways together. There is at least one part."""
    return StepSamples(
        _add_tallies([part.errors for part in parts]),
        {
            name: _add_counts([one.numbers[name] for one in parts if name in one.numbers])
            for name in parts[0].numbers
        },
        {
            name: _add_tallies([one.feedback[name] for one in parts if name in one.feedback])
            for name in parts[0].feedback
        },
        {
            name: _add_tallies([one.compare[name] for one in parts if name in one.compare])
            for name in parts[0].compare
        },
    )


def _add_counts(
    pairs: Sequence[tuple[TimeCounts, TimeCounts]],
) -> tuple[TimeCounts, TimeCounts]:
    a, b = Counter[int](), Counter[int]()
    for of_a, of_b in pairs:
        a.update(of_a)
        b.update(of_b)
    return a, b


def _add_tallies(pairs: Sequence[tuple[Tally, Tally]]) -> tuple[Tally, Tally]:
    a, b = (
        Tally(sum(one.hits for one in side), sum(one.n for one in side))
        for side in zip(*pairs, strict=True)
    )
    return a, b


def hash_plan(rollout: RolloutConfig) -> str:
    """Changes with what is rolled out and in which steps: then it begins anew.

    Settings that came later count only if they are not at their defaults: an upgrade changes none.
    """
    added = () if rollout.start_with == "split" else (rollout.start_with,)
    plan = msgspec.json.encode((rollout.to, rollout.steps, *added))
    return hashlib.sha256(plan).hexdigest()[:16]


def find_first_step(rollout: RolloutConfig) -> int:
    """The number of the step with which a rollout begins."""
    return -1 if rollout.start_with == "shadow" else 0


def compute_share(rollout: RolloutConfig, state: RolloutState | None) -> int:
    """The version's share of the split in this state, in percent; none while it is unknown."""
    if state is None or state.phase == "rolled back" or state.is_shadow:
        return 0
    return rollout.steps[state.step]


def compute_weights(
    rollout: RolloutConfig, weights: Mapping[str, int], state: RolloutState | None
) -> dict[str, int]:
    """The weights of the split in this state; ``weights`` are those of the configuration.

    The state is None while the store has not answered: it may be rolled back.
    """
    share = compute_share(rollout, state)
    others = {name: weight for name, weight in weights.items() if name != rollout.to}
    total = sum(others.values())
    return {
        **{name: weight * (_ALL - share) for name, weight in others.items()},
        rollout.to: total * share,
    }


def check_guardrails(
    rollout: RolloutConfig, samples: StepSamples, *, is_shadow: bool = False
) -> list[GuardrailResult]:
    """Each guardrail that applies to the current step: of copies, only a model is a judge."""
    rails = rollout.guardrails
    count = (rails.errors is not None) + len(rails.list_quantiles()) + len(rails.feedback)
    count += len(rails.compare.list_limits())
    steps = len(rollout.steps) - find_first_step(rollout)
    level = 1 - _ERROR_RATE / max(1, count * steps)
    if is_shadow:
        judged = {name: rail for name, rail in rails.feedback.items() if name == JUDGE_FEEDBACK}
        rails = replace(rails, feedback=judged)
    return [*_check_all(rails, samples, level)]


def _check_all(
    rails: GuardrailsConfig, samples: StepSamples, level: float
) -> Iterator[GuardrailResult]:
    if rails.errors is not None:
        yield _check_rate("errors", samples.errors, rails.errors.max_increase, level)
    for name, increase in rails.list_quantiles().items():
        column = name.rpartition("_p")[0]
        yield _check_quantile(name, samples.numbers[column], increase.max_increase, level)
    shares = [
        *(
            (f"feedback {name}", rail, samples.feedback[name])
            for name, rail in rails.feedback.items()
        ),
        *(
            (name, rail, samples.compare[name])
            for name, rail in rails.compare.list_limits().items()
        ),
    ]
    for name, rail, pair in shares:
        # a fall of what is good is a rise of its opposite
        a, b = (Tally(tally.n - tally.hits, tally.n) for tally in pair)
        yield _check_rate(name, (a, b), rail.max_decrease, level, is_opposite=True)


def _check_rate(
    name: str, pair: tuple[Tally, Tally], allowed: float, level: float, *, is_opposite: bool = False
) -> GuardrailResult:
    a, b = pair
    if not a.n or not b.n:
        return _describe_missing(name, 1.0, allowed, lacks_values=a.n > 0)
    interval = rate_difference_interval(a, b, level)
    shares = (1 - a.share, 1 - b.share) if is_opposite else (a.share, b.share)
    word = "lower" if is_opposite else "higher"
    text = (
        f"{shares[0]:.1%} → {shares[1]:.1%}: at least {max(interval.low, 0):.1%} {word}, "
        f"{allowed:.1%} allowed"
    )
    return GuardrailResult(name, interval.low, interval.high, allowed, text)


def _describe_missing(
    name: str, high: float, allowed: float, *, lacks_values: bool
) -> GuardrailResult:
    text = "no values of the version yet, the step waits" if lacks_values else "no values yet"
    return GuardrailResult(name, -1.0, high, allowed, text, lacks_values, has_values=False)


def _check_quantile(
    name: str, pair: tuple[TimeCounts, TimeCounts], allowed: float, level: float
) -> GuardrailResult:
    """``name`` ends in the percentage of the quantile."""
    if not all(pair):
        return _describe_missing(name, math.inf, allowed, lacks_values=bool(pair[0]))
    p = int(name.rpartition("_p")[2]) / 100
    # each end may be wrong with half of the probability
    low, high = compare_quantiles(*pair, p, 1 - (1 - level) / 2)
    is_time = not name.startswith("completion_tokens")
    unit, factor, word = ("ms", 1000, "longer") if is_time else ("tokens", 1, "more")
    before, after = (f"{find_quantile(one, p) * factor:,.0f}" for one in pair)
    text = (
        f"{before} → {after} {unit}: at least {max(low, 0):.0%} {word}, "
        f"{allowed:.0%} more is allowed"
    )
    return GuardrailResult(name, low, high, allowed, text)


def decide(
    rollout: RolloutConfig, state: RolloutState, samples: StepSamples, now: float
) -> RolloutState:
    """The state after a look at the requests of the current step."""
    if not state.is_open:
        return state
    results = check_guardrails(rollout, samples, is_shadow=state.is_shadow)
    for result in results:
        if result.is_breached:
            reason = f"{result.name}: {result.text}, after {samples.requests} requests"
            phase: RolloutPhase = "rolled back" if rollout.on_breach == "rollback" else "holding"
            return replace(state, phase=phase, reason=reason, is_breached=True)
    if state.phase == "paused":
        return state
    least, elapsed = rollout.step_at_least, now - state.step_at
    is_long_enough = samples.requests >= least.requests and elapsed >= least.time
    is_proven = rollout.require != "proof" or all(result.is_proven for result in results)
    missing = [result.name for result in results if result.lacks_values]
    if is_long_enough and is_proven and not missing:
        after = go_on(rollout, state, now)
        unguarded = [result.name for result in results if not result.has_values]
        return _name_missing(after, unguarded) if unguarded else after
    if elapsed > rollout.step_at_most and state.phase != "holding":
        values = f"no values of {', '.join(missing)}" if missing else "no proof"
        lack = values if is_long_enough else f"{samples.requests} requests"
        return replace(state, phase="holding", reason=f"{lack} within step_at_most")
    return state


def _name_missing(after: RolloutState, names: Sequence[str]) -> RolloutState:
    """The state after a step in which some guardrails had no value of any version."""
    text = f"the step before had no values of {', '.join(names)}"
    return replace(after, reason=f"{after.reason}; {text}" if after.reason else text)


def go_on(rollout: RolloutConfig, state: RolloutState, now: float) -> RolloutState:
    """The next step. At 100 % the rollout is complete; a last step below that is held."""
    step, last = state.step + 1, len(rollout.steps) - 1
    if step > last and rollout.steps[last] < _ALL:
        return RolloutState("holding", last, state.step_at, "held at the last step")
    if step > last or rollout.steps[step] == _ALL:
        return RolloutState("completed", last, now, "all steps are done")
    return RolloutState("running", step, now)


def apply_command(
    rollout: RolloutConfig, state: RolloutState, command: RolloutCommand, now: float
) -> RolloutState:
    """The state after a command of an operator; it is the same if there is no step to go to."""
    match command:
        case "pause":
            return replace(state, phase="paused", reason="by an operator")
        case "resume":
            step = state.step
            if not state.is_shadow and rollout.steps[step] == _ALL:
                step -= 1  # at 100 % no guardrail has others to compare with
            if step < find_first_step(rollout):
                return state
            return RolloutState("running", step, now)
        case "abort":
            return replace(state, phase="rolled back", reason="by an operator")
        case "promote":
            return go_on(rollout, state, now)
