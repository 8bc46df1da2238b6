"""Decode worker responses: native generate responses and OpenAI-style responses.

A generate stream ends with the event that holds the finish reason, which the worker sends only with
``details``. A failed stream ends in plain text. Source: MindIE-LLM 0695772,
single_req_triton_text_infer_interface.cpp and single_req_vllm_openai_infer_interface.cpp; for
the differences of 1.0.RC1, its published pages.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from protocols.chat.decoder import GenerationDecoder
from protocols.chat.wire_responses import WireChoice
from protocols.core import sse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    Timing,
    Usage,
)
from protocols.core.fieldwise import decode_fields, report_lost_fields
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS, build_answer_error
from protocols.mindie.errors import raise_worker_error

# Wire types of generate and generate_stream responses; they accept what real servers send.
#
# Times are in milliseconds, ``queue_wait_time`` is in microseconds. Unary responses have lists of
# times, one for each step; stream events have one value each. ``perf_stat`` is a list of pairs: a
# token and its time. Sources: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp
# (FillResponseBody); for ``perf_stat`` the published pages of 1.0.

SOURCE: Final = "mindie"
"""The source of requests of the protocol's own clients."""
FINISH_REASONS: Final = FinishReasonTable(
    SOURCE, {"eos_token": "eos", "length": "length", "stop_sequence": None}
)
"""None: a worker failure (the request was cancelled or interrupted)."""
_MAX_NUMBER = 1e12


class WorkerTextDetails(Struct, forbid_unknown_fields=True):
    """Fields that the worker sends only on request."""

    finish_reason: Any = None
    generated_tokens: Any = None
    batch_size: Any = None
    queue_wait_time: Any = None
    perf_stat: Any = None
    first_token_cost: None = None
    decode_cost: None = None


class WorkerTextResponse(Struct, forbid_unknown_fields=True):
    """A unary response, or one event of a stream."""

    id: Any = None
    model_name: Any = None
    model_version: Any = None
    text_output: str | None = None
    details: WorkerTextDetails | None = None
    finish_reason: Any = None
    prefill_time: Any = None
    decode_time: Any = None
    error: Any = None


def list_timings(wire: WorkerTextResponse, details: WorkerTextDetails) -> list[Timing]:
    """The timing of each step."""
    batches, queues = _parse_numbers(details.batch_size), _parse_numbers(details.queue_wait_time)
    prefills, decodes = _parse_numbers(wire.prefill_time), _parse_numbers(wire.decode_time)
    if stat := _parse_perf_stat(details.perf_stat):
        prefills, decodes = stat[:1], [None, *stat[1:]]
    timings = []
    for batch, queue, prefill, decode in zip_longest(batches, queues, prefills, decodes):
        timing = Timing(
            _to_seconds(queue, 1e6),
            _to_seconds(prefill, 1e3),
            _to_seconds(decode, 1e3),
            None if batch is None else int(batch),
        )
        if timing != Timing():
            timings.append(timing)
    return timings


def _parse_perf_stat(value: Any) -> list[float | None]:
    pairs = value if isinstance(value, list) else []
    return [_parse_number(pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) > 1]


def _parse_numbers(value: Any) -> list[float | None]:
    return [*map(_parse_number, value if isinstance(value, list) else [value])]


def _parse_number(value: Any) -> float | None:
    """A plausible count or duration; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value < _MAX_NUMBER else None


def _to_seconds(duration: float | None, scale: float) -> float | None:
    return None if duration is None else duration / scale


_END_TOKEN_PATTERN = re.compile(r"</s>|<\|\w{1,32}\|>")
_BROKEN_RESPONSE: Final = "The worker broke off its answer."


class TextDecoder:
    """Decodes a generate or generate_stream response; detects the format from the body.

    ``early``: in the first releases, the last event holds the text of the token that ended it.
    """

    def __init__(self, request: GenerationRequest, *, early: bool) -> None:
        self._source = request.source
        self._wants_timing = request.response_options.timing
        self._early = early
        self._body_reader = sse.ResponseBodyReader()
        self._sse_parser = sse.SseParser()
        self._usage_reader = UsageReader(request)
        self._token_count = 0
        self._has_metadata = False
        self._closing = False
        self._is_done = False
        self._pending_error: GatewayError | None = None

    @property
    def has_ignored_counts(self) -> bool:
        """Whether a token count of the worker was implausible."""
        return self._usage_reader.has_ignored

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        if self._is_done:
            return ()
        return self._decode_events(self._body_reader.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        self._closing = True
        if (body := self._body_reader.unary_body) is not None:
            return self._decode_unary(bytes(body))
        events = [] if self._is_done else self._decode_events(b"")
        if not self._is_done:
            raise StreamBroken("The worker's stream stopped before its end.")
        return events

    # --- a stream ---------------------------------------------------------------------------------

    def _decode_events(self, data: bytes) -> list[Event]:
        events, self._pending_error = sse.collect_events(
            self._iter_payloads(data), self._decode_event
        )
        return events

    def _iter_payloads(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads of events. Raises the error that a line outside an event reports."""
        parser = self._sse_parser
        for payload in parser.close() if self._closing else parser.feed(data):
            if payload.strip() and not self._is_done:
                yield payload
        if self._sse_parser.stray_line is not None and not self._is_done:
            raise_worker_error(self._sse_parser.stray_line)
            raise WorkerFailed(_BROKEN_RESPONSE)

    def _decode_event(self, payload: bytes, events: list[Event]) -> None:
        wire, details = self._decode_wire(payload, events)
        total = self._usage_reader.read_completion_tokens(details.generated_tokens)
        count = 1 if total is None else max(total - self._token_count, 0)
        self._token_count += count
        reason = details.finish_reason or wire.finish_reason
        text = wire.text_output or ""
        if self._early and reason == "eos_token" and _END_TOKEN_PATTERN.fullmatch(text):
            text = ""
        self._add_metadata(wire, details, events)
        events.append(TextDelta(text, tokens=count))
        if reason:
            self._add_end(reason, events)

    # --- one JSON object --------------------------------------------------------------------------

    def _decode_unary(self, body: bytes) -> list[Event]:
        events: list[Event] = []
        wire, details = self._decode_wire(body, events)
        self._add_metadata(wire, details, events)
        count = self._usage_reader.read_completion_tokens(details.generated_tokens)
        events.append(TextDelta(wire.text_output or "", tokens=1 if count is None else count))
        reason = details.finish_reason or wire.finish_reason or ""
        if wire.details is None and not reason and self._source in ("", SOURCE):
            return [*events, ChoiceEnd("unknown"), StreamEnd()]  # the client need not ask for them
        self._add_end(reason, events)
        return events

    # --- both -------------------------------------------------------------------------------------

    def _decode_wire(
        self, body: bytes, events: list[Event]
    ) -> tuple[WorkerTextResponse, WorkerTextDetails]:
        try:
            wire, lost = decode_fields(body, WorkerTextResponse)
        except JSON_ERRORS as e:
            raise_worker_error(body)
            if self._closing and self._body_reader.unary_body is None:
                raise StreamBroken("The worker's stream stopped inside an event.") from e
            raise build_answer_error(e) from e
        if wire.text_output is None or wire.error is not None:
            raise_worker_error(body)
            raise WorkerFailed("The worker's answer has no text.")
        report_lost_fields(lost, events)
        return wire, wire.details or WorkerTextDetails()

    def _add_metadata(
        self, wire: WorkerTextResponse, details: WorkerTextDetails, events: list[Event]
    ) -> None:
        if not self._has_metadata:
            self._has_metadata = True
            model, name = wire.model_name, wire.id
            events.append(
                ResponseMetadata(
                    model if isinstance(model, str) else None,
                    id=name if isinstance(name, str) else None,
                )
            )
        if self._wants_timing:
            events += list_timings(wire, details)

    def _add_end(self, reason: str, events: list[Event]) -> None:
        self._is_done = True
        end = FINISH_REASONS.read_word(reason, self._source).build_end()
        events += [end, *self._usage_reader.build_end()]


class OpenAiStyleDecoder:
    """Decodes an OpenAI-style response with MindIE's deviations.

    Each choice of a stream has its own usage. ``early``: in the first releases, the finish reason
    ``stop_sequence`` means that the request was cancelled or interrupted.
    """

    def __init__(self, request: GenerationRequest, *, early: bool) -> None:
        self._continuous_usage = request.response_options.usage == "each"
        self._early = early
        options = replace(request.response_options, usage="each")
        self._inner = GenerationDecoder(
            replace(request, response_options=options),
            complaint=raise_worker_error,
            source=SOURCE,
        )
        self._choice_index = 0
        self._usages: dict[int, Usage] = {}
        self._pending_error: GatewayError | None = None

    @property
    def unary_choices(self) -> Sequence[WireChoice]:
        """See ``protocols.chat.decoder.GenerationDecoder``."""
        return self._inner.unary_choices

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        return self._merge_usage(self._inner.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        return self._merge_usage(self._inner.close())

    def _merge_usage(self, events: Sequence[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            match event:
                case Usage():
                    self._usages[self._choice_index] = event
                    if self._continuous_usage:
                        out.append(self._sum_usage())
                case ChoiceEnd("stop") if self._early:
                    self._pending_error = WorkerFailed(_BROKEN_RESPONSE)
                    break
                case StreamEnd():
                    is_known = self._usages and not event.has_ignored_usage
                    if is_known and not self._continuous_usage:
                        out.append(self._sum_usage())
                    out.append(event)
                case _:
                    self._choice_index = getattr(event, "index", self._choice_index)
                    out.append(event)
        if self._pending_error is not None and not out:
            raise self._pending_error
        return out

    def _sum_usage(self) -> Usage:
        """The total usage of all choices, which share one prompt."""
        usages = [*self._usages.values()]
        reasoning = [u.reasoning_tokens for u in usages if u.reasoning_tokens is not None]
        return replace(
            usages[-1],
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            reasoning_tokens=sum(reasoning) if reasoning else None,
        )
