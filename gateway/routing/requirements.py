"""The capabilities that a request requires of a fallback. Pure.

A target that does not support an optional parameter still answers and reports the loss
(``protocols.core.loss``). One without a required capability would answer something else: text
instead of a tool call, prose instead of JSON. The first target is the client's choice; a fallback
must meet all requirements.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from protocols.core.loss import CONTENT_LABELS, LossReason, UnsupportedParameter
from protocols.core.request import AnyRequest, EmbeddingRequest, GenerationRequest, Prompt

CONTEXT_LENGTH: Final = "context"
"""A context that is long enough for the prompt."""

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
"""The fields that are requirements, and what each requires. All others are optional."""
_REQUIRED_CONTENT: Final[Mapping[str, str]] = {
    **{label: label for label in CONTENT_LABELS.values()},
    "tool calls": "tools",
}
"""The content of messages that is a requirement, as the detail of a loss names it."""
_SUPPORTED_REASONS: Final[frozenset[LossReason]] = frozenset({"renamed", "emulated"})
"""The reasons of a loss that keep the meaning."""


def find_missing_requirements(
    request: AnyRequest, losses: Sequence[UnsupportedParameter], context: int | None
) -> tuple[str, ...]:
    """The capabilities that ``request`` requires and its target lacks.

    ``losses`` are those of its emulation plan, ``context`` is the target's context length in
    tokens. Only a prompt of token ids can be too long: the number of tokens of a text depends on
    the model.
    """
    missing = dict.fromkeys(_list_missing(request, losses))
    if context is not None and _count_prompt_tokens(request) > context:
        missing[CONTEXT_LENGTH] = None
    return tuple(missing)


def _list_missing(request: AnyRequest, losses: Sequence[UnsupportedParameter]) -> Iterator[str]:
    tools_unused = isinstance(request, GenerationRequest) and request.tool_choice == "none"
    for loss in losses:
        if loss.reason in _SUPPORTED_REASONS or (loss.path == "tools" and tools_unused):
            continue
        if loss.path == "messages":
            yield from (
                _REQUIRED_CONTENT[one]
                for one in loss.detail.split(", ")
                if one in _REQUIRED_CONTENT
            )
        elif loss.path in _REQUIRED_FIELDS:
            yield _REQUIRED_FIELDS[loss.path]


def _count_prompt_tokens(request: AnyRequest) -> int:
    """The tokens of the longest prompt of token ids; 0 if the target is to truncate it."""
    prompts: Sequence[Prompt]
    if isinstance(request, GenerationRequest):
        prompts, overflow = request.prompts, request.stopping.overflow
        truncation = request.stopping.truncate_prompt
    elif isinstance(request, EmbeddingRequest):
        prompts, overflow, truncation = request.inputs, request.overflow, request.truncate
    else:
        return 0
    if overflow == "truncate" or truncation is not None:
        return 0
    return max((len(one) for one in prompts if not isinstance(one, str)), default=0)
