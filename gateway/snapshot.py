"""Everything that one configuration makes, beside the listeners themselves.

A request meets one snapshot and keeps it to its end: the router, the keys, the limits and the
backends that were there when it began. The next snapshot takes over the backends that stay as they
were, and all that is known of them.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from gateway import config as c
from gateway import files, making
from gateway.auth import Keyring
from gateway.core.errors import GatewayError
from gateway.core.ports import Backend
from gateway.paths import Paths
from gateway.router import Router
from gateway.seam import Request, Sink
from gateway.server import Server, Settings, Surroundings

if TYPE_CHECKING:
    from gateway.identity import Issuer

Serve = Callable[[Request, Sink], Coroutine[Any, Any, None]]


class Likeness(Struct, frozen=True):
    """What a backend is made from. Of two that are alike, the first stays."""

    settings: c.Backend
    asked: frozenset[str]
    """The models that it is asked about, where it minds."""
    digests: tuple[bytes, ...]
    """Of its files."""


class Snapshot:
    """What one configuration makes, of which ``digest`` is the hash.

    ``former`` is the one before it, if there was one.
    """

    def __init__(
        self,
        config: c.Config,
        outside: Surroundings,
        digest: str = "",
        *,
        former: "Snapshot | None" = None,
    ) -> None:
        self.config = config
        self.digest = digest
        self.likenesses = {name: likeness(name, config) for name in config.backends}
        self.backends = self._make_backends(outside, former)
        self.created = self._dates(int(outside.now()), former)
        """When each model came, in Unix seconds."""
        self.router = self._make_router(outside)
        self.limiter = making.make_limiter(config, outside.accounts)
        """What holds the keys to their limits; None where there are none."""
        self.issuer = self._make_issuer(outside, former)
        """Who signs tokens; None where nobody does."""
        self.servers = self._make_servers(outside, digest)

    @property
    def by_address(self) -> Mapping[str, Server]:
        """What serves each listener, by its address; of several at one, with the number behind."""
        return {
            c.listener_name(listener_id): server for listener_id, server in self.servers.items()
        }

    @property
    def running(self) -> int:
        """The exchanges that it has now."""
        return sum(server.running for server in self.servers.values())

    def entrance(self, listener_id: c.ListenerId) -> Serve:
        """What a listener's requests go through."""
        return self.servers[listener_id].serve

    def holds(self, backends: Iterable[Backend]) -> bool:
        """Whether it has one of these."""
        own = {id(one) for one in self.backends.values()}
        return any(id(one) in own for one in backends)

    async def over(self) -> None:
        """Wait for the exchanges that run."""
        while self.running:
            for server in self.servers.values():
                await server.over()

    def end(self, why: GatewayError) -> None:
        """End what still runs, and tell its clients why."""
        for server in self.servers.values():
            for exchange in server.answers.live:
                exchange.stop(why)

    async def aclose(self) -> None:
        """Let go of what is its own."""
        if self.issuer is not None:
            await self.issuer.aclose()

    def _ready(self) -> bool:
        return self.router.ready

    def _make_backends(
        self, outside: Surroundings, former: "Snapshot | None"
    ) -> dict[str, Backend]:
        made = {}
        for name, settings in self.config.backends.items():
            if former is not None and former.likenesses.get(name) == self.likenesses[name]:
                made[name] = former.backends[name]
            else:
                asked = making.asked_of(name, self.config)
                made[name] = making.make_backend(settings, outside, name, asked)
        return made

    def _dates(self, now: int, former: "Snapshot | None") -> Mapping[str, int]:
        known = {} if former is None else former.created
        return {name: known.get(name, now) for name in self.config.models}

    def _make_issuer(self, outside: Surroundings, former: "Snapshot | None") -> "Issuer | None":
        if former is not None and former.config.identity == self.config.identity:
            return former.issuer
        return making.make_issuer(self.config, outside.clock)

    def _make_router(self, outside: Surroundings) -> Router:
        config = self.config
        models = {
            name: making.make_model(name, model, self.backends, config.defaults, self.created[name])
            for name, model in config.models.items()
        }
        rules = [making.make_rule(rule) for rule in config.routes]
        return Router(models, draw=outside.draw, rules=rules)

    def _make_servers(self, outside: Surroundings, digest: str) -> Mapping[c.ListenerId, Server]:
        config = self.config
        aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
        tokens = making.make_tokens(config, self.issuer, outside.now)
        keyring = Keyring([making.make_principal(key, aliases) for key in config.keys], tokens)
        keyed = bool(config.keys or config.identity)
        timeouts = making.make_timeouts(config.defaults.timeouts)
        settings = Settings(config.limits.body, timeouts, config=digest)
        servers = {}
        for listener_id, listener in c.listeners_by_id(config).items():
            mounts = [making.make_mount(one) for one in listener.dialects]
            servers[listener_id] = Server(
                Paths(mounts),
                self.router,
                keyring,
                replace(
                    settings,
                    dialect_header=listener.dialect_header,
                    explain=not keyed and c.is_loopback(listener.address),
                ),
                outside,
                pages=making.make_pages(mounts, self._ready, keyed=keyed),
                limiter=self.limiter,
            )
        return servers


def likeness(name: str, config: c.Config) -> Likeness:
    """What the backend called ``name`` is made from."""
    settings = config.backends[name]
    asked: Sequence[str] = ()
    named: tuple[str | None, ...] = ()
    match settings:
        case c.Pool(template=template, tls=tls):
            named = (template, tls.ca if tls else None)
            asked = making.asked_of(name, config) if making.asks(settings) else ()
        case c.Torch(template=template):
            named = (template,)
        case _:
            pass
    looks = [files.look(path) for path in named if path]
    return Likeness(settings, frozenset(asked), tuple(one.digest for one in looks if one))
