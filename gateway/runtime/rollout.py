"""Moves the traffic splits of guarded rollouts.

Every gateway and process reads the shared state of each rollout, and sets its split accordingly:
nothing is reloaded, and users keep their version as the split's hash says. One of them, who holds
the lease, looks at the requests of all and decides (``gateway.evidence.rollout``). If their
configurations differ, all follow the same one (``gateway.evidence.rollout_gateways``).
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.schema import Config, RolloutConfig
from gateway.evidence.rollout import (
    RolloutState,
    compute_share,
    compute_weights,
    decide,
    find_first_step,
    hash_plan,
)
from gateway.evidence.rollout_gateways import (
    ALIVE_CHECKS,
    CommonSettings,
    build_settings,
    find_common_settings,
    list_forgotten,
)
from gateway.evidence.rollout_store import RolloutStore, open_rollout_store
from gateway.pipeline.services import GatewayServices
from gateway.routing.router import Router
from gateway.runtime.rollout_webhook import RolloutWebhook
from gateway.runtime.snapshot import ConfigSnapshot

if TYPE_CHECKING:
    from gateway.observability.metrics.requests import MetricsCollector

_log = logging.getLogger("interlingua.rollout")
_LEASE_CHECKS: Final = ALIVE_CHECKS
"""How many checks a lease lasts."""
_LOOK_PAUSE: Final = 10
"""How many times as long as a look at the requests takes there is none."""
_IDLE_WAIT: Final = 600.0
"""Seconds between checks without a rollout; a reload that adds one ends the wait."""


class RolloutStatus(Struct, frozen=True):
    """A rollout, as metrics and the status show it."""

    model: str
    to: str
    plan: str
    """The hash of the plan that the state is of."""
    state: RolloutState
    share: int
    """The percentage of the split."""

    @property
    def step(self) -> int:
        """The current step, from 1; 0 before the first one."""
        return self.state.step + 1

    @property
    def state_label(self) -> str:
        """The state, as the label of a metric."""
        return self.state.phase.replace(" ", "_")

    def describe_move(self, at: float) -> dict[str, Any]:
        """What a webhook gets."""
        return {
            "model": self.model,
            "version": self.to,
            "state": self.state_label,
            "step": self.step,
            "share": self.share,
            "reason": self.state.reason,
            "at": at,
        }


class RolloutManager:
    """Follows the rollouts of the current configuration."""

    def __init__(
        self, get_snapshot: Callable[[], ConfigSnapshot], services: GatewayServices
    ) -> None:
        """``get_snapshot`` gives the current configuration and its router."""
        self._get_snapshot = get_snapshot
        self._owner = secrets.token_hex(8)
        """Names this process, for the lease."""
        self._wall_clock, self._clock = services.wall_clock, services.clock
        self._task: asyncio.Task[None] | None = None
        self._is_reloaded = asyncio.Event()
        self._webhook = RolloutWebhook()
        self.statuses: dict[str, RolloutStatus] = {}
        """By the model's name."""
        self._next_looks: dict[str, float] = {}
        """When the requests of a model's step may be read again."""
        self._followed: dict[str, tuple[RolloutConfig, RolloutConfig]] = {}
        """The settings of a model's rollout here, and those that all gateways follow."""
        self._differences: dict[str, tuple[str, int]] = {}
        """How the settings of the gateways differ, and in how many checks so far."""

    def __repr__(self) -> str:
        phases = {name: status.state.phase for name, status in self.statuses.items()}
        return f"<RolloutManager {self._owner}, {phases}>"

    def register_metrics(self, metrics: "MetricsCollector") -> None:
        """Add the metrics of the rollouts."""
        from gateway.observability.metrics.rollouts import RolloutCollector  # noqa: PLC0415 - its library

        metrics.register(RolloutCollector(lambda: [*self.statuses.values()]))

    async def start(self) -> None:
        """Set the splits, and follow the rollouts in the background."""
        snapshot = self._get_snapshot()
        self._set_known_splits(snapshot.config, snapshot.router)
        await self.check()
        self._follow_rollouts(self._get_snapshot().config)

    def _follow_rollouts(self, config: Config) -> None:
        if self._task is None and _list_rollouts(config):
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def aclose(self) -> None:
        """Stop; other gateways go on once the lease has run out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._webhook.aclose()

    async def _follow(self) -> None:
        while True:
            waits = [
                self._get_followed(name, rollout).check_every
                for name, rollout in _list_rollouts(self._get_snapshot().config)
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=_IDLE_WAIT)):
                    await self._is_reloaded.wait()
            self._is_reloaded.clear()
            await self.check()

    async def check(self) -> None:
        """Read the state of all rollouts, decide where this process does, and set the splits.

        A reload meanwhile ends it: the next check follows at once, with the new configuration.
        """
        snapshot = self._get_snapshot()
        for name, rollout in _list_rollouts(snapshot.config):
            try:
                await self._check_stored(snapshot, name, rollout)
            except Exception:  # noqa: BLE001 - whatever it is, the other rollouts go on
                effect = self._describe_unknown(name, rollout)
                _log.exception("rollout of %s: it can't be followed now%s", name, effect)

    async def _check_stored(
        self, snapshot: ConfigSnapshot, name: str, rollout: RolloutConfig
    ) -> None:
        with closing(open_rollout_store(snapshot.config)) as store:
            try:
                await self._check_rollout(snapshot, store, name, rollout)
            except store.errors as error:
                why = str(error) or type(error).__name__
                why += self._describe_unknown(name, rollout)
                _log.warning("rollout of %s: the database can't be used now: %s", name, why)

    def _describe_unknown(self, name: str, rollout: RolloutConfig) -> str:
        """What a rollout does that can't be read, if its state has not been read before."""
        if name in self.statuses:
            return ""
        return f"; version {rollout.to} gets no requests until the state is known"

    async def _check_rollout(
        self, snapshot: ConfigSnapshot, store: RolloutStore, name: str, rollout: RolloutConfig
    ) -> None:
        own = rollout
        rollout = await asyncio.to_thread(self._follow_settings, store, name, own)
        if rollout.to not in snapshot.config.models[name].resolve_weights():
            self._stop_split(snapshot, name, own)
            return
        now, plan = self._wall_clock(), hash_plan(rollout)
        before = self.statuses.get(name)
        last_read = before.state if before is not None and before.plan == plan else None
        state = await asyncio.to_thread(
            store.load, name, plan, now, find_first_step(rollout), last_read=last_read
        )
        self._set_split(snapshot, name, rollout, state)
        if state.is_open and self._get_snapshot() is snapshot:
            split = snapshot.config.models[name].get_split_name(name)
            state = await asyncio.to_thread(self._advance, store, name, split, rollout, state)
            self._set_split(snapshot, name, rollout, state)
        after = self.statuses.get(name)
        if before is None or after is None or before.plan != after.plan or before == after:
            return
        if own.webhook is not None and await asyncio.to_thread(
            store.take_lease, name, plan, self._owner, now, _LEASE_CHECKS * rollout.check_every
        ):
            self._webhook.post(own.webhook.reveal(), after.describe_move(now))

    def _follow_settings(
        self, store: RolloutStore, name: str, rollout: RolloutConfig
    ) -> RolloutConfig:
        """Tell the other gateways the settings of this one; returns those that all follow."""
        now = self._wall_clock()
        known = store.list_gateways(name)
        for owner in list_forgotten(known, now):
            store.remove_gateway(name, owner)
        check_every = max(rollout.check_every, self._get_followed(name, rollout).check_every)
        own = build_settings(rollout, known.values(), now, check_every)
        known[self._owner] = own
        store.put_gateway(name, self._owner, own)
        common = find_common_settings(known.values(), now) or CommonSettings(rollout)
        self._log_difference(name, common.difference)
        self._followed[name] = rollout, common.rollout
        return common.rollout

    def _get_followed(self, name: str, rollout: RolloutConfig) -> RolloutConfig:
        """The settings that were last followed instead of these; these if nothing is known."""
        own, followed = self._followed.get(name, (rollout, rollout))
        return followed if own == rollout else rollout

    def _log_difference(self, name: str, difference: str) -> None:
        """Say that settings differ once this has lasted: a gateway that stopped is soon gone."""
        text, checks = self._differences.get(name, ("", 0))
        checks = checks + 1 if difference == text else 1
        self._differences[name] = difference, checks
        if difference and checks == ALIVE_CHECKS + 1:
            _log.warning("rollout of %s: %s", name, difference)

    def _stop_split(self, snapshot: ConfigSnapshot, name: str, rollout: RolloutConfig) -> None:
        """All gateways roll out a version that the model does not have here."""
        if self._get_snapshot() is snapshot:
            self.statuses.pop(name, None)
            weights = snapshot.config.models[name].resolve_weights()
            snapshot.router.set_weights(name, compute_weights(rollout, weights, None))

    def apply(self, config: Config, router: Router) -> None:
        """Set the splits of a new router as the rollouts are now, before it gets requests."""
        self._set_known_splits(config, router)
        self._is_reloaded.set()
        self._follow_rollouts(config)

    def _set_known_splits(self, config: Config, router: Router) -> None:
        """Set the splits as the states are known.

        A version whose state is unknown gets nothing, until it is read, at once: it may have been
        rolled back.
        """
        known, self.statuses = self.statuses, {}
        for name, rollout in _list_rollouts(config):
            weights, followed = (
                config.models[name].resolve_weights(),
                self._get_followed(name, rollout),
            )
            status = known.get(name)
            if status is None or status.plan != hash_plan(followed) or status.to not in weights:
                router.set_weights(name, compute_weights(rollout, weights, None))
            else:
                self.statuses[name] = status
                router.set_weights(name, compute_weights(followed, weights, status.state))

    def _set_split(
        self, snapshot: ConfigSnapshot, name: str, rollout: RolloutConfig, state: RolloutState
    ) -> None:
        """Set a split of the current router, unless a reload has replaced it meanwhile."""
        if self._get_snapshot() is not snapshot:
            return
        weights = compute_weights(rollout, snapshot.config.models[name].resolve_weights(), state)
        share = compute_share(rollout, state)
        status = RolloutStatus(name, rollout.to, hash_plan(rollout), state, share)
        if status == self.statuses.get(name):
            return
        snapshot.router.set_weights(name, weights)
        self.statuses[name] = status
        write = _log.warning if state.phase in ("rolled back", "holding") else _log.info
        why = f": {state.reason}" if state.reason else ""
        write("rollout of %s@%s: %s at %d %%%s", name, rollout.to, state.phase, share, why)

    def _advance(
        self,
        store: RolloutStore,
        name: str,
        split: str,
        rollout: RolloutConfig,
        state: RolloutState,
    ) -> RolloutState:
        """The state after a look at the requests, if this process decides."""
        now, plan = self._wall_clock(), hash_plan(rollout)
        is_leader = store.take_lease(
            name, plan, self._owner, now, _LEASE_CHECKS * rollout.check_every
        )
        began = self._clock()
        if began < self._next_looks.get(name, began):
            return state
        if not is_leader:
            store.publish_samples(rollout, name, split, state)
            self._delay_look(name, began)
            return state
        if state.step_at > now + rollout.check_every:
            _log.warning("rollout of %s: the step begins anew, since the clock went back", name)
            after = replace(state, step_at=now)
            return after if store.save(name, plan, state, after) else state
        samples = store.read_samples(rollout, name, split, state)
        self._delay_look(name, began)
        after = decide(rollout, state, samples, now)
        if after == state or not store.save(name, plan, state, after):
            return state
        return after

    def _delay_look(self, name: str, began: float) -> None:
        """Let a look that began then, and has ended, take a small part of the time."""
        ended = self._clock()
        self._next_looks[name] = ended + _LOOK_PAUSE * (ended - began)


def _list_rollouts(config: Config) -> list[tuple[str, RolloutConfig]]:
    return [
        (name, model.rollout) for name, model in config.models.items() if model.rollout is not None
    ]
