"""Configuration reloads: triggers, validation and results."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from backends.background_call import BackgroundCall
from gateway.config.errors import DOCUMENT_START, ConfigError, ConfigIssue
from gateway.config.file_watch import FileWatcher
from gateway.config.loader import LoadConfig, LoadedConfig

log = logging.getLogger("interlingua")


class ReloadResult(Struct, frozen=True):
    """The result of a reload. ``hash`` is that of the configuration in effect afterwards."""

    hash: str
    filename: str = ""
    issues: tuple[ConfigIssue, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether the new configuration is in effect."""
        return not self.issues


class ConfigSource(Struct, frozen=True):
    """The loaded configuration, and the function that loads it again."""

    loaded: LoadedConfig
    load_config: LoadConfig


class Reloader:
    """Reloads the configuration, one reload at a time.

    ``apply_config`` gets the loaded configuration; if it raises, the old one stays in effect.
    ``report`` gets the result of each reload.
    """

    def __init__(
        self,
        origin: ConfigSource,
        apply_config: Callable[[LoadedConfig], Awaitable[None]],
        report: Callable[[ReloadResult], None],
    ) -> None:
        self._current = origin.loaded
        self._background_call = BackgroundCall(origin.load_config)
        self._apply_config = apply_config
        self._report = report
        self._lock = asyncio.Lock()
        self._pending: asyncio.Task[ReloadResult] | None = None
        self._tasks: set[asyncio.Task[ReloadResult]] = set()
        self._files = self._current.files

    @property
    def files(self) -> frozenset[str]:
        """The files that the configuration names, and those of a failed reload since."""
        return self._files

    async def reload(self) -> ReloadResult:
        """Reload; a call that arrives while a reload is pending shares its result."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().create_task(self._run_reload())
            self._tasks.add(self._pending)
            self._pending.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._pending)

    async def aclose(self) -> None:
        """Cancel running reloads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_reload(self) -> ReloadResult:
        async with self._lock:
            self._pending = None  # a later call must read the file again
            result = await self._reload_once()
        self._report(result)
        return result

    async def _reload_once(self) -> ReloadResult:
        name = self._current.filename
        try:
            loaded = await self._background_call.wait_result()
            await self._apply_config(loaded)
        except ConfigError as error:
            self._files = self._current.files | error.files
            message = "the configuration stays %s, since the new one is wrong:\n%s"
            log.error(message, self._current.hash, error)  # noqa: TRY400 - not a bug: no traceback
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


# Reload triggers: SIGHUP, changed files, and other sources that are asked.

_MAX_PAUSE: Final = 1.0
"""Seconds at most until a file that has changed, or SIGHUP, has an effect after a reload."""
_PAUSE_SHARE: Final = 4.0
"""A pause, as a multiple of the time that the reload took: a storm of signals costs a fifth of the
time at most, unless a reload takes longer than ``_MAX_PAUSE`` allows."""
_POLL_INTERVAL: Final = 5.0
"""Seconds between two questions whether a source that is no file has changed."""


class ReloadTrigger:
    """Reloads when ``reload_requested`` is set or the ``watched_file`` changes.

    After each reload it pauses. Requests meanwhile are one request.

    ``has_changed`` is asked every ``poll_interval`` seconds, in a thread.
    """

    def __init__(
        self,
        reloader: Reloader,
        watched_file: str | None,
        has_changed: Callable[[], bool] | None = None,
        poll_interval: float = _POLL_INTERVAL,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._reloader = reloader
        self._watched_files = () if watched_file is None else (watched_file,)
        self.reload_requested = asyncio.Event()
        self._file_watcher = FileWatcher(self._list_files, self.reload_requested.set)
        self._poll_call = None if has_changed is None else BackgroundCall(has_changed)
        self._poll_interval = poll_interval
        self._pause = pause

    async def run(self) -> None:
        """Run until cancelled. Changes since the construction count."""
        async with asyncio.TaskGroup() as tasks:
            if self._watched_files:
                tasks.create_task(self._file_watcher.run())
            if self._poll_call is not None:
                tasks.create_task(self._poll(self._poll_call))
            loop = asyncio.get_running_loop()
            while True:
                await self.reload_requested.wait()
                self.reload_requested.clear()
                start = loop.time()
                await self._reloader.reload()
                await self._pause(min(_PAUSE_SHARE * (loop.time() - start), _MAX_PAUSE))

    async def _poll(self, has_changed: BackgroundCall[bool]) -> None:
        while True:
            await asyncio.sleep(self._poll_interval)
            if await has_changed.wait_result():
                self.reload_requested.set()

    def _list_files(self) -> frozenset[str]:
        return self._reloader.files.union(self._watched_files)
