"""Worker discovery: the workers of the configuration, of sources, and of the admin API, merged.

Each source (``file_discovery``, ``dns_discovery``) is asked in a task of its own. A source that
fails keeps its last list and is asked again, at first after a second. Every list that arrives is
merged with those of the others, and the pool gets the result if it differs.

What must never happen: an empty pool because sources fail or list nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from msgspec import Struct, field

from backends.http.interfaces import WorkerConfig

log = logging.getLogger("interlingua")

_FIRST_RETRY_DELAY: Final = 1.0
_MAX_WORKERS: Final = 10_000
_MAX_LOGGED_URLS: Final = 20


class DiscoveryError(Exception):
    """A lookup failed. The text says why, for a log."""


class WorkerSource(Protocol):
    """Lists the current workers."""

    @property
    def interval(self) -> float:
        """Seconds until the next lookup."""

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """The workers; an empty list counts as a failure. Raises DiscoveryError."""


class _SourceState(Struct, eq=False):
    """A source, its last list, and its consecutive failures since."""

    source: WorkerSource
    workers: Mapping[str, WorkerConfig] = {}
    failures: int = 0
    error: str = ""
    checked: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerDiscovery:
    """Maintains the set of a pool's workers, and calls ``on_change`` whenever it changes.

    The set holds the static ``workers``, the last list of each source, and the workers added by the
    admin API, without those removed by it. It never becomes empty. For a worker listed twice, the
    admin API takes precedence, then the configuration, then the first source. Changes by the admin
    API last until the process ends.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[WorkerConfig],
        sources: Sequence[WorkerSource],
        on_change: Callable[[Sequence[WorkerConfig]], object],
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._name = name
        self._static = _index_by_url(workers)
        self._source_states = [_SourceState(source) for source in sources]
        self._on_change = on_change
        self._sleep = sleep
        self._added_by_admin: dict[str, WorkerConfig] = {}
        self._removed_by_admin: set[str] = set()
        self._current = dict(self._static)
        self._task: asyncio.Task[None] | None = None
        self.failures = 0
        """The number of failed lookups."""

    def __repr__(self) -> str:
        failing = len(self.source_errors)
        return (
            f"<WorkerDiscovery {self._name}, {len(self._current)} workers,"
            f" {failing} of {len(self._source_states)} sources failing>"
        )

    @property
    def workers(self) -> Sequence[WorkerConfig]:
        """The current set."""
        return tuple(self._current.values())

    @property
    def source_errors(self) -> Sequence[str]:
        """The errors of the sources that fail now."""
        return [state.error for state in self._source_states if state.failures]

    @property
    def manual_workers(self) -> Sequence[str]:
        """The URLs of the workers added or removed by the admin API."""
        return (*self._added_by_admin, *self._removed_by_admin)

    async def start(self, within: float = 2.0) -> None:
        """Start the lookups and wait for the first of each source, at most ``within`` seconds."""
        self._task = asyncio.get_running_loop().create_task(self._watch_sources())
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                for state in self._source_states:
                    await state.checked.wait()

    async def aclose(self) -> None:
        """Stop all lookups."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, worker: WorkerConfig) -> bool:
        """Add a worker or replace the one with its URL; returns whether the URL is new.

        Raises ValueError if there are too many.
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
        """Remove the worker with this URL, wherever it is listed; returns whether there was one.

        It stays removed until it is added again, or until no source lists it any more. Raises
        ValueError for the last worker.
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
            for state in self._source_states:
                tasks.create_task(self._watch_source(state))

    async def _watch_source(self, state: _SourceState) -> None:
        while True:
            try:
                workers = await state.source.list_workers()
                if not workers:
                    raise DiscoveryError("it lists no worker")
                self._store_result(state, workers)
            except DiscoveryError as error:
                self._record_failure(state, str(error))
            except Exception as error:  # noqa: BLE001 - as below
                # A bug in one source must not stop the others.
                self._record_failure(state, f"a source raised {type(error).__name__}", error)
            state.checked.set()
            await self._sleep(_get_next_delay(state))

    def _store_result(self, state: _SourceState, workers: Sequence[WorkerConfig]) -> None:
        if state.failures:
            log.warning("%s: discovery works again", self._name)
        state.failures, state.error = 0, ""
        state.workers = _index_by_url(workers[:_MAX_WORKERS])
        self._merge_workers("discovery")

    def _record_failure(
        self, state: _SourceState, reason: str, exception: Exception | None = None
    ) -> None:
        self.failures += 1
        if reason != state.error:
            message = "%s: discovery failed; the last known workers are kept: %s"
            log.warning(message, self._name, reason, exc_info=exception)
        state.failures, state.error = state.failures + 1, reason

    def _merge_workers(self, origin: str) -> None:
        """Rebuild the set; report it if it changed."""
        merged: dict[str, WorkerConfig] = {}
        for group in (
            self._added_by_admin,
            self._static,
            *(state.workers for state in self._source_states),
        ):
            for url, worker in group.items():
                merged.setdefault(url, worker)
        self._removed_by_admin &= merged.keys()
        workers = {
            url: worker for url, worker in merged.items() if url not in self._removed_by_admin
        }
        if not workers or workers == self._current:
            return
        removed = self._current.keys() - workers.keys()
        added = workers.keys() - self._current.keys()
        if removed:
            log.warning("%s: %s removed %s", self._name, origin, _format_urls(removed))
        if added:
            log.warning("%s: %s added %s", self._name, origin, _format_urls(added))
        self._current = workers
        self._on_change(self.workers)


def _get_next_delay(state: _SourceState) -> float:
    """Seconds until the next lookup; after failures it starts at one and doubles."""
    interval = state.source.interval
    return (
        min(interval, _FIRST_RETRY_DELAY * 2.0 ** min(state.failures - 1, 10))
        if state.failures
        else interval
    )


def _index_by_url(workers: Sequence[WorkerConfig]) -> dict[str, WorkerConfig]:
    indexed: dict[str, WorkerConfig] = {}
    for worker in workers:
        indexed.setdefault(_normalize_url(worker.url), worker)
    return indexed


def _format_urls(urls: Collection[str]) -> str:
    shown = sorted(urls)[:_MAX_LOGGED_URLS]
    omitted = len(urls) - len(shown)
    return ", ".join(shown) + (f" and {omitted} more" if omitted else "")


def _normalize_url(url: str) -> str:
    return url.rstrip("/")
