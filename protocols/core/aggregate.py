"""Folds the events of a stream into a unary response."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from protocols.core.errors import StreamBroken
from protocols.core.events import (
    INCOMPLETE_REASONS,
    ChoiceEnd,
    Classification,
    DetokenizedText,
    Embedding,
    Event,
    FinishReason,
    HostedToolCall,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    RelevanceScore,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    Timing,
    TokenList,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.request import ToolCall


class UnaryChoice(Struct):
    """One complete choice. ``text`` starts with the prompt if the client requested ``echo``."""

    index: int
    text: str = ""
    echo_length: int = 0
    """The number of characters of ``text`` that belong to the prompt."""
    tokens: int = 0
    reasoning: str = ""
    reasoning_signature: str | None = None
    redacted_reasoning: list[str] = []
    refusal: str = ""
    tool_calls: list[ToolCall] = []
    hosted_tool_calls: list[HostedToolCall] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason = "unknown"
    matched_stop: str | int | None = None
    own_word: str | None = None
    """See ``ChoiceEnd``."""


def is_end_of_calls(end: ChoiceEnd | UnaryChoice, *, called: bool) -> bool:
    """Whether a choice with tool calls ends after them: a stop string may have cut one off."""
    is_cut = end.finish_reason == "stop" and isinstance(end.matched_stop, str)
    return called and not is_cut


def cuts_calls(end: ChoiceEnd | UnaryChoice) -> bool:
    """Whether the last call of a choice that ended so may be half a call."""
    return end.finish_reason in INCOMPLETE_REASONS or not is_end_of_calls(end, called=True)


class UnaryResponse(Struct):
    """A complete response: choices of a GenerationRequest or embeddings, ordered by index.

    ``scores`` has one score for each document of a RerankRequest, in the order of the documents.
    """

    choices: list[UnaryChoice] = []
    embeddings: list[tuple[float, ...]] = []
    scores: list[float] = []
    classifications: list[Classification] = []
    """One for each input of a ClassifyRequest, ordered by index."""
    tokens: TokenList = TokenList(())
    """The tokens of a TokenizeRequest."""
    text: str = ""
    """The text of a DetokenizeRequest."""
    usage: Usage | None = None
    timings: list[Timing] = []
    metadata: ResponseMetadata = ResponseMetadata()
    extra: list[ResponseExtra] = []
    events: Sequence[Event] = ()
    """The events in their order, for protocols whose responses are lists of items."""


_INDEX: Final = attrgetter("index")


class ResponseAccumulator:
    """Collects events into a UnaryResponse."""

    def __init__(self) -> None:
        self._choices: dict[int, UnaryChoice] = {}
        self.open_choices: dict[int, UnaryChoice] = {}
        """The choices that have not ended, by their index."""
        self._texts: dict[int, list[str]] = {}
        """The pieces of each choice's text; joined at the end, since each concatenation copies."""
        self._reasoning: dict[int, list[str]] = {}
        self._arguments: dict[tuple[int, int], list[str]] = {}
        """The pieces of the arguments of each tool call of a choice."""
        self._call_places: dict[tuple[int, int], int] = {}
        """The places of the calls of a choice: their indices count those of unknown types, too."""
        self._embeddings: dict[int, tuple[float, ...]] = {}
        self._scores: dict[int, float] = {}
        self._classifications: dict[int, Classification] = {}
        self._response = UnaryResponse()
        self._ended = False

    def add(self, events: Iterable[Event]) -> None:
        """Add events. Raises StreamBroken if a choice continues after its end."""
        for event in events:
            if type(event) is TextDelta:
                choice = self.open_choices.get(event.index) or self._begin_choice(event.index)
                self._texts[event.index].append(event.text)
                choice.tokens += event.tokens
                if event.token_ids:
                    choice.token_ids += event.token_ids
                if event.logprobs:
                    choice.logprobs += event.logprobs
            elif type(event) is ChoiceEnd:
                choice = self.open_choices.get(event.index) or self._begin_choice(event.index)
                choice.finish_reason, choice.matched_stop = event.finish_reason, event.matched_stop
                choice.own_word = event.own_word
                del self.open_choices[event.index]
            elif type(event) is StreamEnd:
                self._ended = True
            elif type(event) is Usage:
                self._response.usage = event
            elif type(event) is ResponseMetadata:
                self._response.metadata = event
            else:
                self._add_other(event)

    def result(self) -> UnaryResponse:
        """The response. Raises StreamBroken unless every choice ended and StreamEnd came."""
        if self.open_choices or not self._ended:
            raise StreamBroken("the answer stopped before its end")
        return self.build_partial()

    def build_partial(self) -> UnaryResponse:
        """The response so far, to be called once. Open choices have no finish reason yet."""
        for index, choice in self._choices.items():
            choice.text = "".join(self._texts[index])
            if index in self._reasoning:
                choice.reasoning = "".join(self._reasoning[index])
        for (index, call), pieces in self._arguments.items():
            calls = self._choices[index].tool_calls
            calls[call] = replace(calls[call], arguments="".join(pieces))
        self._response.choices = sorted(self._choices.values(), key=_INDEX)
        if self._embeddings:
            self._response.embeddings = [self._embeddings[i] for i in sorted(self._embeddings)]
        if self._scores:
            self._response.scores = [self._scores[i] for i in sorted(self._scores)]
        if self._classifications:
            self._response.classifications = sorted(self._classifications.values(), key=_INDEX)
        return self._response

    def _add_other(self, event: Event) -> None:
        """Add an event of a rare kind."""
        match event:
            case Embedding(index, values):
                self._embeddings[index] = values
            case RelevanceScore(index, score):
                self._scores[index] = score
            case Classification(index):
                self._classifications[index] = event
            case TokenList():
                self._response.tokens = event
            case DetokenizedText(text):
                self._response.text = text
            case (
                PromptEcho()
                | ReasoningDelta()
                | RefusalDelta()
                | ToolCallStart()
                | ToolCallDelta()
                | HostedToolCall()
            ):
                choice = self.open_choices.get(event.index) or self._begin_choice(event.index)
                self._extend_choice(choice, event)
            case ResponseExtra():
                self._response.extra.append(event)
            case Timing():
                self._response.timings.append(event)
            case _:  # Start
                pass

    def _begin_choice(self, index: int) -> UnaryChoice:
        if index in self._choices:
            raise StreamBroken(f"choice {index} went on after its end")
        choice = self._choices[index] = self.open_choices[index] = UnaryChoice(index)
        self._texts[index] = []
        return choice

    def _extend_choice(
        self,
        choice: UnaryChoice,
        event: PromptEcho
        | ReasoningDelta
        | RefusalDelta
        | ToolCallStart
        | ToolCallDelta
        | HostedToolCall,
    ) -> None:
        match event:
            case PromptEcho(_, text, logprobs):
                self._texts[choice.index].append(text)
                choice.echo_length += len(text)
                choice.logprobs += logprobs
            case ReasoningDelta(text, _, signature, redacted):
                self._reasoning.setdefault(choice.index, []).append(text)
                choice.reasoning_signature = signature or choice.reasoning_signature
                if redacted is not None:
                    choice.redacted_reasoning.append(redacted)
            case RefusalDelta(text):
                choice.refusal += text
            case ToolCallStart():
                place = len(choice.tool_calls)
                self._call_places[choice.index, event.call_index] = place
                choice.tool_calls.append(ToolCall(event.id, event.name, "", event.kind))
            case HostedToolCall():
                choice.hosted_tool_calls.append(event)
            case _:  # ToolCallDelta
                call = event.call_index
                found = self._call_places.get((choice.index, call))
                if found is None:
                    raise StreamBroken(f"arguments for tool call {call}, which has not begun")
                self._arguments.setdefault((choice.index, found), []).append(event.text)


def aggregate(events: Sequence[Event]) -> UnaryResponse:
    """The response that these events make. Raises StreamBroken if they are incomplete."""
    fold = ResponseAccumulator()
    fold.add(events)
    response = fold.result()
    response.events = events
    return response
