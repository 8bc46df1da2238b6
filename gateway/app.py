"""The one place where the parts meet. Everything is passed in; nothing is global."""

import asyncio
import importlib
import itertools
import os
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import asdict, replace

from backends import KINDS
from backends.upstream import AiohttpUpstream, Worker
from gateway import __version__, openapi
from gateway import config as c
from gateway.auth import Keyring, Principal
from gateway.core.catalog import ModelInfo
from gateway.core.context import Timeouts
from gateway.core.ports import Backend, Dialect, Reply
from gateway.front.reference import Front
from gateway.paths import Mount, Paths
from gateway.router import Defaults, Model, Router, Target, compile_model
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


class App:
    """A running gateway: listeners, router and backends made from one configuration."""

    def __init__(self, config: c.Config, outside: Surroundings) -> None:
        self._config = config
        self.backends = {
            name: make_backend(settings, outside, config.defaults)
            for name, settings in config.backends.items()
        }
        created = int(outside.now())
        models = {
            name: make_model(name, model, self.backends, config.defaults, created)
            for name, model in config.models.items()
        }
        self.router = Router(models, draw=outside.draw)
        keyring = Keyring([make_principal(key) for key in config.keys])
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

    async def start(self) -> list[str]:
        """Start the backends and bind the listeners; gives their URLs."""
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))
        urls = []
        for listener, front in self._fronts:
            host, _, port = listener.address.rpartition(":")
            tls = make_tls(listener.tls) if listener.tls else None
            bound = await front.listen(host.strip("[]"), int(port), tls)
            urls.append(f"{'https' if tls else 'http'}://{host}:{bound}")
        return urls

    async def stop(self) -> None:
        """Take no more connections, let what runs come to its end, and let everything go."""
        self.router.ready = False
        drain = self._config.limits.drain
        await asyncio.gather(*(front.drain(drain) for _, front in self._fronts))
        await asyncio.gather(*(front.close() for _, front in self._fronts))
        await asyncio.gather(*(backend.aclose() for backend in self.backends.values()))


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


def make_pages(mounts: Sequence[Mount], *, keyed: bool) -> dict[str, Reply]:
    """What a listener answers by itself."""
    told = openapi.document(mounts, version=__version__, keyed=keyed)
    return {"/health": Reply(200, b'{"status":"ok"}'), "/openapi.json": Reply(200, told)}


def make_backend(settings: c.Backend, outside: Surroundings, defaults: c.Defaults) -> Backend:
    """The backend that these settings describe."""
    make = load(KINDS[settings.kind])
    match settings:
        case c.Pool():
            backend = make(
                workers=[make_worker(worker, settings) for worker in settings.workers],
                dialect=make_dialect(settings.dialect, settings.profile, {}),
                clock=outside.clock,
                policy=settings.policy,
                timeouts=make_timeouts(settings.timeouts or defaults.timeouts),
                queue=asdict(settings.queue),
                upstream=AiohttpUpstream(ca=settings.tls.ca if settings.tls else None),
            )
        case _:
            given = msgspec.to_builtins(settings)
            backend = make(**{key: value for key, value in given.items() if key != "kind"})
    return cast("Backend", backend)


def make_worker(worker: c.Worker, pool: c.Pool) -> Worker:
    """A worker of a pool."""
    return Worker(
        worker.url,
        worker.weight,
        worker.max_concurrency or pool.max_concurrency,
        worker.auth.bearer.reveal() if worker.auth else None,
    )


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
    compiled = compile_model(info, targets, model.weights(), on_loss, silent)
    return replace(compiled, dialect=model.dialect)


def make_principal(key: c.Key) -> Principal:
    """The holder of a configured key."""
    models = frozenset(key.models) if key.models else None
    return Principal(key.name, key.sha256, models, key.dialect)


def make_timeouts(timeouts: c.Timeouts) -> Timeouts:
    """The limits of an exchange, from the configuration."""
    return Timeouts(**asdict(timeouts))


def make_tls(tls: c.Tls) -> ssl.SSLContext:
    """A server's TLS context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    return context
