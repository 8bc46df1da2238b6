"""Writing the answers of generate and generate_stream.

Both write the same object, its keys in alphabetical order: one for each output of the model, a list
where there is more than one choice. A stream is one event for each piece, and then nothing: no last
event tells of the end.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gateway.core import sse
from gateway.core.aggregate import Answer
from gateway.core.errors import GatewayError
from gateway.core.ports import About, Headers, Reply
from gateway.core.types import (
    End,
    Event,
    GenerateRequest,
    Refusal,
    Start,
    Text,
    TokenLogprob,
    Usage,
)
from protocols.triton import measures, refusal
from protocols.triton.meaning import wanted
from protocols.triton.measures import Piece
from protocols.triton.tensors import flat
from protocols.triton.vocabulary import Profile
from protocols.triton.wire import EVENTS, SAID, SAID_AS_EVENTS, encode, fp32, version


class Generated(Struct, kw_only=True):
    """The answer's object; the fields stand in the order in which they are written."""

    cum_log_probs: Any = UNSET
    cumulative_logprob: Any = UNSET
    finish_reason: Any = UNSET
    id: Any = UNSET
    logprobs: Any = UNSET
    model_name: str
    model_version: str
    num_input_tokens: Any = UNSET
    num_output_tokens: Any = UNSET
    output_log_probs: Any = UNSET
    stop_reason: Any = UNSET
    text_output: Any


class GenerateEncoder:
    """Writes one answer: an object, or with ``framed`` its events."""

    content_type = EVENTS

    def __init__(
        self, request: GenerateRequest, about: About, profile: Profile, *, framed: bool
    ) -> None:
        self._framed = framed
        self._asked = wanted(profile, request.given)
        self._choices = request.choices
        self._prompt_tokens: int | None = None
        self._totals: dict[int, float] = {}
        self._plain = Generated(
            id=request.client_id or UNSET,
            model_name=about.model,
            model_version=version(about),
            text_output="",
        )
        """What tells of a text alone, without it."""

    @cached_property
    def _head(self) -> bytes:
        """An event that tells of a text alone, up to that text."""
        return b"data: " + encode(self._plain).removesuffix(b'""}')

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def write(self, events: Sequence[Event]) -> bytes:
        """One event for each piece of text."""
        if not self._asked and self._choices == 1:
            return b"".join(
                [self._event(one) for one in events if type(one) is Text or type(one) is Refusal]
            )
        return b"".join([sse.event(self._object(row)) for row in self._rows(events)])

    def error(self, error: GatewayError) -> bytes:
        """One more event, and the last."""
        return sse.event(refusal.body(error))

    def whole(self, answer: Answer) -> Reply:
        """The object; framed, it is a stream of one event."""
        choices = answer.choices
        if self._asked or len(choices) != 1:
            if answer.usage is not None:
                self._prompt_tokens = answer.usage.prompt_tokens
            body = self._object(measures.pieces(answer))
        else:
            plain, [choice] = self._plain, choices
            plain.text_output = choice.text + choice.refusal
            body = encode(plain)
        if self._framed:
            return Reply(200, sse.event(body), SAID_AS_EVENTS)
        return Reply(200, body, SAID)

    def _event(self, event: Text | Refusal) -> bytes:
        """An event that is nothing but a text."""
        return self._head + encode(event.text) + b"}\n\n"

    def _object(self, row: Sequence[Piece]) -> bytes:
        told: dict[str, Any] = {}
        for output in self._asked:
            values = measures.measure(output.name, row, self._prompt_tokens)
            if values is not None:
                told[output.name] = _unwrapped(values, output.datatype)
        text = _alone([piece.text for piece in row])
        return encode(replace(self._plain, **told, text_output=text))

    def _rows(self, events: Sequence[Event]) -> list[list[Piece]]:
        """The pieces of each event to be written.

        A lone choice has an event for each text. Several choices share one, since nothing but the
        place in its lists tells them apart.
        """
        rows: list[list[Piece]] = []
        for event in events:
            match event:
                case Start(tokens) if tokens is not None:
                    self._prompt_tokens = tokens
                case Usage(tokens):
                    self._prompt_tokens = tokens
                case Text(text, index):
                    piece = self._piece(rows, index, fresh=True)
                    piece.text += text
                    piece.tokens += event.tokens
                    self._weigh(piece, index, event.logprobs)
                case Refusal(text, index):
                    self._piece(rows, index, fresh=True).text += text
                case End(reason, index, stop) if rows or self._tells_ends():
                    piece = self._piece(rows, index, fresh=False)
                    piece.reason, piece.stop = reason, stop
                case _:
                    pass
        return rows

    def _tells_ends(self) -> bool:
        return any(one.name == "finish_reason" for one in self._asked)

    def _piece(self, rows: list[list[Piece]], index: int, *, fresh: bool) -> Piece:
        if not rows or (fresh and self._choices == 1):
            rows.append([Piece(total=self._totals.get(i)) for i in range(self._choices)])
        return rows[-1][index]

    def _weigh(self, piece: Piece, index: int, logprobs: Sequence[TokenLogprob]) -> None:
        if logprobs:
            piece.logprobs = (*piece.logprobs, *logprobs)
            self._totals[index] = self._totals.get(index, 0.0) + measures.total(logprobs)
            piece.total = self._totals[index]


def _unwrapped(values: list[Any], datatype: str) -> Any:
    """Lists in lists become one."""
    elements = flat(values)
    return _alone([fp32(one) for one in elements] if datatype == "FP32" else elements)


def _alone(elements: list[Any]) -> Any:
    """A lone element stands without its list."""
    return elements[0] if len(elements) == 1 else elements
