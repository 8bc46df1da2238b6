"""The one place where the parts meet. Everything is passed in; nothing is global."""

import asyncio
import functools
import importlib
import itertools
import os
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import asdict, replace

from backends import KINDS
from gateway import __version__, openapi
from gateway import config as c
from gateway.admin import Admin, WorkerSet, obstacle
from gateway.auth import Keyring, Principal
from gateway.core.catalog import ModelInfo
from gateway.core.context import Timeouts
from gateway.core.ports import Backend, Dialect, Reply
from gateway.crew import crew, spared
from gateway.front.reference import Front
from gateway.paths import Mount, Paths
from gateway.router import ANY, Defaults, Model, Router, Target, compile_model
from gateway.rules import Rule, When
from gateway.server import Server, Settings, Surroundings
from gateway.telemetry import log_line
from protocols import DIALECTS


def surroundings() -> Surroundings:
    """The real clock, time and luck, ids that are this process's own, and a log line."""
    start = os.urandom(8).hex()
    numbers = itertools.count()
    return Surroundings(
        clock=time.monotonic,
        now=time.time,  # noqa: TID251 - here it is passed in
        new_id=lambda: f"{start}{next(numbers):08x}",
        draw=random.random,  # noqa: TID251 - as above
        observe=log_line,
    )


def counted(
    outside: Surroundings, backends: Callable[[], Mapping[str, Backend]]
) -> tuple[Surroundings, Callable[[], bytes]]:
    """The surroundings in which each exchange is counted, and the page that tells the counts."""
    from gateway.metrics import Crew, Metrics  # noqa: PLC0415 - nobody else needs its library

    def crews() -> Mapping[str, Crew]:
        return {name: one for name, one in backends().items() if isinstance(one, Crew)}

    metrics = Metrics(outside.observe, crews)
    return replace(outside, observe=metrics.observe), metrics.page


class App:
    """A running gateway: listeners, router and backends made from one configuration."""

    def __init__(self, config: c.Config, outside: Surroundings) -> None:
        self._config = config
        page: Callable[[], bytes] = bytes
        if config.admin is not None:
            outside, page = counted(outside, lambda: self.backends)
        self.backends = {
            name: make_backend(settings, outside, name, asked_of(name, config))
            for name, settings in config.backends.items()
        }
        created = int(outside.now())
        models = {
            name: make_model(name, model, self.backends, config.defaults, created)
            for name, model in config.models.items()
        }
        rules = [make_rule(rule) for rule in config.routes]
        self.router = Router(models, draw=outside.draw, rules=rules)
        aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
        keyring = Keyring([make_principal(key, aliases) for key in config.keys])
        settings = Settings(config.limits.body, make_timeouts(config.defaults.timeouts))
        self._fronts: list[tuple[c.Listener, Front]] = []
        for listener in config.listeners:
            mounts = [make_mount(one) for one in listener.dialects]
            server = Server(
                Paths(mounts),
                self.router,
                keyring,
                replace(settings, dialect_header=listener.dialect_header),
                outside,
                pages=make_pages(mounts, keyed=bool(config.keys)),
            )
            front = Front(
                server.serve,
                header_limit=config.limits.header,
                connections=config.limits.connections,
            )
            self._fronts.append((listener, front))
        self._admin = None if config.admin is None else self._make_admin(config.admin, page)

    async def start(self) -> list[str]:
        """Start the backends and bind the listeners; gives their URLs, the admin's last."""
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))
        urls = []
        for listener, front in self._fronts:
            host, _, port = listener.address.rpartition(":")
            tls = make_tls(listener.tls) if listener.tls else None
            bound = await front.listen(host.strip("[]"), int(port), tls)
            urls.append(f"{'https' if tls else 'http'}://{host}:{bound}")
        if self._admin is not None:
            urls.append(await self._admin.listen())
        return urls

    async def stop(self) -> None:
        """Take no more connections, let what runs come to its end, and let everything go."""
        self.router.ready = False
        drain = self._config.limits.drain
        await asyncio.gather(*(front.drain(drain) for _, front in self._fronts))
        await asyncio.gather(*(front.close() for _, front in self._fronts))
        await asyncio.gather(*(backend.aclose() for backend in self.backends.values()))
        if self._admin is not None:
            await self._admin.close()

    def _make_admin(self, told: c.Admin, metrics: Callable[[], bytes]) -> Admin:
        backends = self.backends
        return Admin(
            told.address,
            obstacle=lambda: obstacle(self.router, backends.values()),
            pools={name: one for name, one in backends.items() if isinstance(one, WorkerSet)},
            metrics=metrics,
            sha256=told.sha256,
        )


def load(reference: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def make_dialect(name: str, profile: str | None, options: Mapping[str, Any]) -> Dialect:
    """The dialect of this name and profile."""
    return cast("Dialect", load(DIALECTS[name])(profile, **options))


def make_mount(dialect: c.ListenerDialect) -> Mount:
    """A dialect, where a listener has it."""
    return Mount(make_dialect(dialect.name, dialect.profile, dialect.options), dialect.prefix)


def make_pages(mounts: Sequence[Mount], *, keyed: bool) -> dict[str, Callable[[], Reply]]:
    """What a listener answers by itself; the larger page is made when it is first asked for."""
    health = Reply(200, b'{"status":"ok"}')

    @functools.cache
    def told() -> Reply:
        return Reply(200, openapi.document(mounts, version=__version__, keyed=keyed))

    return {"/health": lambda: health, "/openapi.json": told}


def make_backend(
    settings: c.Backend, outside: Surroundings, name: str = "", models: Sequence[str] = ()
) -> Backend:
    """The backend that these settings describe. ``models`` are what it is asked for."""
    make = load(KINDS[settings.kind])
    match settings:
        case c.Pool():
            dialect = make_worker_dialect(settings)
            told = crew(name, settings, dialect, models)
            backend = make(clock=outside.clock, draw=outside.draw, **told)
        case _:
            given = msgspec.to_builtins(settings)
            backend = make(**{key: value for key, value in given.items() if key != "kind"})
    return cast("Backend", backend)


def asked_of(backend: str, config: c.Config) -> list[str]:
    """The models that a backend is asked for, by its own names."""
    targets = [
        (target.backend, target.model or name)
        for name, model in config.models.items()
        for target in model.targets().values()
    ]
    named = (model for asked, model in targets if asked == backend and model != ANY)
    return list(dict.fromkeys(named))


def make_worker_dialect(pool: c.Pool) -> Dialect:
    """What a pool's workers are spoken to in."""
    options: dict[str, Any] = dict(pool.options)
    if pool.fields is not None:
        options["fields"] = pool.fields
    if pool.template is not None:
        from gateway.templating import ChatTemplate  # noqa: PLC0415 - jinja2 may not be installed

        options["renderer"] = ChatTemplate(pool.template)
    return spared(pool, make_dialect(pool.dialect, pool.profile, options))


def make_model(
    name: str, model: c.Model, backends: Mapping[str, Backend], defaults: c.Defaults, created: int
) -> Model:
    """A public model, compiled for the router."""
    targets = {
        version: Target(version, target.model or name, backends[target.backend], target.backend)
        for version, target in model.targets().items()
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
    silent = Defaults(model.defaults.sampling(), model.defaults.stopping())
    on_loss = model.on_loss or defaults.on_loss
    salt, sticky = (model.split.name or "", model.split.sticky or ()) if model.split else ("", ())
    compiled = compile_model(info, targets, model.weights(), on_loss, silent, salt=salt)
    return replace(compiled, dialect=model.dialect, fallback=model.fallback or (), sticky=sticky)


def make_rule(rule: c.Rule) -> Rule:
    """An exception, as the router tries it."""
    when = rule.when
    headers = {name.lower(): text for name, text in when.header.items()}
    share = 1.0 if when.share is None else when.share
    compiled = When(when.dialect, headers, when.body, when.key, when.tag, share)
    return Rule(rule.name, when.model, compiled, rule.use.model, rule.use.version)


def make_principal(key: c.Key, aliases: Mapping[str, str]) -> Principal:
    """The holder of a configured key. ``aliases`` gives the model that each stands for."""
    models = frozenset(aliases.get(name, name) for name in key.models) if key.models else None
    return Principal(key.name, key.sha256, models, key.dialect, frozenset(key.tags))


def make_timeouts(timeouts: c.Timeouts) -> Timeouts:
    """The limits of an exchange, from the configuration."""
    return Timeouts(**asdict(timeouts))


def make_tls(tls: c.Tls) -> ssl.SSLContext:
    """A server's TLS context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    return context
