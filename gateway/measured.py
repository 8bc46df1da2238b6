"""Every metric that there may be on the page: for who merges pages, and who documents them."""

from collections.abc import Mapping
from typing import Final

from gateway import engines, reloads, shadow_counts
from gateway.limits import counts as limits
from gateway.limits.shared import counts as shared
from gateway.metrics import exchanges, process, processes, running, vllm, workers
from gateway.recording import lost
from gateway.told import Told

PARTS: Final[Mapping[str, tuple[Told, ...]]] = {
    "Exchanges": exchanges.TOLD,
    "Exchanges that are not over": running.TOLD,
    "Shadows": shadow_counts.TOLD,
    "Pools of workers": workers.TOLD,
    "Local models": engines.TOLD,
    "Limits": (*limits.TOLD, *shared.TOLD),
    "The process": process.TOLD,
    "What is lost": lost.TOLD,
    "The configuration": reloads.TOLD,
    "Several processes": processes.TOLD,
    "By vLLM's names": vllm.TOLD,
}
"""By what they are about."""
EVERY: Final[Mapping[str, Told]] = {one.sample_name: one for part in PARTS.values() for one in part}
"""By the name that they are asked for by."""
