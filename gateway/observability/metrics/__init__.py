"""What all exchanges come to, counted for Prometheus. Labels are configured names only.

exchanges   what each came to, by model, version and split
workers     what a pool of workers does for them
running     those that are not over
process     the process that serves them, and processes of several
vllm        the same figures by the names that vLLM has for them

Nothing here is asked for an answer's pieces: an exchange is counted once, at its end.
"""

from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.metrics.upstream import PoolStats

__all__ = ["MetricsCollector", "PoolStats"]
