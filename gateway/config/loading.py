"""A configuration from its text: parsed, read, checked and completed."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec.inspect
from msgspec import Meta, Struct
from msgspec.structs import replace

from gateway.config import checks
from gateway.config.complaints import START, Complaint, Complaints, ConfigError, Steps, written
from gateway.config.dialects import Dialects
from gateway.config.document import compose, decode
from gateway.config.ground import Ground, known
from gateway.config.pools import Worker
from gateway.config.reader import Place, Reader
from gateway.config.resolve import resolve
from gateway.config.shape import Config
from protocols import DIALECTS

_SHAPE = msgspec.inspect.type_info(Config)
_WORKERS = msgspec.inspect.type_info(Annotated[tuple[Worker, ...], Meta(min_length=1)])
_HASH = 12


class Loaded(Struct, frozen=True):
    """A configuration, and the file that it was in.

    ``hash`` is what its SHA-256 begins with. ``files`` are those that it names, but for lists of
    workers, which pools watch themselves.
    """

    config: Config
    filename: str
    hash: str
    files: frozenset[str]
    locations: Mapping[Steps, Place]

    def build_error(self, *wrong: tuple[Steps, str]) -> ConfigError:
        """What to raise where it can't be used, for what is at each path, or nearest above it."""
        return ConfigError(self.filename, [self._locate_issue(*one) for one in wrong], self.files)

    def _locate_issue(self, path: Steps, message: str) -> Complaint:
        near = next(at for n in range(len(path), -1, -1) if (at := path[:n]) in self.locations)
        mark = self.locations[near].value_position
        return Complaint(mark.line, mark.column, message, written(path))


Source = Callable[[], Loaded]
"""Reads a configuration, each time anew. Raises ConfigError."""


def load(text: str, filename: str, *, env: Mapping[str, str], insecure: bool = False) -> Config:
    """The configuration that ``text`` holds.

    ``filename`` is what complaints call it; paths in it are relative to its folder. With
    ``insecure``, listeners beyond this machine need no keys. Raises ConfigError with all that is
    wrong.
    """
    return _loaded(text, filename, env, insecure=insecure).config


def loaded(data: bytes, filename: str, *, env: Mapping[str, str], insecure: bool = False) -> Loaded:
    """The same of a file's bytes, with where everything is."""
    found = _loaded(decode(data, filename), filename, env, insecure=insecure)
    return replace(found, hash=hashlib.sha256(data).hexdigest()[:_HASH])


def _loaded(text: str, filename: str, env: Mapping[str, str], *, insecure: bool) -> Loaded:
    complaints = Complaints(filename)
    reader = Reader(complaints, env)
    config: Config = reader.decode_document(compose(text, complaints), _SHAPE)
    files = frozenset(file for path, file in reader.files.items() if not _is_watched(path))
    dialects = Dialects(DIALECTS)
    if known(config):
        checks.check(
            config, Ground(complaints, reader.locations, dialects, reader.files), insecure=insecure
        )
    if complaints.issues:
        raise ConfigError(filename, complaints.issues, files)
    config = resolve(config, reader.locations, dialects)
    return Loaded(config, filename, "", files, reader.locations)


def read(path: str, *, env: Mapping[str, str], insecure: bool = False) -> Config:
    """The configuration of a file. Raises ConfigError, and OSError where there is no such file."""
    return loaded(Path(path).read_bytes(), path, env=env, insecure=insecure).config


def opened(path: str, *, env: Mapping[str, str], insecure: bool = False) -> Loaded:
    """The same with where everything is. Raises ConfigError, also where there is no such file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise Complaints(path).build_error(START, message) from None
    return loaded(data, path, env=env, insecure=insecure)


def _is_watched(path: Steps) -> bool:
    """Whether it names a list of workers."""
    return path[-1] == "file" and isinstance(path[-2], int)


def workers(data: bytes, filename: str, *, env: Mapping[str, str]) -> tuple[Worker, ...]:
    """The workers that a file lists, each by its URL. Raises ConfigError."""
    complaints = Complaints(filename)
    reader = Reader(complaints, env)
    found: tuple[Worker, ...] = reader.decode_document(
        compose(decode(data, filename), complaints), _WORKERS
    )
    if known(found):
        checks.check_listed_workers(found, Ground(complaints, reader.locations, Dialects(DIALECTS)))
    if complaints.issues:
        raise ConfigError(filename, complaints.issues)
    return found
