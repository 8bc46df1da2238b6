"""Traffic splits: a model's traffic over its versions, drawn or by sticky assignment. Pure.

A user keeps a version by weighted rendezvous hashing. For each version with a weight::

    n     = the first 52 bits of SHA-256(name LF version LF user), a number
    score = -ln((n + 0.5) / 2**52) / weight

and the version with the least score is chosen. ``name`` is the split's, LF a byte 0x0A, all in
UTF-8. A version's score depends only on its own weight, so that raising a weight moves users to
that version only. No state is kept, so every replica chooses the same.

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
    """A user's version. ``bucket`` is the ``n`` of the version for the user, below 2**52."""

    version: str
    bucket: int


class TrafficSplit:
    """Weights over versions, for A/B tests, canaries and models with one version alike."""

    def __init__(self, weights: Mapping[str, int], name: str = "") -> None:
        """``weights`` has at least one above 0; ``name`` is the salt of the hash."""
        self._name = name
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Replace the weights. Users of a version whose weight rises stay there."""
        name = self._name
        self._weights = {version: weight for version, weight in weights.items() if weight}
        self._versions = list(self._weights)
        self._cumulative_weights = list(itertools.accumulate(self._weights.values()))
        self.only_version = self._versions[0] if len(self._versions) == 1 else None
        """The version with all traffic, if there is only one."""
        self.reported_name = name if len(self._versions) > 1 else ""
        """The name for logs and explanations; "" if there is only one version."""

    def pick_version(self, draw: float) -> str:
        """The version for a random number ``draw`` in [0, 1)."""
        return self._versions[
            bisect.bisect_right(self._cumulative_weights, draw * self._cumulative_weights[-1])
        ]

    def assign_version(self, user: str) -> StickyAssignment:
        """The version that a user keeps."""
        buckets = self.compute_buckets(user)
        version = min(buckets, key=lambda name: compute_score(buckets[name], self._weights[name]))
        return StickyAssignment(version, buckets[version])

    def compute_buckets(self, user: str) -> Mapping[str, int]:
        """The ``n`` of each version for a user."""
        return {version: compute_bucket(self._name, version, user) for version in self._versions}

    @property
    def weights(self) -> Mapping[str, int]:
        """The weight of each version; none is 0."""
        return self._weights


def compute_bucket(name: str, version: str, user: str) -> int:
    """A number below 2**52 that depends on these three only."""
    text = f"{name}\n{version}\n{user}".encode("utf-8", "surrogateescape")
    return int.from_bytes(sha256(text).digest()[:8]) >> (64 - _BUCKET_BITS)


def bucket_to_fraction(bucket: int) -> float:
    """A bucket as a number between 0 and 1, both exclusive."""
    return (bucket + 0.5) / _BUCKET_COUNT


def compute_score(bucket: int, weight: int) -> float:
    """The score of a version with this weight; the least score is chosen."""
    return -math.log(bucket_to_fraction(bucket)) / weight
