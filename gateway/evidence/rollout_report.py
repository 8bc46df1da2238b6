"""The rollouts of a configuration, as the command and the admin listener show them."""

import math
import time
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
from gateway.evidence.rollout_gateways import CommonSettings, find_common_settings
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
    difference: str = ""
    """How the settings of the gateways differ, in a sentence; "" if they do not."""


def list_rollouts(config: Config) -> list[RolloutReport]:
    """All rollouts of a configuration. Raises the errors of its store."""
    names = [name for name, model in config.models.items() if model.rollout is not None]
    if not names:
        return []
    now = time.time()  # noqa: TID251 - the shared state has real times
    with closing(open_rollout_store(config)) as store:
        return [report_rollout(store, config, name, now) for name in names]


def read_common_settings(
    store: RolloutStore, config: Config, model: str, now: float
) -> CommonSettings:
    """The settings that the gateways follow; those of the configuration if none is alive.

    Raises the errors of the store.
    """
    rollout = config.models[model].rollout
    assert rollout is not None  # noqa: S101 - the caller has looked
    common = find_common_settings(store.list_gateways(model).values(), now)
    return common or CommonSettings(rollout)


def report_rollout(store: RolloutStore, config: Config, model: str, now: float) -> RolloutReport:
    """One rollout. Raises the errors of the store."""
    common = read_common_settings(store, config, model, now)
    plan = common.rollout
    state = store.read(model, hash_plan(plan))
    if state is None:
        return RolloutReport(model, plan.to, None, plan.steps, 0, 0, difference=common.difference)
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
        difference=common.difference,
    )


def _report_guardrail(one: GuardrailResult) -> GuardrailReport:
    low, high = (end if math.isfinite(end) else None for end in (one.low, one.high))
    return GuardrailReport(one.name, low, high, one.allowed, one.verdict, one.text)
