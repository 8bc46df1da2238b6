"""Workers that a file lists, which is read anew when it changes."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from backends.aio import BackgroundCall
from backends.pool.discovery.source import DiscoveryError
from backends.upstream import WorkerConfig

WorkerFileReader = Callable[[bytes], Sequence[WorkerConfig]]
"""What a file's bytes list. What it raises says what is wrong."""

_MAX_FILE_BYTES: Final = 1 << 20
_READ_TIMEOUT: Final = 5.0


class _FileContent(Struct, frozen=True):
    """A file's content, and which file it was."""

    identity: tuple[int, int]
    data: bytes


class FileSource:
    """A Source. ``every`` is in seconds.

    What is put in its place whole, by renaming or by another link, counts at once. What is written
    over in place counts when two looks have found it the same: half a list is often a list, too.
    """

    def __init__(self, path: str | Path, read: WorkerFileReader, *, every: float = 1.0) -> None:
        self._path = Path(path)
        self._read = read
        self._every = every
        self._background_read = BackgroundCall(self._read_workers)
        self._last_content: _FileContent | None = None
        self._parsed_data: bytes | None = None
        self._workers: Sequence[WorkerConfig] = ()
        self._parse_error = ""

    @property
    def interval(self) -> float:
        """In how many seconds to look again."""
        return self._every

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """See Source."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT):
                return await self._background_read.wait_result()
        except TimeoutError:
            raise DiscoveryError(f"{self._path}: it can't be read in {_READ_TIMEOUT:g} s") from None

    def _read_workers(self) -> Sequence[WorkerConfig]:
        seen, last = self._read_file(), self._last_content
        self._last_content = seen
        written_now = last is not None and last.identity == seen.identity and last.data != seen.data
        if seen.data != self._parsed_data and not written_now:
            self._parse_content(seen.data)
        if self._parse_error:
            raise DiscoveryError(f"{self._path}: {self._parse_error}")
        return self._workers

    def _read_file(self) -> _FileContent:
        # The file is read each time: a clock that is too coarse hides a change, its bytes don't.
        try:
            if not self._path.is_file():  # what is no file may keep a reader waiting for ever
                raise DiscoveryError(f"{self._path}: there is no such file")
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise DiscoveryError(f"{self._path}: {error.strerror}") from None
        if len(data) > _MAX_FILE_BYTES:
            raise DiscoveryError(f"{self._path}: it is larger than {_MAX_FILE_BYTES} bytes")
        return _FileContent((about.st_dev, about.st_ino), data)

    def _parse_content(self, data: bytes) -> None:
        self._parsed_data = data
        try:
            self._workers, self._parse_error = self._read(data), ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the last good list stays
            self._parse_error = str(error) or type(error).__name__
