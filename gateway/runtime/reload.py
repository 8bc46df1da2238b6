"""A configuration in the place of the one that is served: when it is read, and what came of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec import Struct

from backends.aio import BackgroundCall
from gateway.config.errors import DOCUMENT_START, ConfigError, ConfigIssue
from gateway.config.file_watch import FileWatcher
from gateway.config.loader import LoadConfig, LoadedConfig

log = logging.getLogger("interlingua")


class ReloadResult(Struct, frozen=True):
    """How a reload ended: well where nobody complains.

    ``hash`` is that of the configuration which is served now, whichever that is.
    """

    hash: str
    filename: str = ""
    issues: tuple[ConfigIssue, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether what was read is served."""
        return not self.issues


class ConfigSource(Struct, frozen=True):
    """Where a configuration comes from: what was read there, and what reads it anew."""

    loaded: LoadedConfig
    load_config: LoadConfig


class Reloader:
    """Reads a configuration anew when it is asked to, one time after the other.

    ``take`` is given what was read. Whatever is raised, ConfigError or not, all stays as it was.
    ``tell`` is told of each time.
    """

    def __init__(
        self,
        origin: ConfigSource,
        take: Callable[[LoadedConfig], Awaitable[None]],
        tell: Callable[[ReloadResult], None],
    ) -> None:
        self._current = origin.loaded
        self._background_call = BackgroundCall(origin.load_config)
        self._apply_config = take
        self._report = tell
        self._lock = asyncio.Lock()
        self._pending: asyncio.Task[ReloadResult] | None = None
        self._tasks: set[asyncio.Task[ReloadResult]] = set()
        self._files = self._current.files

    @property
    def files(self) -> frozenset[str]:
        """Those that the configuration names; after a bad one, also those that it named."""
        return self._files

    async def reload(self) -> ReloadResult:
        """Read it, and serve it. Who asks while another waits for its turn gets what that gets."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().create_task(self._run_reload())
            self._tasks.add(self._pending)
            self._pending.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._pending)

    async def aclose(self) -> None:
        """Leave what is begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_reload(self) -> ReloadResult:
        async with self._lock:
            self._pending = None  # the file may be another from here on
            told = await self._reload_once()
        self._report(told)
        return told

    async def _reload_once(self) -> ReloadResult:
        name = self._current.filename
        try:
            loaded = await self._background_call.wait_result()
            await self._apply_config(loaded)
        except ConfigError as error:
            self._files = self._current.files | error.files
            said = "the configuration stays %s, since the new one is wrong:\n%s"
            log.error(said, self._current.hash, error)  # noqa: TRY400 - it is nobody's bug
            return ReloadResult(self._current.hash, name, tuple(error.issues))
        except Exception:
            log.exception(
                "the configuration stays %s, since reloading it failed", self._current.hash
            )
            bug = ConfigIssue(
                DOCUMENT_START.line,
                DOCUMENT_START.column,
                "the gateway failed; its log has the cause",
            )
            return ReloadResult(self._current.hash, name, (bug,))
        self._current = loaded
        self._files = loaded.files
        log.info("the configuration %s is served", loaded.hash)
        return ReloadResult(loaded.hash, name)


# When the configuration is read anew: when a signal says so, or the file has changed.


class ReloadTrigger:
    """Reloads whenever something has ``changed``: so a signal says, and the file ``watched``."""

    def __init__(self, reloader: Reloader, watched: str | None) -> None:
        self._reloader = reloader
        self._watched_files = () if watched is None else (watched,)
        self.reload_requested = asyncio.Event()
        self._file_watcher = FileWatcher(self._list_files, self.reload_requested.set)

    async def run(self) -> None:
        """Until cancelled. What has changed since this was made counts."""
        async with asyncio.TaskGroup() as tasks:
            if self._watched_files:
                tasks.create_task(self._file_watcher.run())
            while True:
                await self.reload_requested.wait()
                self.reload_requested.clear()
                await self._reloader.reload()

    def _list_files(self) -> frozenset[str]:
        return self._reloader.files.union(self._watched_files)
