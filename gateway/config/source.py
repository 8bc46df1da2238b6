"""The text of a configuration: where it comes from, how it is sent to other processes, and read."""

import os
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from gateway.config.loader import LoadedConfig, load_bytes, read_file


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
    return ConfigText(read_file(path), path, insecure=insecure)


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
