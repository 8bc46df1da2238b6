"""Histograms of measured values, and quantiles of their buckets. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket. A bucket includes its upper edge."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        """One for each edge, and one for values above the last."""
        self.total = 0.0
        """The sum of the values."""

    def add(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def extend(self, values: Sequence[float]) -> None:
        """Add many values. They are sorted, so that each bucket is searched once."""
        edges, counts, position = self.edges, self.counts, 0
        ordered = sorted(values)
        while position < len(ordered):
            bucket = bisect_left(edges, ordered[position])
            end = (
                bisect_right(ordered, edges[bucket], position)
                if bucket < len(edges)
                else len(ordered)
            )
            counts[bucket] += end - position
            position = end
        self.total = sum(values, self.total)


def find_bucket(counts: Sequence[int], share: float) -> tuple[int, float]:
    """The bucket of a quantile, and the quantile's position in it (0 to 1).

    Raises ValueError if all ``counts`` are 0.
    """
    rank = share * sum(counts)
    cumulative = 0
    for bucket, count in enumerate(counts):
        if count and cumulative + count >= rank:
            return bucket, (rank - cumulative) / count
        cumulative += count
    raise ValueError("there are no values")


def bucket_quantile(edges: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The estimated quantile; None without values.

    Values are assumed to be spread evenly within a bucket. Above the last edge, the edge is
    returned. ``counts`` has one number for each edge and one for values above the last.
    """
    if not any(counts):
        return None
    bucket, fraction = find_bucket(counts, share)
    if bucket == len(edges):
        return edges[-1]
    low = edges[bucket - 1] if bucket else 0.0
    return low + (edges[bucket] - low) * fraction
