"""Values that an arm came to: all of them, or how many lay in each bucket."""

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Protocol

from msgspec import Struct

from gateway.core.histogram import Histogram


class Mean(Struct, frozen=True):
    """Of ``n`` values; ``variance`` is that of one of them."""

    n: int
    value: float
    variance: float


class Sample(Protocol):
    """Values."""

    @property
    def n(self) -> int:
        """How many there are."""

    def mean(self) -> Mean | None:
        """Their mean; None where there are none."""

    def quantile(self, p: float) -> float:
        """Below which the part ``p`` of them lies, where there are some."""

    def within(self, low: float, high: float) -> tuple[float, float]:
        """Between what the quantiles from ``low`` to ``high`` surely lie, where there are some."""


class Values:
    """Every value."""

    def __init__(self, edges: tuple[float, ...] = ()) -> None:
        """``edges`` are for others, which need them."""
        del edges
        self._found = array("d")
        self._sorted = True

    def extend(self, values: Sequence[float]) -> None:
        """Take these in."""
        self._found.extend(values)
        self._sorted = False

    @property
    def n(self) -> int:
        """See Sample."""
        return len(self._found)

    def mean(self) -> Mean | None:
        """See Sample."""
        if not (n := self.n):
            return None
        value = sum(self._found) / n
        squares = sum((one - value) ** 2 for one in self._found)
        return Mean(n, value, squares / max(1, n - 1))

    def quantile(self, p: float) -> float:
        """Between two values, as far as ``p`` lies between (k - 1/2) / n of the one and the other.

        Source: Hyndman and Fan, The American Statistician 50 (1996), 361-365, definition 5.
        """
        if not self._sorted:
            self._found = array("d", sorted(self._found))
            self._sorted = True
        last = self.n - 1
        at = min(max(p * (last + 1) - 0.5, 0.0), float(last))
        below = int(at)
        above = min(below + 1, last)
        return self._found[below] + (at - below) * (self._found[above] - self._found[below])

    def within(self, low: float, high: float) -> tuple[float, float]:
        """See Sample."""
        return self.quantile(low), self.quantile(high)


class Buckets(Histogram):
    """How many values lie up to each edge. Within a bucket they are taken to be spread evenly."""

    def take(self, upto: Mapping[float, int]) -> None:
        """Hold as many values as lie up to each edge, the last of which is infinite.

        Raises ValueError where that can't be.
        """
        *edges, last = sorted(upto)
        counts = [upto[edge] for edge in (*edges, last)]
        if last != inf or counts != sorted(counts):
            raise ValueError("these are not all the buckets")
        self.edges = tuple(edges)
        self.counts = [high - low for low, high in pairwise((0, *counts))]

    @property
    def n(self) -> int:
        """See Sample."""
        return sum(self.counts)

    def mean(self) -> Mean | None:
        """See Sample. For the variance, what is above the last edge is taken to be there."""
        if not (n := self.n):
            return None
        middles = [(low + high) / 2 for low, high in self._sides()]
        widths = [high - low for low, high in self._sides()]
        middle = sum(count * at for count, at in zip(self.counts, middles, strict=True)) / n
        squares = (
            count * ((at - middle) ** 2 + width**2 / 12)
            for count, at, width in zip(self.counts, middles, widths, strict=True)
        )
        return Mean(n, self.total / n, sum(squares) / n)

    def quantile(self, p: float) -> float:
        """See Sample. What is above the last edge is taken to be there."""
        at, part = self._find(p)
        low, high = self._sides()[at]
        return low + (high - low) * part

    def within(self, low: float, high: float) -> tuple[float, float]:
        """See Sample: from the lower edge of the one's bucket to the upper edge of the other's."""
        edges = (0.0, *self.edges, inf)
        return edges[self._find(low)[0]], edges[self._find(high)[0] + 1]

    def _find(self, p: float) -> tuple[int, float]:
        """The bucket that a quantile is in, and how far along."""
        upto = list(accumulate(self.counts, initial=0))
        wanted = p * upto[-1]
        at = next(k for k, n in enumerate(upto[1:]) if n >= wanted and self.counts[k])
        return at, (wanted - upto[at]) / self.counts[at]

    def _sides(self) -> list[tuple[float, float]]:
        """The edges of each bucket; the last one has no width."""
        return list(pairwise((0.0, *self.edges, self.edges[-1])))
