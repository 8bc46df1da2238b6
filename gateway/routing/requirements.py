"""What a request needs of a target, beside what it would merely like. Pure.

A target that falls short of a wish answers all the same, and says so (``protocols.core.loss``). One
that lacks an ability would answer something else: words in place of a tool's call, prose in place
of JSON. The first target is the client's choice; one that answers in its stead must be able.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from protocols.core.loss import LossReason, UnsupportedParameter
from protocols.core.request import GenerationRequest, Prompt, Request

CONTEXT_LENGTH: Final = "context"
"""Room for the prompt."""

_REQUIRED_FIELDS: Final[Mapping[str, str]] = {
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
_REQUIRED_CONTENT: Final[Mapping[str, str]] = {
    "images": "images",
    "audio": "audio",
    "videos": "videos",
    "files": "files",
    "tool calls": "tools",
}
"""What of a conversation's content is one, in the words of its losses' details."""
_SUPPORTED_REASONS: Final[frozenset[LossReason]] = frozenset({"renamed", "emulated"})
"""Nothing of the meaning is gone."""


def find_missing_requirements(
    request: Request, losses: Sequence[UnsupportedParameter], context: int | None
) -> tuple[str, ...]:
    """The abilities that ``request`` needs and its target lacks.

    ``losses`` are those of the plan for it, ``context`` is how many tokens the target takes. Only a
    prompt of token ids is known to be too long: how many tokens a text makes, its model alone can
    tell, and one may be of any length.
    """
    found = dict.fromkeys(_list_missing(request, losses))
    if context is not None and _count_prompt_tokens(request) > context:
        found[CONTEXT_LENGTH] = None
    return tuple(found)


def _list_missing(request: Request, losses: Sequence[UnsupportedParameter]) -> Iterator[str]:
    idle = isinstance(request, GenerationRequest) and request.tool_choice == "none"
    for loss in losses:
        if loss.reason in _SUPPORTED_REASONS or (loss.path == "tools" and idle):
            continue
        if loss.path == "messages":
            yield from (
                _REQUIRED_CONTENT[one]
                for one in loss.detail.split(", ")
                if one in _REQUIRED_CONTENT
            )
        elif loss.path in _REQUIRED_FIELDS:
            yield _REQUIRED_FIELDS[loss.path]


def _count_prompt_tokens(request: Request) -> int:
    """How many tokens the longest prompt has at the least, as the target is to see it."""
    prompts: Sequence[Prompt]
    if isinstance(request, GenerationRequest):
        prompts, overflow = request.prompts, request.stopping.overflow
        cut = request.stopping.truncate_prompt
    else:
        prompts, overflow, cut = request.inputs, request.overflow, request.truncate
    if overflow == "truncate" or cut is not None:
        return 0
    return max((len(one) for one in prompts if not isinstance(one, str)), default=0)
