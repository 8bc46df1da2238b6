"""Builds runtime objects from configuration sections."""

import functools
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends import BACKENDS
from backends.interfaces import Backend, ComputesChoices
from backends.model_memory import ModelMemory
from backends.pool.settings import PoolContext, PoolSettings, WorkerSourceSettings
from backends.torch.settings import TorchSettings
from gateway import __version__
from gateway.auth.api_keys import Principal
from gateway.config import loader, schema
from gateway.config.registry import ProtocolRegistry, load_symbol
from gateway.http_server import openapi
from gateway.http_server.overview import build_overview
from gateway.observability.recording_writer import RecordingPolicy
from gateway.pipeline.http import HttpRequest
from gateway.pipeline.services import GatewayServices
from gateway.ratelimit.counters import CounterRegistry
from gateway.ratelimit.limiter import ANONYMOUS_KEY, RateLimiter
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
from protocols.core.catalog import ModelInfo, ModelTask
from protocols.core.interfaces import (
    ClientAdapter,
    HttpResponse,
    ModelMetadataReader,
    SupportsKeepAlive,
    UpstreamAdapter,
    UpstreamRequest,
)
from protocols.core.restricted import RestrictedAdapter

if TYPE_CHECKING:
    from gateway.auth.jwks import JwksClient
    from gateway.auth.jwt import JwtVerifier


def build_adapter(name: str, profile: str | None, options: Mapping[str, Any]) -> ClientAdapter:
    """Create the adapter of a protocol and profile."""
    return cast("ClientAdapter", load_symbol(PROTOCOLS[name])(profile, **options))


def build_health_requests() -> Mapping[str, UpstreamRequest]:
    """The health request of each protocol that workers may speak, by the protocol's name."""
    registry = ProtocolRegistry(PROTOCOLS)
    return {
        name: cast("UpstreamAdapter", build_adapter(name, None, {})).health_request
        for name in registry.names
        if registry.serves_workers(name)
    }


def build_mount(protocol: schema.ListenerProtocolConfig) -> AdapterMount:
    """Create the adapter of a listener's protocol, with its path prefix."""
    adapter = build_adapter(protocol.name, protocol.profile, protocol.options)
    if protocol.keep_alive and isinstance(adapter, SupportsKeepAlive):
        adapter.keep_connections()
    return AdapterMount(adapter, protocol.prefix)


_ADMIN_PATHS: Final = (
    "/metrics", "/-/ui", "/-/ui/", "/-/live", "/-/ready", "/-/status", "/-/requests", "/-/workers",
)  # fmt: skip
"""Paths that are asked for at the wrong port."""
_RETRY_LATER: Final = (("Retry-After", "5"),)


class HealthSources(Struct, frozen=True):
    """What the health checks of listeners report."""

    is_ready: Callable[[], bool]
    """Whether the gateway accepts requests, i.e. does not drain."""
    failed_models: Callable[[], Collection[str]] = tuple
    """The models that can't be loaded."""
    loading_models: Callable[[], Mapping[str, str]] = dict
    """How far each model is that is not loaded yet."""
    model_count: int = 0
    strict: bool = False
    """Whether one failed or unloaded model is enough to be unhealthy."""

    def get_status(self, failed: Collection[str], loading: Collection[str]) -> str:
        """``ok`` if requests are answered, else why not."""
        if not self.is_ready():
            return "draining"
        if self.strict and failed:
            return "failed"
        if loading and (self.strict or len(loading) == self.model_count):
            return "loading"
        return "ok"


def build_static_pages(
    mounts: Sequence[AdapterMount],
    health: HealthSources,
    *,
    keyed: bool,
    feedback: bool = False,
    admin_url: str | None = None,
) -> dict[str, Callable[[HttpRequest], HttpResponse]]:
    """The pages that a listener answers itself; documents are built on first use.

    The names of models that failed or are being loaded are shown where clients need no key.
    """
    place = "the setting admin says where" if admin_url is None else f"it is at {admin_url}"
    wrong_port = HttpResponse(
        404,
        msgspec.json.encode(
            {"error": {"message": f"this path is the admin listener's; {place}", "code": 404}}
        ),
    )

    alive = HttpResponse(200, b'"I\'m alive!"')  # LiteLLM's, as are the paths below /health

    def get_health(_: HttpRequest) -> HttpResponse:
        failed, loading = health.failed_models(), health.loading_models()
        status = health.get_status(failed, loading)
        names: dict[str, object] = {"failed_models": failed, "loading_models": loading}
        shown = {} if keyed else {name: models for name, models in names.items() if models}
        return HttpResponse(
            200 if status == "ok" else 503,
            msgspec.json.encode({"status": status} | shown),
            _RETRY_LATER if status == "loading" else (),
        )

    @functools.cache
    def get_openapi() -> HttpResponse:
        document = openapi.build_document(
            mounts, version=__version__, keyed=keyed, feedback=feedback
        )
        return HttpResponse(200, document)

    return {
        "/": build_overview(mounts, keyed=keyed, admin_url=admin_url),
        "/health": get_health,
        "/health/readiness": get_health,
        "/health/liveliness": lambda _: alive,
        "/health/liveness": lambda _: alive,
        "/openapi.json": lambda _: get_openapi(),
        **dict.fromkeys(_ADMIN_PATHS, lambda _: wrong_port),
    }


def build_backend(
    settings: schema.BackendConfig,
    services: GatewayServices,
    name: str = "",
    models: Sequence[str] = (),
    *,
    retry_counters: MutableMapping[frozenset[str], Any] | None = None,
    model_memory: ModelMemory | None = None,
) -> Backend:
    """Create a backend. ``models`` are its names of the models that are routed to it.

    ``retry_counters`` are those of all pools; all local models share ``model_memory``.
    """
    backend_class = load_symbol(BACKENDS[settings.kind])
    if isinstance(settings, PoolSettings):
        backend = backend_class(
            settings,
            adapter=build_upstream_adapter(settings),
            clock=services.clock,
            draw=services.draw,
            context=PoolContext(
                name, models, parse_worker_list, retry_counters, build_health_requests
            ),
        )
    else:
        arguments = msgspec.to_builtins(settings)
        del arguments["kind"]
        if isinstance(settings, TorchSettings):
            arguments["memory"] = model_memory
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


def _build_shadow(name: str, model: schema.ModelConfig, shadow: schema.ShadowConfig) -> ShadowRule:
    is_evidence = model.rollout is not None and model.rollout.start_with == "shadow"
    return ShadowRule(name, shadow, model.get_split_name(name) if is_evidence else "")


def build_model(
    name: str,
    model: schema.ModelConfig,
    backends: Mapping[str, Backend],
    defaults: schema.DefaultsConfig,
    created: int,
    *,
    task: ModelTask,
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
        task=task,
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
        settings=compiled.settings
        if defaults.stream_usage
        else replace(compiled.settings, stream_usage=False),
        timeouts=model.timeouts,
        unsupported_content=model.unsupported_content or defaults.unsupported_content,
        protocol=model.protocol,
        fallbacks=model.fallback or (),
        fallback_requires_access=model.fallback_requires_access,
        sticky=sticky,
        shadow=None if model.shadow is None else _build_shadow(name, model, model.shadow),
        judge=model.judge,
        recording=recording,
        is_measured=model.rollout is not None
        and bool(model.rollout.guardrails.compare.list_limits()),
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


def compute_memory_limit(limits: schema.ServerLimitsConfig) -> int:
    """Bytes that the process may hold for its clients.

    At least one body of the largest size, four times: compressed, as read, decoded, and as sent.
    """
    return max(limits.memory, 4 * limits.body)


def cap_connections(limits: schema.ServerLimitsConfig) -> schema.ServerLimitsConfig:
    """The limits with no more connections than the process has open files for."""
    return replace(limits, connections=min(limits.connections, compute_max_clients()))
