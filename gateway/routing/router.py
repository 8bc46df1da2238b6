"""Routes a request to a target, by its model, the rules and the traffic split. Pure.

The configuration is compiled once into a table. Routing a request only looks up and draws random
numbers.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from backends.interfaces import Backend, ModelTimeouts, ReportsFailure, ReportsLoading, ReportsModel
from gateway.config.schema import (
    JudgeConfig,
    ModelDefaultsConfig,
    OnLoss,
    ShadowConfig,
    UnsupportedContent,
)
from gateway.observability.recording_writer import RecordingPolicy
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.rules import RouteRule, RuleMatch, find_matching_rule
from gateway.routing.traffic_split import TrafficSplit
from protocols.core.catalog import ModelInfo, ModelState, VersionInfo
from protocols.core.errors import Forbidden, ModelNotFound, VersionNotFound
from protocols.core.interfaces import NO_SETTINGS, ModelSettings, RoutingInfo
from protocols.core.units import has_dot_segment

AllowedModels = frozenset[str] | None
"""The public models that a principal may use; None is all."""
AttributesLoader = Callable[[], RequestAttributes]
"""Returns a request's attributes. It is not called where the model's name is enough."""
CATCH_ALL_MODEL = "*"
"""The model that serves every name no other model has; at the end of a name, any rest of it."""


class RequestDefaults(Struct, frozen=True):
    """Defaults for what the client did not set: fields of the request's two sections, by name."""

    sampling: Mapping[str, Any] = {}
    stopping: Mapping[str, Any] = {}

    @classmethod
    def compile(cls, config: ModelDefaultsConfig) -> "RequestDefaults":
        """The defaults that are set, by section."""
        values = {name: value for name, value in asdict(config).items() if value is not None}
        stopping = {name: values.pop(name) for name in ("max_tokens",) if name in values}
        return cls(values, stopping)

    @property
    def has_values(self) -> bool:
        """Whether there are any defaults."""
        return bool(self.sampling or self.stopping)

    @property
    def by_path(self) -> Mapping[str, Any]:
        """The defaults by field path of the internal request."""
        return {
            f"{section}.{name}": value
            for section, values in (("sampling", self.sampling), ("stopping", self.stopping))
            for name, value in values.items()
        }


class Target(Struct, frozen=True):
    """A backend, and that backend's name for the model."""

    version: str
    backend_model: str
    backend: Backend
    backend_name: str
    computes_choices: bool = False
    """Whether the backend is a local model, where each choice needs a slot."""


class ShadowRule(Struct, frozen=True):
    """The shadow traffic of the model whose configured name is ``model``."""

    model: str
    config: ShadowConfig
    split: str = ""
    """The split whose rollout takes the responses as evidence; "" if none does."""


class Model(Struct, frozen=True):
    """A public model, compiled."""

    info: ModelInfo
    targets: Mapping[str, Target]
    split: TrafficSplit
    on_loss: OnLoss = "report"
    defaults: RequestDefaults = RequestDefaults()
    timeouts: ModelTimeouts | None = None
    """Of its streams, where they are not those of the backend."""
    unsupported_content: UnsupportedContent = "refuse"
    """What happens to a request with content that its target can't see."""
    settings: ModelSettings = NO_SETTINGS
    """The limit and the defaults, for requests that are passed through."""
    protocol: str | None = None
    """The protocol of its clients where several protocols have the same path."""
    fallbacks: tuple[str, ...] = ()
    """Its fallbacks in their order: versions of its own, or other models."""
    fallback_requires_access: bool = False
    """Whether fallback models that the principal may not use are skipped."""
    sticky: tuple[str, ...] = ()
    """The sources of sticky assignment in their order; without any, versions are drawn."""
    rules: tuple[RouteRule, ...] = ()
    """The rules to try for its requests, in their order."""
    routing_headers: frozenset[str] = frozenset()
    """The headers, in lower case, by which requests to any model are routed."""
    shadow: ShadowRule | None = None
    judge: JudgeConfig | None = None
    """What judges its answers, if anything does."""
    recording: RecordingPolicy | None = None
    """How its requests are recorded, if they are."""
    is_measured: bool = False
    """Whether its responses are measured, for the guardrails of its rollout."""


class RouteReason(Struct, frozen=True):
    """Why a target was chosen. Nothing in it identifies the user."""

    rule: str = ""
    """The name of the rule that matched."""
    sticky: str = ""
    """The sticky source used: ``header:NAME``, ``body:FIELD``, ``key`` or ``address``."""
    bucket: int | None = None
    """The user's hash; see ``gateway.routing.traffic_split``."""


_RANDOM_CHOICE = RouteReason()


class Route(Struct, frozen=True):
    """The target of a request, and the model whose settings apply."""

    model: Model
    target: Target
    pinned: bool = False
    """The client named the version, so neither the rules nor the split applied."""
    reason: RouteReason = _RANDOM_CHOICE
    original_model: str = ""
    """The model that the client requested, if a rule led to another."""
    split: str = ""
    """The name of the traffic split that chose the version."""

    @property
    def requested_model(self) -> str:
        """The public model that the client requested; the API key allows this one."""
        return self.original_model or self.model.info.name

    @property
    def target_name(self) -> str:
        """``model@version``, as in logs and metrics."""
        return f"{self.model.info.name}@{self.target.version}"


class RouteObserver(Protocol):
    """Observes how one request is routed, and draws the random numbers for it."""

    def draw(self) -> float:
        """A number in [0, 1)."""

    def on_rule(self, rule: RouteRule, mismatch: str, match: RuleMatch | None) -> None:
        """A rule was tried; see ``gateway.routing.rules.RuleObserver``."""


class Router:
    """The routing table; also the catalog of models for the protocols' listings."""

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        draw: Callable[[], float],
        rules: Sequence[RouteRule] = (),
        ready: bool = True,
        strict_health: bool = False,
    ) -> None:
        """``rules`` name only models and versions in ``models``.

        ``strict_health``: a single model that is not loaded makes health checks fail.
        """
        read = {f"header:{name}" for rule in rules for name in rule.headers}
        read.update(source for model in models.values() for source in model.sticky)
        headers = frozenset(
            source.removeprefix("header:").lower() for source in read if source[:7] == "header:"
        )
        self._models = [
            replace(
                model,
                rules=tuple(_select_rules(model.info, rules)),
                routing_headers=headers,
            )
            for model in models.values()
        ]
        self._by_name = {
            name: model for model in self._models for name in (model.info.name, *model.info.aliases)
        }
        self._names_by_lower_case = {name.lower(): name for name in reversed(self._by_name)}
        self._wildcards = sorted(
            (model for model in self._models if model.info.name.endswith(CATCH_ALL_MODEL)),
            key=lambda model: -len(model.info.name),
        )
        """The models for every name with a beginning, the longest beginning first."""
        self._fixed_routes = self._build_fixed_routes()
        """The routes of models with one version and neither rules nor sticky sources."""
        self._backends = [*{id(backend): backend for backend in self._list_backends()}.values()]
        self._draw = draw
        self.ready = ready
        self._strict_health = strict_health

    def route(
        self,
        name: str,
        version: str | None = None,
        load_attributes: AttributesLoader = RequestAttributes,
        observer: RouteObserver | None = None,
    ) -> Route:
        """The route for ``name``, which may pin a version as ``name@version``.

        ``observer`` is set for a request that is explained. Raises ModelNotFound or
        VersionNotFound.
        """
        if observer is None and version is None and name in self._fixed_routes:
            return self._fixed_routes[name]
        model, pinned = self._resolve_name(name, version)
        if pinned is not None:
            return Route(model, model.targets[pinned], pinned=True)
        if model.rules or model.sticky:
            return self._apply_rules(model, load_attributes(), observer)
        split = model.split
        number = self._draw() if observer is None else observer.draw()
        return Route(model, model.targets[split.pick_version(number)], split=split.reported_name)

    def list_fallbacks(
        self, route: Route, load_attributes: AttributesLoader = RequestAttributes
    ) -> Iterator[Route]:
        """The fallbacks of a route, each target once. A pinned version has none.

        Rules apply to the requested model only, not to fallbacks.
        """
        if route.pinned:
            return
        target_names = {route.target_name}
        reason = RouteReason(route.reason.rule)
        for name in route.model.fallbacks:
            target = route.model.targets.get(name)
            if target is None:
                model = self._by_name[name]
                attributes = load_attributes() if model.sticky else RequestAttributes()
                fallback = self._apply_split(
                    model, attributes, reason, self._draw, route.requested_model
                )
            else:
                fallback = replace(route, target=target, reason=reason)
            if fallback.target_name not in target_names:
                target_names.add(fallback.target_name)
                yield fallback

    @property
    def models(self) -> Sequence[Model]:
        """The models with their rules, without other names of them."""
        return self._models

    def route_shadow(
        self,
        route: Route,
        shadow: ShadowRule,
        load_attributes: AttributesLoader = RequestAttributes,
    ) -> Route | None:
        """The target of a request's shadow, if the request is drawn for one.

        A request with a pinned version has none, and a shadow never goes to the same target.
        """
        if route.pinned or self._draw() >= shadow.config.share:
            return None
        target = route.model.targets.get(shadow.config.to)
        if target is None:
            model = self._by_name[shadow.config.to]
            shadow_route = self._apply_split(
                model,
                load_attributes() if model.sticky else RequestAttributes(),
                _RANDOM_CHOICE,
                self._draw,
            )
        else:
            shadow_route = Route(route.model, target)
        return None if shadow_route.target_name == route.target_name else shadow_route

    def route_at_random(self, name: str) -> Route:
        """The target of a request of the gateway's own to a model of the configuration."""
        model = self._by_name[name]
        return self._apply_split(model, RequestAttributes(), _RANDOM_CHOICE, self._draw)

    def check_access(self, name: str, allowed_models: AllowedModels) -> None:
        """Raise Forbidden if ``name``, which may pin a version, is a model that is not allowed."""
        if allowed_models is None:
            return
        model = self._by_name.get(name)
        if model is not None and model.info.name in allowed_models:
            return
        model = model or self._by_name.get(name.rpartition("@")[0])
        wildcard = self._find_wildcard(name) if model is None else None
        if model is None and wildcard is None:
            return  # there is no such model
        if wildcard is not None and wildcard.info.name in allowed_models - {CATCH_ALL_MODEL}:
            return
        if (name if model is None else model.info.name) not in allowed_models:
            raise Forbidden(_describe_unknown_model(name), model=name)

    def allows_worker_model(self, name: str, allowed_models: AllowedModels) -> bool:
        """Whether ``name`` is an allowed model and its workers call it so, too."""
        try:
            self.check_access(name, allowed_models)
            model, _ = self._resolve_name(name, None)
        except ModelNotFound:
            return False
        return all(target.backend_model == name for target in model.targets.values())

    def find_name(self, info: RoutingInfo) -> str:
        """The configured name that ``info`` means; the client's own if there is no such model.

        Without a name it is the only model, if there is one. See ``RoutingInfo.other_names``.
        """
        if not info.model:
            only = self._models[0].info.name if len(self._models) == 1 else CATCH_ALL_MODEL
            return "" if only == CATCH_ALL_MODEL else only
        names = (info.model, *info.other_names)
        for name in names:
            if name in self._by_name:
                return name
        for name in names:
            if name.lower() in self._names_by_lower_case:
                return self._names_by_lower_case[name.lower()]
        return info.model

    def find_protocol(self, name: str, allowed_models: AllowedModels = None) -> str | None:
        """The protocol of a model's clients, if the configuration sets it."""
        model = self._by_name.get(name)
        if model is None or not (allowed_models is None or model.info.name in allowed_models):
            return None
        return model.protocol

    def list_models(self, allowed_models: AllowedModels = None) -> Sequence[ModelInfo]:
        """The public models that are allowed, with their current readiness."""
        return [
            self._read_current_info(model)
            for model in self._models
            if not model.info.name.endswith(CATCH_ALL_MODEL)
            and (allowed_models is None or model.info.name in allowed_models)
        ]

    @property
    def model_count(self) -> int:
        """How many models there are."""
        return len(self._models)

    def read_readiness(self) -> tuple[object, ...]:
        """Whether the gateway and each backend is ready: while this is equal, so are listings."""
        return (self.ready, *map(_read_state, self._backends))

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        """The model of this name or alias. Raises ModelNotFound or VersionNotFound."""
        resolved, _ = self._resolve_name(model, version)
        return self._read_current_info(resolved)

    def set_weights(self, name: str, weights: Mapping[str, int]) -> None:
        """Replace the weights of a model's split."""
        self._by_name[name].split.set_weights(weights)
        self._fixed_routes = self._build_fixed_routes()

    def _build_fixed_routes(self) -> dict[str, Route]:
        return {
            name: Route(one, one.targets[version])
            for name, one, version in self._list_fixed_models()
        }

    def list_model_backends(self, name: str) -> Sequence[Backend]:
        """The backends of a model's versions, also of a name that a wildcard serves."""
        model, _ = self._resolve_name(name, None)
        return [target.backend for target in model.targets.values()]

    def _list_backends(self) -> Iterator[Backend]:
        for model in self._models:
            for target in model.targets.values():
                yield target.backend

    def _list_fixed_models(self) -> Iterator[tuple[str, Model, str]]:
        """Each model with one version and neither rules nor sticky sources, and that version."""
        for name, model in self._by_name.items():
            version = model.split.only_version
            if version is not None and not model.rules and not model.sticky:
                yield name, model, version

    def _resolve_name(self, name: str, version: str | None) -> tuple[Model, str | None]:
        """The model of a name, and the pinned version."""
        model = self._by_name.get(name)
        if model is None and version is None and "@" in name:
            model_name, _, pinned = name.rpartition("@")
            if model_name in self._by_name:
                return self._resolve_name(model_name, pinned)
        if model is None:
            return self._resolve_catch_all(name), None
        if version is not None and version not in model.targets:
            raise VersionNotFound(
                f"the model {quote_name(name)} has no version {quote_name(version)}",
                model=name,
                version=version,
            )
        return model, version

    def _find_wildcard(self, name: str) -> Model | None:
        """The model for every name with the longest beginning that this one has."""
        for model in self._wildcards:
            beginning = model.info.name[:-1]
            if name.startswith(beginning) and len(name) > len(beginning):
                return model
        return None

    def _resolve_catch_all(self, name: str) -> Model:
        model = self._find_wildcard(name)
        if model is None or has_dot_segment(name):  # workers get it in paths
            raise ModelNotFound(_describe_unknown_model(name), model=name)
        rest = name[len(model.info.name) - 1 :]
        targets = {
            key: replace(
                target,
                backend_model=name
                if model.info.name == CATCH_ALL_MODEL
                else target.backend_model.replace(CATCH_ALL_MODEL, rest),
            )
            for key, target in model.targets.items()
        }
        return replace(model, info=replace(model.info, name=name), targets=targets)

    def _apply_rules(
        self, model: Model, attributes: RequestAttributes, observer: RouteObserver | None
    ) -> Route:
        """By the first rule that matches, or else by the traffic split."""
        draw, on_rule = (
            (self._draw, None) if observer is None else (observer.draw, observer.on_rule)
        )
        match = find_matching_rule(model.rules, attributes, model.sticky, draw, on_rule)
        if match is None:
            return self._apply_split(model, attributes, _RANDOM_CHOICE, draw)
        rule = match.rule
        to = rule.config.to
        target_model = model if to.model is None else self._by_name[to.model]
        original_model = "" if target_model is model else model.info.name
        if rule.recording is not None:
            target_model = replace(target_model, recording=rule.recording)
        if to.version is None:
            return self._apply_split(
                target_model, attributes, RouteReason(rule.name), draw, original_model
            )
        reason = RouteReason(rule.name, match.sticky, match.bucket)
        target = target_model.targets[to.version]
        return Route(target_model, target, reason=reason, original_model=original_model)

    @staticmethod
    def _apply_split(
        model: Model,
        attributes: RequestAttributes,
        reason: RouteReason,
        draw: Callable[[], float],
        original_model: str = "",
    ) -> Route:
        source, user = attributes.find_first_source(model.sticky)
        if not source:
            version = model.split.pick_version(draw())
        else:
            assignment = model.split.assign_version(user)
            version = assignment.version
            reason = RouteReason(reason.rule, source, assignment.bucket)
        split = model.split.reported_name
        return Route(
            model, model.targets[version], reason=reason, original_model=original_model, split=split
        )

    @property
    def is_loading(self) -> bool:
        """Whether no request can be answered yet, as every backend still loads its model."""
        return bool(self._backends) and all(map(_loads, self._backends))

    @property
    def is_healthy(self) -> bool:
        """Whether health checks of the protocols succeed, unless the gateway drains."""
        if self._strict_health:
            return not any(_loads(one) or _has_failed(one) for one in self._backends)
        return not self.is_loading

    @staticmethod
    def _read_current_info(model: Model) -> ModelInfo:
        targets, versions = model.targets, model.info.versions
        current = tuple(
            _read_current_version(version, targets[version.name].backend)
            if version.name in targets
            else version
            for version in versions
        )
        if current == versions:
            return model.info
        length = model.info.context_length or _find_shortest_context(current)
        return replace(model.info, versions=current, context_length=length)


def _loads(backend: Backend) -> bool:
    return isinstance(backend, ReportsLoading) and backend.loading is not None


def _has_failed(backend: Backend) -> bool:
    return isinstance(backend, ReportsFailure) and backend.failure is not None


def _read_state(backend: Backend) -> bool | tuple[bool, ModelState]:
    """What listings show of a backend."""
    return (
        (backend.ready, backend.report_model())
        if isinstance(backend, ReportsModel)
        else backend.ready
    )


def _find_shortest_context(versions: Sequence[VersionInfo]) -> int | None:
    """The context that every version has; None unless it is known of all of them."""
    features = [one.state.features for one in versions if one.state is not None]
    lengths = [one.context_length or 0 for one in features if one is not None]
    return min(lengths) or None if lengths and len(lengths) == len(versions) else None


def _read_current_version(version: VersionInfo, backend: Backend) -> VersionInfo:
    state = backend.report_model() if isinstance(backend, ReportsModel) else None
    if (version.ready, version.state) == (backend.ready, state):
        return version
    return replace(version, ready=backend.ready, state=state)


class PrincipalCatalog(Struct, frozen=True):
    """The models that one principal may use, as listings show them: a ``Catalog``."""

    router: Router
    allowed_models: AllowedModels
    shows_targets: bool
    """Whether the principal may see traffic splits and the backends' names of models."""
    loads: list[Awaitable[bool]] = field(default_factory=list)
    """What must be done before the response is sent."""

    @property
    def ready(self) -> bool:
        """See ``Catalog``."""
        return self.router.ready and self.router.is_healthy

    def list_models(self) -> Sequence[ModelInfo]:
        """See ``Catalog``."""
        return [self._hide_targets(info) for info in self.router.list_models(self.allowed_models)]

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        """See ``Catalog``."""
        self.router.check_access(model, self.allowed_models)
        return self._hide_targets(self.router.find_model(model, version))

    def keep_model(self, model: ModelInfo, seconds: float | None) -> bool:
        """See ``protocols.core.catalog.LoadsModels``."""
        backends = {
            id(backend): backend
            for backend in self.router.list_model_backends(model.name)
            if isinstance(backend, ReportsModel) and backend.report_model().on_demand
        }
        self.loads.extend(backend.keep_model(seconds) for backend in backends.values())
        return bool(backends)

    def _hide_targets(self, info: ModelInfo) -> ModelInfo:
        if self.shows_targets:
            return info
        versions = [
            replace(version, backend_model=info.name, share=None) for version in info.versions
        ]
        return replace(info, versions=tuple(versions))


def _select_rules(model: ModelInfo, rules: Sequence[RouteRule]) -> Iterator[RouteRule]:
    """The rules that apply to a model's requests."""
    for rule in rules:
        name = rule.config.when.model
        if name is None or name == model.name or name in model.aliases:
            yield rule


def _describe_unknown_model(name: str) -> str:
    return f"the model {quote_name(name)} does not exist"


def quote_name(name: str) -> str:
    """A name for an error message: quoted and shortened."""
    return repr(name if len(name) <= 200 else name[:200] + "…")  # noqa: PLR2004


def compile_model(
    info: ModelInfo,
    targets: Mapping[str, Target],
    weights: Mapping[str, int],
    on_loss: OnLoss = "report",
    defaults: RequestDefaults = RequestDefaults(),  # noqa: B008 - frozen
    *,
    salt: str = "",
) -> Model:
    """A model with these versions; ``weights`` has at least one weight above 0.

    ``salt`` is the split's name; "" uses the model's name.
    """
    settings = NO_SETTINGS
    if defaults.has_values or info.max_tokens is not None:
        settings = ModelSettings(info.max_tokens, defaults.by_path)
    total = sum(weights.values())
    versions = tuple(
        VersionInfo(name, target.backend_model, round(100 * weights.get(name, 0) / total))
        for name, target in targets.items()
    )
    split = TrafficSplit({name: weights.get(name, 0) for name in targets}, salt or info.name)
    return Model(
        replace(info, versions=versions), targets, split, on_loss, defaults, settings=settings
    )
