"""Counts usage from a backend's events if the backend reports none."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from protocols.core.request import (
    AnyRequest,
    ClassifyRequest,
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    RerankRequest,
    TextPart,
)

_EVENTS_WITHOUT_TEXT: Final = frozenset({ResponseMetadata, ResponseExtra, ChoiceEnd, StreamEnd})
"""Events that have no text."""
_CHARACTERS_PER_TOKEN: Final = 4
"""A rule of thumb."""
_MAX_CHARACTERS_PER_TOKEN: Final = 16
"""No text has more: a worker that reports fewer tokens has counted chunks instead of tokens."""


class UsageCounter(Struct, eq=False):
    """Counts the tokens of one response. The backend's own usage always has precedence."""

    _request: AnyRequest
    _has_usage: bool = False
    _prompt_tokens: int | None = None
    _tokens: int = 0
    _characters: int = 0
    _untokenized_characters: int = 0
    """Characters of events without a number of tokens."""

    def apply(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events, with Usage before StreamEnd if the backend sent none."""
        if self._has_usage:
            return events
        is_last = events and type(events[-1]) is StreamEnd
        if is_last and len(events) > 1 and type(events[-2]) is Usage:
            self._has_usage = True
            return events
        tokens = characters = 0
        for event in events:
            if type(event) is TextDelta:
                tokens += event.tokens
                characters += len(event.text)
            elif type(event) in _EVENTS_WITHOUT_TEXT:
                continue
            elif type(event) is Usage:
                self._has_usage = True
                return events  # nothing more is counted
            elif type(event) is StreamStart:
                self._prompt_tokens = event.prompt_tokens
            elif (
                type(event) is ReasoningDelta
                or type(event) is RefusalDelta
                or type(event) is ToolCallDelta
            ):
                self._untokenized_characters += len(event.text)
        self._tokens += tokens
        self._characters += characters
        return [*events[:-1], self._count_usage(), events[-1]] if is_last else events

    def build_missing_usage(self) -> tuple[Usage, ...]:
        """The usage so far, unless the backend has reported it."""
        return () if self._has_usage else (self._count_usage(),)

    def _count_usage(self) -> Usage:
        """The usage so far.

        Its source is ``estimated`` if a part of it is: a prompt whose tokens the backend did not
        report, and events without a number of tokens, each by its length.
        """
        is_undercounted = self._characters > self._tokens * _MAX_CHARACTERS_PER_TOKEN
        tokens = estimate_tokens(self._characters) if is_undercounted else self._tokens
        estimated = is_undercounted
        if self._untokenized_characters:
            tokens += estimate_tokens(self._untokenized_characters)
            estimated = True
        prompt = self._prompt_tokens
        if prompt is None:
            prompt, is_guessed = _count_prompt_tokens(self._request)
            estimated = estimated or is_guessed
        return Usage(prompt, tokens, None, None, "estimated" if estimated else "counted")


def estimate_tokens(characters: int) -> int:
    """The estimated number of tokens of a text of this length."""
    return -(-characters // _CHARACTERS_PER_TOKEN)


def _count_prompt_tokens(request: AnyRequest) -> tuple[int, bool]:
    """The prompt's tokens, and whether they are estimated; token ids are counted exactly."""
    tokens, is_estimated, prefix_length = 0, False, 0
    prompts: Sequence[Prompt] = ()
    if type(request) is GenerationRequest:
        prompts = request.prompts
        for message in request.messages:
            length = 0
            for part in message.parts:
                if type(part) is TextPart:
                    length += len(part.text)
            tokens += estimate_tokens(length)
            is_estimated = True
    elif isinstance(request, EmbeddingRequest):
        prefix_length, prompts = len(request.instruction or ""), request.inputs
    elif isinstance(request, ClassifyRequest):
        prompts = request.inputs
    elif isinstance(request, RerankRequest):
        prefix_length, prompts = max(map(len, request.queries)), request.documents
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens += estimate_tokens(len(prompt) + prefix_length)
            is_estimated = True
        else:
            tokens += len(prompt)
    return tokens, is_estimated
