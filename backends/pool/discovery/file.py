"""Workers that a file lists, which is read anew when it changes."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from backends.aside import Aside
from backends.pool.discovery.source import DiscoveryFailed
from backends.upstream import Worker

Read = Callable[[bytes], Sequence[Worker]]
"""What a file's bytes list. What it raises says what is wrong."""

_LARGEST: Final = 1 << 20
_PATIENCE: Final = 5.0


class _Seen(Struct, frozen=True):
    """A file's content, and which file it was."""

    which: tuple[int, int]
    data: bytes


class File:
    """A Source. ``every`` is in seconds.

    What is put in its place whole, by renaming or by another link, counts at once. What is written
    over in place counts when two looks have found it the same: half a list is often a list, too.
    """

    def __init__(self, path: str | Path, read: Read, *, every: float = 1.0) -> None:
        self._path = Path(path)
        self._read = read
        self._every = every
        self._aside = Aside(self._look)
        self._last: _Seen | None = None
        self._taken: bytes | None = None
        self._workers: Sequence[Worker] = ()
        self._wrong = ""

    @property
    def every(self) -> float:
        """In how many seconds to look again."""
        return self._every

    async def look(self) -> Sequence[Worker]:
        """See Source."""
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._aside.run()
        except TimeoutError:
            raise DiscoveryFailed(f"{self._path}: it can't be read in {_PATIENCE:g} s") from None

    def _look(self) -> Sequence[Worker]:
        seen, last = self._open(), self._last
        self._last = seen
        written_now = last is not None and last.which == seen.which and last.data != seen.data
        if seen.data != self._taken and not written_now:
            self._take(seen.data)
        if self._wrong:
            raise DiscoveryFailed(f"{self._path}: {self._wrong}")
        return self._workers

    def _open(self) -> _Seen:
        # The file is read each time: a clock that is too coarse hides a change, its bytes don't.
        try:
            if not self._path.is_file():  # what is no file may keep a reader waiting for ever
                raise DiscoveryFailed(f"{self._path}: there is no such file")
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                data = file.read(_LARGEST + 1)
        except OSError as error:
            raise DiscoveryFailed(f"{self._path}: {error.strerror}") from None
        if len(data) > _LARGEST:
            raise DiscoveryFailed(f"{self._path}: it is larger than {_LARGEST} bytes")
        return _Seen((about.st_dev, about.st_ino), data)

    def _take(self, data: bytes) -> None:
        self._taken = data
        try:
            self._workers, self._wrong = self._read(data), ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the last good list stays
            self._wrong = str(error) or type(error).__name__
