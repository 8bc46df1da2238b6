"""What the supervisor tells of its processes, for Prometheus."""

from typing import Final

from gateway.told import MetricDefinition

SERVING_PROCESSES: Final = MetricDefinition(
    "interlingua_processes", "gauge", "Processes that serve.", merge_mode="supervisor"
)
PROCESS_RESTARTS: Final = MetricDefinition(
    "interlingua_process_restarts",
    "counter",
    "Processes that were started in the place of one that ended.",
    merge_mode="supervisor",
)
SUPERVISOR_METRICS: Final = (SERVING_PROCESSES, PROCESS_RESTARTS)
