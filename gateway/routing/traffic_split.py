"""How the traffic of a model is shared among its versions: by luck, or by who asks. Pure.

Who asks is held to an arm by weighted rendezvous hashing. For each arm with a weight::

    n     = the first 52 bits of SHA-256(name LF version LF who), a number
    score = -ln((n + 0.5) / 2**52) / weight

and the arm with the least score is taken. ``name`` is the split's, LF a byte 0x0A, all in UTF-8.
An arm's score depends on nothing but its own weight, so that raising it moves only those who come
to it, and nobody between the others. No state is kept, so every replica finds the same.

Source: Schindelhauer and Schomaker, Weighted Distributed Hash Tables (SPAA 2005), the logarithmic
method.
"""

import bisect
import itertools
import math
from collections.abc import Mapping
from hashlib import sha256

from msgspec import Struct

_BUCKET_BITS = 52
_BUCKET_COUNT = 1 << _BUCKET_BITS


class StickyAssignment(Struct, frozen=True):
    """Where someone is held. ``bucket`` is the arm's ``n`` for them, below 2**52."""

    version: str
    bucket: int


class TrafficSplit:
    """Weights over versions: the A/B test, the canary and the plain route alike."""

    def __init__(self, weights: Mapping[str, int], name: str = "") -> None:
        """``weights`` has at least one above 0; ``name`` is what the hash is salted with."""
        self._weights = {arm: weight for arm, weight in weights.items() if weight}
        self._versions = list(self._weights)
        self._cumulative_weights = list(itertools.accumulate(self._weights.values()))
        self._name = name
        self.only_version = self._versions[0] if len(self._versions) == 1 else None
        """The version that has all of it, where there is nothing to share out."""
        self.reported_name = name if len(self._versions) > 1 else ""
        """What it is called where it is told of; "" where there is nothing to share out."""

    def pick_version(self, draw: float) -> str:
        """The version at ``draw``, which is in [0, 1)."""
        return self._versions[
            bisect.bisect_right(self._cumulative_weights, draw * self._cumulative_weights[-1])
        ]

    def assign_version(self, who: str) -> StickyAssignment:
        """The arm that someone is held to."""
        buckets = self.compute_buckets(who)
        chosen = min(buckets, key=lambda arm: compute_score(buckets[arm], self._weights[arm]))
        return StickyAssignment(chosen, buckets[chosen])

    def compute_buckets(self, who: str) -> Mapping[str, int]:
        """Each arm's ``n`` for someone."""
        return {arm: compute_bucket(self._name, arm, who) for arm in self._versions}

    @property
    def weights(self) -> Mapping[str, int]:
        """Each arm's, of which none is 0."""
        return self._weights


def compute_bucket(name: str, arm: str, who: str) -> int:
    """A number below 2**52 that follows from these three alone."""
    text = f"{name}\n{arm}\n{who}".encode("utf-8", "surrogateescape")
    return int.from_bytes(sha256(text).digest()[:8]) >> (64 - _BUCKET_BITS)


def bucket_to_fraction(bucket: int) -> float:
    """Where it lies between 0 and 1; it is neither."""
    return (bucket + 0.5) / _BUCKET_COUNT


def compute_score(bucket: int, weight: int) -> float:
    """What an arm of this weight is measured by; the least is taken."""
    return -math.log(bucket_to_fraction(bucket)) / weight
