"""What tells of workers, and how it fails."""

from collections.abc import Sequence
from typing import Protocol

from backends.upstream import WorkerConfig


class DiscoveryError(Exception):
    """A source can't tell which workers there are. Its text says why, for a log."""


class WorkerSource(Protocol):
    """Tells which workers there are now."""

    @property
    def interval(self) -> float:
        """In how many seconds to look again."""

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """The workers; none at all counts as a failure. Raises DiscoveryFailed."""
