"""Which target answers which model. Pure: no I/O and no clock.

All that the configuration decides is decided once, when the table is compiled; a request looks up
and draws.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.catalog import ModelInfo, VersionInfo
from gateway.core.errors import ModelNotFound, VersionNotFound
from gateway.core.ports import Backend

OnLoss = Literal["report", "reject", "ignore"]
ANY = "*"
"""The model that stands for every name no other model has."""


class Defaults(Struct, frozen=True):
    """What holds where a client was silent: fields of the request's two sections, by name."""

    sampling: Mapping[str, Any] = {}
    stopping: Mapping[str, Any] = {}

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.sampling or self.stopping)


class Target(Struct, frozen=True):
    """A backend, and that backend's name for the model."""

    version: str
    model: str
    backend: Backend
    backend_name: str


class Split:
    """A weighted choice among targets: the A/B test, the canary and the plain route alike."""

    def __init__(self, targets: Sequence[Target], weights: Sequence[int]) -> None:
        self._targets = targets
        self._edges = list(itertools.accumulate(weights))

    def pick(self, draw: float) -> Target:
        """The target at ``draw``, which is in [0, 1)."""
        return self._targets[bisect.bisect_right(self._edges, draw * self._edges[-1])]


class Model(Struct, frozen=True):
    """A public model, compiled."""

    info: ModelInfo
    targets: Mapping[str, Target]
    split: Split
    on_loss: OnLoss = "report"
    defaults: Defaults = Defaults()
    dialect: str | None = None
    """What its clients speak where several dialects have one path."""
    fallback: tuple[str, ...] = ()
    """Who answers in its stead, in this order: versions of its own, or other models."""


class Route(Struct, frozen=True):
    """Where a request goes, and under which of the model's rules."""

    model: Model
    target: Target
    pinned: bool = False
    """The client named the version, so the split was not asked."""

    @property
    def named(self) -> str:
        """As it is told of: ``model@version``."""
        return f"{self.model.info.name}@{self.target.version}"


class Router:
    """The table that requests follow; also the catalog that dialects list it by."""

    def __init__(
        self, models: Mapping[str, Model], *, draw: Callable[[], float], ready: bool = True
    ) -> None:
        self._models = list(models.values())
        self._by_name = dict(models)
        for model in models.values():
            self._by_name.update(dict.fromkeys(model.info.aliases, model))
        self._draw = draw
        self.ready = ready

    def route(self, name: str, version: str | None = None) -> Route:
        """The route for ``name``, which may pin a version as ``name@version``.

        Raises ModelNotFound or VersionNotFound.
        """
        model = self._by_name.get(name)
        if model is None and version is None and "@" in name:
            plain, _, pinned = name.rpartition("@")
            if plain in self._by_name:
                return self.route(plain, pinned)
        if model is None:
            return self._any(name)
        if version is None:
            return Route(model, model.split.pick(self._draw()))
        target = model.targets.get(version)
        if target is None:
            raise VersionNotFound(
                f"the model {shown(name)} has no version {shown(version)}",
                model=name,
                version=version,
            )
        return Route(model, target, pinned=True)

    def after(self, route: Route) -> Iterator[Route]:
        """Who answers in its stead, each target once. Nobody does for a version that was pinned."""
        if route.pinned:
            return
        seen = {route.named}
        for name in route.model.fallback:
            target = route.model.targets.get(name)
            found = self.route(name) if target is None else replace(route, target=target)
            if found.named not in seen:
                seen.add(found.named)
                yield found

    def dialect(self, name: str) -> str | None:
        """What the clients of a model speak, where the configuration says so."""
        model = self._by_name.get(name)
        return None if model is None else model.dialect

    def models(self) -> Sequence[ModelInfo]:
        """Every public model, with its readiness now."""
        return [self._now(model) for model in self._models if model.info.name != ANY]

    def find(self, model: str, version: str | None = None) -> ModelInfo:
        """The model of this name or alias. Raises ModelNotFound or VersionNotFound."""
        found = self.route(model, version)
        return self._now(found.model)

    def _any(self, name: str) -> Route:
        model = self._by_name.get(ANY)
        if model is None or not name:
            raise ModelNotFound(f"the model {shown(name)} does not exist", model=name)
        target = replace(model.split.pick(self._draw()), model=name)
        return Route(replace(model, info=replace(model.info, name=name)), target)

    @staticmethod
    def _now(model: Model) -> ModelInfo:
        versions = tuple(
            replace(version, ready=model.targets[version.name].backend.ready)
            if version.name in model.targets
            else version
            for version in model.info.versions
        )
        return replace(model.info, versions=versions)


def shown(name: str) -> str:
    """A name as an error message may show it: quoted, and not at any length."""
    return repr(name if len(name) <= 200 else name[:200] + "…")  # noqa: PLR2004


def compile_model(
    info: ModelInfo,
    targets: Mapping[str, Target],
    weights: Mapping[str, int],
    on_loss: OnLoss = "report",
    defaults: Defaults = Defaults(),  # noqa: B008 - frozen
) -> Model:
    """A model of these versions; ``weights`` names at least one with a weight above 0."""
    total = sum(weights.values())
    versions = tuple(
        VersionInfo(name, target.model, round(100 * weights.get(name, 0) / total))
        for name, target in targets.items()
    )
    arms = [name for name in targets if weights.get(name)]
    split = Split([targets[name] for name in arms], [weights[name] for name in arms])
    return Model(replace(info, versions=versions), targets, split, on_loss, defaults)
