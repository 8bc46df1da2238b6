"""All metric definitions, for the reference page and for merging pages of several processes."""

from collections.abc import Mapping
from typing import Final

from gateway.observability.metrics import (
    dropped,
    engines,
    rate_limits,
    reloads,
    requests,
    rollouts,
    shadows,
    system,
    upstream,
    vllm_compat,
)
from gateway.observability.metrics.definition import MetricDefinition

METRIC_GROUPS: Final[Mapping[str, tuple[MetricDefinition, ...]]] = {
    "Requests": requests.REQUEST_METRICS,
    "Running requests": requests.RUNNING_REQUEST_METRICS,
    "Shadow traffic": shadows.SHADOW_METRICS,
    "Rollouts": rollouts.ROLLOUT_METRICS,
    "Workers": upstream.UPSTREAM_METRICS,
    "Local engines": engines.ENGINE_METRICS,
    "Rate limits": (*rate_limits.RATE_LIMIT_METRICS, *rate_limits.RATE_LIMIT_STORE_METRICS),
    "Process": system.PROCESS_METRICS,
    "Feedback": dropped.FEEDBACK_METRICS,
    "Recordings": (dropped.RECORDED_REQUESTS,),
    "Dropped records": dropped.DROPPED_RECORD_METRICS,
    "Configuration": reloads.RELOAD_METRICS,
    "Serving processes": system.SUPERVISOR_METRICS,
    "vLLM names": vllm_compat.VLLM_METRICS,
}
"""Definitions by the heading of the reference page."""
METRICS_BY_NAME: Final[Mapping[str, MetricDefinition]] = {
    one.sample_name: one for part in METRIC_GROUPS.values() for one in part
}
"""Definitions by sample name."""
