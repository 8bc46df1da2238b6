"""A configuration from its text: parsed, read, checked and completed."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec.inspect
from msgspec import Meta, Struct
from msgspec.structs import replace

from gateway.config import checks
from gateway.config.complaints import (
    DOCUMENT_START,
    ConfigError,
    ConfigIssue,
    ConfigPath,
    IssueCollector,
    format_path,
)
from gateway.config.dialects import ProtocolRegistry
from gateway.config.document import compose_yaml, decode_utf8
from gateway.config.ground import ValidationContext, is_set
from gateway.config.pools import WorkerSourceConfig
from gateway.config.reader import ConfigDecoder, SourceLocation
from gateway.config.resolve import apply_defaults
from gateway.config.shape import Config
from protocols import DIALECTS

_CONFIG_TYPE = msgspec.inspect.type_info(Config)
_WORKER_LIST_TYPE = msgspec.inspect.type_info(
    Annotated[tuple[WorkerSourceConfig, ...], Meta(min_length=1)]
)
_HASH_LENGTH = 12


class LoadedConfig(Struct, frozen=True):
    """A configuration, and the file that it was in.

    ``hash`` is what its SHA-256 begins with. ``files`` are those that it names, but for lists of
    workers, which pools watch themselves.
    """

    config: Config
    filename: str
    hash: str
    files: frozenset[str]
    locations: Mapping[ConfigPath, SourceLocation]

    def build_error(self, *wrong: tuple[ConfigPath, str]) -> ConfigError:
        """What to raise where it can't be used, for what is at each path, or nearest above it."""
        return ConfigError(self.filename, [self._locate_issue(*one) for one in wrong], self.files)

    def _locate_issue(self, path: ConfigPath, message: str) -> ConfigIssue:
        near = next(at for n in range(len(path), -1, -1) if (at := path[:n]) in self.locations)
        mark = self.locations[near].value_position
        return ConfigIssue(mark.line, mark.column, message, format_path(path))


LoadConfig = Callable[[], LoadedConfig]
"""Reads a configuration, each time anew. Raises ConfigError."""


def load_text(
    text: str, filename: str, *, env: Mapping[str, str], insecure: bool = False
) -> Config:
    """The configuration that ``text`` holds.

    ``filename`` is what complaints call it; paths in it are relative to its folder. With
    ``insecure``, listeners beyond this machine need no keys. Raises ConfigError with all that is
    wrong.
    """
    return _load(text, filename, env, insecure=insecure).config


def load_bytes(
    data: bytes, filename: str, *, env: Mapping[str, str], insecure: bool = False
) -> LoadedConfig:
    """The same of a file's bytes, with where everything is."""
    found = _load(decode_utf8(data, filename), filename, env, insecure=insecure)
    return replace(found, hash=hashlib.sha256(data).hexdigest()[:_HASH_LENGTH])


def _load(text: str, filename: str, env: Mapping[str, str], *, insecure: bool) -> LoadedConfig:
    complaints = IssueCollector(filename)
    reader = ConfigDecoder(complaints, env)
    config: Config = reader.decode_document(compose_yaml(text, complaints), _CONFIG_TYPE)
    files = frozenset(file for path, file in reader.files.items() if not _is_worker_list(path))
    dialects = ProtocolRegistry(DIALECTS)
    if is_set(config):
        checks.validate_config(
            config,
            ValidationContext(complaints, reader.locations, dialects, reader.files),
            insecure=insecure,
        )
    if complaints.issues:
        raise ConfigError(filename, complaints.issues, files)
    config = apply_defaults(config, reader.locations, dialects)
    return LoadedConfig(config, filename, "", files, reader.locations)


def load_config(path: str, *, env: Mapping[str, str], insecure: bool = False) -> Config:
    """The configuration of a file. Raises ConfigError, and OSError where there is no such file."""
    return load_bytes(Path(path).read_bytes(), path, env=env, insecure=insecure).config


def load_file(path: str, *, env: Mapping[str, str], insecure: bool = False) -> LoadedConfig:
    """The same with where everything is. Raises ConfigError, also where there is no such file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise IssueCollector(path).build_error(DOCUMENT_START, message) from None
    return load_bytes(data, path, env=env, insecure=insecure)


def _is_worker_list(path: ConfigPath) -> bool:
    """Whether it names a list of workers."""
    return path[-1] == "file" and isinstance(path[-2], int)


def load_worker_list(
    data: bytes, filename: str, *, env: Mapping[str, str]
) -> tuple[WorkerSourceConfig, ...]:
    """The workers that a file lists, each by its URL. Raises ConfigError."""
    complaints = IssueCollector(filename)
    reader = ConfigDecoder(complaints, env)
    found: tuple[WorkerSourceConfig, ...] = reader.decode_document(
        compose_yaml(decode_utf8(data, filename), complaints), _WORKER_LIST_TYPE
    )
    if is_set(found):
        checks.check_listed_workers(
            found, ValidationContext(complaints, reader.locations, ProtocolRegistry(DIALECTS))
        )
    if complaints.issues:
        raise ConfigError(filename, complaints.issues)
    return found
