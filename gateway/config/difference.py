"""What differs between two configurations: by name, by field, and by who is sent elsewhere. Pure.

The users that a split moves are found with the split's own hash over 100,000 names, ``user-0`` and
so on: their share is that of any users, within a third of a percent.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from gateway.config.complaints import Steps, written
from gateway.config.pools import Pool
from gateway.config.shape import Config, Listener, Model
from gateway.config.shown import dump
from gateway.splits import Split

Seat = tuple[str, int]
"""A listener's address, and how many before it have the same: several may take any free port."""

Leaves = Mapping[Steps, Any]
"""What has no parts of something, by the way to it."""

_USERS: Final = 100_000
_WHOLE: Final = ("version", "admin", "limits", "defaults", "identity", "state", "observe")
"""The parts of a configuration that have no names in them."""
_HIDDEN: Final = ("sha256",)
"""Fields of which no more is told than that they differ."""
_TOLD_ELSEWHERE: Final[Mapping[str, frozenset[str]]] = {
    "models": frozenset({"aliases", "versions", "backend", "model"}),
    "backends": frozenset({"workers"}),
}
"""Fields that are a kind of their own."""


class Change(Struct, frozen=True):
    """A field that differs; null where it is not there, or says nothing."""

    field: str
    before: Any
    after: Any


class Group(Struct, frozen=True):
    """Things of one kind, by their names."""

    come: tuple[str, ...]
    go: tuple[str, ...]
    change: Mapping[str, tuple[Change, ...]]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.come or self.go or self.change)


class Move(Struct, frozen=True):
    """Users that go from one version to another; ``percent`` is of all the model's users."""

    before: str
    after: str
    percent: float


class Sharing(Struct, frozen=True):
    """How the traffic of a model is shared out, in percent by version, and who moves.

    ``how`` users are found again: ``held`` to their versions as before, sent by ``chance`` each
    time, or told apart by other things and shared out ``anew``. Only ``held`` has ``moves``.
    """

    model: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    how: Literal["held", "chance", "anew"]
    moves: tuple[Move, ...]


class Difference(Struct, frozen=True):
    """All that differs. ``fixed`` is what can't change while a gateway runs, and why."""

    settings: tuple[Change, ...]
    groups: Mapping[str, Group]
    users: tuple[Sharing, ...]
    fixed: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        """Whether nothing does."""
        return not (
            self.settings or self.users or any(not one.is_empty for one in self.groups.values())
        )


def difference(old: Config, new: Config) -> Difference:
    """What differs between these two."""
    before, after = _named(old), _named(new)
    groups = {kind: _group(before[kind], after[kind]) for kind in before}
    both = [name for name in new.models if name in old.models]
    sharings = (_sharing(name, old.models[name], new.models[name]) for name in both)
    users = tuple(one for one in sharings if one is not None)
    why = {written(path): message for path, message in fixed(old, new)}
    return Difference(tuple(_settings(old, new)), groups, users, why)


# --- what can't be reloaded ----------------------------------------------------------------------


def named(seat: Seat) -> str:
    """What to call a listener: its address; of several at one, with the number behind."""
    address, number = seat
    return f"{address} ({number + 1})" if number else address


def seats(config: Config) -> Mapping[Seat, Listener]:
    """The listeners, by what makes one the same in the next configuration."""
    taken = Counter[str]()
    found = {}
    for listener in config.listeners:
        found[listener.address, taken[listener.address]] = listener
        taken[listener.address] += 1
    return found


def fixed(old: Config, new: Config) -> Iterator[tuple[Steps, str]]:
    """What of ``new`` can't take the place of the ``old`` while the gateway runs, and why."""
    here, there = old.admin and old.admin.address, new.admin and new.admin.address
    if here != there:
        told = f"it is at {here}" if here else "there is none"
        yield ("admin",), f"{told} for as long as the gateway runs; restart it"
    for name in ("state", "observe"):
        if getattr(old, name) != getattr(new, name):
            yield (name,), "can't change for as long as the gateway runs; restart it"
    before = seats(old)
    for number, (seat, listener) in enumerate(seats(new).items()):
        if seat not in before:
            continue
        if (before[seat].tls is None) != (listener.tls is None):
            message = "begins or ceases to speak TLS, which needs a restart; or take another port"
            yield ("listeners", number, "tls"), message
        if before[seat].front != listener.front:
            message = "can't change while the address is bound; restart, or take another port"
            yield ("listeners", number, "front"), message


# --- names and fields ----------------------------------------------------------------------------


def _named(config: Config) -> Mapping[str, Mapping[str, Leaves]]:
    """Everything that has a name, by its kind."""
    listeners = {f"{at} #{n + 1}" if n else at: one for (at, n), one in seats(config).items()}
    aliases = {one: {"model": name} for name, m in config.models.items() for one in m.aliases}
    versions = {
        f"{name}@{version}": target
        for name, model in config.models.items()
        for version, target in model.targets().items()
    }
    workers = {
        f"{name} {one.url or one.dns or one.srv or one.file}": one
        for name, pool in config.backends.items()
        if isinstance(pool, Pool)
        for one in pool.workers
    }
    found: Mapping[str, Mapping[str, Any]] = {
        "listeners": listeners,
        "backends": config.backends,
        "workers": workers,
        "models": config.models,
        "versions": versions,
        "aliases": aliases,
        "routes": {rule.name: rule for rule in config.routes},
        "keys": {key.name: key for key in config.keys},
    }
    return {
        kind: {
            name: _parts(one, _TOLD_ELSEWHERE.get(kind, frozenset())) for name, one in named.items()
        }
        for kind, named in found.items()
    }


def _parts(thing: Any, elsewhere: frozenset[str]) -> Leaves:
    return {path: one for path, one in _leaves(thing, ()) if path[0] not in elsewhere}


def _group(before: Mapping[str, Leaves], after: Mapping[str, Leaves]) -> Group:
    changes = {name: tuple(_changes(before[name], after[name])) for name in after if name in before}
    return Group(
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        {name: found for name, found in changes.items() if found},
    )


def _settings(old: Config, new: Config) -> Iterator[Change]:
    for name in _WHOLE:
        before, after = getattr(old, name), getattr(new, name)
        yield from _changes(dict(_leaves(before, (name,))), dict(_leaves(after, (name,))))
    here, there = [one.name for one in old.routes], [one.name for one in new.routes]
    both = [name for name in there if name in here]
    if (was := [name for name in here if name in there]) != both:
        yield Change("routes", was, both)


def _changes(before: Leaves, after: Leaves) -> Iterator[Change]:
    kind = ("kind",)
    if before.get(kind) != after.get(kind):  # and so is all the rest
        yield Change("kind", before.get(kind), after.get(kind))
        return
    for path in dict.fromkeys((*before, *after)):
        was, now = before.get(path), after.get(path)
        if was != now:
            hidden = path[-1] in _HIDDEN
            yield Change(written(path), _shown(was, hidden=hidden), _shown(now, hidden=hidden))


def _leaves(value: Any, path: Steps) -> Iterator[tuple[Steps, Any]]:
    """What has no parts, by the way to it."""
    match value:
        case Struct():
            config = value.__struct_config__
            if config.tag_field:
                yield (*path, config.tag_field), config.tag
            for name in value.__struct_fields__:
                yield from _leaves(getattr(value, name), (*path, name))
        case Mapping():
            for key, one in value.items():
                yield from _leaves(one, (*path, key))
        case _:
            yield path, value


def _shown(value: Any, *, hidden: bool) -> Any:
    return "***" if hidden and value is not None else dump(value)


# --- users ---------------------------------------------------------------------------------------


def _sharing(name: str, old: Model, new: Model) -> Sharing | None:
    """How users move between a model's versions; None where they stay."""
    here, there = _Split(name, old), _Split(name, new)
    before, after = here.shares(), there.shares()
    if here.weights == there.weights and here.held == there.held:
        return None
    if len(before) == 1 or len(after) == 1:
        return Sharing(name, before, after, "held", tuple(_all(before, after)))
    if not (here.sticky or there.sticky):
        return Sharing(name, before, after, "chance", ())
    if here.sticky != there.sticky:
        return Sharing(name, before, after, "anew", ())
    return Sharing(name, before, after, "held", tuple(_moves(here, there)))


class _Split:
    """How a model's traffic is shared out."""

    def __init__(self, model: str, told: Model) -> None:
        split = told.split
        weights = {arm: weight for arm, weight in told.weights().items() if weight}
        least = math.gcd(*weights.values())
        self.weights = {arm: weight // least for arm, weight in weights.items()}
        self.name = (split and split.name) or model
        self.sticky = (split and split.sticky) or ()
        one_of_several = self.sticky and len(weights) > 1
        self.held = (self.name, self.sticky) if one_of_several else None

    def shares(self) -> Mapping[str, float]:
        """In percent."""
        total = sum(self.weights.values())
        return {arm: round(100 * weight / total, 2) for arm, weight in self.weights.items()}


def _all(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Move]:
    """All go from the one version, or to it."""
    for was, left in before.items():
        for now, came in after.items():
            if was != now:
                yield Move(was, now, min(left, came))


def _moves(here: _Split, there: _Split) -> Iterator[Move]:
    before, after = Split(here.weights, here.name), Split(there.weights, there.name)
    users = [f"user-{number}" for number in range(_USERS)]
    pairs = Counter((before.hold(who).version, after.hold(who).version) for who in users)
    for (was, now), count in sorted(pairs.items()):
        if was != now:
            yield Move(was, now, 100 * count / _USERS)
