"""Watches files for changes while the gateway runs."""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from backends.background_call import BackgroundCall

_POLL_INTERVAL: Final = 1.0


class FileState(Struct, frozen=True):
    """The device and inode of the file at a path, and a digest of its content."""

    device_inode: tuple[int, int]
    digest: bytes


FileStates = Mapping[str, FileState | None]
"""By path; None if nothing can be read."""


def read_file_state(path: str) -> FileState | None:
    """The state of a path, following links; of a folder, a digest of its files' names and times."""
    digest = hashlib.sha256()
    try:
        location = Path(path)
        status = location.stat()
        if location.is_file():  # reading a pipe or a device may block forever
            digest.update(location.read_bytes())
        elif location.is_dir():
            for entry in sorted(location.iterdir()):
                entry_status = entry.stat()
                digest.update(
                    f"{entry.name}\n{entry_status.st_size} {entry_status.st_mtime_ns}\n".encode()
                )
    except OSError:
        return None
    return FileState((status.st_dev, status.st_ino), digest.digest())


class FileWatcher:
    """Reads the files repeatedly and calls ``on_change`` when one has changed.

    The states at construction are the first ones to compare with.

    A file that is replaced as a whole, by renaming or by another link, counts as changed at once;
    Kubernetes changes mounted volumes in this way. A file that is overwritten in place counts when
    two reads, ``interval`` seconds apart, find the same content, because half a file may be valid.
    """

    def __init__(
        self,
        list_files: Callable[[], Collection[str]],
        on_change: Callable[[], object],
        *,
        interval: float = _POLL_INTERVAL,
    ) -> None:
        self._list_files = list_files
        self._on_change = on_change
        self._interval = interval
        self._background_call = BackgroundCall(self._read_states)
        self._last_states = self._accepted_states = self._read_states()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self.update(await self._background_call.wait_result())

    def update(self, states: FileStates) -> None:
        """Compare the current states with the last ones. A new file is no change."""
        last_states, self._last_states = self._last_states, states
        self._accepted_states = {
            path: self._accepted_states.get(path, state) for path, state in states.items()
        }
        if states == self._accepted_states or any(
            _is_being_written(last_states.get(path, states[path]), states[path]) for path in states
        ):
            return
        self._accepted_states = states
        self._on_change()

    def _read_states(self) -> FileStates:
        return {path: read_file_state(path) for path in self._list_files()}


def _is_being_written(last: FileState | None, current: FileState | None) -> bool:
    """Whether the file may be incomplete, because it is being overwritten."""
    replaced = (
        last is not None and current is not None and last.device_inode != current.device_inode
    )
    return last != current and not replaced
