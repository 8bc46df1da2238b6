"""The indices of an answer: one item for each that was requested, counted from 0.

An item is a choice of a prompt, or the vector, score or class of an input. Clients find items by
their indices, so that an answer with a gap, or with two items of one index, is none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from protocols.core.errors import WorkerError, WorkerFailed

_MAX_NAMED: Final = 10
"""How many indices an error names: there may be thousands."""


def check_indices(
    found: Iterable[int], count: int, noun: str, error: type[WorkerError] = WorkerFailed
) -> None:
    """Raise ``error`` unless each index from 0 to ``count`` - 1 is among those found once.

    ``noun`` is what an item is called: ``choice``.
    """
    counts = Counter(list(found))
    missing = [index for index in range(count) if index not in counts]
    doubled = [index for index, times in counts.items() if times > 1]
    surplus = [index for index in counts if not 0 <= index < count]
    faults = [
        f"{fault} {noun} {_format_indices(indices)}"
        for fault, indices in (
            ("lacks", missing),
            ("has more than one", doubled),
            ("has the unrequested", surplus),
        )
        if indices
    ]
    if faults:
        text = f"The worker's answer {', '.join(faults)}; it was asked for {count}, counted from 0."
        raise error(text)


class RisingIndex:
    """Tells a stream whose index counts the chunks of its only choice from one with more choices.

    Foundry Local and the first releases of TGI's chat number the chunks: each index is one more
    than that of the chunk before. A stream of several choices comes back to the first one.
    """

    def __init__(self) -> None:
        self._rises: bool | None = None
        self._first = 0
        self._count = 0
        """How many chunks came."""

    def follow(self, index: int) -> bool | None:
        """Whether the next chunk is one of the first one's choice, whatever its index is.

        None means that the chunk after it decides this.
        """
        self._count += 1
        if self._count == 1:
            self._first = index
            return False
        if self._rises is None:
            if index != self._first + self._count - 1:
                self._rises = False
            elif self._count > _UNDECIDED_COUNT:
                self._rises = True
        return self._rises


_UNDECIDED_COUNT: Final = 2
"""So many chunks may have indices that rise by chance: those of two choices."""


def _format_indices(indices: Sequence[int]) -> str:
    """The first of them: ``1, 2 and 5 more``."""
    named = ", ".join(map(str, indices[:_MAX_NAMED]))
    more = len(indices) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
