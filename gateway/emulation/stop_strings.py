"""Emulates stop strings for a worker that does not support them, or only some of them."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from protocols.core.request import AnyRequest, GenerationRequest, StopConditions
from protocols.core.stop_strings import StopStringFilter

STOP_STRING_FIELDS: Final = frozenset({"stopping.stop", "stopping.include_stop"})
"""The fields that are emulated here."""

OutputEvent = PromptEcho | TextDelta | ReasoningDelta | RefusalDelta | ToolCallStart | ToolCallDelta
"""The events of a choice before its end."""


def remove_stop_strings(request: AnyRequest) -> AnyRequest:
    """The request without stop strings that the gateway has to include or to name.

    A worker would remove them from the text.
    """
    if not isinstance(request, GenerationRequest) or not (
        request.stopping.include_stop or request.response_options.matched_stop
    ):
        return request
    return replace(request, stopping=replace(request.stopping, stop=(), include_stop=None))


def select_effective_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings that can match: without those that contain another one before their end."""
    candidates = tuple(filter(None, stops))
    return tuple(stop for stop in candidates if not any(other in stop[:-1] for other in candidates))


class StopStringEmulator:
    """Ends each choice at its first stop string, which is sent only if it is to be included.

    Whole events are held back while a stop string may begin in them, so that tokens stay with
    their text. Events of a choice after its end are dropped.
    """

    def __init__(self, stopping: StopConditions, choices: int) -> None:
        """``choices`` is the number of choices of the response."""
        self._stops = select_effective_stops(stopping.stop)
        self._include_stop = bool(stopping.include_stop)
        self._choices_left = choices
        self._open_choices: dict[int, _ChoiceBuffer] = {}
        self._ended_choices: set[int] = set()
        self._stopped: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended here, while the backend still generates one of them."""
        return self._choices_left <= 0 and bool(self._stopped)

    def apply(self, events: Sequence[Event]) -> list[Event]:
        """The events that can be sent now."""
        out: list[Event] = []
        for event in events:
            match event:
                case ChoiceEnd(_, index):
                    self._stopped.discard(index)
                    if index not in self._ended_choices:
                        out += self._get_choice(index).flush()
                        out.append(event)
                        self._end_choice(index)
                case (
                    PromptEcho()
                    | TextDelta()
                    | ReasoningDelta()
                    | RefusalDelta()
                    | ToolCallStart()
                    | ToolCallDelta()
                ):
                    if event.index not in self._ended_choices:
                        self._add_event(event, out)
                case StreamEnd():
                    self._stopped.clear()
                    out.append(event)
                case _:
                    out.append(event)
        return out

    def _add_event(self, event: OutputEvent, out: list[Event]) -> None:
        choice = self._get_choice(event.index)
        out += choice.add_event(event)
        if choice.matched_stop is not None:
            out.append(ChoiceEnd("stop", event.index, choice.matched_stop))
            self._stopped.add(event.index)
            self._end_choice(event.index)

    def _get_choice(self, index: int) -> "_ChoiceBuffer":
        choice = self._open_choices.get(index)
        if choice is None:
            choice = self._open_choices[index] = _ChoiceBuffer(
                self._stops, include=self._include_stop
            )
        return choice

    def _end_choice(self, index: int) -> None:
        del self._open_choices[index]
        self._ended_choices.add(index)
        self._choices_left -= 1


class _ChoiceBuffer:
    """One choice's events, until it ends."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._filter = StopStringFilter(stops, include=include)
        self._pending_events: deque[OutputEvent] = deque()
        self._sendable_characters = 0
        """How many characters of the held events can be sent."""
        self.matched_stop: str | None = None

    def add_event(self, event: OutputEvent) -> list[Event]:
        """The events that can be sent after ``event``. A match is stored in ``matched_stop``."""
        if not isinstance(event, TextDelta):
            if not self._pending_events:
                return [event]
            self._pending_events.append(event)
            return []
        text, self.matched_stop = self._filter.feed(event.text)
        self._pending_events.append(event)
        self._sendable_characters += len(text)
        return self._pop_sendable()

    def flush(self) -> list[Event]:
        """The held events, at the end of the choice."""
        return list(self._pending_events)

    def _pop_sendable(self) -> list[Event]:
        out: list[Event] = []
        while self._pending_events:
            first = self._pending_events[0]
            if isinstance(first, TextDelta):
                if len(first.text) > self._sendable_characters:
                    if self.matched_stop is not None and self._sendable_characters:
                        out.append(shorten_delta(first, self._sendable_characters))
                    break
                self._sendable_characters -= len(first.text)
            out.append(self._pending_events.popleft())
        return out


def shorten_delta(event: TextDelta, length: int) -> TextDelta:
    """The first ``length`` characters, with the tokens that begin within them.

    Token ids and logprobs that can't be assigned to characters are left out.
    """
    text = event.text[:length]
    token_count = _count_tokens_within(event, length)
    if token_count is not None:
        ids = event.token_ids if len(event.token_ids) == len(event.logprobs) else ()
        return replace(
            event,
            text=text,
            tokens=token_count,
            token_ids=ids[:token_count],
            logprobs=event.logprobs[:token_count],
        )
    if event.tokens <= 1 and len(event.token_ids) <= 1 and len(event.logprobs) <= 1:
        return replace(event, text=text)
    share = -(-event.tokens * length // len(event.text))
    return replace(event, text=text, tokens=share, token_ids=(), logprobs=())


def _count_tokens_within(event: TextDelta, length: int) -> int | None:
    """How many tokens begin before ``length``; None where the logprobs do not spell the text."""
    if "".join(logprob.token for logprob in event.logprobs) != event.text:
        return None
    position, token_count = 0, 0
    for logprob in event.logprobs:
        if position >= length:
            break
        position += len(logprob.token)
        token_count += 1
    return token_count
