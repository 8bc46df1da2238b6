"""Loads a configuration: parses, decodes and validates its text, and fills in defaults."""

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec.inspect
from msgspec import Meta, Struct
from msgspec.structs import replace

from backends.interfaces import Timeouts
from backends.pool.settings import PoolSettings, RetrySettings, WorkerSourceSettings
from gateway.config import validate, validate_pools
from gateway.config.decoder import ConfigDecoder, SourceLocation
from gateway.config.errors import (
    DOCUMENT_START,
    ConfigError,
    ConfigIssue,
    ConfigPath,
    IssueCollector,
    format_path,
)
from gateway.config.key_file import KeyFile, read_key_file
from gateway.config.registry import ProtocolRegistry
from gateway.config.schema import (
    BackendConfig,
    Config,
    ListenerConfig,
    ListenerProtocolConfig,
)
from gateway.config.validation_context import ValidationContext, is_set
from gateway.config.yaml_reader import MAX_FILE_SIZE, compose_yaml, decode_utf8
from protocols import PROTOCOLS
from protocols.core.units import RateValue, Secret, format_rate

# Defaults.

_DEFAULT_ADDRESS = "127.0.0.1:8000"
SectionT = TypeVar("SectionT", Timeouts, RetrySettings)


def apply_defaults(
    config: Config, locations: Mapping[ConfigPath, SourceLocation], protocols: ProtocolRegistry
) -> Config:
    """Fill in ``defaults`` in each pool; without listeners, add one with every protocol."""
    backends: dict[str, BackendConfig] = {}
    for name, backend in config.backends.items():
        if isinstance(backend, PoolSettings):
            at = ("backends", name)
            backends[name] = replace(
                backend,
                timeouts=_merge_defaults(
                    backend.timeouts, config.defaults.timeouts, locations, at, "timeouts"
                ),
                retries=_merge_defaults(
                    backend.retries, config.defaults.retries, locations, at, "retries"
                ),
            )
        else:
            backends[name] = backend
    listeners = config.listeners or (build_default_listener(protocols),)
    return replace(config, backends=backends, listeners=listeners)


def _merge_defaults(
    section: SectionT | None,
    default: SectionT,
    locations: Mapping[ConfigPath, SourceLocation],
    at: ConfigPath,
    key: str,
) -> SectionT:
    """The default, overridden by the fields that the file sets at ``key``."""
    names = [name for name in default.__struct_fields__ if (*at, key, name) in locations]
    return replace(default, **{name: getattr(section, name) for name in names})


def build_default_listener(protocols: ProtocolRegistry) -> ListenerConfig:
    """A listener with every protocol: at its own paths, or below its name if they are taken."""
    mounts = []
    claimed = {("GET", "/")}  # the gateway's own page
    for name in filter(protocols.serves_clients, protocols.names):
        endpoints = protocols.endpoints(name, None, {})
        prefix = "" if claimed.isdisjoint(endpoints) else f"/{name}"
        claimed.update((method, prefix + path) for method, path in endpoints)
        mounts.append(ListenerProtocolConfig(name=name, prefix=prefix))
    return ListenerConfig(address=_DEFAULT_ADDRESS, protocols=tuple(mounts))


_CONFIG_TYPE = msgspec.inspect.type_info(Config)
_WORKER_LIST_TYPE = msgspec.inspect.type_info(
    Annotated[tuple[WorkerSourceSettings, ...], Meta(min_length=1)]
)
_HASH_LENGTH = 12


class LoadedConfig(Struct, frozen=True):
    """A configuration and its file.

    ``hash`` is the start of the SHA-256 of the file, whose bytes are ``data``. ``files`` are those
    that it names, except lists of workers, which pools watch themselves.
    """

    config: Config
    filename: str
    hash: str
    files: frozenset[str]
    locations: Mapping[ConfigPath, SourceLocation]
    data: bytes = b""

    def build_error(self, *issues: tuple[ConfigPath, str]) -> ConfigError:
        """The error for these issues, each a path and a message; the nearest known path counts."""
        return ConfigError(self.filename, [self.locate_issue(*one) for one in issues], self.files)

    def locate_issue(self, path: ConfigPath, message: str) -> ConfigIssue:
        """The issue with this message at the nearest known path."""
        nearest = next(
            prefix for n in range(len(path), -1, -1) if (prefix := path[:n]) in self.locations
        )
        position = self.locations[nearest].value_position
        return ConfigIssue(position.line, position.column, message, format_path(path))


LoadConfig = Callable[[], LoadedConfig]
"""Reads a configuration; each call reads it again. Raises ConfigError."""


def load_text(
    text: str, filename: str, *, env: Mapping[str, str], insecure: bool = False
) -> Config:
    """Parse and validate the configuration in ``text``.

    ``filename`` is its name in issues; paths in it are relative to its folder. With
    ``insecure``, listeners beyond loopback need no keys. Raises ConfigError with all issues.
    """
    return _load(text, filename, env, insecure=insecure).config


def load_bytes(
    data: bytes, filename: str, *, env: Mapping[str, str], insecure: bool = False
) -> LoadedConfig:
    """Parse and validate a file's bytes, and keep the locations of all values."""
    loaded = _load(decode_utf8(data, filename), filename, env, insecure=insecure)
    return replace(loaded, hash=hashlib.sha256(data).hexdigest()[:_HASH_LENGTH], data=data)


def _load(text: str, filename: str, env: Mapping[str, str], *, insecure: bool) -> LoadedConfig:
    collector = IssueCollector(filename)
    reader = ConfigDecoder(collector, env)
    config: Config = reader.decode_document(compose_yaml(text, collector), _CONFIG_TYPE)
    files = frozenset(file for path, file in reader.files.items() if not _is_worker_list(path))
    protocols = ProtocolRegistry(PROTOCOLS)
    if is_set(config):
        key_file = _read_key_file(config, reader, collector, env)
        if key_file is not None:
            collector.issues += key_file.issues
            config = replace(config, keys=(*config.keys, *key_file.keys))
        context = ValidationContext(collector, reader.locations, protocols, reader.files, key_file)
        validate.validate_config(config, context, insecure=insecure)
    if collector.issues:
        raise ConfigError(filename, collector.issues, files)
    config = apply_defaults(config, reader.locations, protocols)
    return LoadedConfig(config, filename, "", files, reader.locations)


def _read_key_file(
    config: Config, reader: ConfigDecoder, collector: IssueCollector, env: Mapping[str, str]
) -> KeyFile | None:
    """The file of keys; None if there is none, or if it or ``keys`` can't be read."""
    if not is_set(config.keys_file) or config.keys_file is None or not is_set(config.keys):
        return None
    try:
        return read_key_file(config.keys_file, env, len(config.keys))
    except OSError as error:
        position = reader.locations["keys_file",].value_position
        message = f"the file can't be read: {error.strerror}"
        collector.add(position, message, ("keys_file",))
    except ConfigError as error:
        collector.issues += (replace(one, file=error.filename) for one in error.issues)
    return None


def load_config(path: str, *, env: Mapping[str, str], insecure: bool = False) -> Config:
    """Load the configuration of a file. Raises ConfigError, and OSError if it can't be read."""
    return load_bytes(Path(path).read_bytes(), path, env=env, insecure=insecure).config


def load_file(path: str, *, env: Mapping[str, str], insecure: bool = False) -> LoadedConfig:
    """Load a file, with the locations of values. Raises ConfigError, also if it can't be read."""
    return load_bytes(fetch_file(path).data, path, env=env, insecure=insecure)


def _is_worker_list(path: ConfigPath) -> bool:
    """Whether the value at ``path`` names a list of workers."""
    return path[-1] == "file" and isinstance(path[-2], int)


def load_worker_list(
    data: bytes, filename: str, *, env: Mapping[str, str]
) -> tuple[WorkerSourceSettings, ...]:
    """The workers that a file lists, each by its URL. Raises ConfigError."""
    collector = IssueCollector(filename)
    reader = ConfigDecoder(collector, env)
    workers: tuple[WorkerSourceSettings, ...] = reader.decode_document(
        compose_yaml(decode_utf8(data, filename), collector), _WORKER_LIST_TYPE
    )
    if is_set(workers):
        validate_pools.check_listed_workers(
            workers, ValidationContext(collector, reader.locations, ProtocolRegistry(PROTOCOLS))
        )
    if collector.issues:
        raise ConfigError(filename, collector.issues)
    return workers


# A configuration as plain values, with ``***`` for secrets.


def dump_config(value: Any) -> Any:
    """Dictionaries, lists and scalars, in the order of the fields; durations in seconds."""
    match value:
        case Secret():
            return "***"
        case Struct():
            config = value.__struct_config__
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return tag | {
                name: dump_config(getattr(value, name)) for name in value.__struct_fields__
            }
        case Mapping():
            return {key: dump_config(one) for key, one in value.items()}
        case RateValue():
            return format_rate(value)
        case tuple():
            return [dump_config(one) for one in value]
        case _:
            return value


# Configuration texts, as they are sent to other processes.


class ConfigText(Struct, frozen=True):
    """A configuration as bytes. ``env_overrides`` replace variables of the environment."""

    data: bytes
    filename: str
    env_overrides: Mapping[str, str] = {}
    insecure: bool = False

    def load(self) -> LoadedConfig:
        """Parse and validate it. Raises ConfigError."""
        env = {**os.environ, **self.env_overrides}
        return load_bytes(self.data, self.filename, env=env, insecure=self.insecure)


ConfigFetcher = Callable[[], ConfigText]
"""Returns the current text. Raises ConfigError if there is none."""


def make_file_fetcher(path: str, *, insecure: bool) -> ConfigFetcher:
    """A fetcher that reads a file."""
    return partial(fetch_file, path, insecure=insecure)


def fetch_file(path: str, *, insecure: bool = False) -> ConfigText:
    """Read a configuration file. Raises ConfigError if it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return ConfigText(file.read(MAX_FILE_SIZE + 1), path, insecure=insecure)
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise IssueCollector(path).build_error(DOCUMENT_START, message) from None


class ConfigReader:
    """Loads the current text at each call, and keeps the last valid one."""

    def __init__(self, fetch: ConfigFetcher) -> None:
        self._fetch = fetch
        self.last_text = ConfigText(b"", "")

    def __call__(self) -> LoadedConfig:
        """Raises ConfigError."""
        text = self._fetch()
        loaded = text.load()
        self.last_text = text
        return loaded

    def has_changed(self) -> bool:
        """Whether there is another text than the last valid one. Raises ConfigError."""
        return self._fetch() != self.last_text
