"""What a configuration leaves unsaid, said."""

from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from gateway.config.complaints import Steps
from gateway.config.dialects import Dialects
from gateway.config.pools import Pool, Retries, Timeouts
from gateway.config.reader import Place
from gateway.config.shape import Backend, Config, Listener, ListenerDialect

_ADDRESS = "127.0.0.1:8000"
SectionT = TypeVar("SectionT", Timeouts, Retries)


def resolve(config: Config, places: Mapping[Steps, Place], dialects: Dialects) -> Config:
    """What a pool does not say, from the defaults; without listeners, every dialect here."""
    backends: dict[str, Backend] = {}
    for name, backend in config.backends.items():
        if isinstance(backend, Pool):
            at = ("backends", name)
            backends[name] = replace(
                backend,
                timeouts=_filled(
                    backend.timeouts, config.defaults.timeouts, places, at, "timeouts"
                ),
                retries=_filled(backend.retries, config.defaults.retries, places, at, "retries"),
            )
        else:
            backends[name] = backend
    listeners = config.listeners or (everything(dialects),)
    return replace(config, backends=backends, listeners=listeners)


def _filled(
    own: SectionT | None, default: SectionT, places: Mapping[Steps, Place], at: Steps, key: str
) -> SectionT:
    """The default, but for what stands in the file at ``key``."""
    said = [name for name in default.__struct_fields__ if (*at, key, name) in places]
    return replace(default, **{name: getattr(own, name) for name in said})


def everything(dialects: Dialects) -> Listener:
    """A listener with every dialect: at its own paths, or below its name where those are taken."""
    mounts = []
    claimed: set[tuple[str, str]] = set()
    for name in filter(dialects.serves_clients, dialects.names):
        endpoints = dialects.endpoints(name, None, {})
        prefix = "" if claimed.isdisjoint(endpoints) else f"/{name}"
        claimed.update((method, prefix + path) for method, path in endpoints)
        mounts.append(ListenerDialect(name=name, prefix=prefix))
    return Listener(address=_ADDRESS, dialects=tuple(mounts))
