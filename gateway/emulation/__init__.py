"""Emulation: features that the gateway provides where a worker can't.

planner       which unsupported parameters the gateway emulates
prompt_echo   echo the prompt before the response, the suffix behind it
stop_strings  stop strings
fan_out       several choices, prompts or inputs as several requests
usage         count tokens where the backend reports none
execute       run the plan around a backend's events

The text that a model writes is never repaired: invalid JSON stays as it came.
"""
