"""What a configuration tells of, made: each part from the Struct that describes it."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import asdict, replace

from backends import BACKENDS
from backends.interfaces import Backend, Timeouts
from gateway import __version__
from gateway.auth.api_keys import Principal
from gateway.config import schema
from gateway.crew import build_pool_arguments, restricted
from gateway.descriptors import compute_max_clients
from gateway.http_server import openapi
from gateway.http_server.connection import ConnectionLimits
from gateway.pipeline.handler import GatewayServices
from gateway.ratelimit.limiter import (
    ANONYMOUS_KEY,
    CounterRegistry,
    KeyRateLimits,
    RateLimiter,
    RateLimits,
)
from gateway.routing.paths import AdapterMount
from gateway.routing.router import (
    CATCH_ALL_MODEL,
    Model,
    RequestDefaults,
    ShadowRule,
    Target,
    compile_model,
)
from gateway.routing.rules import RouteConditions, RouteRule
from protocols import DIALECTS
from protocols.core.catalog import ModelInfo
from protocols.core.interfaces import ClientAdapter, HttpResponse, ModelMetadataReader

if TYPE_CHECKING:
    from gateway.auth.jwks import JwksClient
    from gateway.auth.jwt import JwtVerifier


def load_symbol(reference: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def build_adapter(name: str, profile: str | None, options: Mapping[str, Any]) -> ClientAdapter:
    """The dialect of this name and profile."""
    return cast("ClientAdapter", load_symbol(DIALECTS[name])(profile, **options))


def build_mount(dialect: schema.ListenerProtocolConfig) -> AdapterMount:
    """A dialect, where a listener has it."""
    return AdapterMount(
        build_adapter(dialect.name, dialect.profile, dialect.options), dialect.prefix
    )


def build_static_pages(
    mounts: Sequence[AdapterMount], ready: Callable[[], bool], *, keyed: bool
) -> dict[str, Callable[[], HttpResponse]]:
    """What a listener answers by itself; the larger page is made when it is first asked for.

    ``ready`` tells whether requests may come.
    """
    well, leaving = (
        HttpResponse(200, b'{"status":"ok"}'),
        HttpResponse(503, b'{"status":"draining"}'),
    )

    @functools.cache
    def told() -> HttpResponse:
        return HttpResponse(200, openapi.build_document(mounts, version=__version__, keyed=keyed))

    return {"/health": lambda: well if ready() else leaving, "/openapi.json": told}


def build_backend(
    settings: schema.BackendConfig,
    outside: GatewayServices,
    name: str = "",
    models: Sequence[str] = (),
) -> Backend:
    """The backend that these settings describe. ``models`` are what it is asked for."""
    make = load_symbol(BACKENDS[settings.kind])
    match settings:
        case schema.PoolConfig():
            dialect = build_upstream_adapter(settings)
            told = build_pool_arguments(name, settings, dialect, models)
            backend = make(clock=outside.clock, draw=outside.draw, **told)
        case _:
            given = msgspec.to_builtins(settings)
            backend = make(**{key: value for key, value in given.items() if key != "kind"})
    return cast("Backend", backend)


def list_backend_models(backend: str, config: schema.Config) -> list[str]:
    """The models that a backend is asked for, by its own names."""
    targets = [
        (target.backend, target.model or name)
        for name, model in config.models.items()
        for target in model.resolve_targets().values()
    ]
    named = (model for asked, model in targets if asked == backend and model != CATCH_ALL_MODEL)
    return list(dict.fromkeys(named))


def needs_model_discovery(pool: schema.PoolConfig) -> bool:
    """Whether a pool's workers are asked about the models that they are to serve."""
    return issubclass(load_symbol(DIALECTS[pool.dialect]), ModelMetadataReader)


def build_upstream_adapter(pool: schema.PoolConfig) -> ClientAdapter:
    """What a pool's workers are spoken to in."""
    options: dict[str, Any] = dict(pool.options)
    if pool.fields is not None:
        options["fields"] = pool.fields
    if pool.template is not None:
        from backends.chat_template import ChatTemplate  # noqa: PLC0415 - jinja2 may not be installed

        options["renderer"] = ChatTemplate(pool.template)
    return restricted(pool, build_adapter(pool.dialect, pool.profile, options))


def build_model(
    name: str,
    model: schema.ModelConfig,
    backends: Mapping[str, Backend],
    defaults: schema.DefaultsConfig,
    created: int,
) -> Model:
    """A public model, compiled for the router."""
    targets = {
        version: Target(version, target.model or name, backends[target.backend], target.backend)
        for version, target in model.resolve_targets().items()
    }
    info = ModelInfo(
        name,
        (),
        model.task,
        model.aliases,
        created,
        model.limits.context,
        model.limits.max_tokens,
        model.options,
    )
    silent = RequestDefaults(
        model.defaults.get_sampling_defaults(), model.defaults.get_stopping_defaults()
    )
    on_loss = model.on_loss or defaults.on_loss
    salt, sticky = (model.split.name or "", model.split.sticky or ()) if model.split else ("", ())
    compiled = compile_model(info, targets, model.resolve_weights(), on_loss, silent, salt=salt)
    return replace(
        compiled,
        protocol=model.dialect,
        fallbacks=model.fallback or (),
        sticky=sticky,
        shadow=None if model.shadow is None else build_shadow(name, model.shadow),
    )


def build_shadow(name: str, shadow: schema.ShadowConfig) -> ShadowRule:
    """What is copied of the requests to the model of this name."""
    return ShadowRule(name, shadow.to, shadow.share, shadow.max_concurrent, shadow.timeout)


def build_rule(rule: schema.RouteConfig) -> RouteRule:
    """An exception, as the router tries it."""
    when = rule.when
    headers = {name.lower(): text for name, text in when.header.items()}
    share = 1.0 if when.share is None else when.share
    compiled = RouteConditions(when.dialect, headers, when.body, when.key, when.tag, share)
    return RouteRule(rule.name, when.model, compiled, rule.use.model, rule.use.version)


def build_principal(key: schema.ApiKeyConfig, aliases: Mapping[str, str]) -> Principal:
    """The holder of a configured key. ``aliases`` gives the model that each stands for."""
    models = frozenset(aliases.get(name, name) for name in key.models) if key.models else None
    tags = frozenset(key.tags)
    return Principal(key.name, key.sha256, models, key.dialect, tags, key.explain)


def build_rate_limiter(config: schema.Config, accounts: CounterRegistry) -> RateLimiter | None:
    """What holds the keys to their limits; None where there are none."""
    aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
    common = config.defaults.limits
    named = {key.name: key.limits or common for key in config.keys} or {ANONYMOUS_KEY: common}
    told = {name: _build_key_limits(one, aliases) for name, one in named.items() if one is not None}
    others = None if common is None else _build_key_limits(common, aliases)
    return RateLimiter(told, accounts, others) if told else None


def _build_key_limits(
    limits: schema.KeyRateLimitConfig, aliases: Mapping[str, str]
) -> KeyRateLimits:
    models = limits.models or {}
    narrow = {aliases.get(name, name): _build_rate_limits(one) for name, one in models.items()}
    return KeyRateLimits(_build_rate_limits(limits), narrow)


def _build_rate_limits(told: schema.RateLimitConfig) -> RateLimits:
    return RateLimits(told.requests, told.tokens, told.concurrent, told.budget)


def build_jwks_client(config: schema.Config, clock: Callable[[], float]) -> "JwksClient | None":
    """Who signs tokens, if somebody does."""
    if config.identity is None:
        return None
    from gateway.auth.jwks import JwksClient  # noqa: PLC0415 - its libraries may not be installed

    return JwksClient(config.identity, clock)


def build_jwt_verifier(
    config: schema.Config, issuer: "JwksClient | None", now: Callable[[], float]
) -> "JwtVerifier | None":
    """What verifies tokens, if somebody signs them."""
    if config.identity is None or issuer is None:
        return None
    from gateway.auth.jwt import JwtPolicy, JwtVerifier

    aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
    return JwtVerifier(JwtPolicy(config.identity, aliases), issuer, now)


def build_timeouts(timeouts: schema.TimeoutsConfig) -> Timeouts:
    """The limits of an exchange, from the configuration."""
    return Timeouts(**asdict(timeouts))


def build_connection_limits(limits: schema.ServerLimitsConfig) -> ConnectionLimits:
    """What a listener holds its clients to."""
    return ConnectionLimits(
        max_header_size=limits.header,
        max_connections=min(limits.connections, compute_max_clients()),
        max_per_address=limits.connections_per_address,
        header_timeout=limits.head_time,
        body_timeout=limits.body_pause,
        idle_timeout=limits.keep,
    )
