"""What an answer comes to, noted as it passes; and two of them side by side."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from gateway.core.context import Clock
from gateway.core.loss import Loss
from gateway.core.ports import Piece, Pieces, Take
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    End,
    Event,
    FinishReason,
    Refusal,
    Request,
    Text,
    Thought,
    Usage,
    Vector,
)
from gateway.exchange import Answering
from gateway.telemetry import Outcome

Fate = Outcome | Literal["dropped"]


class Arm(Struct, omit_defaults=True):
    """One of two answers to a request. Times are in seconds, from when its target was asked.

    ``dropped``: there was no room for it. ``length`` is in characters, as far as it came.
    """

    model: str
    version: str
    outcome: Fate = "ok"
    error: str = ""
    """The class of the error."""
    finish: tuple[FinishReason, ...] = ()
    """Why each choice ended."""
    tokens: int = 0
    length: int = 0
    first_token: float | None = None
    duration: float = 0.0


class Shadowed(Struct, omit_defaults=True, tag_field="kind", tag="shadow"):
    """A client's answer, and its shadow's. ``id`` is the client's exchange."""

    id: str
    shadow_id: str
    main: Arm
    shadow: Arm
    losses: tuple[Loss, ...] = ()
    """The shadow's."""
    equal: bool | None = None
    """Whether both say the same; None where they need not, or did not come to their end."""


Tell = Callable[[Shadowed], None]


class Noted:
    """What one answer comes to. Of what it says only digests are kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A target is asked. What another said before it was heard by nobody."""
        self._began = self._clock()
        self._first: float | None = None
        self._begun: set[int] = set()
        self._ends: dict[int, FinishReason] = {}
        self._done = False
        self._tokens = self._length = 0
        self._usage: Usage | None = None
        self._digests: dict[tuple[int, int], hashlib.blake2b] = {}

    def take(self, events: Sequence[Event]) -> None:
        """Note these events."""
        for event in events:
            match event:
                case Text(text, index, tokens):
                    self._tokens += tokens
                    self._say(text, index)
                case Refusal(text, index):
                    self._say(text, index)
                case CallStart(index, call, _, text) | CallArguments(index, call, text):
                    self._say(text, index, call)
                case Thought(index=index):
                    self._speak()
                    self._begun.add(index)
                case Vector():
                    self._speak()
                case End(reason, index):
                    self._ends[index] = reason
                case Usage():
                    self._usage = event
                case Done():
                    self._done = True
                case _:
                    pass

    @property
    def complete(self) -> bool:
        """Whether it came to its end, and each choice to its own."""
        return self._done and self._begun <= self._ends.keys()

    def arm(self, target: tuple[str, str], how: tuple[Fate, str]) -> Arm:
        """What it comes to by now.

        ``target`` is a model and its version, ``how`` the outcome and the error's class.
        """
        return Arm(
            *target,
            *how,
            tuple(self._ends[index] for index in sorted(self._ends)),
            self._tokens if self._usage is None else self._usage.completion_tokens,
            self._length,
            self._first,
            self._clock() - self._began,
        )

    def says_as(self, other: "Noted") -> bool:
        """Whether both say the same words, and call the same tools with them."""
        return self.said() == other.said()

    def said(self) -> dict[tuple[int, int], bytes]:
        """The digest of each choice's words, and of those of each call in it."""
        return {place: digest.digest() for place, digest in self._digests.items()}

    def _say(self, text: str, index: int, call: int = -1) -> None:
        """Note words of a choice, or of a call in it."""
        self._speak()
        self._begun.add(index)
        self._length += len(text)
        digest = self._digests.get((index, call))
        if digest is None:
            digest = self._digests[index, call] = hashlib.blake2b()
        digest.update(text.encode("utf-8", "surrogatepass"))

    def _speak(self) -> None:
        if self._first is None:
            self._first = self._clock() - self._began


class Overheard:
    """An answer that is noted as it passes."""

    def __init__(self, answering: Answering, noted: Noted) -> None:
        self.losses = answering.losses
        self.encoder = answering.encoder
        self.opening = answering.opening
        self.whole = answering.whole
        self._answering = answering
        self._noted = noted

    @property
    def request(self) -> Request:
        """See ``gateway.exchange.Answering``."""
        return self._answering.request

    def heard(self, events: Sequence[Event]) -> Sequence[Event]:
        """See ``gateway.exchange.Answering``."""
        events = self._answering.heard(events)
        self._noted.take(events)
        return events

    async def gathered(self) -> Piece:
        """See ``gateway.exchange.Answering``."""
        self._noted.begin()
        body, said = await self._answering.gathered()
        self._noted.take(said)
        return body, said

    def pieces(self, take: Take | None = None) -> Pieces:
        """See ``gateway.exchange.Answering``."""
        self._noted.begin()
        return self._answering.pieces(take)
