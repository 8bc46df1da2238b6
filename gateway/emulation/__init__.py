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

from gateway.emulation.affixes import Around, around
from gateway.emulation.asking import answer, gathered, parts
from gateway.emulation.counting import Count, counted
from gateway.emulation.planning import Plan, planned

__all__ = [
    "Around",
    "Count",
    "Plan",
    "answer",
    "around",
    "counted",
    "gathered",
    "parts",
    "planned",
]
