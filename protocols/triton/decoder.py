"""Decode worker responses: streams and unary responses.

A stream has no last event and may have no event at all: it ends with the body, whose length the
connection guarantees. A worker that reports finish reasons must report one before the end; for
other workers the end of the body is the only sign.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from protocols.core import sse
from protocols.core.errors import GatewayError, MalformedRequest, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FieldValues,
    ResponseMetadata,
    StreamStart,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from protocols.core.fieldwise import report_lost_fields
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.indices import check_indices
from protocols.core.json_text import TEXT_ERRORS, JsonDecoder
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS, build_answer_error
from protocols.triton import rapidjson
from protocols.triton.errors import raise_response_error, raise_worker_error
from protocols.triton.model_config import ModelAdapter
from protocols.triton.params import TEXT_OUTPUT
from protocols.triton.tensors import flatten_values

# Wire format of worker responses: an object of the model's outputs, unary or one for each event.

_MAX_LENIENT_PARSE_BYTES: Final = 1 << 20
"""Bytes that require a closer look for numbers that are not JSON."""
NO_REASON: Final = "None"
"""Finish reason values that mean "none yet"."""
FINISH_REASONS: Final = FinishReasonTable(
    "triton",
    {
        "stop": "eos",
        "eos": "eos",
        "length": "length",
        "max_tokens": "length",
        "cancelled": None,
        "timeout": None,
        "not_finished": None,
    },
    is_optional=True,
)
"""Finish reasons of vLLM and TensorRT-LLM; None is a worker failure."""
_decode_json = JsonDecoder().decode
_LOGPROB_OUTPUTS: Final = ("logprobs", "output_log_probs")
_READ_OUTPUTS: Final = (
    TEXT_OUTPUT, "finish_reason", "stop_reason", "num_output_tokens", "num_input_tokens",
    *_LOGPROB_OUTPUTS,
)  # fmt: skip


_DEFAULT_OUTPUT_NAMES: Final[Mapping[str, str]] = {name: name for name in _READ_OUTPUTS}


def map_output_names(wires: Mapping[str, str]) -> Mapping[str, str]:
    """A model's names for the outputs that are decoded; ``wires`` are those that differ."""
    known = {name: wires.get(name, name) for name in _READ_OUTPUTS}
    return _DEFAULT_OUTPUT_NAMES if known == _DEFAULT_OUTPUT_NAMES else known


class ParsedResponse(Struct):
    """A response or an event: each list has one item for each choice, as far as known."""

    texts: list[str]
    model: str | None
    finish_reasons: Sequence[str] = ()
    stop_reasons: Sequence[str] = ()
    token_counts: Sequence[Any] = ()
    prompt_tokens: Any = None
    logprobs: Sequence[tuple[TokenLogprob, ...]] = ()
    lost: FieldValues = ()
    """Outputs that are unknown, or could not be read."""


class _SingleText(Struct, forbid_unknown_fields=True):
    """A response with one text. The field names are those of the model families."""

    text_output: str
    model_name: str | None = None
    model_version: str | None = None
    finish_reason: str | UnsetType | None = UNSET
    stop_reason: str | UnsetType | None = UNSET
    num_output_tokens: int | UnsetType = UNSET
    num_input_tokens: int | None = None
    id: str | None = None
    sequence_id: int = 0
    sequence_start: bool = False
    sequence_end: bool = False


_decode_single_text = JsonDecoder(_SingleText).decode


class _TextEvent(Struct, forbid_unknown_fields=True, gc=False):
    """An event that adds a text and nothing else."""

    text_output: str
    model_name: str | None = None
    model_version: str | None = None
    id: str | None = None
    sequence_id: int = 0
    sequence_start: bool = False
    sequence_end: bool = False


_text_event_decoder = JsonDecoder(_TextEvent, skims=True)


def _parse_single_text(body: bytes) -> ParsedResponse | None:
    """Decode a response with one text; None if it has another shape or is invalid."""
    try:
        wire = _decode_single_text(body)
    except JSON_ERRORS:
        return None
    parsed = ParsedResponse(
        [wire.text_output], wire.model_name, prompt_tokens=wire.num_input_tokens
    )
    if wire.finish_reason is not UNSET:
        parsed.finish_reasons = (_parse_reason(wire.finish_reason),)
    if wire.stop_reason is not UNSET:
        parsed.stop_reasons = (_parse_reason(wire.stop_reason),)
    if wire.num_output_tokens is not UNSET:
        parsed.token_counts = (wire.num_output_tokens,)
    return parsed


class _LogprobCandidate(Struct):
    logprob: float | None = None
    rank: int | None = None
    decoded_token: str | None = None


_CandidateColumn = list[dict[str, _LogprobCandidate]]


def parse_response(
    body: bytes, request: GenerationRequest, output_names: Mapping[str, str]
) -> ParsedResponse:
    """Decode an object of outputs; ``output_names`` are the model's names for them.

    Raises the error that the object reports, and WorkerFailed for an invalid object.
    """
    if output_names is _DEFAULT_OUTPUT_NAMES:
        parsed = _parse_single_text(body)
        if parsed is not None:
            return parsed
    decode = _decode_json if len(body) > _MAX_LENIENT_PARSE_BYTES else rapidjson.parse_value
    try:
        response = decode(body)
    except (MalformedRequest, *JSON_ERRORS) as e:
        raise build_answer_error(e) from e
    text_name = output_names[TEXT_OUTPUT]
    if not isinstance(response, dict) or text_name not in response or "error" in response:
        raise_response_error(response, text_name)
        if not isinstance(response, dict) or not (
            text_name in response or "model_name" in response
        ):
            raise WorkerFailed("The worker's response does not follow its protocol.")
    outputs = {
        name: flatten_values(response[wire])
        for name, wire in output_names.items()
        if wire in response
    }
    known = {*output_names.values(), *_TextEvent.__struct_fields__}
    unknown = tuple(
        [((k,), one) for k, one in response.items() if k not in known and one is not None]
    )
    texts = outputs.pop(TEXT_OUTPUT, [])
    if not {str}.issuperset(map(type, texts)):
        raise WorkerFailed("The worker's answer is no text.")
    model = response.get("model_name")
    parsed = ParsedResponse(texts, model if isinstance(model, str) else None, lost=unknown)
    if outputs:
        _parse_details(outputs, parsed, request)
    return parsed


def _parse_details(
    outputs: Mapping[str, list[Any]], parsed: ParsedResponse, request: GenerationRequest
) -> None:
    """Add the finish reasons, token counts and log probabilities."""
    parsed.finish_reasons = _parse_reasons(outputs.get("finish_reason", []))
    parsed.stop_reasons = _parse_reasons(outputs.get("stop_reason", []))
    parsed.token_counts = _parse_counts(outputs.get("num_output_tokens", []))
    prompt = _parse_counts(outputs.get("num_input_tokens", []))
    parsed.prompt_tokens = prompt[0] if prompt else None
    if request.logprobs is not None and parsed.texts:
        columns, numbers = (outputs.get(name, []) for name in _LOGPROB_OUTPUTS)
        try:
            parsed.logprobs = _parse_logprobs(columns, numbers, parsed.texts, request.logprobs.top)
        except (MalformedRequest, TypeError, *JSON_ERRORS):
            parsed.lost = (*parsed.lost, (("logprobs",), True))


def _parse_reasons(values: list[Any]) -> list[str]:
    return [_parse_reason(value) for value in values]


def _parse_reason(value: Any) -> str:
    return value if isinstance(value, str) else NO_REASON


def _parse_counts(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _parse_logprobs(
    columns: list[Any], numbers: list[Any], texts: list[str], top: int
) -> list[tuple[TokenLogprob, ...]]:
    """Decode logprobs of each choice from either family: JSON candidates, or plain numbers."""
    if columns:
        return [_parse_candidates(column, top) for column in columns]
    size = len(numbers) // len(texts)
    return [
        _build_bare_logprobs(numbers[i * size : (i + 1) * size], text if size == 1 else "")
        for i, text in enumerate(texts)
    ]


def _parse_candidates(value: Any, top: int) -> tuple[TokenLogprob, ...]:
    if not isinstance(value, str):
        return ()
    column = msgspec.convert(rapidjson.parse_value(value.encode()), _CandidateColumn | None)
    return tuple(_build_token_logprob(token, top) for token in column or () if token)


def _build_token_logprob(candidates: Mapping[str, _LogprobCandidate], top: int) -> TokenLogprob:
    """Return the sampled token, which comes first, and the alternatives, which have a rank."""
    alternatives = tuple(
        TopLogprob(
            candidate.decoded_token or "",
            _replace_missing_logprob(candidate.logprob),
            _parse_token_id(key),
        )
        for key, candidate in sorted(candidates.items(), key=lambda item: item[1].rank or 0)
        if candidate.rank is not None and (top < 0 or candidate.rank <= top)
    )
    key, sampled = next(iter(candidates.items()))
    logprob = _drop_non_finite(sampled.logprob)
    return TokenLogprob(sampled.decoded_token or "", logprob, alternatives, _parse_token_id(key))


def _build_bare_logprobs(numbers: list[Any], text: str) -> tuple[TokenLogprob, ...]:
    """Decode plain numbers; the token of a number is known only if there is one token."""
    values = [number if isinstance(number, float) else None for number in numbers]
    return tuple(TokenLogprob(text, _drop_non_finite(value)) for value in values)


def _parse_token_id(key: str) -> int | None:
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= 20 else None  # noqa: PLR2004 - more is no token


def _drop_non_finite(logprob: float | None) -> float | None:
    return logprob if logprob is not None and math.isfinite(logprob) else None


def _replace_missing_logprob(logprob: float | None) -> float:
    return float("-inf") if logprob is None or math.isnan(logprob) else logprob


class GenerateDecoder:
    """Decodes the response to a GenerationRequest, as a stream of events or one JSON body.

    The first byte decides which. ``output_names`` are the model's outputs, ``adapter`` wrote the
    request. If the worker returns ``prompt`` at the start of each choice, it is removed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        output_names: Mapping[str, str],
        adapter: ModelAdapter,
        prompt: str | None,
    ) -> None:
        self._request = request
        self._output_names = output_names
        self._token_per_event = adapter.is_streaming(request)
        """Whether each event counts as one token, unless counts are reported."""
        self._is_unary = False
        self._choice_count = request.n or 1
        self._body_reader = sse.ResponseBodyReader()
        self._sse_parser = sse.SseParser()
        self._pending_prompts = [prompt] * self._choice_count
        self._seen_choices: set[int] = set()
        self._ended_choices: set[int] = set()
        self._may_be_empty = adapter.may_be_empty(request)
        """Whether a body without events is a response without text."""
        self._reports_finish_reason = False
        self._usage_reader = UsageReader(request)
        self._prompt_tokens: int | None = None
        self._token_count: int | None = None
        self._has_metadata = False
        self._pending_error: GatewayError | None = None
        self._expects_texts = True
        """Whether no event had more than a text so far; counts, for instance, are in each."""
        self._accepts_texts = False

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if (
            self._accepts_texts
            and sse.is_plain_event(data)
            and self._sse_parser.is_between_events
            and self._pending_error is None
        ):
            events: list[Event] = []
            if self._read_texts((data[6:-2],), events):
                return events
        stream = self._body_reader.feed(data)
        return self._read_events(stream) if stream else ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = self._body_reader.unary_body
        events = self._read_remainder() if body is None else self._read_unary(bytes(body))
        open_choices = [i for i in range(self._choice_count) if i not in self._ended_choices]
        if open_choices:
            self._check_end(open_choices)
        running = self._request.response_options.usage == "each"
        ends = [ChoiceEnd("unknown", index) for index in open_choices]
        usage = None if running else self._build_usage()
        return [*events, *ends, *self._usage_reader.build_end(usage)]

    def _check_end(self, open_choices: Sequence[int]) -> None:
        """Raise StreamBroken unless these choices are complete."""
        complete = self._seen_choices.issuperset(open_choices)
        if self._is_unary:
            if not complete:
                check_indices(self._seen_choices, self._choice_count, "choice")
            return
        complete = complete and not self._reports_finish_reason
        if not self._seen_choices:
            complete = self._may_be_empty
        if self._sse_parser.stray_line is not None:
            raise_worker_error(self._sse_parser.stray_line)
            complete = False
        if not complete:
            raise StreamBroken("The worker's stream stopped before its end.")

    def _read_unary(self, body: bytes) -> Sequence[Event]:
        self._is_unary = True
        events: list[Event] = []
        self._read_object(body, events)
        return events

    # --- events -----------------------------------------------------------------------------------

    def _read_events(self, data: bytes) -> Sequence[Event]:
        if self._pending_error is not None:
            raise self._pending_error
        batches = self._sse_parser.feed_batches(data)
        events, self._pending_error = sse.collect_events(batches, self._read_payloads)
        return events

    def _read_payloads(self, payloads: Sequence[bytes], events: list[Event]) -> None:
        """Read events with only a text together, and each other event alone."""
        position = 0
        while position < len(payloads):
            if self._accepts_texts:
                position += self._read_texts(payloads[position:], events)
            if position < len(payloads):
                if payloads[position].strip():
                    self._read_object(payloads[position], events)
                position += 1

    def _read_remainder(self) -> Sequence[Event]:
        """Read an event without its final newlines."""
        if self._pending_error is not None:
            raise self._pending_error
        parser = self._sse_parser
        # Of a stream without an event, the bytes that may be a mark count.
        start = b"" if self._body_reader.is_detected else self._body_reader.feed(b"\n\n")
        try:
            payloads = filter(bytes.strip, [*parser.feed(start), *parser.close()])
            events, self._pending_error = sse.collect_events(payloads, self._read_object)
        except WorkerFailed as error:
            if error.__cause__ is None:  # valid JSON that holds an error
                raise
            raise StreamBroken("The worker's stream stopped inside an event.") from error
        if self._pending_error is not None:
            raise self._pending_error
        return events

    def _read_object(self, body: bytes, events: list[Event]) -> None:
        parsed = parse_response(body, self._request, self._output_names)
        report_lost_fields(parsed.lost, events)
        self._add_counts(parsed, events)
        if parsed.finish_reasons:
            self._reports_finish_reason = True
        if parsed.texts[self._choice_count :]:
            self._report_surplus(len(parsed.texts), events)
        for index, text in enumerate(parsed.texts[: self._choice_count]):
            self._seen_choices.add(index)
            self._add_choice(parsed, index, text, events)
        if parsed.token_counts and self._request.response_options.usage == "each":
            events += filter(None, (self._build_usage(),))
        self._accepts_texts = self._expects_texts and self._has_begun()

    def _report_surplus(self, count: int, events: list[Event]) -> None:
        """Report the choices that nobody asked for. Of a beam search, models return each beam."""
        width = max(self._choice_count, self._request.sampling.beam_width or 1)
        for index in range(width, count):
            report_lost_fields((((f"text_output[{index}]",), True),), events)

    def _read_texts(self, payloads: Sequence[bytes], events: list[Event]) -> int:
        """Read events that have only a text; returns their number.

        None is expected after one that has more.
        """
        wires: list[_TextEvent] = []
        try:
            wires.extend(_text_event_decoder.decode_each(payloads))
        except TEXT_ERRORS:  # what was decoded before it stays in the list
            self._accepts_texts = self._expects_texts = False
        for wire in wires:
            if text := wire.text_output:
                tokens = 1 if self._token_per_event else math.ceil(len(text) / 4)
                events.append(TextDelta(text, tokens=tokens))
        return len(wires)

    def _has_begun(self) -> bool:
        """Whether the only choice has begun and not ended."""
        return (
            self._choice_count == 1
            and self._output_names is _DEFAULT_OUTPUT_NAMES
            and self._has_metadata
            and 0 in self._seen_choices
            and 0 not in self._ended_choices
        )

    def _add_counts(self, parsed: ParsedResponse, events: list[Event]) -> None:
        if not self._has_metadata and parsed.model is not None:
            self._has_metadata = True
            events.append(ResponseMetadata(parsed.model))
        prompt_tokens = self._usage_reader.read_prompt_tokens(parsed.prompt_tokens)
        if prompt_tokens is not None:
            if self._prompt_tokens is None and not self._is_unary:
                events.append(StreamStart(prompt_tokens))
            self._prompt_tokens = prompt_tokens
        if parsed.token_counts:
            self._token_count = self._usage_reader.add_completion_tokens(
                self._token_count, parsed.token_counts
            )
            if self._token_count is None:
                parsed.token_counts = ()

    def _build_usage(self) -> Usage | None:
        """Return the worker's usage, if it counted both prompt and completion tokens."""
        return self._usage_reader.read_usage(self._prompt_tokens, self._token_count)

    # --- one choice -------------------------------------------------------------------------------

    def _add_choice(
        self, parsed: ParsedResponse, index: int, text: str, events: list[Event]
    ) -> None:
        prompt = self._pending_prompts[index]
        if prompt is not None:
            self._pending_prompts[index] = None
            text = text.removeprefix(prompt)
        logprobs = parsed.logprobs[index] if index < len(parsed.logprobs) else ()
        reason = parsed.finish_reasons[index] if index < len(parsed.finish_reasons) else NO_REASON
        if index in self._ended_choices:
            if text or logprobs:
                raise StreamBroken(f"The worker went on with choice {index} after its end.")
            return
        if text or logprobs:
            tokens = self._count_tokens(parsed, index, text, logprobs)
            events.append(TextDelta(text, index, tokens, logprobs=logprobs))
        if reason != NO_REASON:
            events.append(self._build_choice_end(reason, index, parsed))

    def _count_tokens(
        self, parsed: ParsedResponse, index: int, text: str, logprobs: tuple[TokenLogprob, ...]
    ) -> int:
        """Return the token count of a text, from the most precise source."""
        if len(parsed.token_counts) == len(parsed.texts):
            return int(parsed.token_counts[index])
        if logprobs:
            return len(logprobs)
        return 1 if self._token_per_event and not self._is_unary else math.ceil(len(text) / 4)

    def _build_choice_end(self, wire: str, index: int, parsed: ParsedResponse) -> ChoiceEnd:
        finish = FINISH_REASONS.read_word(wire, self._request.source)
        self._ended_choices.add(index)
        stop = parsed.stop_reasons[index] if index < len(parsed.stop_reasons) else NO_REASON
        if finish.reason != "eos" or stop == NO_REASON:
            return finish.build_end(index)
        ids = self._request.stopping.stop_token_ids
        return ChoiceEnd("stop", index, next((id_ for id_ in ids if str(id_) == stop), stop))
