"""Everything that one configuration makes, beside the listeners themselves.

A request meets one snapshot and keeps it to its end: the router, the keys, the limits and the
backends that were there when it began. The next snapshot takes over the backends that stay as they
were, and all that is known of them.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import Backend
from gateway.auth.api_keys import Authenticator
from gateway.config import file_watch, listeners, schema, validate
from gateway.pipeline.handler import GatewayServices, HandlerSettings, RequestHandler
from gateway.pipeline.http import HttpRequest, ResponseWriter
from gateway.routing.paths import PathRouter
from gateway.routing.router import Router
from gateway.runtime import build
from protocols.core.errors import GatewayError

if TYPE_CHECKING:
    from gateway.auth.jwks import JwksClient


HandleRequest = Callable[[HttpRequest, ResponseWriter], Coroutine[Any, Any, None]]


class BackendFingerprint(Struct, frozen=True):
    """What a backend is made from. Of two that are alike, the first stays."""

    settings: schema.BackendConfig
    discovered_models: frozenset[str]
    """The models that it is asked about, where it minds."""
    file_digests: tuple[bytes, ...]
    """Of its files."""


class ConfigSnapshot:
    """What one configuration makes, of which ``digest`` is the hash.

    ``former`` is the one before it, if there was one.
    """

    def __init__(
        self,
        config: schema.Config,
        outside: GatewayServices,
        digest: str = "",
        *,
        former: "ConfigSnapshot | None" = None,
    ) -> None:
        self.config = config
        self.config_hash = digest
        self.fingerprints = {name: fingerprint_backend(name, config) for name in config.backends}
        self.backends = self._build_backends(outside, former)
        self.model_created = self._build_created_times(int(outside.wall_clock()), former)
        """When each model came, in Unix seconds."""
        self.router = self._build_router(outside)
        self.rate_limiter = build.build_rate_limiter(config, outside.counter_registry)
        """What holds the keys to their limits; None where there are none."""
        self.jwks_client = self._build_jwks_client(outside, former)
        """Who signs tokens; None where nobody does."""
        self.handlers = self._build_handlers(outside, digest)

    @property
    def handlers_by_address(self) -> Mapping[str, RequestHandler]:
        """What serves each listener, by its address; of several at one, with the number behind."""
        return {
            listeners.listener_name(listener_id): server
            for listener_id, server in self.handlers.items()
        }

    @property
    def running_count(self) -> int:
        """The exchanges that it has now."""
        return sum(server.running_count for server in self.handlers.values())

    def get_handler(self, listener_id: listeners.ListenerId) -> HandleRequest:
        """What a listener's requests go through."""
        return self.handlers[listener_id].handle

    def has_any_backend(self, backends: Iterable[Backend]) -> bool:
        """Whether it has one of these."""
        own = {id(one) for one in self.backends.values()}
        return any(id(one) in own for one in backends)

    async def wait_idle(self) -> None:
        """Wait for the exchanges that run."""
        while self.running_count:
            for server in self.handlers.values():
                await server.wait_idle()

    def stop_requests(self, why: GatewayError) -> None:
        """End what still runs, and tell its clients why."""
        for server in self.handlers.values():
            for exchange in server.dispatcher.running_requests:
                exchange.stop(why)

    async def aclose(self) -> None:
        """Let go of what is its own."""
        if self.jwks_client is not None:
            await self.jwks_client.aclose()

    def _is_ready(self) -> bool:
        return self.router.ready

    def _build_backends(
        self, outside: GatewayServices, former: "ConfigSnapshot | None"
    ) -> dict[str, Backend]:
        made = {}
        for name, settings in self.config.backends.items():
            if former is not None and former.fingerprints.get(name) == self.fingerprints[name]:
                made[name] = former.backends[name]
            else:
                asked = build.list_backend_models(name, self.config)
                made[name] = build.build_backend(settings, outside, name, asked)
        return made

    def _build_created_times(self, now: int, former: "ConfigSnapshot | None") -> Mapping[str, int]:
        known = {} if former is None else former.model_created
        return {name: known.get(name, now) for name in self.config.models}

    def _build_jwks_client(
        self, outside: GatewayServices, former: "ConfigSnapshot | None"
    ) -> "JwksClient | None":
        if former is not None and former.config.identity == self.config.identity:
            return former.jwks_client
        return build.build_jwks_client(self.config, outside.clock)

    def _build_router(self, outside: GatewayServices) -> Router:
        config = self.config
        models = {
            name: build.build_model(
                name, model, self.backends, config.defaults, self.model_created[name]
            )
            for name, model in config.models.items()
        }
        rules = [build.build_rule(rule) for rule in config.routes]
        return Router(models, draw=outside.draw, rules=rules)

    def _build_handlers(
        self, outside: GatewayServices, digest: str
    ) -> Mapping[listeners.ListenerId, RequestHandler]:
        config = self.config
        aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
        tokens = build.build_jwt_verifier(config, self.jwks_client, outside.wall_clock)
        keyring = Authenticator(
            [build.build_principal(key, aliases) for key in config.keys], tokens
        )
        keyed = bool(config.keys or config.identity)
        timeouts = build.build_timeouts(config.defaults.timeouts)
        settings = HandlerSettings(config.limits.body, timeouts, config_hash=digest)
        servers = {}
        for listener_id, listener in listeners.listeners_by_id(config).items():
            mounts = [build.build_mount(one) for one in listener.protocols]
            servers[listener_id] = RequestHandler(
                PathRouter(mounts),
                self.router,
                keyring,
                replace(
                    settings,
                    allow_protocol_header=listener.protocol_header,
                    explain_without_key=not keyed and validate.is_loopback(listener.address),
                ),
                outside,
                pages=build.build_static_pages(mounts, self._is_ready, keyed=keyed),
                limiter=self.rate_limiter,
            )
        return servers


def fingerprint_backend(name: str, config: schema.Config) -> BackendFingerprint:
    """What the backend called ``name`` is made from."""
    settings = config.backends[name]
    asked: Sequence[str] = ()
    named: tuple[str | None, ...] = ()
    match settings:
        case schema.PoolConfig(chat_template=template, tls=tls):
            named = (template, tls.ca if tls else None)
            asked = (
                build.list_backend_models(name, config)
                if build.needs_model_discovery(settings)
                else ()
            )
        case schema.TorchConfig(chat_template=template):
            named = (template,)
        case _:
            pass
    looks = [file_watch.read_file_state(path) for path in named if path]
    return BackendFingerprint(settings, frozenset(asked), tuple(one.digest for one in looks if one))
