"""Events to responses of generate and generate_stream.

Both write one object with sorted keys: one for each output of the model, a list
if there are several choices. A stream has one event for each delta and no end marker.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from protocols.core import sse
from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    RefusalDelta,
    StreamStart,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.core.response_losses import TEXT_AND_REFUSAL
from protocols.triton import errors
from protocols.triton.formats import (
    CHUNKED_EVENT_HEADERS,
    CHUNKED_JSON_HEADERS,
    EVENT_STREAM,
    encode_json,
    encode_json_lines,
    get_version_number,
    round_to_fp32,
)
from protocols.triton.params import TritonProfile
from protocols.triton.requests import list_requested_outputs
from protocols.triton.tensors import flatten_values

FINISH_REASONS: Final[Mapping[FinishReason | None, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
    "content_filter": "stop",
    "unknown": "None",
    None: "None",
}
"""``unknown``: the worker gave no reason. Triton writes Python's None while a choice is running."""


class ChoiceOutput(Struct):
    """What an event or a unary response adds to one choice.

    ``total`` is the log probability of the choice so far, if the worker reports any.
    """

    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    own_word: str | None = None
    logprobs: Sequence[TokenLogprob] = ()
    cumulative_logprob: float | None = None


def list_choice_outputs(answer: UnaryResponse) -> list[ChoiceOutput]:
    """Convert the choices of a unary response."""
    return [_build_choice_output(choice, answer) for choice in answer.choices]


def _build_choice_output(choice: UnaryChoice, answer: UnaryResponse) -> ChoiceOutput:
    tokens = choice.tokens
    if answer.usage is not None and len(answer.choices) == 1:
        tokens = answer.usage.completion_tokens
    own = choice.logprobs[max(len(choice.logprobs) - choice.tokens, 0) :]
    return ChoiceOutput(
        text=choice.text + choice.refusal,
        tokens=tokens,
        finish_reason=choice.finish_reason,
        matched_stop=choice.matched_stop,
        own_word=choice.own_word,
        logprobs=own,
        cumulative_logprob=sum_logprobs(own) if own else None,
    )


def sum_logprobs(logprobs: Sequence[TokenLogprob]) -> float:
    """Return the log probability of these tokens together."""
    return sum(token.logprob for token in logprobs if token.logprob is not None)


def get_output_values(
    name: str, row: Sequence[ChoiceOutput], prompt_tokens: int | None
) -> list[Any] | None:
    """Return an output's values, one for each choice; None if unknown."""
    if name == "num_input_tokens":
        return None if prompt_tokens is None else [prompt_tokens]
    if name in _LOGPROB_OUTPUTS and all(piece.cumulative_logprob is None for piece in row):
        return None
    return [_OUTPUT_READERS[name](piece) for piece in row]


def _list_logprobs(piece: ChoiceOutput) -> list[float]:
    return [one.logprob or 0.0 for one in piece.logprobs]


def _encode_candidates(piece: ChoiceOutput) -> str:
    """Encode JSON: for each token, the candidates by id."""
    return msgspec.json.encode([_build_candidates(one) for one in piece.logprobs]).decode()


def _build_candidates(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    """Return the candidates with the sampled token first, as readers require."""
    candidates = {_get_candidate_key(token): _build_candidate(token, None)}
    for rank, top in enumerate(sorted(token.top, key=lambda top: -top.logprob), 1):
        candidates[_get_candidate_key(top)] = _build_candidate(top, rank)
    return candidates


def _build_candidate(token: TokenLogprob | TopLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": token.token}


def _get_candidate_key(token: TokenLogprob | TopLogprob) -> str:
    return token.token if token.id is None else str(token.id)


_LOGPROB_OUTPUTS: Final = frozenset(
    {"cumulative_logprob", "cum_log_probs", "output_log_probs", "logprobs"}
)
_OUTPUT_READERS: Final[Mapping[str, Callable[[ChoiceOutput], Any]]] = {
    "text_output": lambda piece: piece.text,
    "finish_reason": lambda piece: piece.own_word or FINISH_REASONS[piece.finish_reason],
    "stop_reason": lambda piece: str(piece.matched_stop),
    "num_output_tokens": lambda piece: piece.tokens,
    "cumulative_logprob": lambda piece: piece.cumulative_logprob,
    "cum_log_probs": lambda piece: piece.cumulative_logprob,
    "output_log_probs": _list_logprobs,
    "logprobs": _encode_candidates,
}


class GenerateResponse(Struct, kw_only=True):
    """The object of a response; fields are in writing order."""

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
    """Encodes a response: an object, or events if ``framed``."""

    content_type = EVENT_STREAM
    hidden_reasons = frozenset({"content_filter"})
    content_losses = TEXT_AND_REFUSAL

    def __init__(
        self,
        request: GenerationRequest,
        context: ResponseContext,
        profile: TritonProfile,
        *,
        framed: bool,
    ) -> None:
        self._as_events = framed
        self._requested_outputs = list_requested_outputs(profile, request.provided_fields)
        self._choice_count = request.choice_count
        self._prompt_tokens: int | None = None
        self._cumulative_logprobs: dict[int, float] = {}
        self._template = GenerateResponse(
            id=request.client_id or UNSET,
            model_name=context.model,
            model_version=get_version_number(context),
            text_output="",
        )
        """The object of a delta with only text, without the text."""

    @cached_property
    def _event_head(self) -> bytes:
        """The event of a delta with only text, up to the text."""
        return b"data: " + encode_json(self._template).removesuffix(b'""}')

    def headers(self) -> Headers:
        """Empty: no extra headers."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Encode one event for each text delta."""
        if not self._requested_outputs and self._choice_count == 1:
            texts = [
                event.text
                for event in events
                if type(event) is TextDelta or type(event) is RefusalDelta
            ]
            if not texts:
                return b""
            # JSON has no line feed within a string.
            head, tail = self._event_head, b"}\n\n"
            return head + encode_json_lines(texts)[:-1].replace(b"\n", tail + head) + tail
        return b"".join(
            [sse.format_event(self._encode_object(row)) for row in self._collect_rows(events)]
        )

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode an error as the last event."""
        return sse.format_event(errors.encode_error_body(error))

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """Encode the object; as a stream of one event if framed."""
        choices = answer.choices
        if self._requested_outputs or len(choices) != 1:
            if answer.usage is not None:
                self._prompt_tokens = answer.usage.prompt_tokens
            body = self._encode_object(list_choice_outputs(answer))
        else:
            [choice] = choices
            text = choice.text + choice.refusal
            body = encode_json(replace(self._template, text_output=text))
        if self._as_events:
            return HttpResponse(200, sse.format_event(body), CHUNKED_EVENT_HEADERS)
        return HttpResponse(200, body, CHUNKED_JSON_HEADERS)

    def _encode_object(self, row: Sequence[ChoiceOutput]) -> bytes:
        outputs: dict[str, Any] = {}
        for output in self._requested_outputs:
            values = get_output_values(output.name, row, self._prompt_tokens)
            if values is not None:
                outputs[output.name] = _flatten_output(values, output.datatype)
        text = _unwrap_single([piece.text for piece in row])
        return encode_json(replace(self._template, **outputs, text_output=text))

    def _collect_rows(self, events: Sequence[Event]) -> list[list[ChoiceOutput]]:
        """Group deltas into events.

        A single choice has an event for each delta. Several choices share an event, since only the
        position in its lists identifies a choice.
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
                    piece.own_word = event.own_word
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
            total = self._cumulative_logprobs.get(index, 0.0) + sum_logprobs(logprobs)
            piece.cumulative_logprob = self._cumulative_logprobs[index] = total


def _flatten_output(values: list[Any], datatype: str) -> Any:
    """Flatten nested lists."""
    elements = flatten_values(values)
    return _unwrap_single([*map(round_to_fp32, elements)] if datatype == "FP32" else elements)


def _unwrap_single(elements: list[Any]) -> Any:
    """Unwrap a single element."""
    return elements[0] if len(elements) == 1 else elements
