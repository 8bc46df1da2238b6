"""When the configuration is read anew: when a signal says so, or the file has changed."""

import asyncio

from gateway.config.file_watch import FileWatcher
from gateway.reload import Reloader


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
