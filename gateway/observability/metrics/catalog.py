"""All metric definitions, for the reference page and for merging pages of several processes."""

from collections.abc import Mapping
from typing import Final

from gateway.observability.metrics import requests, rollouts, system, upstream, vllm_compat
from gateway.observability.metrics.definition import MetricDefinition

METRIC_GROUPS: Final[Mapping[str, tuple[MetricDefinition, ...]]] = {
    "Requests": requests.REQUEST_METRICS,
    "Running requests": requests.RUNNING_REQUEST_METRICS,
    "Shadow traffic": system.SHADOW_METRICS,
    "Rollouts": rollouts.ROLLOUT_METRICS,
    "Workers": upstream.UPSTREAM_METRICS,
    "Local engines": system.ENGINE_METRICS,
    "Rate limits": (*system.RATE_LIMIT_METRICS, *system.RATE_LIMIT_STORE_METRICS),
    "Process": system.PROCESS_METRICS,
    "Feedback": system.FEEDBACK_METRICS,
    "Recordings": (system.RECORDED_REQUESTS,),
    "Dropped records": system.DROPPED_RECORD_METRICS,
    "Configuration": system.RELOAD_METRICS,
    "Serving processes": system.SUPERVISOR_METRICS,
    "vLLM names": vllm_compat.VLLM_METRICS,
}
"""Definitions by the heading of the reference page."""
METRICS_BY_NAME: Final[Mapping[str, MetricDefinition]] = {
    one.sample_name: one for part in METRIC_GROUPS.values() for one in part
}
"""Definitions by sample name."""
