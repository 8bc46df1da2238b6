"""Emulates ``echo`` (the prompt before the response) and ``suffix`` (a text behind it).

The gateway does both for every worker, so that they do not depend on the target. An echo with
logprobs needs the model's logprobs of the prompt and is left to the backend.
"""

from collections.abc import Sequence

from protocols.core.events import ChoiceEnd, Event, PromptEcho, TextDelta
from protocols.core.request import AnyRequest, GenerationRequest


class EchoAndSuffix:
    """Adds the prompt before and the suffix behind each choice."""

    def __init__(self, request: GenerationRequest, *, echo: bool) -> None:
        self._prompts = request.prompts if echo else ()
        self._choices_per_prompt = request.n or 1
        self._echoes_left = len(self._prompts) * self._choices_per_prompt
        """How many choices still lack their echo."""
        self._suffix = request.suffix or ""
        self._started_choices: set[int] = set()

    def apply(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events with echo and suffix added."""
        if self._echoes_left:
            events = self._add_echo(events)
        return self._add_suffix(events) if self._suffix else events

    def _add_echo(self, events: Sequence[Event]) -> Sequence[Event]:
        """Add the prompt before each choice."""
        out: list[Event] = []
        for at, event in enumerate(events):
            if (
                type(event) is TextDelta or type(event) is ChoiceEnd
            ) and event.index not in self._started_choices:
                self._started_choices.add(event.index)
                out.append(
                    PromptEcho(
                        event.index, str(self._prompts[event.index // self._choices_per_prompt])
                    )
                )
                self._echoes_left -= 1
                if not self._echoes_left:
                    return [*out, *events[at:]]
            out.append(event)
        return out

    def _add_suffix(self, events: Sequence[Event]) -> Sequence[Event]:
        """Add the suffix at the end of each choice."""
        out: list[Event] = []
        for event in events:
            if type(event) is ChoiceEnd:
                out.append(TextDelta(self._suffix, event.index, tokens=0))
            out.append(event)
        return out


def strip_echo_and_suffix(request: AnyRequest) -> tuple[AnyRequest, EchoAndSuffix | None]:
    """The request for the backend without these fields, and the emulation of them, if any."""
    if type(request) is not GenerationRequest or not (request.echo or request.suffix):
        return request, None
    echo = bool(request.echo) and request.logprobs is None and _has_only_texts(request)
    return request.without_fields(echo=echo, suffix=True), EchoAndSuffix(request, echo=echo)


def _has_only_texts(request: GenerationRequest) -> bool:
    for prompt in request.prompts:
        if type(prompt) is not str:
            return False
    return bool(request.prompts)
