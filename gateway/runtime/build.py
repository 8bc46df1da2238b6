"""Builds runtime objects from configuration sections."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import asdict, replace

from backends import BACKENDS
from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import WorkerConfig
from backends.interfaces import Backend, Timeouts
from gateway import __version__
from gateway.auth.api_keys import Principal
from gateway.config import loader, schema
from gateway.http_server import openapi
from gateway.http_server.overload import ConnectionLimits
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
from gateway.runtime.process import compute_max_clients
from protocols import PROTOCOLS
from protocols.core.catalog import ModelInfo
from protocols.core.interfaces import (
    ClientAdapter,
    HttpResponse,
    ModelMetadataReader,
    UpstreamAdapter,
)
from protocols.core.restricted import RestrictedAdapter

if TYPE_CHECKING:
    from gateway.auth.jwks import JwksClient
    from gateway.auth.jwt import JwtVerifier


# Worker pools.


def build_pool_arguments(
    name: str, told: schema.PoolConfig, dialect: ClientAdapter, models: Sequence[str]
) -> Mapping[str, Any]:
    """Build the arguments of the pool backend ``name``, without clock and random numbers.

    ``models`` are the workers' names of the models that are routed to it.
    """
    fixed = [_build_worker(one, told) for one in told.workers if one.url is not None]
    settings = _build_pool_settings(told) | {
        "name": name,
        "models": tuple(models),
        "sources": [_build_discovery_source(one, told) for one in told.workers if one.url is None],
    }
    return {
        "workers": fixed,
        "dialect": dialect,
        "settings": settings,
        "upstream": AsyncioHttpClient(ca=told.tls.ca if told.tls else None),
        "readers": {
            one.file: _make_worker_file_reader(one, told)
            for one in told.workers
            if one.file is not None
        },
    }


def restricted(pool: schema.PoolConfig, dialect: ClientAdapter) -> ClientAdapter:
    """Restrict the workers' adapter to the parameters that they support."""
    if not pool.unsupported_parameters:
        return dialect
    adapter = cast("UpstreamAdapter", dialect)
    return cast("ClientAdapter", RestrictedAdapter(adapter, pool.unsupported_parameters))


def _build_pool_settings(told: schema.PoolConfig) -> dict[str, Any]:
    probe = asdict(told.health)
    health = {key: probe.pop(key) for key in ("fall", "rise", "slow_start", "panic_threshold")}
    return {
        "policy": told.policy,
        "timeouts": asdict(told.timeouts or schema.TimeoutsConfig()),
        "retries": asdict(told.retries or schema.RetryConfig()),
        "queue": asdict(told.queue),
        "max_concurrency": told.total_concurrency,
        "health": health | asdict(told.breaker),
        "probe": probe,
    }


def _build_worker(one: schema.WorkerSourceConfig, pool: schema.PoolConfig) -> WorkerConfig:
    return WorkerConfig(one.url or "", **_build_worker_options(one, pool))


def _build_worker_options(
    one: schema.WorkerSourceConfig, pool: schema.PoolConfig
) -> dict[str, Any]:
    return {
        "weight": one.weight,
        "max_concurrency": one.max_concurrency or pool.max_concurrency,
        "bearer": one.auth.bearer.reveal() if one.auth else None,
    }


def _build_discovery_source(
    one: schema.WorkerSourceConfig, pool: schema.PoolConfig
) -> dict[str, Any]:
    if one.file is not None:
        return {"file": one.file}
    asked = {
        "name": one.dns or one.srv,
        "record": "srv" if one.dns is None else "a",
        "refresh_interval": one.refresh_interval,
        "nameserver": one.nameserver,
    }
    return {"dns": asked, "template": {"scheme": one.scheme, **_build_worker_options(one, pool)}}


def _make_worker_file_reader(
    listed: schema.WorkerSourceConfig, pool: schema.PoolConfig
) -> Callable[[bytes], Sequence[WorkerConfig]]:
    """Make the reader of a worker list file.

    Settings beside the file name are defaults for the workers in the file.
    """
    plain = schema.WorkerSourceConfig()

    def read(data: bytes) -> Sequence[WorkerConfig]:
        found = []
        for one in loader.load_worker_list(data, "workers", env={}):
            weight = listed.weight if one.weight == plain.weight else one.weight
            most = one.max_concurrency or listed.max_concurrency
            whole = replace(one, weight=weight, max_concurrency=most, auth=one.auth or listed.auth)
            found.append(_build_worker(whole, pool))
        return found

    return read


def load_symbol(reference: str) -> Any:
    """Import the object named ``module:name``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def build_adapter(name: str, profile: str | None, options: Mapping[str, Any]) -> ClientAdapter:
    """Create the adapter of a protocol and profile."""
    return cast("ClientAdapter", load_symbol(PROTOCOLS[name])(profile, **options))


def build_mount(dialect: schema.ListenerProtocolConfig) -> AdapterMount:
    """Create the adapter of a listener's protocol, with its path prefix."""
    return AdapterMount(
        build_adapter(dialect.name, dialect.profile, dialect.options), dialect.prefix
    )


def build_static_pages(
    mounts: Sequence[AdapterMount], ready: Callable[[], bool], *, keyed: bool
) -> dict[str, Callable[[], HttpResponse]]:
    """The pages that a listener answers itself; the OpenAPI document is built on first use.

    ``ready`` tells whether the gateway accepts requests, i.e. does not drain.
    """
    ok, draining = (
        HttpResponse(200, b'{"status":"ok"}'),
        HttpResponse(503, b'{"status":"draining"}'),
    )

    @functools.cache
    def get_openapi() -> HttpResponse:
        return HttpResponse(200, openapi.build_document(mounts, version=__version__, keyed=keyed))

    return {"/health": lambda: ok if ready() else draining, "/openapi.json": get_openapi}


def build_backend(
    settings: schema.BackendConfig,
    outside: GatewayServices,
    name: str = "",
    models: Sequence[str] = (),
) -> Backend:
    """Create a backend. ``models`` are its names of the models that are routed to it."""
    make = load_symbol(BACKENDS[settings.kind])
    match settings:
        case schema.PoolConfig():
            dialect = build_upstream_adapter(settings)
            told = build_pool_arguments(name, settings, dialect, models)
            backend = make(clock=outside.clock, draw=outside.draw, **told)
        case _:
            arguments = msgspec.to_builtins(settings)
            backend = make(**{key: value for key, value in arguments.items() if key != "kind"})
    return cast("Backend", backend)


def list_backend_models(backend: str, config: schema.Config) -> list[str]:
    """The models that are routed to a backend, by the backend's names."""
    targets = [
        (target.backend, target.model or name)
        for name, model in config.models.items()
        for target in model.resolve_targets().values()
    ]
    named = (model for asked, model in targets if asked == backend and model != CATCH_ALL_MODEL)
    return list(dict.fromkeys(named))


def needs_model_discovery(pool: schema.PoolConfig) -> bool:
    """Whether the pool's protocol reads model metadata from the workers."""
    return issubclass(load_symbol(PROTOCOLS[pool.protocol]), ModelMetadataReader)


def build_upstream_adapter(pool: schema.PoolConfig) -> ClientAdapter:
    """Create the adapter for a pool's workers."""
    options: dict[str, Any] = dict(pool.options)
    if pool.fields is not None:
        options["fields"] = pool.fields
    if pool.chat_template is not None:
        from backends.chat_template import ChatTemplate  # noqa: PLC0415 - jinja2 may not be installed

        options["renderer"] = ChatTemplate(pool.chat_template)
    return restricted(pool, build_adapter(pool.protocol, pool.profile, options))


def build_model(
    name: str,
    model: schema.ModelConfig,
    backends: Mapping[str, Backend],
    defaults: schema.DefaultsConfig,
    created: int,
) -> Model:
    """Build the router's model."""
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
        protocol=model.protocol,
        fallbacks=model.fallback or (),
        sticky=sticky,
        shadow=None if model.shadow is None else build_shadow(name, model.shadow),
    )


def build_shadow(name: str, shadow: schema.ShadowConfig) -> ShadowRule:
    """Build the shadow rule of the model ``name``."""
    return ShadowRule(name, shadow.to, shadow.share, shadow.max_concurrency, shadow.timeout)


def build_rule(rule: schema.RouteConfig) -> RouteRule:
    """Build a route."""
    when = rule.when
    headers = {name.lower(): text for name, text in when.header.items()}
    share = 1.0 if when.share is None else when.share
    compiled = RouteConditions(when.protocol, headers, when.body, when.key, when.tag, share)
    return RouteRule(rule.name, when.model, compiled, rule.to.model, rule.to.version)


def build_principal(key: schema.ApiKeyConfig, aliases: Mapping[str, str]) -> Principal:
    """Build the principal of an API key. ``aliases`` maps aliases to models."""
    models = frozenset(aliases.get(name, name) for name in key.models) if key.models else None
    tags = frozenset(key.tags)
    return Principal(key.name, key.sha256, models, key.protocol, tags, key.explain)


def build_rate_limiter(config: schema.Config, accounts: CounterRegistry) -> RateLimiter | None:
    """Build the rate limiter; None without limits."""
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
    """Create the JWKS client; None without JWT authentication."""
    if config.identity is None:
        return None
    from gateway.auth.jwks import JwksClient  # noqa: PLC0415 - its libraries may not be installed

    return JwksClient(config.identity, clock)


def build_jwt_verifier(
    config: schema.Config, issuer: "JwksClient | None", now: Callable[[], float]
) -> "JwtVerifier | None":
    """Create the JWT verifier; None without JWT authentication."""
    if config.identity is None or issuer is None:
        return None
    from gateway.auth.jwt import JwtPolicy, JwtVerifier  # noqa: PLC0415 - as above

    aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
    return JwtVerifier(JwtPolicy(config.identity, aliases), issuer, now)


def build_timeouts(timeouts: schema.TimeoutsConfig) -> Timeouts:
    """Build the timeouts of requests."""
    return Timeouts(**asdict(timeouts))


def compute_body_budget(limits: schema.ServerLimitsConfig) -> int:
    """Bytes of request bodies that the process may hold: at least one of the largest size."""
    return max(limits.buffered_bodies, limits.body)


def build_connection_limits(limits: schema.ServerLimitsConfig) -> ConnectionLimits:
    """Build the connection limits of a listener."""
    return ConnectionLimits(
        max_header_size=limits.header,
        max_connections=min(limits.connections, compute_max_clients()),
        max_per_address=limits.connections_per_address,
        tls_handshake_timeout=limits.tls_handshake_timeout,
        header_timeout=limits.header_timeout,
        body_timeout=limits.body_timeout,
        body_total_timeout=limits.body_total_timeout,
        min_body_rate=limits.min_body_rate,
        idle_timeout=limits.idle_timeout,
    )
