"""The prompt before an answer (``echo``), and a ``suffix`` behind it.

Both are put there here and nowhere else; so a client gets them whichever worker answers. An echo
with logprobs needs the model's own view of the prompt, and stays with the backend.
"""

from collections.abc import Sequence

from gateway.core.types import End, Event, GenerateRequest, PromptEcho, Request, Text


class Around:
    """Puts the prompt before and the suffix behind each choice."""

    def __init__(self, request: GenerateRequest, *, echo: bool) -> None:
        self._prompts = request.prompts if echo else ()
        self._n = request.n or 1
        self._left = len(self._prompts) * self._n
        """How many choices are still to begin with their prompt."""
        self._suffix = request.suffix or ""
        self._begun: set[int] = set()

    def apply(self, events: Sequence[Event]) -> Sequence[Event]:
        """These events, with what belongs around them."""
        if self._left:
            events = self._echoed(events)
        return self._followed(events) if self._suffix else events

    def _echoed(self, events: Sequence[Event]) -> Sequence[Event]:
        """With the prompt before each choice."""
        out: list[Event] = []
        for at, event in enumerate(events):
            if (type(event) is Text or type(event) is End) and event.index not in self._begun:
                self._begun.add(event.index)
                out.append(PromptEcho(event.index, str(self._prompts[event.index // self._n])))
                self._left -= 1
                if not self._left:
                    return [*out, *events[at:]]
            out.append(event)
        return out

    def _followed(self, events: Sequence[Event]) -> Sequence[Event]:
        """With the suffix at each choice's end."""
        out: list[Event] = []
        for event in events:
            if type(event) is End:
                out.append(Text(self._suffix, event.index, tokens=0))
            out.append(event)
        return out


def around(request: Request) -> tuple[Request, Around | None]:
    """The request as the backend sees it, and what is left to do around its answer."""
    if type(request) is not GenerateRequest or not (request.echo or request.suffix):
        return request, None
    echo = bool(request.echo) and request.logprobs is None and _texts(request)
    return request.without(echo=echo, suffix=True), Around(request, echo=echo)


def _texts(request: GenerateRequest) -> bool:
    for prompt in request.prompts:
        if type(prompt) is not str:
            return False
    return bool(request.prompts)
