"""A configuration from its text: parsed, read, checked and completed."""

from collections.abc import Mapping
from pathlib import Path

import msgspec.inspect

from gateway.config import checks
from gateway.config.complaints import Complaints, ConfigError
from gateway.config.dialects import Dialects
from gateway.config.document import compose, spot
from gateway.config.ground import Ground, known
from gateway.config.reader import Reader
from gateway.config.resolve import resolve
from gateway.config.shape import Config
from protocols import DIALECTS

_SHAPE = msgspec.inspect.type_info(Config)


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


def decode(data: bytes, filename: str) -> str:
    """The text of a file. Raises ConfigError unless it is UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise Complaints(filename).fail(spot(before, len(before)), message) from None
