"""Files that may change while the gateway runs, and what tells of it."""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from backends.aio import BackgroundCall

_POLL_INTERVAL: Final = 1.0


class FileState(Struct, frozen=True):
    """What is found at a path: which file it leads to, and a digest of what that holds."""

    device_inode: tuple[int, int]
    digest: bytes


FileStates = Mapping[str, FileState | None]
"""By path; None where nothing can be read."""


def read_file_state(path: str) -> FileState | None:
    """What is at a path, links followed; of a folder, what is told of the files in it."""
    digest = hashlib.sha256()
    try:
        location = Path(path)
        status = location.stat()
        if location.is_file():  # what is neither may keep a reader waiting for ever
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
    """Looks at ``files`` again and again, and tells ``changed`` whenever something is new there.

    What it finds when it is made is as it should be.

    What is put in a file's place whole, by renaming or by another link, counts at once: so a volume
    is changed that Kubernetes mounts. What is written in place counts when two looks, ``every``
    seconds apart, have found it the same: half a file may be a good one, too.
    """

    def __init__(
        self,
        files: Callable[[], Collection[str]],
        changed: Callable[[], object],
        *,
        every: float = _POLL_INTERVAL,
    ) -> None:
        self._list_files = files
        self._on_change = changed
        self._interval = every
        self._background_call = BackgroundCall(self._read_states)
        self._last_states = self._accepted_states = self._read_states()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self.update(await self._background_call.wait_result())

    def update(self, states: FileStates) -> None:
        """This is what is there now. A file that was not looked at before is as it should be."""
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
    """Whether it may not be whole yet."""
    replaced = (
        last is not None and current is not None and last.device_inode != current.device_inode
    )
    return last != current and not replaced
