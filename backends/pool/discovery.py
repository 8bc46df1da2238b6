"""The workers of a pool, from all who name some: the configuration, sources and the admin."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct, field

from backends.aio import BackgroundCall
from backends.http.interfaces import WorkerConfig

# What tells of workers, and how it fails.


class DiscoveryError(Exception):
    """A source can't tell which workers there are. Its text says why, for a log."""


class WorkerSource(Protocol):
    """Tells which workers there are now."""

    @property
    def interval(self) -> float:
        """In how many seconds to look again."""

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """The workers; none at all counts as a failure. Raises DiscoveryFailed."""


log = logging.getLogger("interlingua")

_FIRST_RETRY_DELAY: Final = 1.0
_MAX_WORKERS: Final = 10_000
_MAX_LOGGED_URLS: Final = 20


class _SourceState(Struct, eq=False):
    """A source: whom it named last, and how often in a row it has failed since."""

    source: WorkerSource
    workers: Mapping[str, WorkerConfig] = {}
    failures: int = 0
    error: str = ""
    checked: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerDiscovery:
    """Keeps the set of a pool's workers, and tells it to ``replace`` whenever it changes.

    The set holds the static ``workers``, those that each source named when it last named any, and
    those that the admin added, less those that the admin removed. It never shrinks to nothing. Who
    is named twice is what the admin says, or else the configuration, or else the first source.
    What the admin says is not kept beyond the process.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[WorkerConfig],
        sources: Sequence[WorkerSource],
        replace: Callable[[Sequence[WorkerConfig]], object],
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._name = name
        self._static = _index_by_url(workers)
        self._source_states = [_SourceState(source) for source in sources]
        self._on_change = replace
        self._sleep = sleep
        self._added_by_admin: dict[str, WorkerConfig] = {}
        self._removed_by_admin: set[str] = set()
        self._current = dict(self._static)
        self._task: asyncio.Task[None] | None = None
        self.failures = 0
        """How often a source has failed, or named nobody."""

    @property
    def workers(self) -> Sequence[WorkerConfig]:
        """The set as it is now."""
        return tuple(self._current.values())

    @property
    def source_errors(self) -> Sequence[str]:
        """Why each source that fails now does."""
        return [one.error for one in self._source_states if one.failures]

    @property
    def manual_workers(self) -> Sequence[str]:
        """The URLs of the workers that the admin added or removed."""
        return (*self._added_by_admin, *self._removed_by_admin)

    async def start(self, within: float = 2.0) -> None:
        """Begin to look, and wait until each source was looked at, ``within`` seconds at most."""
        self._task = asyncio.get_running_loop().create_task(self._watch_sources())
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                for one in self._source_states:
                    await one.checked.wait()

    async def aclose(self) -> None:
        """Stop looking at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, worker: WorkerConfig) -> bool:
        """Add a worker, or put it in the place of the one with its URL; whether it is a new one.

        Raises ValueError where there are too many.
        """
        url = _normalize_url(worker.url)
        new = url not in self._current
        if new and len(self._current) >= _MAX_WORKERS:
            raise ValueError(f"there are {_MAX_WORKERS} workers already")
        self._added_by_admin[url] = worker
        self._removed_by_admin.discard(url)
        self._merge_workers("the admin")
        return new

    def remove(self, url: str) -> bool:
        """Remove the worker with this URL, whoever named it; whether there was one.

        It stays away until it is added again, or until nobody names it any more and then somebody
        does. Raises ValueError for the last one.
        """
        url = _normalize_url(url)
        if url not in self._current:
            return False
        if len(self._current) == 1:
            raise ValueError("it is the last worker; add another first")
        self._added_by_admin.pop(url, None)
        self._removed_by_admin.add(url)
        self._merge_workers("the admin")
        return True

    async def _watch_sources(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for one in self._source_states:
                tasks.create_task(self._watch_source(one))

    async def _watch_source(self, one: _SourceState) -> None:
        while True:
            try:
                found = await one.source.list_workers()
                if not found:
                    raise DiscoveryError("it names no worker")
                self._store_result(one, found)
            except DiscoveryError as error:
                self._record_failure(one, str(error))
            except Exception as error:  # noqa: BLE001 - as below
                # A fault of ours in one source must not keep the others from being looked at.
                self._record_failure(one, f"a source broke: {type(error).__name__}", error)
            one.checked.set()
            await self._sleep(_get_next_delay(one))

    def _store_result(self, one: _SourceState, found: Sequence[WorkerConfig]) -> None:
        if one.failures:
            log.warning("%s: workers are told of again", self._name)
        one.failures, one.error = 0, ""
        one.workers = _index_by_url(found[:_MAX_WORKERS])
        self._merge_workers("discovery")

    def _record_failure(self, one: _SourceState, why: str, fault: Exception | None = None) -> None:
        self.failures += 1
        if why != one.error:
            said = "%s: workers can't be told of, so those known stay: %s"
            log.warning(said, self._name, why, exc_info=fault)
        one.failures, one.error = one.failures + 1, why

    def _merge_workers(self, who: str) -> None:
        """Make the set anew, and tell of it where it changed."""
        named: dict[str, WorkerConfig] = {}
        for group in (
            self._added_by_admin,
            self._static,
            *(one.workers for one in self._source_states),
        ):
            for url, worker in group.items():
                named.setdefault(url, worker)
        self._removed_by_admin &= named.keys()
        now = {url: worker for url, worker in named.items() if url not in self._removed_by_admin}
        if not now or now == self._current:
            return
        gone, come = self._current.keys() - now.keys(), now.keys() - self._current.keys()
        if gone:
            log.warning("%s: %s took away %s", self._name, who, _format_urls(gone))
        if come:
            log.warning("%s: %s brought %s", self._name, who, _format_urls(come))
        self._current = now
        self._on_change(self.workers)


def _get_next_delay(one: _SourceState) -> float:
    """Seconds until the next look: soon after a failure, then ever later."""
    every = one.source.interval
    return (
        min(every, _FIRST_RETRY_DELAY * 2.0 ** min(one.failures - 1, 10)) if one.failures else every
    )


def _index_by_url(workers: Sequence[WorkerConfig]) -> dict[str, WorkerConfig]:
    found: dict[str, WorkerConfig] = {}
    for worker in workers:
        found.setdefault(_normalize_url(worker.url), worker)
    return found


def _format_urls(urls: Collection[str]) -> str:
    shown = sorted(urls)[:_MAX_LOGGED_URLS]
    more = len(urls) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _normalize_url(url: str) -> str:
    return url.rstrip("/")


# Workers that a file lists, which is read anew when it changes.

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


# Which workers a pool has, while it runs.
#
# source      what tells of workers, and how it fails
# names       DNS: a host's addresses, a service's places
# nameserver  asks nameservers
# file        a file that lists them
# merging     all of it, and the admin's word, made one set
