"""Counters of a pool: retries, failures, queue times and cancelled responses. Pure.

The outcome of a request is counted elsewhere; these are the metrics of attempts and of the queue.
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
    """The metrics of one pool since its creation."""

    retries: Counter[str] = field(default_factory=Counter[str])
    """Retries by reason: see ``settings.RetryReason``; or ``fallback``: to the same workers."""
    exhausted: int = 0
    """Retries that the budget prevented."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Failures of workers by kind: see ``workers.get_error_kind``."""
    shed: Counter[str] = field(default_factory=Counter[str])
    """Rejected requests by reason: ``queue_full``, ``queue_wait`` or ``no_worker``."""
    abandoned: int = 0
    """Responses that were cancelled at the worker before their end."""
    request_durations: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    """Durations of attempts in seconds."""
    queue_times: Histogram = field(default_factory=lambda: Histogram(QUEUE_TIME_BUCKETS))
    """Time in the queue in seconds, of requests that had to wait."""
    stream_gaps: Histogram = field(default_factory=lambda: Histogram(STREAM_GAP_BUCKETS))
    """The longest time in seconds between two reads of a completed stream."""
