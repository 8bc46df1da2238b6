"""What the gateway does in a backend's stead, for every backend alike.

planning    which losses it makes up for
affixes     the prompt before an answer, the suffix behind it
stops       stop strings
fanout      several choices, prompts or inputs, by several requests
counting    usage, where the backend tells none
asking      all of this around a backend's answer: the only part that waits for anything

    plan = planned(request, backend.losses(request, names))
    async with aclosing(answer(backend, request, context, plan)) as batches:
        ...

``gathered`` gives all of an answer in one piece.

What a model is to write is never mended: JSON that is none stays as it came.
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
