"""The runtime objects of one configuration, without the listeners.

A request uses one snapshot until it ends: router, keys, limits and backends. The next snapshot
reuses unchanged backends with their state.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import Backend
from backends.model_memory import ModelMemory
from backends.pool.settings import PoolSettings
from backends.torch.settings import TorchSettings
from gateway.auth.api_keys import Authenticator
from gateway.config import file_watch, listeners, schema
from gateway.config.validate_listeners import is_loopback
from gateway.http_server.connection import HandleRequest
from gateway.http_server.cors import CorsHandler, CorsPolicy
from gateway.http_server.forwarded import ForwardedHandler
from gateway.http_server.overload import TrustedProxies
from gateway.http_server.turn_slices import iterate_in_turns
from gateway.http_server.web_pages import WebPageGuard
from gateway.observability.recording_writer import RecordingPolicy
from gateway.pipeline.feedback import FEEDBACK_PATH
from gateway.pipeline.handler import RequestHandler
from gateway.pipeline.services import GatewayServices, HandlerSettings
from gateway.routing.failed_models import list_failed_models, list_loading_models
from gateway.routing.paths import PathRouter
from gateway.routing.router import Router
from gateway.routing.rules import compile_rule
from gateway.runtime import build
from protocols.core.errors import GatewayError
from protocols.core.json_counts import BodyCounts

if TYPE_CHECKING:
    from gateway.auth.jwks import JwksClient


class BackendFingerprint(Struct, frozen=True):
    """What a backend is built from. A backend with an equal fingerprint is reused."""

    settings: schema.BackendConfig
    discovered_models: frozenset[str]
    """The models that it is asked to describe, if its protocol needs that."""
    file_digests: tuple[bytes, ...]
    """Digests of the files that its settings name."""


class ConfigSnapshot:
    """The runtime objects of a configuration with the hash ``config_hash``.

    ``previous`` is the snapshot before it, whose unchanged backends are reused.
    """

    def __init__(
        self,
        config: schema.Config,
        services: GatewayServices,
        config_hash: str = "",
        *,
        previous: "ConfigSnapshot | None" = None,
    ) -> None:
        self.config = config
        self.config_hash = config_hash
        models = build.list_backend_models(config)
        self.fingerprints = {
            name: fingerprint_backend(settings, models[name])
            for name, settings in config.backends.items()
        }
        self.retry_counters: WeakValueDictionary[frozenset[str], Any] = (
            WeakValueDictionary() if previous is None else previous.retry_counters
        )
        """See ``backends.pool.settings.PoolContext``. They outlive a configuration."""
        self.model_memory: ModelMemory = (
            ModelMemory() if previous is None else previous.model_memory
        )
        """The memory of local models that are loaded on demand. It outlives a configuration."""
        self.model_memory.limit = config.limits.model_memory
        self.backends = self._build_backends(services, previous, models)
        self.model_created = self._build_created_times(int(services.wall_clock()), previous)
        """When each model was added, in Unix seconds."""
        self.router = self._build_router(services)
        self.rate_limiter = build.build_rate_limiter(config, services.counter_registry)
        """The rate limiter; None without limits."""
        self.jwks_client = self._build_jwks_client(services, previous)
        """The JWKS client; None without JWT authentication."""
        self.handlers = self._build_handlers(services, config_hash)

    @property
    def handlers_by_address(self) -> Mapping[str, RequestHandler]:
        """The request handlers by listener name."""
        return {
            listeners.listener_name(listener_id): server
            for listener_id, server in self.handlers.items()
        }

    @property
    def running_count(self) -> int:
        """The number of running requests."""
        return sum(server.running_count for server in self.handlers.values())

    def get_handler(self, listener_id: listeners.ListenerId) -> HandleRequest:
        """The handler of a listener's requests."""
        handle: HandleRequest = self.handlers[listener_id].handle
        config = listeners.listeners_by_id(self.config)[listener_id]
        if config.trusted_proxies:
            trusted = TrustedProxies(config.trusted_proxies)
            handle = ForwardedHandler(handle, trusted, config.forwarded_header).handle
        policy = None if config.cors is None else CorsPolicy(config.cors)
        if not (self.config.keys or self.config.identity):
            hosts = config.allowed_hosts if is_loopback(config.address) else None
            handle = WebPageGuard(handle, policy, hosts).handle
        return handle if policy is None else CorsHandler(handle, policy).handle

    def has_any_backend(self, backends: Iterable[Backend]) -> bool:
        """Whether the snapshot uses one of these backends."""
        own_ids = {id(backend) for backend in self.backends.values()}
        return any(id(backend) in own_ids for backend in backends)

    async def wait_idle(self) -> None:
        """Wait until no request runs."""
        while self.running_count:
            for server in self.handlers.values():
                await server.wait_idle()

    async def stop_requests(self, error: GatewayError) -> None:
        """Stop all running requests with this error."""
        for server in self.handlers.values():
            async for request in iterate_in_turns(server.dispatcher.running_requests):
                request.stop(error)

    async def aclose(self) -> None:
        """Close the JWKS client."""
        if self.jwks_client is not None:
            await self.jwks_client.aclose()

    def _build_health_sources(self) -> build.HealthSources:
        config, backends = self.config, self.backends
        return build.HealthSources(
            lambda: self.router.ready,
            lambda: list_failed_models(config, backends),
            lambda: list_loading_models(config, backends),
            len(config.models),
            strict=config.health == "strict",
        )

    def _build_backends(
        self,
        services: GatewayServices,
        previous: "ConfigSnapshot | None",
        models: Mapping[str, Sequence[str]],
    ) -> dict[str, Backend]:
        backends = {}
        for name, settings in self.config.backends.items():
            if previous is not None and previous.fingerprints.get(name) == self.fingerprints[name]:
                backends[name] = previous.backends[name]
            else:
                backends[name] = build.build_backend(
                    settings,
                    services,
                    name,
                    models[name],
                    retry_counters=self.retry_counters,
                    model_memory=self.model_memory,
                )
        return backends

    def _build_created_times(
        self, now: int, previous: "ConfigSnapshot | None"
    ) -> Mapping[str, int]:
        created = {} if previous is None else previous.model_created
        return {name: created.get(name, now) for name in self.config.models}

    def _build_jwks_client(
        self, services: GatewayServices, previous: "ConfigSnapshot | None"
    ) -> "JwksClient | None":
        if previous is not None and previous.config.identity == self.config.identity:
            return previous.jwks_client
        return build.build_jwks_client(self.config, services.clock)

    def _build_router(self, services: GatewayServices) -> Router:
        config = self.config

        def create_policy(record: schema.RecordConfig | None) -> RecordingPolicy | None:
            recorder = services.request_recorder
            return None if record is None or recorder is None else recorder.create_policy(record)

        default_policy = create_policy(config.defaults.record)
        tasks = schema.map_model_tasks(config.models, config.backends)
        models = {
            name: build.build_model(
                name,
                model,
                self.backends,
                config.defaults,
                self.model_created[name],
                task=tasks[name],
                recording=create_policy(model.record) or default_policy,
            )
            for name, model in config.models.items()
        }
        rules = [compile_rule(rule, create_policy(rule.record)) for rule in config.routes]
        strict = config.health == "strict"
        return Router(models, draw=services.draw, rules=rules, strict_health=strict)

    def _build_handlers(
        self, services: GatewayServices, config_hash: str
    ) -> Mapping[listeners.ListenerId, RequestHandler]:
        config = self.config
        tokens = build.build_jwt_verifier(config, self.jwks_client, services.wall_clock)
        keyring = Authenticator(build.build_principals(config), tokens)
        keyed = bool(config.keys or config.identity)
        settings = HandlerSettings(
            config.limits.body,
            BodyCounts(config.limits.body_objects, config.limits.body_values),
            config.defaults.timeouts,
            config_hash=config_hash,
        )
        handlers = {}
        for listener_id, listener in listeners.listeners_by_id(config).items():
            mounts = [build.build_mount(protocol) for protocol in listener.protocols]
            handlers[listener_id] = RequestHandler(
                PathRouter(mounts),
                self.router,
                keyring,
                replace(
                    settings,
                    allow_protocol_header=listener.protocol_header,
                    default_model=listener.default_model or "",
                    explain_without_key=not keyed and is_loopback(listener.address),
                ),
                services,
                pages=build.build_static_pages(
                    mounts,
                    self._build_health_sources(),
                    keyed=keyed,
                    feedback=FEEDBACK_PATH in services.own_endpoints,
                    admin_url=_get_admin_url(config, listener, keyed=keyed),
                ),
                limiter=self.rate_limiter,
            )
        return handlers


def _get_admin_url(
    config: schema.Config, listener: schema.ListenerConfig, *, keyed: bool
) -> str | None:
    """The web UI's address, for a listener that only this machine reaches: others need not know."""
    admin = config.admin
    if admin is None or keyed or not is_loopback(listener.address):
        return None
    return None if admin.address.endswith(":0") else f"http://{admin.address}/-/ui/"


def fingerprint_backend(
    settings: schema.BackendConfig, routed_models: Sequence[str]
) -> BackendFingerprint:
    """The fingerprint of a backend, to which these models are routed."""
    models: Sequence[str] = ()
    named: tuple[str | None, ...] = ()
    match settings:
        case PoolSettings(chat_template=template, tls=tls):
            named = (template, tls.ca if tls else None)
            models = routed_models if build.needs_model_discovery(settings) else ()
        case TorchSettings(chat_template=template):
            named = (template,)
        case _:
            pass
    states = [file_watch.read_file_state(path) for path in named if path]
    return BackendFingerprint(
        settings, frozenset(models), tuple(state.digest for state in states if state)
    )
