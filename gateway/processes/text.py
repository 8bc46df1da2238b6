"""What is served, as it can be sent: the text of a configuration, and how to read it."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct

from gateway.config import Loaded, loaded
from gateway.config.complaints import START, Complaints


class Text(Struct, frozen=True):
    """A configuration as bytes. ``values`` stand beside the environment of who reads it."""

    data: bytes
    filename: str
    env_overrides: Mapping[str, str] = {}
    insecure: bool = False

    def load(self) -> Loaded:
        """What it says. Raises ConfigError."""
        env = {**os.environ, **self.env_overrides}
        return loaded(self.data, self.filename, env=env, insecure=self.insecure)


Fetch = Callable[[], Text]
"""Gives the text as it is now. Raises ConfigError where there is none."""


def in_file(path: str, *, insecure: bool) -> Fetch:
    """That of a file."""
    return partial(_file, path, insecure=insecure)


def _file(path: str, *, insecure: bool) -> Text:
    try:
        return Text(Path(path).read_bytes(), path, insecure=insecure)
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise Complaints(path).build_error(START, message) from None


class Reading:
    """Reads a text anew each time that it is called, and keeps the last that was right."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.last_text = Text(b"", "")

    def __call__(self) -> Loaded:
        """Raises ConfigError."""
        text = self._fetch()
        found = text.load()
        self.last_text = text
        return found
