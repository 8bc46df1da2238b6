"""What a pool counts of what it does for requests. Pure.

What one exchange came to is told of it at its end; here is what that does not tell: the workers
that were asked in vain, the time in the queue, the answers that nobody waited for.
"""

from collections import Counter
from typing import Final

from msgspec import Struct, field

from backends.histogram import Histogram

LATENCY_BUCKETS: Final = (*(0.001 * 2**k for k in range(20)),)
"""Upper edges in seconds, from 1 ms to 9 minutes."""
QUEUE_TIME_BUCKETS: Final = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""In seconds."""
STREAM_GAP_BUCKETS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
)
"""In seconds."""


class PoolMetrics(Struct, eq=False):
    """Of one pool, since it was made."""

    retries: Counter[str] = field(default_factory=Counter[str])
    """How often another worker was asked, by the reason: see ``retry.Reason``."""
    exhausted: int = 0
    """How often another would have been asked, had the budget allowed it."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """What workers failed with: see ``member.kind``."""
    shed: Counter[str] = field(default_factory=Counter[str])
    """Who was sent away: ``queue_full``, ``queue_wait`` or ``no_worker``."""
    abandoned: int = 0
    """Answers that were ended at their worker before their end, since nobody waited for them."""
    request_durations: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    """Each try at a worker, from its begin to its end."""
    queue_times: Histogram = field(default_factory=lambda: Histogram(QUEUE_TIME_BUCKETS))
    """For a place at a worker, of those who had to."""
    stream_gaps: Histogram = field(default_factory=lambda: Histogram(STREAM_GAP_BUCKETS))
    """The longest time between two reads of a stream that came to its end."""
