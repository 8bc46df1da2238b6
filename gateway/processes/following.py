"""When the configuration is read anew: when a signal says so, or the file has changed."""

import asyncio

from gateway.files import Watch
from gateway.reload import Reloader


class Following:
    """Reloads whenever something has ``changed``: so a signal says, and the file ``watched``."""

    def __init__(self, reloader: Reloader, watched: str | None) -> None:
        self._reloader = reloader
        self._watched = () if watched is None else (watched,)
        self.changed = asyncio.Event()
        self._watch = Watch(self._files, self.changed.set)

    async def run(self) -> None:
        """Until cancelled. What has changed since this was made counts."""
        async with asyncio.TaskGroup() as tasks:
            if self._watched:
                tasks.create_task(self._watch.run())
            while True:
                await self.changed.wait()
                self.changed.clear()
                await self._reloader.reload()

    def _files(self) -> frozenset[str]:
        return self._reloader.files.union(self._watched)
