"""Members of one name to backends, and to the model of that name."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.tools.migrate.members import WEIGHTS, Kind, Member, Worker
from gateway.tools.migrate.origins import MOCK
from gateway.tools.migrate.source import Notes
from gateway.tools.migrate.writing import Told

_HEAVIEST: Final = 1000


class Group(Struct):
    """A model's name, and who answers for it, in the file's order."""

    name: str
    members: list[Member]


class Habits(Struct, frozen=True):
    """What every pool has: as the settings of the whole file say."""

    policy: str
    breaker: Mapping[str, Any]
    most: int | None


class Made(Struct):
    """The parts of a configuration."""

    backends: dict[str, Any] = {}
    models: dict[str, Any] = {}
    names: dict[str, str] = {}
    """The models, by every name that they have."""
    tasks: dict[str, str] = {}
    """Of the models."""


class _Version(Struct):
    """Workers of one kind, and which share of the model's requests is theirs."""

    kind: Kind
    workers: list[Worker]
    share: float
    comments: list[str]


def add(group: Group, habits: Habits, made: Made, notes: Notes) -> None:
    """Make the group a model of the configuration."""
    by = _shared_by(group.members)
    versions = _versions(_ranked(group.members, by), by)
    targets: dict[str, Any] = {}
    for number, version in enumerate(versions, 1):
        name = _free(group.name, made.backends)
        made.backends[name] = _backend(version, by, habits)
        target = {"backend": name}
        if version.kind.model is not None and version.kind.script is None:
            target["model"] = version.kind.model
        targets[str(number)] = target
    model: dict[str, Any] = targets["1"] if len(versions) == 1 else {"versions": targets}
    if len(versions) > 1:
        model["split"] = {"weights": _weights(versions)}
        model["fallback"] = sorted(targets, key=lambda n: versions[int(n) - 1].kind.order)
    task = made.tasks[group.name] = group.members[0].task
    if task != "chat":
        model["task"] = task
    if defaults := _common(group, notes):
        model["defaults"] = defaults
    made.models[group.name] = model
    made.names[group.name] = group.name


def _common(group: Group, notes: Notes) -> Mapping[str, float]:
    """The defaults that all have in common; a model has no others."""
    first, *rest = (member.defaults for member in group.members)
    common = {key: value for key, value in first.items() if all(o.get(key) == value for o in rest)}
    for member in group.members:
        for key in member.defaults.keys() - common.keys():
            why = f"its {key} differs from that of others of this name; give them two names"
            notes.add(member.at, "left out", why)
    return common


# --- who takes how much ---------------------------------------------------------------------------


def _shared_by(members: Sequence[Member]) -> str | None:
    """The number by which requests are shared out, as the other one picks it."""
    return next((key for key in WEIGHTS if key in members[0].worker.shares), None)


def _share(worker: Worker, by: str | None) -> float:
    return worker.twice if by is None else worker.shares.get(by, 0.0)


def _ranked(members: Sequence[Member], by: str | None) -> Sequence[Member]:
    """Those that get nothing, as long as others can be asked, rank behind them."""
    if not any(_share(member.worker, by) for member in members):
        return members
    last = 1 + max(member.kind.order for member in members)
    return [
        one if _share(one.worker, by) else replace(one, kind=replace(one.kind, order=last))
        for one in members
    ]


def _weights(versions: Sequence[_Version]) -> Mapping[str, int]:
    """Only the first in rank share the requests; the others stand by."""
    first = min(version.kind.order for version in versions)
    shares = [version.share if version.kind.order == first else 0 for version in versions]
    return {str(n): share for n, share in enumerate(_scaled(shares, 1_000_000), 1)}


def _versions(members: Sequence[Member], by: str | None) -> list[_Version]:
    """Members of one kind together, unless they have one address with two keys."""
    versions: list[_Version] = []
    for member in members:
        worker, share = member.worker, _share(member.worker, by)
        found = next((one for one in versions if _joins(one, member)), None)
        if found is None:
            versions.append(_Version(member.kind, [worker], share, [*member.comments]))
            continue
        found.share += share
        found.comments += [text for text in member.comments if text not in found.comments]
        _join(found.workers, worker)
    return versions


def _joins(version: _Version, member: Member) -> bool:
    new = member.worker
    keys = [worker.key for worker in version.workers if worker.url == new.url]
    return version.kind == member.kind and keys in ([], [new.key])


def _join(workers: list[Worker], new: Worker) -> None:
    """One more; who is there already weighs as much as both."""
    for n, old in enumerate(workers):
        if old.url == new.url:
            every = {**old.shares, **new.shares}
            shares = {key: _share(old, key) + _share(new, key) for key in every}
            workers[n] = replace(old, shares=shares, twice=old.twice + new.twice)
            return
    workers.append(new)


def _scaled(shares: Sequence[float], most: int) -> list[int]:
    """Whole numbers in the same proportion, as small as they can be; not all of them 0."""
    if not any(shares):
        return [1] * len(shares)
    whole = [round(share * 1000) for share in shares]
    common = math.gcd(*whole)
    found = [share // common for share in whole]
    if max(found) > most:
        return [max(round(share * most / max(found)), min(share, 1)) for share in found]
    return found


# --- what is written ------------------------------------------------------------------------------


def _backend(version: _Version, by: str | None, habits: Habits) -> Any:
    kind = version.kind
    if kind.script is not None:
        return {"kind": MOCK, "script": [kind.script]}
    pool: dict[str, Any] = {"dialect": kind.dialect}
    if kind.profile is not None:
        pool["profile"] = kind.profile
    weights = _scaled([_share(worker, by) for worker in version.workers], _HEAVIEST)
    pool["workers"] = [
        _worker(worker, weight, habits)
        for worker, weight in zip(version.workers, weights, strict=True)
    ]
    if len(version.workers) > 1:
        pool["policy"] = habits.policy
    if timeouts := {
        key: value
        for key, value in (("first_token", kind.first_token), ("total", kind.total))
        if value is not None
    }:
        pool["timeouts"] = timeouts
    if kind.retries is not None:
        pool["retries"] = {"max": kind.retries}
    if habits.breaker:
        pool["breaker"] = habits.breaker
    return Told(pool, version.comments)


def _worker(worker: Worker, weight: int, habits: Habits) -> Any:
    told: dict[str, Any] = {"url": worker.url}
    if weight != 1:
        told["weight"] = weight
    if (most := worker.most or habits.most) is not None:
        told["max_concurrency"] = most
    if worker.key is not None:
        told["auth"] = {"bearer": worker.key}
    return worker.url if len(told) == 1 else told


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """A backend's name, like the model's."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:90] or "any"
    number = 1
    while (found := stem if number == 1 else f"{stem}-{number}") in taken:
        number += 1
    return found
