"""What a configuration leaves unsaid, said."""

from collections.abc import Mapping

from msgspec.structs import asdict, replace

from gateway.config.complaints import Steps
from gateway.config.dialects import Dialects
from gateway.config.mounts import paths
from gateway.config.reader import Place
from gateway.config.shape import Backend, Config, Listener, ListenerDialect, Pool, Timeouts

_ADDRESS = "127.0.0.1:8000"


def resolve(config: Config, places: Mapping[Steps, Place], dialects: Dialects) -> Config:
    """Every pool's timeouts from the defaults; without listeners, every dialect on this machine."""
    backends: dict[str, Backend] = {}
    for name, backend in config.backends.items():
        if isinstance(backend, Pool):
            said = [
                key for key in asdict(Timeouts()) if ("backends", name, "timeouts", key) in places
            ]
            own = {key: getattr(backend.timeouts, key) for key in said}
            timeouts = replace(config.defaults.timeouts, **own)
            backends[name] = replace(backend, timeouts=timeouts)
        else:
            backends[name] = backend
    listeners = config.listeners or (everything(dialects),)
    return replace(config, backends=backends, listeners=listeners)


def everything(dialects: Dialects) -> Listener:
    """A listener with every dialect: at its own paths, or below its name where those are taken."""
    mounts = []
    claimed: set[tuple[str, str]] = set()
    for name in dialects.names:
        made = dialects.make(name, None, {})
        prefix = "" if claimed.isdisjoint(paths(made, "")) else f"/{name}"
        claimed.update(paths(made, prefix))
        mounts.append(ListenerDialect(name=name, prefix=prefix))
    return Listener(address=_ADDRESS, dialects=tuple(mounts))
