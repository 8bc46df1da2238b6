"""How measured values lie, kept as plain numbers. Pure."""

from bisect import bisect_left


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
