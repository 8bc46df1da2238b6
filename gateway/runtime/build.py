"""Builds runtime objects from configuration sections."""

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from backends import BACKENDS
from backends.interfaces import Backend, ComputesChoices
from backends.pool.settings import PoolContext, PoolSettings, WorkerSourceSettings
from gateway import __version__
from gateway.auth.api_keys import Principal
from gateway.config import loader, schema
from gateway.config.registry import load_symbol
from gateway.http_server import openapi
from gateway.observability.recording_writer import RecordingPolicy
from gateway.pipeline.services import GatewayServices
from gateway.ratelimit.limiter import (
    ANONYMOUS_KEY,
    CounterRegistry,
    RateLimiter,
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
from gateway.runtime.process import compute_max_clients
from gateway.store.response_store import MemoryResponseStore, ResponseStore, get_store_limits
from protocols import PROTOCOLS
from protocols.core.catalog import ModelInfo
from protocols.core.interfaces import (
    ClientAdapter,
    HttpResponse,
    ModelMetadataReader,
    SupportsKeepAlive,
    UpstreamAdapter,
)
from protocols.core.restricted import RestrictedAdapter

if TYPE_CHECKING:
    from gateway.auth.jwks import JwksClient
    from gateway.auth.jwt import JwtVerifier


def build_adapter(name: str, profile: str | None, options: Mapping[str, Any]) -> ClientAdapter:
    """Create the adapter of a protocol and profile."""
    return cast("ClientAdapter", load_symbol(PROTOCOLS[name])(profile, **options))


def build_mount(protocol: schema.ListenerProtocolConfig) -> AdapterMount:
    """Create the adapter of a listener's protocol, with its path prefix."""
    adapter = build_adapter(protocol.name, protocol.profile, protocol.options)
    if protocol.keep_alive and isinstance(adapter, SupportsKeepAlive):
        adapter.keep_connections()
    return AdapterMount(adapter, protocol.prefix)


def build_static_pages(
    mounts: Sequence[AdapterMount],
    ready: Callable[[], bool],
    *,
    keyed: bool,
    feedback: bool = False,
) -> dict[str, Callable[[], HttpResponse]]:
    """The pages that a listener answers itself; documents are built on first use.

    ``ready`` tells whether the gateway accepts requests, i.e. does not drain.
    """
    ok, draining = (
        HttpResponse(200, b'{"status":"ok"}'),
        HttpResponse(503, b'{"status":"draining"}'),
    )

    alive = HttpResponse(200, b'"I\'m alive!"')  # LiteLLM's, as are the paths below /health

    @functools.cache
    def get_openapi() -> HttpResponse:
        document = openapi.build_document(
            mounts, version=__version__, keyed=keyed, feedback=feedback
        )
        return HttpResponse(200, document)

    @functools.cache
    def get_overview() -> HttpResponse:
        return HttpResponse(200, _encode_overview(mounts, keyed=keyed))

    return {
        "/": get_overview,
        "/health": lambda: ok if ready() else draining,
        "/health/readiness": lambda: ok if ready() else draining,
        "/health/liveliness": lambda: alive,
        "/health/liveness": lambda: alive,
        "/openapi.json": get_openapi,
    }


def _encode_overview(mounts: Sequence[AdapterMount], *, keyed: bool) -> bytes:
    """What a listener serves, for somebody who opens its root: the endpoints of each protocol."""
    endpoints: dict[str, list[str]] = {}
    for mount in mounts:
        endpoints.setdefault(mount.adapter.name, []).extend(
            f"{endpoint.method} {mount.prefix}{endpoint.path}"
            for endpoint in mount.adapter.endpoints
        )
    overview = {
        "name": "Interlingua",
        "version": __version__,
        "api_key_required": keyed,
        "openapi": "/openapi.json",
        "health": "/health",
        "endpoints": endpoints,
    }
    return msgspec.json.format(msgspec.json.encode(overview), indent=2)


def build_backend(
    settings: schema.BackendConfig,
    services: GatewayServices,
    name: str = "",
    models: Sequence[str] = (),
    retry_counters: MutableMapping[frozenset[str], Any] | None = None,
) -> Backend:
    """Create a backend. ``models`` are its names of the models that are routed to it.

    ``retry_counters`` are those of all pools.
    """
    backend_class = load_symbol(BACKENDS[settings.kind])
    if isinstance(settings, PoolSettings):
        backend = backend_class(
            settings,
            adapter=build_upstream_adapter(settings),
            clock=services.clock,
            draw=services.draw,
            context=PoolContext(name, models, parse_worker_list, retry_counters),
        )
    else:
        arguments = msgspec.to_builtins(settings)
        del arguments["kind"]
        backend = backend_class(**arguments)
    return cast("Backend", backend)


def parse_worker_list(content: bytes) -> Sequence[WorkerSourceSettings]:
    """Parse a file that lists workers. Raises ConfigError."""
    return loader.load_worker_list(content, "workers", env={})


def list_backend_models(config: schema.Config) -> Mapping[str, Sequence[str]]:
    """The models that are routed to each backend, by the backend's names."""
    models: dict[str, dict[str, None]] = {name: {} for name in config.backends}
    for name, model in config.models.items():
        for target in model.resolve_targets().values():
            model_name = target.model or name
            if not model_name.endswith(CATCH_ALL_MODEL):
                models[target.backend][model_name] = None
    return {backend: list(names) for backend, names in models.items()}


def needs_model_discovery(pool: PoolSettings) -> bool:
    """Whether the pool's protocol reads model metadata from the workers."""
    return issubclass(load_symbol(PROTOCOLS[pool.protocol]), ModelMetadataReader)


def build_upstream_adapter(pool: PoolSettings) -> ClientAdapter:
    """Create the adapter for a pool's workers."""
    options: dict[str, Any] = dict(pool.options)
    if pool.fields is not None:
        options["fields"] = pool.fields
    if pool.chat_template is not None:
        from backends.chat_template import ChatTemplate  # noqa: PLC0415 - importing Jinja takes time

        options["renderer"] = ChatTemplate(pool.chat_template)
    adapter = build_adapter(pool.protocol, pool.profile, options)
    if not pool.unsupported_parameters:
        return adapter
    restricted = RestrictedAdapter(cast("UpstreamAdapter", adapter), pool.unsupported_parameters)
    return cast("ClientAdapter", restricted)


def build_model(
    name: str,
    model: schema.ModelConfig,
    backends: Mapping[str, Backend],
    defaults: schema.DefaultsConfig,
    created: int,
    *,
    recording: RecordingPolicy | None = None,
) -> Model:
    """Build the router's model."""
    targets = {
        version: Target(
            version,
            target.model or name,
            backend := backends[target.backend],
            target.backend,
            computes_choices=isinstance(backend, ComputesChoices),
        )
        for version, target in model.resolve_targets().items()
    }
    info = ModelInfo(
        name=name,
        versions=(),
        task=model.task,
        aliases=model.aliases,
        created=created,
        context_length=model.limits.context,
        max_tokens=model.limits.max_tokens,
        protocol_options=model.options,
        list_aliases=model.list_aliases,
    )
    request_defaults = RequestDefaults.compile(model.defaults)
    on_loss = model.on_loss or defaults.on_loss
    salt, sticky = (model.split.name or "", model.split.sticky or ()) if model.split else ("", ())
    compiled = compile_model(
        info, targets, model.resolve_weights(), on_loss, request_defaults, salt=salt
    )
    return replace(
        compiled,
        timeouts=model.timeouts,
        unsupported_content=model.unsupported_content or defaults.unsupported_content,
        protocol=model.protocol,
        fallbacks=model.fallback or (),
        fallback_requires_access=model.fallback_requires_access,
        sticky=sticky,
        shadow=None if model.shadow is None else ShadowRule(name, model.shadow),
        recording=recording,
    )


def build_principals(config: schema.Config) -> Sequence[Principal]:
    """Build the principals of the API keys. Keys with the same models share one set."""
    names = schema.map_model_names(config.models)

    @functools.cache
    def resolve_models(models: tuple[str, ...]) -> frozenset[str]:
        return frozenset(names.get(name, name) for name in models)

    return [
        Principal(
            name=key.name,
            sha256=key.sha256,
            models=resolve_models(key.models) if key.models else None,
            protocol=key.protocol,
            tags=frozenset(key.tags),
            explain=key.explain,
            feedback=key.feedback or key.feedback_on_all_keys,
            feedback_on_all_keys=key.feedback_on_all_keys,
        )
        for key in config.keys
    ]


def build_rate_limiter(config: schema.Config, registry: CounterRegistry) -> RateLimiter | None:
    """Build the rate limiter; None without limits."""
    names = schema.map_model_names(config.models)
    default = _resolve_limited_models(config.defaults.limits, names)
    by_key = {
        key.name: _resolve_limited_models(key.limits, names) or default for key in config.keys
    }
    by_key = by_key or {ANONYMOUS_KEY: default}
    limits = {key: limits for key, limits in by_key.items() if limits is not None}
    return RateLimiter(limits, registry, default) if limits else None


def _resolve_limited_models(
    limits: schema.KeyRateLimitConfig | None, names: Mapping[str, str]
) -> schema.KeyRateLimitConfig | None:
    if limits is None or limits.models is None:
        return limits
    models = {names.get(name, name): one for name, one in limits.models.items()}
    return replace(limits, models=models)


def build_jwks_client(config: schema.Config, clock: Callable[[], float]) -> "JwksClient | None":
    """Create the JWKS client; None without JWT authentication."""
    if config.identity is None:
        return None
    from gateway.auth.jwks import JwksClient  # noqa: PLC0415 - its libraries may not be installed

    return JwksClient(config.identity, clock)


def build_jwt_verifier(
    config: schema.Config, issuer: "JwksClient | None", wall_clock: Callable[[], float]
) -> "JwtVerifier | None":
    """Create the JWT verifier; None without JWT authentication."""
    if config.identity is None or issuer is None:
        return None
    from gateway.auth.jwt import JwtVerifier  # noqa: PLC0415 - as above

    names = schema.map_model_names(config.models)
    return JwtVerifier(config.identity, names, issuer, wall_clock)


def build_response_store(
    config: schema.ResponseStoreConfig, wall_clock: Callable[[], float]
) -> ResponseStore | None:
    """Build the configured store; None if nothing is stored."""
    if not config.enabled:
        return None
    limits = get_store_limits(config)
    if config.sqlite is not None:
        from gateway.store.sqlite_store import SqliteResponseStore  # noqa: PLC0415 - nobody else needs its library

        return SqliteResponseStore(config.sqlite, limits, wall_clock)
    if config.redis is not None:
        from gateway.store.redis_store import RedisResponseStore  # noqa: PLC0415 - redis may not be installed

        return RedisResponseStore(config, limits, wall_clock)
    return MemoryResponseStore(limits, wall_clock)


def compute_body_budget(limits: schema.ServerLimitsConfig) -> int:
    """Bytes of request bodies that the process may hold.

    At least one of the largest size that is forwarded: it is held as it came, and as it is sent.
    """
    return max(limits.buffered_bodies, 2 * limits.body)


def cap_connections(limits: schema.ServerLimitsConfig) -> schema.ServerLimitsConfig:
    """The limits with no more connections than the process has open files for."""
    return replace(limits, connections=min(limits.connections, compute_max_clients()))
