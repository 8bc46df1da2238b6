"""``interlingua rollout``: the guarded rollouts of a configuration, and commands to them."""

import os
import time
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from gateway.config.errors import ConfigError
from gateway.config.loader import load_config
from gateway.terminal import print_text

if TYPE_CHECKING:
    from gateway.config.schema import Config, RolloutConfig
    from gateway.evidence.rollout import RolloutCommand, RolloutState
    from gateway.evidence.rollout_report import RolloutReport
    from gateway.evidence.rollout_store import RolloutStore

_FORBIDDEN: Final = {
    "pause": ("rolled back", "completed"),
    "resume": ("running", "completed"),
    "abort": ("rolled back",),
    "promote": ("rolled back", "completed"),
}
"""The phases in which a command means nothing."""


@click.command()
@click.argument("command", type=click.Choice(["status", "pause", "resume", "abort", "promote"]))
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", help="The model; by default the only one with a rollout.")
def rollout(command: str, file: str, model: str | None) -> None:
    """Show a guarded rollout, or steer it.

    \b
      interlingua rollout status gateway.yaml
      interlingua rollout abort gateway.yaml --model chat

    FILE is the configuration. The state is in the database of its setting observe.usage, or in
    the Redis server of its setting state; all gateways that share it follow within their
    check_every.

    pause keeps the current split, resume goes on and begins the step anew, abort sends no more
    requests to the version, promote goes to the next step now, unless a guardrail is breached.

    Exit codes: 0 done, 1 the command does not fit the rollout's phase, 2 wrong usage.
    """  # noqa: D301 - click reads \b
    from gateway.evidence.rollout_report import read_common_settings, report_rollout  # noqa: PLC0415 - only here
    from gateway.evidence.rollout_store import open_rollout_store  # noqa: PLC0415 - only here

    config = _load(file)
    name, _ = _find_rollout(config, file, model)
    now = time.time()  # noqa: TID251 - the shared state has real times
    store = open_rollout_store(config)
    try:
        with closing(store):
            if command == "status":
                _show_status(report_rollout(store, config, name, now))
            else:
                common = read_common_settings(store, config, name, now)
                split = config.models[name].get_split_name(name)
                _steer(store, name, split, common.rollout, _as_command(command), now=now)
    except store.errors as error:
        why = str(error) or type(error).__name__
        raise click.ClickException(f"the state of the rollout can't be used now: {why}") from None


def _steer(
    store: "RolloutStore",
    name: str,
    split: str,
    plan: "RolloutConfig",
    command: "RolloutCommand",
    *,
    now: float,
) -> None:
    from gateway.evidence.rollout import apply_command, find_first_step, hash_plan  # noqa: PLC0415 - only here

    state = store.load(name, hash_plan(plan), now, find_first_step(plan))
    if state.phase in _FORBIDDEN[command]:
        raise click.ClickException(f"the rollout of {name} is {state.phase}")
    if command == "promote" and state.is_open:
        _refuse_breach(store, name, split, plan, state, now=now)
    after = apply_command(plan, state, command, now)
    if command == "promote" and after == state:
        raise click.ClickException(f"the rollout of {name} is at its last step")
    if command == "resume" and after == state:
        raise click.ClickException(f"the rollout of {name} has no step below 100 % to resume at")
    if not store.save(name, hash_plan(plan), state, after):
        raise click.ClickException("the rollout has just changed; look at its status")
    _show_state(name, plan, after)


def _refuse_breach(
    store: "RolloutStore",
    name: str,
    split: str,
    plan: "RolloutConfig",
    state: "RolloutState",
    *,
    now: float,
) -> None:
    """Raises ClickException if a guardrail is breached, which no gateway may have seen yet."""
    from gateway.evidence.rollout import decide, hash_plan  # noqa: PLC0415 - only here

    seen = decide(plan, state, store.read_samples(plan, name, split, state), now)
    if seen.is_breached:
        store.save(name, hash_plan(plan), state, seen)
        raise click.ClickException(f"the rollout of {name} is {seen.phase} now: {seen.reason}")


def _show_state(name: str, plan: "RolloutConfig", state: "RolloutState") -> None:
    from gateway.evidence.rollout import compute_share  # noqa: PLC0415 - only here

    is_open = state.phase not in ("rolled back", "completed")
    share = f", {compute_share(plan, state)} %" if is_open else ""
    print_text(f"{name}@{plan.to}: {state.phase}{share}")
    if state.reason:
        print_text(f"  {state.reason}")


def _show_status(report: "RolloutReport") -> None:
    is_open = report.phase not in ("rolled back", "completed", None)
    share = f", {report.share} %" if is_open else ""
    print_text(f"{report.model}@{report.version}: {report.phase or 'not begun'}{share}")
    if report.reason:
        print_text(f"  {report.reason}")
    if report.difference:
        print_text(f"  {report.difference}")
    if report.phase is None:
        return
    if report.phase == "completed":
        print_text(f"  since {datetime.fromtimestamp(report.step_at, UTC):%Y-%m-%d %H:%M:%S} UTC")
        return
    kind = "copies of requests (shadow traffic)" if report.step < 0 else "requests"
    print_text(f"  {report.requests:,} of {report.requests_at_least:,} {kind} in this step")
    for rail in report.guardrails:
        print_text(f"  {rail.name}: {rail.verdict}: {rail.text}")


def _as_command(command: str) -> "RolloutCommand":
    match command:
        case "pause" | "resume" | "abort":
            return command
        case _:
            return "promote"


def _load(file: str) -> "Config":
    try:
        return load_config(file, env=os.environ, insecure=True)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _find_rollout(config: "Config", file: str, model: str | None) -> "tuple[str, RolloutConfig]":
    """Raises UsageError."""
    rollouts = {name: one.rollout for name, one in config.models.items() if one.rollout is not None}
    if model is None and len(rollouts) == 1:
        [model] = rollouts
    if model not in rollouts or model is None:
        listed = ", ".join(rollouts) or "none"
        raise click.UsageError(f"name a model with --model; {file} rolls out {listed}")
    return model, rollouts[model]
