"""Emulation: features that the gateway provides where a worker can't.

planner       which unsupported parameters the gateway emulates
prompt_echo   echo the prompt before the response, the suffix behind it
stop_strings  stop strings
fan_out       several choices, prompts or inputs as several requests
usage         count tokens where the backend reports none
execute       run the plan around a backend's events

The text that a model writes is never repaired: invalid JSON stays as it came.
"""

from gateway.emulation.execute import collect_emulated, count_parts, stream_emulated
from gateway.emulation.planner import EmulationPlan, plan_emulation
from gateway.emulation.prompt_echo import EchoAndSuffix, strip_echo_and_suffix
from gateway.emulation.usage import UsageCounter, add_usage

__all__ = [
    "EchoAndSuffix",
    "EmulationPlan",
    "UsageCounter",
    "add_usage",
    "collect_emulated",
    "count_parts",
    "plan_emulation",
    "stream_emulated",
    "strip_echo_and_suffix",
]
