"""The files of recordings: rotates, compresses and removes them.

Each line is written whole, so that a process that is killed leaves a readable file. Each process
writes files of its own, which it holds locked: the others compress and remove only what nobody
writes to.
"""

import fcntl
import gzip
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gateway.config.schema import RecordConfig
from gateway.observability.log_rate import RareWarnings
from gateway.observability.recording import (
    COMPRESSED_SUFFIX,
    PLAIN_SUFFIX,
)

_MAX_FILE_SIZE: Final = 64 << 20
_FILES_PER_FOLDER: Final = 8
"""A file is at most this part of the folder's limit."""
_MAX_FILE_AGE: Final = 3600.0
CLEANUP_INTERVAL: Final = 60.0
_ABANDONED_AFTER: Final = 60.0
"""Seconds after the last write from which on an unlocked file belongs to no process."""
_COMPRESSION_LEVEL: Final = 1
_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_FILE_NAME: Final = re.compile(r"interlingua-\d{8}T\d{6}Z-[\d-]+\.jsonl(?:\.gz(?:\.part)?)?")


class RecordingFolder:
    """The files of one folder, of which this process writes one. For the writer's thread."""

    def __init__(self, path: str, now: Callable[[], float]) -> None:
        """``now`` gives Unix seconds."""
        self.warnings = RareWarnings(now)
        self.failed_at: float | None = None
        """When a write failed last; None once it is known that no more do."""
        self._path = Path(path)
        self._now = now
        self._file: _LockedFile | None = None
        self._retention = float("inf")
        self._max_size = 0
        self._cleaned_at = float("-inf")

    def configure(self, config: RecordConfig) -> None:
        """Use these limits from now on."""
        self._retention, self._max_size = config.retention, config.size

    def write_lines(self, data: bytes) -> None:
        """Append whole lines. Raises OSError; nothing of them is in the file then."""
        if self._file is not None and self._file.is_removed:
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
            self._file = _LockedFile.create(self._path, self._now())
        try:
            self._file.append(data)
        except OSError:
            if self._file.is_damaged:  # else it stays open: the disk may have room soon
                self._file.close()
                self._file = None
            raise
        limit = min(_MAX_FILE_SIZE, self._max_size // _FILES_PER_FOLDER)
        if self._file.size >= limit:
            self._rotate()

    def clean_up(self) -> None:
        """Rotate a file that is old, and remove what is too old or too much. Never raises."""
        now = self._now()
        if abs(now - self._cleaned_at) < CLEANUP_INTERVAL:
            return
        if self._file is not None and now - self._file.created_at >= _MAX_FILE_AGE:
            self._rotate()
        else:
            self._remove_files()

    def close(self) -> None:
        """Close the file. It stays as it is: the next process compresses it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it stays as it is
                _compress_file(file.path)
            file.close()
        self._remove_files()

    def _remove_files(self) -> None:
        self._cleaned_at = self._now()
        with suppress(OSError):
            for path in sorted(self._list_files()):
                self._remove_if_old(path)
            sizes = {path: path.stat().st_size for path in sorted(self._list_files())}
            total = sum(sizes.values())
            for path, size in sizes.items():
                if total <= self._max_size:
                    break
                if _remove_file(path):
                    total -= size

    def _list_files(self) -> Iterator[Path]:
        for path in self._path.iterdir():
            if _FILE_NAME.fullmatch(path.name) and (self._file is None or path != self._file.path):
                yield path

    def _remove_if_old(self, path: Path) -> None:
        """Remove a file after its time; compress what a process left behind."""
        try:
            age = self._now() - path.stat().st_mtime
        except FileNotFoundError:  # another process was faster
            return
        if age >= self._retention:
            _remove_file(path)
        elif age >= _ABANDONED_AFTER and not path.name.endswith(COMPRESSED_SUFFIX):
            if path.name.endswith(PLAIN_SUFFIX):
                with _lock_file(path) as is_locked:
                    if is_locked:
                        _compress_file(path)
            else:
                path.unlink(missing_ok=True)


class _LockedFile:
    """A new file that this process writes to."""

    def __init__(self, path: Path, descriptor: int, now: float) -> None:
        self.path = path
        self.size = 0
        self.created_at = now
        self.is_damaged = False
        """Whether a part of a line could not be removed from its end."""
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: Path, now: float) -> "_LockedFile":
        """Create a file with a name that no other has. Raises OSError."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        for number in itertools.count():
            name = f"interlingua-{stamp}-{os.getpid()}{f'-{number}' if number else ''}"
            path = folder / f"{name}{PLAIN_SUFFIX}"
            if path.exists() or (folder / f"{name}{COMPRESSED_SUFFIX}").exists():
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(path, descriptor, now)
        raise AssertionError  # it counts without end

    @property
    def is_removed(self) -> bool:
        """Whether somebody removed the file."""
        return os.fstat(self._descriptor).st_nlink == 0

    def append(self, data: bytes) -> None:
        """Append all of it, or nothing and raise OSError."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            try:
                os.ftruncate(self._descriptor, self.size)
                os.lseek(self._descriptor, self.size, os.SEEK_SET)
            except OSError:
                self.is_damaged = True
            raise
        self.size += len(data)

    def close(self) -> None:
        """Close and unlock it."""
        with suppress(OSError):
            os.close(self._descriptor)


@contextmanager
def _lock_file(path: Path) -> Iterator[bool]:
    """Lock a file meanwhile; False if a process writes to it, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_file(path: Path) -> bool:
    """Remove a file unless a process writes to it. Returns whether it is gone. Raises OSError."""
    if path.name.endswith(PLAIN_SUFFIX):
        with _lock_file(path) as is_locked:
            if not is_locked:
                return False
            path.unlink(missing_ok=True)
    else:
        path.unlink(missing_ok=True)
    return True


def _compress_file(path: Path) -> None:
    """Replace a file by its compressed form, which appears whole. Raises OSError.

    An empty file is removed. The caller has locked it.
    """
    if not path.stat().st_size:
        path.unlink()
        return
    target = path.with_name(path.name + ".gz")
    part = path.with_name(path.name + ".gz.part")
    times = path.stat()
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
        with (
            path.open("rb") as source,
            os.fdopen(descriptor, "wb") as raw,
            gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, raw) as compressed,
        ):
            shutil.copyfileobj(source, compressed, 1 << 20)
        os.utime(part, (times.st_atime, times.st_mtime))
        part.rename(target)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    path.unlink()
