"""Reading workers' answers: streams and whole ones.

A stream has no last event, and may have none at all: its end is the end of the body, which is sure
where the connection says that the body is whole. A worker that tells finish reasons has to tell one
before; of another's end nothing more is known.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.core import sse
from gateway.core.errors import GatewayError, StreamBroken, WorkerFailed
from gateway.core.types import (
    Done,
    End,
    Event,
    GenerateRequest,
    Served,
    Start,
    Text,
    TokenLogprob,
    Usage,
)
from protocols.triton.failures import complain_of
from protocols.triton.incoming import REASONS, UNTOLD, Said, read
from protocols.triton.plan import Plan

_LARGEST_EVENT: Final = 1 << 24
"""A model that does not stream tells all in one event."""


class AnswerDecoder:
    """Reads the answer to a GenerateRequest, as a stream of events or as one JSON body.

    Which of the two it is shows in the first byte. ``known`` are the model's ``incoming.outputs``,
    ``plan`` is how it was asked. ``prompt`` may stand in front of each choice, and is cut off.
    """

    def __init__(
        self, request: GenerateRequest, known: Mapping[str, str], plan: Plan, prompt: str | None
    ) -> None:
        self._body = sse.Body()
        self._reader = _Reader(request, known, plan, prompt)

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        share = self._body.feed(data)
        return self._reader.feed(share) if share else ()

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        body = self._body.whole
        if body is None:
            return self._reader.close(self._body.feed(b"\n\n"))
        return self._reader.whole(bytes(body))


class _Reader:
    """Reads any answer; see ``AnswerDecoder``."""

    def __init__(
        self, request: GenerateRequest, known: Mapping[str, str], plan: Plan, prompt: str | None
    ) -> None:
        self._request = request
        self._known = known
        self._in_pieces = plan.streams(request)
        """Whether each event is a token's, as far as nothing else is told."""
        self._whole = False
        self._choices = request.n or 1
        self._splitter = sse.Splitter(limit=_LARGEST_EVENT)
        self._prompts = [prompt] * self._choices
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._may_be_empty = plan.may_be_empty(request)
        """Whether a body without events is an answer without text."""
        self._tells_ends = False
        self._prompt_tokens: int | None = None
        self._tokens: int | None = None
        self._served = False
        self._failed: GatewayError | None = None

    def feed(self, data: bytes) -> Sequence[Event]:
        """What the next bytes of a stream tell."""
        if self._failed is not None:
            raise self._failed
        payloads = filter(bytes.strip, self._splitter.feed(data))
        events, self._failed = sse.events_of(payloads, self._read)
        return events

    def close(self, rest: bytes) -> Sequence[Event]:
        """What a stream's end tells; ``rest`` ends an event whose newlines are missing."""
        if self._failed is not None:
            raise self._failed
        events = self._rest(rest)
        untold = self._untold()
        if untold:
            self._check_end(untold)
        return self._complete(events, untold)

    def whole(self, body: bytes) -> Sequence[Event]:
        """What an answer in one piece tells."""
        self._whole = True
        events: list[Event] = []
        self._read(body, events)
        untold = self._untold()
        if not self._seen.issuperset(untold):
            raise WorkerFailed("The worker did not answer as often as it was asked to.")
        return self._complete(events, untold)

    def _untold(self) -> Sequence[int]:
        return [i for i in range(self._choices) if i not in self._ended]

    def _complete(self, events: Sequence[Event], untold: Sequence[int]) -> Sequence[Event]:
        usage = [] if self._request.want.usage == "each" else self._usage()
        return [*events, *[End("unknown", i) for i in untold], *usage, Done()]

    def _check_end(self, untold: Sequence[int]) -> None:
        """Raises unless these choices of a stream are complete, though nothing said so."""
        complete = self._seen.issuperset(untold) and not self._tells_ends
        if not self._seen:
            complete = self._may_be_empty
        if self._splitter.stray is not None:
            complain_of(self._splitter.stray)
            complete = False
        if not complete:
            raise StreamBroken("The worker's stream stopped before its end.")

    # --- events -----------------------------------------------------------------------------------

    def _rest(self, data: bytes) -> Sequence[Event]:
        """An event whose newlines are missing, which are ``data``."""
        try:
            events = self.feed(data)
        except WorkerFailed as error:
            if error.__cause__ is None:  # it could be read, and is a complaint
                raise
            raise StreamBroken("The worker's stream stopped inside an event.") from error
        if self._failed is not None:
            raise self._failed
        return events

    def _read(self, body: bytes, events: list[Event]) -> None:
        said = read(body, self._request, self._known)
        self._count(said, events)
        if said.reasons:
            self._tells_ends = True
        for index, text in enumerate(said.texts[: self._choices]):
            self._seen.add(index)
            self._piece(said, index, text, events)
        if said.counts and self._request.want.usage == "each":
            events += self._usage()

    def _count(self, said: Said, events: list[Event]) -> None:
        if not self._served and said.model is not None:
            self._served = True
            events.append(Served(said.model))
        if said.prompt_tokens is not None:
            if self._prompt_tokens is None and not self._whole:
                events.append(Start(said.prompt_tokens))
            self._prompt_tokens = said.prompt_tokens
        if said.counts:
            self._tokens = (self._tokens or 0) + sum(said.counts)

    def _usage(self) -> list[Event]:
        """What the worker counted, if it counted both."""
        if self._prompt_tokens is None or self._tokens is None:
            return []
        return [Usage(self._prompt_tokens, self._tokens)]

    # --- one choice -------------------------------------------------------------------------------

    def _piece(self, said: Said, index: int, text: str, events: list[Event]) -> None:
        prompt = self._prompts[index]
        if prompt is not None:
            self._prompts[index] = None
            text = text.removeprefix(prompt)
        logprobs = said.logprobs[index] if index < len(said.logprobs) else ()
        reason = said.reasons[index] if index < len(said.reasons) else UNTOLD
        if index in self._ended:
            if text or logprobs:
                raise StreamBroken(f"The worker went on with choice {index} after its end.")
            return
        if text or logprobs:
            tokens = self._size(said, index, text, logprobs)
            events.append(Text(text, index, tokens, logprobs=logprobs))
        if reason != UNTOLD:
            events.append(self._end(reason, index, said))

    def _size(self, said: Said, index: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> int:
        """How many tokens a text is, from whatever tells most of it."""
        if len(said.counts) == len(said.texts):
            return said.counts[index]
        if logprobs:
            return len(logprobs)
        return 1 if self._in_pieces and not self._whole else math.ceil(len(text) / 4)

    def _end(self, wire: str, index: int, said: Said) -> End:
        reason = REASONS.get(wire, "unknown")
        if reason is None:
            raise WorkerFailed(f"The worker broke off ({wire}).")
        self._ended.add(index)
        stop = said.stops[index] if index < len(said.stops) else UNTOLD
        if reason != "eos" or stop == UNTOLD:
            return End(reason, index)
        ids = self._request.stopping.stop_token_ids
        number = next((one for one in ids if str(one) == stop), None)
        return End("stop", index, stop if number is None else number)
