"""Loads a configuration: parses, decodes and validates its text, and fills in defaults."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

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
    return load_bytes(read_file(path), path, env=env, insecure=insecure)


def read_file(path: str) -> bytes:
    """The bytes of a file, one more than allowed at most. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise IssueCollector(path).build_error(DOCUMENT_START, message) from None


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
