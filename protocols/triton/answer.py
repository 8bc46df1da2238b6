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
        self._as_events = framed
        self._requested_outputs = wanted(profile, request.given)
        self._choice_count = request.choice_count
        self._prompt_tokens: int | None = None
        self._cumulative_logprobs: dict[int, float] = {}
        self._template = Generated(
            id=request.client_id or UNSET,
            model_name=about.model,
            model_version=version(about),
            text_output="",
        )
        """What tells of a text alone, without it."""

    @cached_property
    def _event_head(self) -> bytes:
        """An event that tells of a text alone, up to that text."""
        return b"data: " + encode(self._template).removesuffix(b'""}')

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """One event for each piece of text."""
        if not self._requested_outputs and self._choice_count == 1:
            return b"".join(
                [
                    self._encode_text_event(one)
                    for one in events
                    if type(one) is Text or type(one) is Refusal
                ]
            )
        return b"".join([sse.event(self._encode_object(row)) for row in self._collect_rows(events)])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """One more event, and the last."""
        return sse.event(refusal.body(error))

    def encode_unary(self, answer: Answer) -> Reply:
        """The object; framed, it is a stream of one event."""
        choices = answer.choices
        if self._requested_outputs or len(choices) != 1:
            if answer.usage is not None:
                self._prompt_tokens = answer.usage.prompt_tokens
            body = self._encode_object(measures.pieces(answer))
        else:
            plain, [choice] = self._template, choices
            plain.text_output = choice.text + choice.refusal
            body = encode(plain)
        if self._as_events:
            return Reply(200, sse.event(body), SAID_AS_EVENTS)
        return Reply(200, body, SAID)

    def _encode_text_event(self, event: Text | Refusal) -> bytes:
        """An event that is nothing but a text."""
        return self._event_head + encode(event.text) + b"}\n\n"

    def _encode_object(self, row: Sequence[Piece]) -> bytes:
        told: dict[str, Any] = {}
        for output in self._requested_outputs:
            values = measures.measure(output.name, row, self._prompt_tokens)
            if values is not None:
                told[output.name] = _unwrapped(values, output.datatype)
        text = _alone([piece.text for piece in row])
        return encode(replace(self._template, **told, text_output=text))

    def _collect_rows(self, events: Sequence[Event]) -> list[list[Piece]]:
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
                    piece = self._get_choice_output(rows, index, fresh=True)
                    piece.text += text
                    piece.tokens += event.tokens
                    self._add_logprobs(piece, index, event.logprobs)
                case Refusal(text, index):
                    self._get_choice_output(rows, index, fresh=True).text += text
                case End(reason, index, stop) if rows or self._reports_finish_reason():
                    piece = self._get_choice_output(rows, index, fresh=False)
                    piece.finish_reason, piece.matched_stop = reason, stop
                case _:
                    pass
        return rows

    def _reports_finish_reason(self) -> bool:
        return any(one.name == "finish_reason" for one in self._requested_outputs)

    def _get_choice_output(self, rows: list[list[Piece]], index: int, *, fresh: bool) -> Piece:
        if not rows or (fresh and self._choice_count == 1):
            rows.append(
                [
                    Piece(cumulative_logprob=self._cumulative_logprobs.get(i))
                    for i in range(self._choice_count)
                ]
            )
        return rows[-1][index]

    def _add_logprobs(self, piece: Piece, index: int, logprobs: Sequence[TokenLogprob]) -> None:
        if logprobs:
            piece.logprobs = (*piece.logprobs, *logprobs)
            self._cumulative_logprobs[index] = self._cumulative_logprobs.get(
                index, 0.0
            ) + measures.total(logprobs)
            piece.cumulative_logprob = self._cumulative_logprobs[index]


def _unwrapped(values: list[Any], datatype: str) -> Any:
    """Lists in lists become one."""
    elements = flat(values)
    return _alone([fp32(one) for one in elements] if datatype == "FP32" else elements)


def _alone(elements: list[Any]) -> Any:
    """A lone element stands without its list."""
    return elements[0] if len(elements) == 1 else elements
