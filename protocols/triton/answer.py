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

from protocols.core import sse
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    RefusalDelta,
    StreamStart,
    TextDelta,
    TokenLogprob,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.triton import measures, refusal
from protocols.triton.meaning import list_requested_outputs
from protocols.triton.measures import ChoiceOutput
from protocols.triton.tensors import flatten_values
from protocols.triton.vocabulary import TritonProfile
from protocols.triton.wire import (
    CHUNKED_EVENT_HEADERS,
    CHUNKED_JSON_HEADERS,
    EVENT_STREAM,
    encode_json,
    get_version_number,
    round_to_fp32,
)


class GenerateResponse(Struct, kw_only=True):
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

    content_type = EVENT_STREAM

    def __init__(
        self,
        request: GenerationRequest,
        about: ResponseContext,
        profile: TritonProfile,
        *,
        framed: bool,
    ) -> None:
        self._as_events = framed
        self._requested_outputs = list_requested_outputs(profile, request.given)
        self._choice_count = request.choice_count
        self._prompt_tokens: int | None = None
        self._cumulative_logprobs: dict[int, float] = {}
        self._template = GenerateResponse(
            id=request.client_id or UNSET,
            model_name=about.model,
            model_version=get_version_number(about),
            text_output="",
        )
        """What tells of a text alone, without it."""

    @cached_property
    def _event_head(self) -> bytes:
        """An event that tells of a text alone, up to that text."""
        return b"data: " + encode_json(self._template).removesuffix(b'""}')

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
                    if type(one) is TextDelta or type(one) is RefusalDelta
                ]
            )
        return b"".join(
            [sse.format_event(self._encode_object(row)) for row in self._collect_rows(events)]
        )

    def encode_error_event(self, error: GatewayError) -> bytes:
        """One more event, and the last."""
        return sse.format_event(refusal.encode_error_body(error))

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """The object; framed, it is a stream of one event."""
        choices = answer.choices
        if self._requested_outputs or len(choices) != 1:
            if answer.usage is not None:
                self._prompt_tokens = answer.usage.prompt_tokens
            body = self._encode_object(measures.list_choice_outputs(answer))
        else:
            plain, [choice] = self._template, choices
            plain.text_output = choice.text + choice.refusal
            body = encode_json(plain)
        if self._as_events:
            return HttpResponse(200, sse.format_event(body), CHUNKED_EVENT_HEADERS)
        return HttpResponse(200, body, CHUNKED_JSON_HEADERS)

    def _encode_text_event(self, event: TextDelta | RefusalDelta) -> bytes:
        """An event that is nothing but a text."""
        return self._event_head + encode_json(event.text) + b"}\n\n"

    def _encode_object(self, row: Sequence[ChoiceOutput]) -> bytes:
        told: dict[str, Any] = {}
        for output in self._requested_outputs:
            values = measures.get_output_values(output.name, row, self._prompt_tokens)
            if values is not None:
                told[output.name] = _flatten_output(values, output.datatype)
        text = _unwrap_single([piece.text for piece in row])
        return encode_json(replace(self._template, **told, text_output=text))

    def _collect_rows(self, events: Sequence[Event]) -> list[list[ChoiceOutput]]:
        """The pieces of each event to be written.

        A lone choice has an event for each text. Several choices share one, since nothing but the
        place in its lists tells them apart.
        """
        rows: list[list[ChoiceOutput]] = []
        for event in events:
            match event:
                case StreamStart(tokens) if tokens is not None:
                    self._prompt_tokens = tokens
                case Usage(tokens):
                    self._prompt_tokens = tokens
                case TextDelta(text, index):
                    piece = self._get_choice_output(rows, index, fresh=True)
                    piece.text += text
                    piece.tokens += event.tokens
                    self._add_logprobs(piece, index, event.logprobs)
                case RefusalDelta(text, index):
                    self._get_choice_output(rows, index, fresh=True).text += text
                case ChoiceEnd(reason, index, stop) if rows or self._reports_finish_reason():
                    piece = self._get_choice_output(rows, index, fresh=False)
                    piece.finish_reason, piece.matched_stop = reason, stop
                case _:
                    pass
        return rows

    def _reports_finish_reason(self) -> bool:
        return any(one.name == "finish_reason" for one in self._requested_outputs)

    def _get_choice_output(
        self, rows: list[list[ChoiceOutput]], index: int, *, fresh: bool
    ) -> ChoiceOutput:
        if not rows or (fresh and self._choice_count == 1):
            rows.append(
                [
                    ChoiceOutput(cumulative_logprob=self._cumulative_logprobs.get(i))
                    for i in range(self._choice_count)
                ]
            )
        return rows[-1][index]

    def _add_logprobs(
        self, piece: ChoiceOutput, index: int, logprobs: Sequence[TokenLogprob]
    ) -> None:
        if logprobs:
            piece.logprobs = (*piece.logprobs, *logprobs)
            self._cumulative_logprobs[index] = self._cumulative_logprobs.get(
                index, 0.0
            ) + measures.sum_logprobs(logprobs)
            piece.cumulative_logprob = self._cumulative_logprobs[index]


def _flatten_output(values: list[Any], datatype: str) -> Any:
    """Lists in lists become one."""
    elements = flatten_values(values)
    return _unwrap_single(
        [round_to_fp32(one) for one in elements] if datatype == "FP32" else elements
    )


def _unwrap_single(elements: list[Any]) -> Any:
    """A lone element stands without its list."""
    return elements[0] if len(elements) == 1 else elements
