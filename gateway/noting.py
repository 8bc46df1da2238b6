"""What an answer comes to, noted as it passes; and two of them side by side."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from backends.interfaces import EventSink, StreamItem, StreamItems
from gateway.exchange import ResponseStrategy
from gateway.observability.record import RequestOutcome
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import Clock
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import Request

ShadowOutcome = RequestOutcome | Literal["dropped"]


class ShadowSide(Struct, omit_defaults=True):
    """One of two answers to a request. Times are in seconds, from when its target was asked.

    ``dropped``: there was no room for it. ``length`` is in characters, as far as it came.
    """

    model: str
    version: str
    outcome: ShadowOutcome = "ok"
    error: str = ""
    """The class of the error."""
    finish: tuple[FinishReason, ...] = ()
    """Why each choice ended."""
    tokens: int = 0
    length: int = 0
    first_token: float | None = None
    duration: float = 0.0


class ShadowComparison(Struct, omit_defaults=True, tag_field="kind", tag="shadow"):
    """A client's answer, and its shadow's. ``id`` is the client's exchange."""

    id: str
    shadow_id: str
    main: ShadowSide
    shadow: ShadowSide
    losses: tuple[UnsupportedParameter, ...] = ()
    """The shadow's."""
    equal: bool | None = None
    """Whether both say the same; None where they need not, or did not come to their end."""


ReportComparison = Callable[[ShadowComparison], None]


class ResponseSummary:
    """What one answer comes to. Of what it says only digests are kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """A target is asked. What another said before it was heard by nobody."""
        self._started_at = self._clock()
        self._first_token_time: float | None = None
        self._started_choices: set[int] = set()
        self._finish_reasons: dict[int, FinishReason] = {}
        self._is_done = False
        self._tokens = self._length = 0
        self._usage: Usage | None = None
        self._digests: dict[tuple[int, int], hashlib.blake2b] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Note these events."""
        for event in events:
            match event:
                case TextDelta(text, index, tokens):
                    self._tokens += tokens
                    self._add_content(text, index)
                case RefusalDelta(text, index):
                    self._add_content(text, index)
                case ToolCallStart(index, call, _, text) | ToolCallDelta(index, call, text):
                    self._add_content(text, index, call)
                case ReasoningDelta(index=index):
                    self._mark_first_token()
                    self._started_choices.add(index)
                case Embedding():
                    self._mark_first_token()
                case ChoiceEnd(reason, index):
                    self._finish_reasons[index] = reason
                case Usage():
                    self._usage = event
                case StreamEnd():
                    self._is_done = True
                case _:
                    pass

    @property
    def is_complete(self) -> bool:
        """Whether it came to its end, and each choice to its own."""
        return self._is_done and self._started_choices <= self._finish_reasons.keys()

    def build_side(self, target: tuple[str, str], how: tuple[ShadowOutcome, str]) -> ShadowSide:
        """What it comes to by now.

        ``target`` is a model and its version, ``how`` the outcome and the error's class.
        """
        return ShadowSide(
            *target,
            *how,
            tuple(self._finish_reasons[index] for index in sorted(self._finish_reasons)),
            self._tokens if self._usage is None else self._usage.completion_tokens,
            self._length,
            self._first_token_time,
            self._clock() - self._started_at,
        )

    def has_same_content(self, other: "ResponseSummary") -> bool:
        """Whether both say the same words, and call the same tools with them."""
        return self.get_digests() == other.get_digests()

    def get_digests(self) -> dict[tuple[int, int], bytes]:
        """The digest of each choice's words, and of those of each call in it."""
        return {place: digest.digest() for place, digest in self._digests.items()}

    def _add_content(self, text: str, index: int, call: int = -1) -> None:
        """Note words of a choice, or of a call in it."""
        self._mark_first_token()
        self._started_choices.add(index)
        self._length += len(text)
        digest = self._digests.get((index, call))
        if digest is None:
            digest = self._digests[index, call] = hashlib.blake2b()
        digest.update(text.encode("utf-8", "surrogatepass"))

    def _mark_first_token(self) -> None:
        if self._first_token_time is None:
            self._first_token_time = self._clock() - self._started_at


class ObservedStrategy:
    """An answer that is noted as it passes."""

    def __init__(self, answering: ResponseStrategy, noted: ResponseSummary) -> None:
        self.unsupported_parameters = answering.unsupported_parameters
        self.get_encoder = answering.get_encoder
        self.get_stream_headers = answering.get_stream_headers
        self.build_response = answering.build_response
        self._strategy = answering
        self._summary = noted

    @property
    def request(self) -> Request:
        """See ``gateway.exchange.ResponseStrategy``."""
        return self._strategy.request

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """See ``gateway.exchange.ResponseStrategy``."""
        events = self._strategy.process_events(events)
        self._summary.add_events(events)
        return events

    async def collect(self) -> StreamItem:
        """See ``gateway.exchange.ResponseStrategy``."""
        self._summary.start()
        body, said = await self._strategy.collect()
        self._summary.add_events(said)
        return body, said

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """See ``gateway.exchange.ResponseStrategy``."""
        self._summary.start()
        return self._strategy.stream(take)
