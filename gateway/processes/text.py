"""What is served, as it can be sent: the text of a configuration, and how to read it."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct

from gateway.config.complaints import DOCUMENT_START, IssueCollector
from gateway.config.loading import LoadedConfig, load_bytes


class ConfigText(Struct, frozen=True):
    """A configuration as bytes. ``values`` stand beside the environment of who reads it."""

    data: bytes
    filename: str
    env_overrides: Mapping[str, str] = {}
    insecure: bool = False

    def load(self) -> LoadedConfig:
        """What it says. Raises ConfigError."""
        env = {**os.environ, **self.env_overrides}
        return load_bytes(self.data, self.filename, env=env, insecure=self.insecure)


ConfigFetcher = Callable[[], ConfigText]
"""Gives the text as it is now. Raises ConfigError where there is none."""


def make_file_fetcher(path: str, *, insecure: bool) -> ConfigFetcher:
    """That of a file."""
    return partial(_fetch_file, path, insecure=insecure)


def _fetch_file(path: str, *, insecure: bool) -> ConfigText:
    try:
        return ConfigText(Path(path).read_bytes(), path, insecure=insecure)
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise IssueCollector(path).build_error(DOCUMENT_START, message) from None


class ConfigReader:
    """Reads a text anew each time that it is called, and keeps the last that was right."""

    def __init__(self, fetch: ConfigFetcher) -> None:
        self._fetch = fetch
        self.last_text = ConfigText(b"", "")

    def __call__(self) -> LoadedConfig:
        """Raises ConfigError."""
        text = self._fetch()
        found = text.load()
        self.last_text = text
        return found
