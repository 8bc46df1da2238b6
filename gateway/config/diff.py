"""The difference of two configurations: names, required restarts, users who move. Pure.

The share of users who move follows from the weights alone. Weighted rendezvous hashing gives each
user and version an exponential variate with the version's weight as its rate, and the user goes to
the version with the least one. A user of version i stays there if it is least before and after,
which has the probability 1 / sum over j of max(w[j] / w[i], v[j] / v[i]), with the weights w before
and v after.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from backends.pool.settings import PoolSettings
from gateway.config.errors import format_path
from gateway.config.listeners import listeners_by_id, restart_required
from gateway.config.schema import BackendConfig, Config, ModelConfig

_SECTIONS: Final = (
    "version",
    "admin",
    "limits",
    "defaults",
    "identity",
    "state",
    "stored_responses",
    "observe",
)
"""The sections of a configuration that hold no names."""


class NameChanges(Struct, frozen=True):
    """Names of one kind: only in the new configuration, only in the old, with other settings."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or self.changed)


class TrafficShift(Struct, frozen=True):
    """How the traffic of a model is split, in percent by version, and what part of it moves.

    ``assignment`` of users to versions is ``sticky``: they keep theirs but for ``moved`` percent;
    ``random``: each request is sent at random; or ``reassigned``: the sticky sources differ, so the
    share of users who move is unknown. Only ``sticky`` has ``moved``.
    """

    model: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    assignment: Literal["sticky", "random", "reassigned"]
    moved: float | None = None


class ConfigDiff(Struct, frozen=True):
    """The difference. ``restart_required``: what can't change while a gateway runs, and why."""

    sections: tuple[str, ...]
    names: Mapping[str, NameChanges]
    traffic: tuple[TrafficShift, ...]
    restart_required: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.sections or self.traffic or any(not one.is_empty for one in self.names.values())
        )


def diff_configs(old: Config, new: Config) -> ConfigDiff:
    """The difference of two configurations."""
    before, after = _names(old), _names(new)
    names = {kind: _name_changes(before[kind], after[kind]) for kind in before}
    models = [name for name in new.models if name in old.models]
    shifts = (_traffic_shift(name, old.models[name], new.models[name]) for name in models)
    return ConfigDiff(
        tuple(_changed_sections(old, new)),
        names,
        tuple(one for one in shifts if one is not None),
        {format_path(path): message for path, message in restart_required(old, new)},
    )


# --- names ---------------------------------------------------------------------------------------


def _changed_sections(old: Config, new: Config) -> Iterator[str]:
    yield from (name for name in _SECTIONS if getattr(old, name) != getattr(new, name))
    before = dict.fromkeys(rule.name for rule in old.routes)
    after = dict.fromkeys(rule.name for rule in new.routes)
    common = [name for name in after if name in before]
    if [name for name in before if name in after] != common:
        yield "routes (order)"


def _names(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """All named sections by kind. A section that is a kind of its own is left out of the others."""
    return {
        "listeners": {
            f"{address} #{number + 1}" if number else address: listener
            for (address, number), listener in listeners_by_id(config).items()
        },
        "backends": {name: _without_workers(one) for name, one in config.backends.items()},
        "workers": {
            f"{name} {worker.url or worker.dns or worker.srv or worker.file}": worker
            for name, pool in config.backends.items()
            if isinstance(pool, PoolSettings)
            for worker in pool.workers
        },
        "models": {
            name: replace(model, aliases=(), versions=None, backend=None, model=None)
            for name, model in config.models.items()
        },
        "versions": {
            f"{name}@{version}": target
            for name, model in config.models.items()
            for version, target in model.resolve_targets().items()
        },
        "aliases": {alias: name for name, one in config.models.items() for alias in one.aliases},
        "routes": {rule.name: rule for rule in config.routes},
        "keys": {key.name: key for key in config.keys},
    }


def _without_workers(backend: BackendConfig) -> BackendConfig:
    return replace(backend, workers=()) if isinstance(backend, PoolSettings) else backend


def _name_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> NameChanges:
    return NameChanges(
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        tuple(name for name in after if name in before and before[name] != after[name]),
    )


# --- users ---------------------------------------------------------------------------------------


def moved_share(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """The share of users who move to another version, with these weights of one sticky split.

    No weight is 0. With the weights w and v, this is 1 minus the sum over the versions i in both of
    1 / sum over the versions j in either of max(w[j] / w[i], v[j] / v[i]).
    """
    versions = before.keys() | after.keys()
    staying = 0.0
    for version in before.keys() & after.keys():
        staying += 1 / sum(
            max(before.get(other, 0) / before[version], after.get(other, 0) / after[version])
            for other in versions
        )
    return max(0.0, 1 - staying)


def _traffic_shift(model: str, old: ModelConfig, new: ModelConfig) -> TrafficShift | None:
    """How the users of a model move between its versions; None if they stay."""
    before, after = _effective_split(model, old), _effective_split(model, new)
    if before == after:
        return None
    assignment: Literal["sticky", "random", "reassigned"] = "sticky"
    moved: float | None = None
    if len(before.weights) == 1 or len(after.weights) == 1:
        moved = moved_share(before.weights, after.weights)
    elif before.sticky != after.sticky:
        assignment = "reassigned"
    elif not before.sticky:
        assignment = "random"
    elif before.name == after.name:
        moved = moved_share(before.weights, after.weights)
    else:  # the name salts the hash, so the new assignment does not depend on the old one
        staying = {one: share * after.parts.get(one, 0) for one, share in before.parts.items()}
        moved = 1 - sum(staying.values())
    percent = None if moved is None else round(100 * moved, 2)
    return TrafficShift(model, before.percents, after.percents, assignment, percent)


class _EffectiveSplit(Struct, frozen=True):
    """Weights without 0 and in lowest terms; ``name`` and ``sticky`` where they assign users."""

    weights: Mapping[str, int]
    sticky: tuple[str, ...] = ()
    name: str = ""

    @property
    def parts(self) -> Mapping[str, float]:
        """The part of the traffic that each version gets."""
        total = sum(self.weights.values())
        return {version: weight / total for version, weight in self.weights.items()}

    @property
    def percents(self) -> Mapping[str, float]:
        """The same in percent."""
        return {version: round(100 * share, 2) for version, share in self.parts.items()}


def _effective_split(name: str, model: ModelConfig) -> _EffectiveSplit:
    weights = {version: weight for version, weight in model.resolve_weights().items() if weight}
    divisor = math.gcd(*weights.values())
    weights = {version: weight // divisor for version, weight in weights.items()}
    split = model.split
    if split is None or not split.sticky or len(weights) == 1:
        return _EffectiveSplit(weights)
    return _EffectiveSplit(weights, split.sticky, split.name or name)
