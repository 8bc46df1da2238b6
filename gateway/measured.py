"""Every metric that there may be on the page: for who merges pages, and who documents them."""

from collections.abc import Mapping
from typing import Final

from gateway import engines, reloads, shadow_counts
from gateway.limits import counts as limits
from gateway.limits.shared import counts as shared
from gateway.metrics import exchanges, process, processes, running, vllm, workers
from gateway.recording import lost
from gateway.told import MetricDefinition

METRIC_GROUPS: Final[Mapping[str, tuple[MetricDefinition, ...]]] = {
    "Exchanges": exchanges.REQUEST_METRICS,
    "Exchanges that are not over": running.RUNNING_REQUEST_METRICS,
    "Shadows": shadow_counts.SHADOW_METRICS,
    "Pools of workers": workers.UPSTREAM_METRICS,
    "Local models": engines.ENGINE_METRICS,
    "Limits": (*limits.RATE_LIMIT_METRICS, *shared.RATE_LIMIT_STORE_METRICS),
    "The process": process.PROCESS_METRICS,
    "What is lost": lost.DROPPED_RECORD_METRICS,
    "The configuration": reloads.RELOAD_METRICS,
    "Several processes": processes.SUPERVISOR_METRICS,
    "By vLLM's names": vllm.VLLM_METRICS,
}
"""By what they are about."""
METRICS_BY_NAME: Final[Mapping[str, MetricDefinition]] = {
    one.sample_name: one for part in METRIC_GROUPS.values() for one in part
}
"""By the name that they are asked for by."""
