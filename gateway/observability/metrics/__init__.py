"""The collectors behind /metrics. Labels are configured names only.

definition   name, type, labels and help of a metric
catalog      all metric definitions, for the reference page and for several processes
requests     finished requests, by model, version and traffic split, and running requests
upstream     pools and their workers
engines      local models
shadows      shadow traffic
rollouts     guarded rollouts
rate_limits  rate limits, and the store that several gateways share
reloads      configuration reloads
dropped      feedback and recordings; log lines, usage rows and traces that were dropped
system       the process itself, its connections, and the supervisor
vllm_compat  the same numbers under vLLM's metric names

A request is counted once, at its end.
"""

from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.metrics.upstream import PoolStats

__all__ = ["MetricsCollector", "PoolStats"]
