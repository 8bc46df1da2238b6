"""Usage, where a backend tells none: counted from what it said."""

from collections.abc import Sequence
from typing import Final

from gateway.core.brief import Asked, Brief
from gateway.core.ports import Piece
from gateway.core.types import (
    CallArguments,
    Done,
    EmbedRequest,
    End,
    Event,
    Refusal,
    Served,
    Start,
    Text,
    Thought,
    Usage,
)

_WORDLESS: Final = frozenset({Served, End, Done})
"""What every answer has, and tells nothing of its length."""
_DECIDING: Final = frozenset({Usage, Done})
"""Usage tells by coming before Done that it is told."""
_PER_TOKEN: Final = 4
"""Characters, as a rule of thumb."""
_MOST_PER_TOKEN: Final = 16
"""No text has so many characters to a token: who says so has called a whole answer one piece."""


class Count:
    """Watches one answer. The backend's own figures always win."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._told = False
        self._prompt: int | None = None
        self._tokens = 0
        self._characters = 0
        self._unmeasured = 0
        """Characters of what comes without a number of tokens."""

    def apply(self, events: Sequence[Event]) -> Sequence[Event]:
        """These events, with usage before Done if there was none."""
        for event in events:
            if type(event) is Text:
                self._tokens += event.tokens
                self._characters += len(event.text)
            elif type(event) in _WORDLESS:
                continue
            elif type(event) is Usage:
                self._told = True
                return events  # nothing of it is counted any more
            elif type(event) is Start:
                self._prompt = event.prompt_tokens
            elif type(event) is Thought or type(event) is Refusal or type(event) is CallArguments:
                self._unmeasured += len(event.text)
        if self._told or not events or type(events[-1]) is not Done:
            return events
        return [*events[:-1], *self.missing(), events[-1]]

    def missing(self) -> tuple[Usage, ...]:
        """The usage of what was said so far, unless the backend has told it.

        ``estimated`` where a part of it is: a prompt of which the backend said nothing, and what
        has no tokens of its own, each by its length.
        """
        if self._told:
            return ()
        crammed = self._characters > self._tokens * _MOST_PER_TOKEN
        tokens = by_length(self._characters) if crammed else self._tokens
        tokens += by_length(self._unmeasured)
        prompt, guessed = self._prompt, False
        if prompt is None:
            prompt, guessed = _prompt_tokens(self._asked)
        estimated = guessed or crammed or self._unmeasured > 0
        return (Usage(prompt, tokens, source="estimated" if estimated else "counted"),)


def counted(asked: Asked, pieces: Sequence[Piece]) -> Piece:
    """All of an answer as one piece, with usage before Done if there was none."""
    said: list[Event] = []
    body = None
    for data, events in pieces:
        said += events
        body = data or body
    if next(filter(_DECIDING.__contains__, map(type, said)), None) is Usage:
        return body, said
    count, said = Count(asked), []
    for _, events in pieces:
        said += count.apply(events)
    return body, said


def by_length(characters: int) -> int:
    """How many tokens a text of this length may have."""
    return -(-characters // _PER_TOKEN)


def _prompt_tokens(asked: Asked) -> tuple[int, bool]:
    """The prompt's tokens, and whether they are a guess: ids are as many as they are."""
    request = asked.request if isinstance(asked, Brief) else asked
    tokens, guessed, before = 0, False, 0
    if isinstance(request, EmbedRequest):
        before, given = len(request.instruction or ""), request.inputs
    else:
        given = request.prompts
        for message in request.messages:
            tokens += by_length(len(message.text))
            guessed = True
    for one in given:
        if isinstance(one, str):
            tokens += by_length(len(one) + before)
            guessed = True
        else:
            tokens += len(one)
    return tokens, guessed
