"""The memory that local models share: which are loaded, and which make room for another.

A model that is to be loaded reserves its size first. While that does not fit, the model that was
used least recently is unloaded: an idle one at once, a busy one after its running requests, to
which no new ones are added. Reservations are served in their order, so that no model waits for
ever behind others that are busy.
"""

import asyncio
from typing import Protocol


class LoadableModel(Protocol):
    """A model that can be unloaded."""

    @property
    def idle(self) -> bool:
        """Whether it has no requests."""

    @property
    def last_used(self) -> float:
        """When its last request ended, in seconds of a monotonic clock."""

    async def unload(self) -> None:
        """Unload it after its running requests; it releases its memory."""


class ModelMemory:
    """Memory for models that are loaded on demand."""

    def __init__(self, limit: int | None = None) -> None:
        """``limit`` is in bytes; None: any number of models may be loaded."""
        self.limit = limit
        self._sizes: dict[LoadableModel, int] = {}
        self._lock = asyncio.Lock()

    async def reserve(self, model: LoadableModel, size: int) -> None:
        """Reserve memory for a model, or correct its size, and unload others for it."""
        async with self._lock:
            while (other := self._find_other(model, size)) is not None:
                await other.unload()
            self._sizes[model] = size

    def release(self, model: LoadableModel) -> None:
        """Release the memory of a model."""
        self._sizes.pop(model, None)

    def _find_other(self, model: LoadableModel, size: int) -> LoadableModel | None:
        """The model to unload next; None if there is room."""
        others = {one: used for one, used in self._sizes.items() if one is not model}
        if self.limit is None or sum(others.values()) + size <= self.limit or not others:
            return None
        return min(others, key=lambda one: (not one.idle, one.last_used))
