"""The collectors behind /metrics. Labels are configured names only.

definition   name, type, labels and help of a metric
catalog      all metric definitions, for the reference page and for several processes
requests     finished and running requests, by model, version and traffic split
upstream     pools and their workers
system       process, reloads, rate limits, shadow traffic, local engines, dropped records
vllm_compat  the same numbers under vLLM's metric names

A request is counted once, at its end.
"""

from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.metrics.upstream import PoolStats

__all__ = ["MetricsCollector", "PoolStats"]
