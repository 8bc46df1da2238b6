"""How measured values lie, kept as plain numbers. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Histogram:
    """How many values lie up to each edge and above the one before it."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        """One for each edge, and the last for what is above all of them."""
        self.total = 0.0
        """The sum of the values."""

    def add(self, value: float) -> None:
        """Take a value in."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def extend(self, values: Sequence[float]) -> None:
        """Take many in: in their order, those that lie in one bucket are together."""
        edges, counts, done = self.edges, self.counts, 0
        ordered = sorted(values)
        while done < len(ordered):
            at = bisect_left(edges, ordered[done])
            here = bisect_right(ordered, edges[at], done) if at < len(edges) else len(ordered)
            counts[at] += here - done
            done = here
        self.total = sum(values, self.total)
