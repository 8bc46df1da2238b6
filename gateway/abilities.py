"""What a request needs of a target, beside what it would merely like. Pure.

A target that falls short of a wish answers all the same, and says so (``gateway.core.loss``). One
that lacks an ability would answer something else: words in place of a tool's call, prose in place
of JSON. The first target is the client's choice; one that answers in its stead must be able.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.core.loss import Loss, Reason
from gateway.core.types import GenerateRequest, Prompt, Request

CONTEXT: Final = "context"
"""Room for the prompt."""

_PATHS: Final[Mapping[str, str]] = {
    "tools": "tools",
    "tool_choice": "tool choice",
    "output": "structured output",
    "logprobs.top": "logprobs",
    "logprobs.prompt": "logprobs",
    "insert_before": "infilling",
    "adapter": "adapters",
    "dimensions": "dimensions",
}
"""The fields that are abilities. All others are wishes."""
_MESSAGES: Final[Mapping[str, str]] = {
    "images": "images",
    "audio": "audio",
    "videos": "videos",
    "files": "files",
    "tool calls": "tools",
}
"""What of a conversation's content is one, in the words of its losses' details."""
_CARRIED: Final[frozenset[Reason]] = frozenset({"renamed", "emulated"})
"""Nothing of the meaning is gone."""


def lacking(request: Request, losses: Sequence[Loss], context: int | None) -> tuple[str, ...]:
    """The abilities that ``request`` needs and its target lacks.

    ``losses`` are those of the plan for it, ``context`` is how many tokens the target takes. Only a
    prompt of token ids is known to be too long: how many tokens a text makes, its model alone can
    tell, and one may be of any length.
    """
    found = dict.fromkeys(_lost(request, losses))
    if context is not None and _tokens(request) > context:
        found[CONTEXT] = None
    return tuple(found)


def _lost(request: Request, losses: Sequence[Loss]) -> Iterator[str]:
    idle = isinstance(request, GenerateRequest) and request.tool_choice == "none"
    for loss in losses:
        if loss.reason in _CARRIED or (loss.path == "tools" and idle):
            continue
        if loss.path == "messages":
            yield from (_MESSAGES[one] for one in loss.detail.split(", ") if one in _MESSAGES)
        elif loss.path in _PATHS:
            yield _PATHS[loss.path]


def _tokens(request: Request) -> int:
    """How many tokens the longest prompt has at the least, as the target is to see it."""
    prompts: Sequence[Prompt]
    if isinstance(request, GenerateRequest):
        prompts, overflow = request.prompts, request.stopping.overflow
        cut = request.stopping.truncate_prompt
    else:
        prompts, overflow, cut = request.inputs, request.overflow, request.truncate
    if overflow == "truncate" or cut is not None:
        return 0
    return max((len(one) for one in prompts if not isinstance(one, str)), default=0)
