"""Worker discovery by a file, which is read again when it changes.

Each lookup reads the whole file in a thread, since a network file system may not answer, and parses
it only if its content differs.

What must never happen: a pool with half a list, because another program was still writing it.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from backends.background_call import BackgroundCall
from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError

WorkerFileReader = Callable[[bytes], Sequence[WorkerConfig]]
"""Parses the content of a file. Its exception says what is wrong."""

_MAX_FILE_BYTES: Final = 1 << 20
_READ_TIMEOUT: Final = 5.0


class _FileContent(Struct, frozen=True):
    """A file's content, with its device and inode."""

    identity: tuple[int, int]
    data: bytes


class FileSource:
    """A WorkerSource that reads a file every ``interval`` seconds.

    A file that is replaced (renamed or linked) is used at once. A file that is overwritten in place
    is used when two lookups have read the same content, since half a list is often valid, too.
    """

    def __init__(self, path: str | Path, read: WorkerFileReader, *, interval: float = 1.0) -> None:
        self._path = Path(path)
        self._read = read
        self._every = interval
        self._background_read = BackgroundCall(self._read_workers)
        self._last_content: _FileContent | None = None
        self._parsed_data: bytes | None = None
        self._workers: Sequence[WorkerConfig] = ()
        self._parse_error = ""

    def __repr__(self) -> str:
        state = ", invalid" if self._parse_error else ""
        return f"<FileSource {self._path}, {len(self._workers)} workers{state}>"

    @property
    def interval(self) -> float:
        """Seconds until the next lookup."""
        return self._every

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """See WorkerSource."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT):
                return await self._background_read.wait_result()
        except TimeoutError:
            raise DiscoveryError(f"{self._path}: not read within {_READ_TIMEOUT:g} s") from None

    def _read_workers(self) -> Sequence[WorkerConfig]:
        content, last = self._read_file(), self._last_content
        self._last_content = content
        written_now = (
            last is not None and last.identity == content.identity and last.data != content.data
        )
        if content.data != self._parsed_data and not written_now:
            self._parse_content(content.data)
        if self._parse_error:
            raise DiscoveryError(f"{self._path}: {self._parse_error}")
        return self._workers

    def _read_file(self) -> _FileContent:
        # The file is read each time: timestamps may be too coarse to show a change.
        try:
            if not self._path.is_file():  # reading a pipe may block forever
                raise DiscoveryError(f"{self._path}: no such file")
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise DiscoveryError(f"{self._path}: {error.strerror}") from None
        if len(data) > _MAX_FILE_BYTES:
            raise DiscoveryError(f"{self._path}: it is larger than {_MAX_FILE_BYTES} bytes")
        return _FileContent((status.st_dev, status.st_ino), data)

    def _parse_content(self, data: bytes) -> None:
        self._parsed_data = data
        try:
            self._workers, self._parse_error = self._read(data), ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the last good list stays
            self._parse_error = str(error) or type(error).__name__
