"""The gateways of one rollout may have different settings of it; here is which ones decide.

Each process tells the others, through the store, which settings its configuration has. All follow
those that were loaded last, of the processes that are alive: their steps, guardrails and times. So
there is one plan, one state and one decision, also while a new configuration is rolled out to the
gateways one by one. The webhook is each gateway's own.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.config.errors import join_names
from gateway.config.schema import RolloutConfig
from protocols.core.json_text import decode_json

ALIVE_CHECKS: Final = 3
"""A process that has told nothing for so many checks is gone."""
_RETENTION: Final = 7 * 86400.0
"""Seconds after which a process that is gone is forgotten."""


class GatewaySettings(Struct, frozen=True):
    """What one process has told. Times are in Unix seconds."""

    rollout: str
    """Its settings, as JSON."""
    began: float
    """When the first of the processes with these settings loaded them."""
    seen_at: float
    seconds: float
    """For how long it counts as alive."""

    def is_alive(self, now: float) -> bool:
        """Whether it is not gone; a clock that jumps revives nobody."""
        return abs(now - self.seen_at) < self.seconds


class CommonSettings(Struct, frozen=True):
    """The settings that all gateways follow."""

    rollout: RolloutConfig
    difference: str = ""
    """How many gateways have others, in a sentence; "" if none has."""


def build_settings(
    rollout: RolloutConfig,
    known: Iterable[GatewaySettings],
    now: float,
    check_every: float,
) -> GatewaySettings:
    """What a process with this rollout, which checks so often, tells the others."""
    text = _encode(rollout)
    began = min((one.began for one in known if one.rollout == text), default=now)
    return GatewaySettings(text, began, now, ALIVE_CHECKS * check_every)


def find_common_settings(known: Collection[GatewaySettings], now: float) -> CommonSettings | None:
    """The settings that decide; None if no process is alive.

    A process of another release may have settings that can't be read here; they don't decide.
    """
    alive = [one for one in known if one.is_alive(now)]
    readable = {one.rollout: rollout for one in alive if (rollout := _decode(one.rollout))}
    candidates = [one for one in alive if one.rollout in readable]
    if not candidates:
        return None
    last = max(candidates, key=lambda one: (one.began, one.rollout))
    common = readable[last.rollout]
    others = [one.rollout for one in alive if one.rollout != last.rollout]
    if not others:
        return CommonSettings(common)
    fields = {
        name
        for text in others
        for name in RolloutConfig.__struct_fields__
        if text not in readable or getattr(readable[text], name) != getattr(common, name)
    }
    return CommonSettings(
        common,
        f"gateway processes with other settings ({join_names(sorted(fields))}): {len(others)} of "
        f"{len(alive)}; all follow those that were loaded last: to {common.to}, "
        f"steps {', '.join(map(str, common.steps))}, check_every {common.check_every:g}s",
    )


def list_forgotten(known: Mapping[str, GatewaySettings], now: float) -> list[str]:
    """The processes that have been gone for long."""
    return [owner for owner, one in known.items() if now - one.seen_at > _RETENTION]


def _encode(rollout: RolloutConfig) -> str:
    return msgspec.json.encode(replace(rollout, webhook=None)).decode()


def _decode(text: str) -> RolloutConfig | None:
    try:
        return decode_json(text, kind=RolloutConfig)
    except msgspec.DecodeError:
        return None
