"""Summaries of a response and of its shadow copy's, and their comparison."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from gateway.observability.record import RequestOutcome
from protocols.core.errors import ErrorOrigin, GatewayError
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

ShadowOutcome = RequestOutcome | Literal["dropped"]


class ShadowSide(Struct, omit_defaults=True):
    """One of the two responses to a request. Times are in seconds since it was sent.

    ``dropped``: there was no room for the shadow, or a client's request took its slot. ``length``
    is in characters.
    """

    model: str
    version: str
    outcome: ShadowOutcome = "ok"
    error: str = ""
    """The class of the error."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """Why each choice ended."""
    tokens: int = 0
    length: int = 0
    first_token: float | None = None
    duration: float = 0.0
    measures: dict[str, bool] = {}
    """What is measured of the copy's response, if a rollout takes it as evidence."""


class ShadowComparison(Struct, omit_defaults=True, tag_field="kind", tag="shadow"):
    """A client's response and its shadow's. ``id`` is the client's request."""

    id: str
    shadow_id: str
    primary: ShadowSide
    shadow: ShadowSide
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    """The shadow's."""
    split: str = ""
    """The split whose rollout takes the shadow as evidence; "" if none does."""
    equal: bool | None = None
    """Whether both have the same content; None if they need not, or one is incomplete."""


class ResponseSummary:
    """Summarizes one response. Of its content it keeps only digests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """The request is sent to a target. Forget what a failed target sent before."""
        self._started_at = self._clock()
        self._first_token_time: float | None = None
        self._started_choices: set[int] = set()
        self._finish_reasons: dict[int, FinishReason] = {}
        self._is_done = False
        self._tokens = self._length = 0
        self._usage: Usage | None = None
        self._digests: dict[tuple[int, int], hashlib.blake2b] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Add these events to the summary."""
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
        """Whether the response and each of its choices has ended."""
        return self._is_done and self._started_choices <= self._finish_reasons.keys()

    def build_side(self, target: tuple[str, str], outcome: tuple[ShadowOutcome, str]) -> ShadowSide:
        """The summary so far.

        ``target`` is a model and its version, ``outcome`` comes with the error's class name.
        """
        return ShadowSide(
            *target,
            *outcome,
            tuple(self._finish_reasons[index] for index in sorted(self._finish_reasons)),
            self._tokens if self._usage is None else self._usage.completion_tokens,
            self._length,
            self._first_token_time,
            self._clock() - self._started_at,
        )

    def has_same_content(self, other: "ResponseSummary") -> bool:
        """Whether both have the same text and the same tool calls."""
        return self.get_digests() == other.get_digests()

    def get_digests(self) -> dict[tuple[int, int], bytes]:
        """The digest of each choice's text, and of each tool call in it."""
        return {key: digest.digest() for key, digest in self._digests.items()}

    def _add_content(self, text: str, index: int, call: int = -1) -> None:
        """Add text of a choice, or of a tool call in it."""
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


_OUTCOME_BY_BLAME: Final[Mapping[ErrorOrigin, RequestOutcome]] = {
    "client": "client_error",
    "worker": "worker_error",
    "gateway": "gateway_error",
}


def classify_error(error: GatewayError) -> tuple[RequestOutcome, str]:
    """The outcome of a background request that fails, and the class of the error."""
    return _OUTCOME_BY_BLAME[error.origin], type(error).__name__
