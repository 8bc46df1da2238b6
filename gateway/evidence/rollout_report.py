"""The rollouts of a configuration, as the command and the admin listener show them."""

import math
from contextlib import closing

from msgspec import Struct

from gateway.config.schema import Config
from gateway.evidence.rollout import (
    GuardrailResult,
    RolloutPhase,
    check_guardrails,
    compute_share,
    hash_plan,
)
from gateway.evidence.rollout_store import RolloutStore, open_rollout_store


class GuardrailReport(Struct, frozen=True):
    """A guardrail of the current step: see ``GuardrailResult``. None: nothing is known."""

    name: str
    low: float | None
    high: float | None
    allowed: float
    verdict: str
    text: str


class RolloutReport(Struct, frozen=True):
    """How far a rollout is."""

    model: str
    version: str
    phase: RolloutPhase | None
    """None: it has not begun."""
    steps: tuple[int, ...]
    """The share of each step, in percent."""
    step: int
    """The number of the current step, from 0; -1 while shadow traffic decides."""
    share: int
    """The share of the version now, in percent."""
    reason: str = ""
    """Why the phase is what it is."""
    step_at: float = 0.0
    """When the step began, in Unix seconds."""
    requests: int = 0
    """The requests to the version in the step."""
    requests_at_least: int = 0
    """The requests that the step needs."""
    guardrails: tuple[GuardrailReport, ...] = ()


def list_rollouts(config: Config) -> list[RolloutReport]:
    """All rollouts of a configuration. Raises the errors of its store."""
    names = [name for name, model in config.models.items() if model.rollout is not None]
    if not names:
        return []
    with closing(open_rollout_store(config)) as store:
        return [report_rollout(store, config, name) for name in names]


def report_rollout(store: RolloutStore, config: Config, model: str) -> RolloutReport:
    """One rollout. Raises the errors of the store."""
    plan = config.models[model].rollout
    assert plan is not None  # noqa: S101 - the caller has looked
    state = store.read(model, hash_plan(plan))
    if state is None:
        return RolloutReport(model, plan.to, None, plan.steps, 0, 0)
    split = config.models[model].get_split_name(model)
    samples = store.read_samples(plan, model, split, state)
    return RolloutReport(
        model,
        plan.to,
        state.phase,
        plan.steps,
        state.step,
        compute_share(plan, state),
        reason=state.reason,
        step_at=state.step_at,
        requests=samples.requests,
        requests_at_least=plan.step_at_least.requests,
        guardrails=tuple(
            map(_report_guardrail, check_guardrails(plan, samples, is_shadow=state.is_shadow))
        ),
    )


def _report_guardrail(one: GuardrailResult) -> GuardrailReport:
    low, high = (end if math.isfinite(end) else None for end in (one.low, one.high))
    return GuardrailReport(one.name, low, high, one.allowed, one.verdict, one.text)
