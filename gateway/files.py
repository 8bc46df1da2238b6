"""Files that may change while the gateway runs, and what tells of it."""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from backends.aside import Aside

_EVERY: Final = 1.0


class Look(Struct, frozen=True):
    """What is found at a path: which file it leads to, and a digest of what that holds."""

    which: tuple[int, int]
    digest: bytes


Looks = Mapping[str, Look | None]
"""By path; None where nothing can be read."""


def look(path: str) -> Look | None:
    """What is at a path, links followed; of a folder, what is told of the files in it."""
    digest = hashlib.sha256()
    try:
        found = Path(path)
        about = found.stat()
        if found.is_file():  # what is neither may keep a reader waiting for ever
            digest.update(found.read_bytes())
        elif found.is_dir():
            for one in sorted(found.iterdir()):
                inside = one.stat()
                digest.update(f"{one.name}\n{inside.st_size} {inside.st_mtime_ns}\n".encode())
    except OSError:
        return None
    return Look((about.st_dev, about.st_ino), digest.digest())


class Watch:
    """Looks at ``files`` again and again, and tells ``changed`` whenever something is new there.

    What it finds when it is made is as it should be.

    What is put in a file's place whole, by renaming or by another link, counts at once: so a volume
    is changed that Kubernetes mounts. What is written in place counts when two looks, ``every``
    seconds apart, have found it the same: half a file may be a good one, too.
    """

    def __init__(
        self,
        files: Callable[[], Collection[str]],
        changed: Callable[[], object],
        *,
        every: float = _EVERY,
    ) -> None:
        self._files = files
        self._changed = changed
        self._every = every
        self._aside = Aside(self._look)
        self._last = self._taken = self._look()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._every)
            self.see(await self._aside.run())

    def see(self, now: Looks) -> None:
        """This is what is there now. A file that was not looked at before is as it should be."""
        last, self._last = self._last, now
        self._taken = {path: self._taken.get(path, one) for path, one in now.items()}
        if now == self._taken or any(
            _is_moving(last.get(path, now[path]), now[path]) for path in now
        ):
            return
        self._taken = now
        self._changed()

    def _look(self) -> Looks:
        return {path: look(path) for path in self._files()}


def _is_moving(last: Look | None, now: Look | None) -> bool:
    """Whether it may not be whole yet."""
    replaced = last is not None and now is not None and last.which != now.which
    return last != now and not replaced
