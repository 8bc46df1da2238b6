"""A configuration from its text: parsed, read, checked and completed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec.inspect
from msgspec import Meta

from gateway.config import checks
from gateway.config.complaints import Complaints, ConfigError
from gateway.config.dialects import Dialects
from gateway.config.document import compose, decode
from gateway.config.ground import Ground, known
from gateway.config.pool_checks import check_listed
from gateway.config.pools import Worker
from gateway.config.reader import Reader
from gateway.config.resolve import resolve
from gateway.config.shape import Config
from protocols import DIALECTS

_SHAPE = msgspec.inspect.type_info(Config)
_WORKERS = msgspec.inspect.type_info(Annotated[tuple[Worker, ...], Meta(min_length=1)])


def load(text: str, filename: str, *, env: Mapping[str, str], insecure: bool = False) -> Config:
    """The configuration that ``text`` holds.

    ``filename`` is what complaints call it; paths in it are relative to its folder. With
    ``insecure``, listeners beyond this machine need no keys. Raises ConfigError with all that is
    wrong.
    """
    complaints = Complaints(filename)
    reader = Reader(complaints, env)
    config: Config = reader.document(compose(text, complaints), _SHAPE)
    dialects = Dialects(DIALECTS)
    if known(config):
        checks.check(config, Ground(complaints, reader.places, dialects), insecure=insecure)
    if complaints.found:
        raise ConfigError(filename, complaints.found)
    return resolve(config, reader.places, dialects)


def read(path: str, *, env: Mapping[str, str], insecure: bool = False) -> Config:
    """The configuration of a file. Raises ConfigError, and OSError where there is no such file."""
    return load(decode(Path(path).read_bytes(), path), path, env=env, insecure=insecure)


def workers(data: bytes, filename: str, *, env: Mapping[str, str]) -> tuple[Worker, ...]:
    """The workers that a file lists, each by its URL. Raises ConfigError."""
    complaints = Complaints(filename)
    reader = Reader(complaints, env)
    found: tuple[Worker, ...] = reader.document(
        compose(decode(data, filename), complaints), _WORKERS
    )
    if known(found):
        check_listed(found, Ground(complaints, reader.places, Dialects(DIALECTS)))
    if complaints.found:
        raise ConfigError(filename, complaints.found)
    return found
