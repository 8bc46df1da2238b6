"""What a source shows of one model: the figures of each of its arms, and of whom they are."""

from collections import Counter
from typing import Any

from msgspec import Struct, field

from gateway.figures import Figures


class Asked(Struct, frozen=True):
    """What is looked for."""

    model: str
    everything: bool = False
    """Also what no split sent there, without telling the splits apart."""
    since: float = 0.0
    """In Unix seconds."""


class Evidence(Struct):
    """What was found. Arms are named by split and version; the split is "" with ``everything``."""

    exact: bool
    """Whether each value is known, and not only its bucket."""
    arms: dict[tuple[str, str], Figures[Any]] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    """All that are told of."""
    apart: Counter[str] = field(default_factory=Counter)
    """The model's exchanges that no split sent where they were answered, by why."""
    sticky: int = 0
    """The model's exchanges whose clients are held to their arm."""
    lines: int = 0
    skipped: int = 0
    """Lines that tell of no exchange."""
    early: int = 0
    """Exchanges from before the time that is looked at."""

    def splits(self) -> list[str]:
        """Those that sent something."""
        return sorted({split for split, _ in self.arms if split})

    def versions(self, split: str) -> list[str]:
        """Those that a split sent something to, in the order of their numbers."""
        found = [version for one, version in self.arms if one == split]
        return sorted(found, key=lambda name: (not name.isdecimal(), name.zfill(20)))
