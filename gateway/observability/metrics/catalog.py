"""Every metric that there may be on the page: for who merges pages, and who documents them."""

from collections.abc import Mapping
from typing import Final

from gateway.observability.metrics import requests, system, upstream, vllm_compat
from gateway.observability.metrics.definition import MetricDefinition

METRIC_GROUPS: Final[Mapping[str, tuple[MetricDefinition, ...]]] = {
    "Exchanges": requests.REQUEST_METRICS,
    "Exchanges that are not over": requests.RUNNING_REQUEST_METRICS,
    "Shadows": system.SHADOW_METRICS,
    "Pools of workers": upstream.UPSTREAM_METRICS,
    "Local models": system.ENGINE_METRICS,
    "Limits": (*system.RATE_LIMIT_METRICS, *system.RATE_LIMIT_STORE_METRICS),
    "The process": system.PROCESS_METRICS,
    "What is lost": system.DROPPED_RECORD_METRICS,
    "The configuration": system.RELOAD_METRICS,
    "Several processes": system.SUPERVISOR_METRICS,
    "By vLLM's names": vllm_compat.VLLM_METRICS,
}
"""By what they are about."""
METRICS_BY_NAME: Final[Mapping[str, MetricDefinition]] = {
    one.sample_name: one for part in METRIC_GROUPS.values() for one in part
}
"""By the name that they are asked for by."""
