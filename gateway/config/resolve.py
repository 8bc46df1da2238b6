"""What a configuration leaves unsaid, said."""

from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from gateway.config.complaints import ConfigPath
from gateway.config.dialects import ProtocolRegistry
from gateway.config.pools import PoolConfig, RetryConfig, TimeoutsConfig
from gateway.config.reader import SourceLocation
from gateway.config.shape import BackendConfig, Config, ListenerConfig, ListenerProtocolConfig

_DEFAULT_ADDRESS = "127.0.0.1:8000"
SectionT = TypeVar("SectionT", TimeoutsConfig, RetryConfig)


def apply_defaults(
    config: Config, places: Mapping[ConfigPath, SourceLocation], dialects: ProtocolRegistry
) -> Config:
    """What a pool does not say, from the defaults; without listeners, every dialect here."""
    backends: dict[str, BackendConfig] = {}
    for name, backend in config.backends.items():
        if isinstance(backend, PoolConfig):
            at = ("backends", name)
            backends[name] = replace(
                backend,
                timeouts=_merge_defaults(
                    backend.timeouts, config.defaults.timeouts, places, at, "timeouts"
                ),
                retries=_merge_defaults(
                    backend.retries, config.defaults.retries, places, at, "retries"
                ),
            )
        else:
            backends[name] = backend
    listeners = config.listeners or (build_default_listener(dialects),)
    return replace(config, backends=backends, listeners=listeners)


def _merge_defaults(
    own: SectionT | None,
    default: SectionT,
    places: Mapping[ConfigPath, SourceLocation],
    at: ConfigPath,
    key: str,
) -> SectionT:
    """The default, but for what stands in the file at ``key``."""
    said = [name for name in default.__struct_fields__ if (*at, key, name) in places]
    return replace(default, **{name: getattr(own, name) for name in said})


def build_default_listener(dialects: ProtocolRegistry) -> ListenerConfig:
    """A listener with every dialect: at its own paths, or below its name where those are taken."""
    mounts = []
    claimed: set[tuple[str, str]] = set()
    for name in filter(dialects.serves_clients, dialects.names):
        endpoints = dialects.endpoints(name, None, {})
        prefix = "" if claimed.isdisjoint(endpoints) else f"/{name}"
        claimed.update((method, prefix + path) for method, path in endpoints)
        mounts.append(ListenerProtocolConfig(name=name, prefix=prefix))
    return ListenerConfig(address=_DEFAULT_ADDRESS, dialects=tuple(mounts))
