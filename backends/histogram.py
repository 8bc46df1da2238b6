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


def find_bucket(counts: Sequence[int], share: float) -> tuple[int, float]:
    """The bucket in which a quantile lies, and how far along in it. ``counts`` are not all 0."""
    wanted = share * sum(counts)
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            return bucket, (wanted - below) / count
        below += count
    raise ValueError("there are no values")


def bucket_quantile(edges: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The quantile of values of which only the buckets are known; None if there are none.

    Within a bucket, values are taken to be spread evenly. Values above the last edge are taken to
    lie at it. ``counts`` has one number for each edge and one for what lies above them.
    """
    if not any(counts):
        return None
    bucket, part = find_bucket(counts, share)
    if bucket == len(edges):
        return edges[-1]
    low = edges[bucket - 1] if bucket else 0.0
    return low + (edges[bucket] - low) * part
