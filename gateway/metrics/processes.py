"""What the supervisor tells of its processes, for Prometheus."""

from typing import Final

from gateway.told import Told

PROCESSES: Final = Told(
    "interlingua_processes", "gauge", "Processes that serve.", merge_mode="supervisor"
)
RESTARTS: Final = Told(
    "interlingua_process_restarts",
    "counter",
    "Processes that were started in the place of one that ended.",
    merge_mode="supervisor",
)
TOLD: Final = (PROCESSES, RESTARTS)
