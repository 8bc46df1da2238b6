"""Decodes workers' responses, streaming and unary, to chat and completion requests.

The common case is read first, by a type that accepts nothing else: chunks with one text
(``protocols.chat.chunks``), many at a time, and unary responses with one text. Whatever that type
refuses is read by the types that accept all that real servers send. Both make the same events.

What must never happen:

- A response that ends well without each requested choice and its finish reason, or goes on after
  one that came alone; a choice that nobody asked for, which the rest of the gateway has no place
  for.
- A failure of the worker, or a word that no table knows, that becomes a harmless end.
- Two tool calls that become one, whatever ids a worker sends, or a count that no request can have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from protocols.chat.chunks import (
    TextChunk,
    bare_text_chunk_decoder,
    read_reasoning,
    read_text_chunks,
)
from protocols.chat.tool_call_assembler import ToolCallAssembler
from protocols.chat.wire_responses import (
    WireChoice,
    WireDelta,
    WireResponse,
    count_echoed_tokens,
    decode_known_text_response,
    decode_response,
    decode_response_without_logprobs,
    list_unwritten_fields,
    read_choice_end,
    read_content_parts,
    read_logprobs,
    read_metadata,
    read_required_text,
    read_text_response,
    read_usage,
    split_token_count,
)
from protocols.chat.worker_errors import raise_worker_error
from protocols.core import sse
from protocols.core.custom_tools import knows_custom_tools
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FieldValues,
    FinishReason,
    PromptEcho,
    RefusalDelta,
    ResponseExtra,
    TextDelta,
    Usage,
)
from protocols.core.fieldwise import has_lost_element, report_lost_fields
from protocols.core.finish_reasons import FinishReasonTable, FinishWord
from protocols.core.indices import RisingIndex, check_indices
from protocols.core.json_text import TEXT_ERRORS
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS, build_answer_error

FINISH_REASONS: Final[Mapping[str, FinishReason | None]] = {
    "stop": "eos",
    "eos": "eos",
    "eos_token": "eos",
    "end_turn": "eos",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "token_limit": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "invalid flag": None,
    "insufficient_system_resource": None,
    "network_error": None,
    "cancelled": None,
    "timeout": None,
    "sensitive": "content_filter",
    **dict.fromkeys(
        ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII"), "content_filter"
    ),
}
"""Finish reasons by wire name, also of related workers (``insufficient_system_resource``: DeepSeek,
``sensitive`` and ``network_error``: Z.AI, ``cancelled`` and ``timeout``: TensorRT-LLM,
``end_turn``: gateways for Bedrock, ``token_limit``: watsonx, words in capitals: Gemini); None is a
worker failure."""
APPROXIMATIONS: Final[Mapping[str, FinishReason]] = {
    "repetition": "length",
    "model_length": "length",
    "model_context_window_exceeded": "length",
    "time_limit": "length",
}
"""The nearest reasons for words of vLLM, Mistral, Z.AI and watsonx, whose requests may have a time
limit: what was generated until then is the answer."""
_DONE_PAYLOAD: Final = b"[DONE]"


class _ChoiceState:
    """The state of one choice."""

    __slots__ = ("finish", "index", "is_ended", "pending_end", "pending_prompt", "tool_calls")

    def __init__(self, index: int, prompt: str | None) -> None:
        self.index = index
        self.tool_calls: ToolCallAssembler | None = None  # from its first call on
        self.is_ended = False
        self.finish: FinishWord | None = None
        """Why it ended."""
        self.pending_end: WireChoice | None = None
        """Its end in a stream, as long as more of it may follow."""
        self.pending_prompt = prompt  # what is still to come back of it, where it was asked for


def _check_choices(wire: WireResponse) -> None:
    """Raise WorkerFailed if the choices are no list."""
    if any(path == ("choices",) for path, _ in wire.extra):
        raise WorkerFailed("The worker's answer has choices that are no list.")


def _has_only_text(wire: WireChoice, delta: WireDelta | None) -> bool:
    """Whether a choice has no more than a text and a finish reason, as most have."""
    return (
        wire.logprobs is None
        and not wire.token_ids
        and (
            delta is None
            or (
                type(delta.content) is not list
                and not delta.reasoning_content
                and not delta.reasoning
                and not delta.refusal
                and not delta.tool_calls
                and delta.function_call is None
            )
        )
    )


class GenerationDecoder(sse.StreamDecoder):
    """Decodes the response to a GenerationRequest, as a stream or as one JSON body.

    The first byte decides which: see ``sse.ResponseBodyReader``. ``echoes``: the worker was asked
    to return the prompt. ``complaint`` raises the error in a body that is no response.
    ``ends_calls``: the end of the stream also ends a choice that called a tool and has no finish
    reason. ``skips_logprobs``: log probabilities and unknown keys are not needed. ``source`` is the
    worker's protocol, of which these keys and unknown finish reasons are.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        echoes: bool = False,
        complaint: Callable[[bytes], None] = raise_worker_error,
        ends_calls: bool = False,
        skips_logprobs: bool = False,
        source: str = "",
    ) -> None:
        super().__init__(complaint)
        self._request = request
        self._choice_count = request.choice_count
        self._finish_reasons = FinishReasonTable(source, FINISH_REASONS, APPROXIMATIONS)
        self._decode: Callable[[bytes | bytearray], WireResponse] = decode_response
        if skips_logprobs:
            self._decode = decode_response_without_logprobs
        self._reads_text = self._choice_count == 1 and not (skips_logprobs or echoes)
        """Whether to try ``read_text_response``: who skips, has tried it."""
        self._source = source
        self._is_own = bool(source) and request.source in ("", source)
        """Whether the client speaks the worker's protocol, so that it gets all keys."""
        self._response_extra: FieldValues = ()
        """The unknown keys of the last chunk that had any, which further chunks may repeat."""
        self._expects_echo = echoes
        self._end_closes_tool_calls = ends_calls
        self._has_metadata = False
        self._usage_reader = UsageReader(request)
        self._usage: Usage | None = None
        self._choices: dict[int, _ChoiceState] = {}
        self._only_index = 0
        """The worker's index of the choice, if one was requested: some workers count from 1."""
        self._rising_index: RisingIndex | None = RisingIndex()
        """None once it is known not to rise."""
        self._pending_chunk: WireResponse | None = None
        """A chunk that may be of another choice."""
        self.unary_choices: Sequence[WireChoice] = ()
        """The choices of a unary response, as the worker wrote them."""
        self._accepts_texts = False
        """Whether the first choice is in its text, so that text chunks may follow."""

    def __repr__(self) -> str:
        ended = "done" if self._is_done else f"{self._count_ended()} ended"
        return f"<GenerationDecoder {len(self._choices)} choices, {ended}>"

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        if not data:
            return ()
        events: list[Event] = []
        try:
            if (
                self._body_reader.is_stream
                and sse.is_plain_event(data)
                and self._sse_parser.is_between_events
            ):
                payload = data[6:-2]
                if self._accepts_texts and self._read_texts(iter((payload,)), events):
                    return events
                if not sse.has_surrogate(payload):  # else a half may belong to the event before
                    self._read_payload(payload, events)
                    return events
            for payloads in self._sse_parser.feed_batches(self._body_reader.feed(data)):
                self._read_payloads(payloads, events)
        except GatewayError as error:
            if not events:
                raise
            self._pending_error = error
        return events

    def _read_simple_document(self, document: bytearray) -> Sequence[Event]:
        return self._read_text_response(document) if self._reads_text else ()

    def _read_document(self, body: bytes | bytearray) -> Sequence[Event]:
        events: list[Event] = []
        self._read_json(body, events, is_unary=True)
        return events + self._build_end_events()

    def _build_missing_end(self) -> Sequence[Event]:
        events: list[Event] = []
        self._read_pending_chunk(events, belongs=True)  # it may have the end
        return [*events, *self._build_end_events()] if self._is_complete() else ()

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payloads(self, payloads: Sequence[bytes], events: list[Event]) -> None:
        """Decode text chunks together, and each other chunk alone."""
        position, remaining = 0, iter(payloads)
        while position < len(payloads):
            position += self._read_texts(remaining, events)
            if position < len(payloads):
                self._read_payload(payloads[position], events)
                position += 1

    def _read_texts(self, payloads: Iterator[bytes], events: list[Event]) -> int:
        """Decode chunks up to one that is no text chunk, and take it; returns their number."""
        chunks: list[TextChunk] = []
        if self._accepts_texts:
            try:  # noqa: SIM105 - suppress() would be three calls
                chunks.extend(bare_text_chunk_decoder.decode_each(payloads))
            except TEXT_ERRORS:
                pass  # what was decoded before it stays in the list
            keeps_name = self._is_own and self._request.stream
            read_text_chunks(chunks, events, self._source, keeps_name=keeps_name)
            if chunks:
                self._rising_index = None
        else:
            next(payloads, None)
        return len(chunks)

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done or not (text := payload.strip()):
            return
        if text != _DONE_PAYLOAD:
            self._read_json(payload, events, is_unary=False)
            return
        if self._pending_chunk is not None:
            self._read_pending_chunk(events, belongs=True)
        if self._end_closes_tool_calls:
            events += self._end_tool_calling_choices()
        if not self._is_complete():
            if self._choices and self._count_ended() == len(self._choices):
                check_indices(self._choices, self._choice_count, "choice", StreamBroken)
            raise StreamBroken("The worker ended its stream without a finish reason.")
        events += self._build_end_events()

    def _end_tool_calling_choices(self) -> list[Event]:
        """End the choices whose last event was a tool call."""
        events: list[Event] = []
        for index, choice in self._choices.items():
            calls = choice.tool_calls
            if not choice.is_ended and calls is not None and calls.started_count:
                choice.is_ended = True
                events += [*calls.close(), ChoiceEnd("tool_calls", index)]
        return events

    def _is_complete(self) -> bool:
        return self._count_ended() == self._choice_count

    def _count_ended(self) -> int:
        """The number of ended choices."""
        return len([True for choice in self._choices.values() if choice.is_ended])

    def _build_end_events(self) -> list[Event]:
        self._is_done = True
        running = self._request.response_options.usage == "each"
        ends = self._usage_reader.build_end(None if running else self._usage)
        return [*self._take_ends(), *ends]

    # --- one JSON object --------------------------------------------------------------------------

    def _read_text_response(self, body: bytearray) -> list[Event]:
        """The events of a unary response with one text and its usage; [] of any other."""
        found = read_text_response(
            body, self._usage_reader, self._source, decode_known_text_response
        )
        if found is None:
            return []
        self._is_done = True
        wire, events = found
        self.unary_choices = wire.choices or ()
        return events

    def _read_json(self, body: bytes | bytearray, events: list[Event], *, is_unary: bool) -> None:
        try:
            wire = self._decode(body)
        except JSON_ERRORS as e:
            self._raise_if_error(bytes(body))
            raise build_answer_error(e) from e
        if wire.choices is None or wire.error is not None:
            self._raise_if_error(bytes(body))
            _check_choices(wire)
        if is_unary:
            self._read_wire(wire, events, is_unary=True)
        else:
            self._read_chunk(wire, events)

    def _read_chunk(self, wire: WireResponse, events: list[Event]) -> None:
        """Read a chunk, unless the next one decides which choice it belongs to."""
        belongs: bool | None = False
        if self._rising_index is not None and self._choice_count == 1 and wire.choices:
            belongs = self._follow_index(wire.choices, events)
            if belongs is None:
                self._pending_chunk, self._accepts_texts = wire, False
                return
        self._read_wire(wire, events, belongs=belongs is True)
        first = self._choices.get(0)
        self._accepts_texts = (
            self._has_metadata
            and self._request.logprobs is None
            and first is not None
            and not first.is_ended
            and first.pending_prompt is None
            and first.tool_calls is None
            and not self._only_index
        )

    def _follow_index(self, choices: Sequence[WireChoice], events: list[Event]) -> bool | None:
        """Whether a chunk belongs to the first one's choice; see ``RisingIndex``."""
        belongs: bool | None = False
        first = self._choices.get(0)
        has_ended = first is not None and first.is_ended
        if self._rising_index is not None and len(choices) == 1 and not has_ended:
            belongs = self._rising_index.follow(choices[0].index or 0)
        if belongs is not None and self._pending_chunk is not None:
            self._read_pending_chunk(events, belongs=belongs)
        if belongs is False and self._choices:
            self._rising_index = None  # it does not rise
        return belongs

    def _read_pending_chunk(self, events: list[Event], *, belongs: bool) -> None:
        """Read the chunk that waits, if there is one; ``belongs``: to the first one's choice."""
        wire, self._pending_chunk = self._pending_chunk, None
        if wire is None:
            return
        if belongs and wire.choices:
            lost = ((("choices[0]", "index"), wire.choices[0].index),)
            report_lost_fields(lost, events)
        self._read_wire(wire, events, belongs=belongs)

    def _read_wire(
        self,
        wire: WireResponse,
        events: list[Event],
        *,
        is_unary: bool = False,
        belongs: bool = False,
    ) -> None:
        """Read an answer or a chunk; ``belongs``: its choice is the only one, whatever it says."""
        choices = wire.choices or []
        if is_unary:
            if not choices:
                raise WorkerFailed("The worker's answer has no choices.")
            self._check_unary(choices)
            self.unary_choices = choices
        self._add_metadata(wire, events)
        if wire.extra and wire.extra != self._response_extra:
            self._response_extra = wire.extra
            events.append(ResponseExtra(self._source, "response", wire.extra))
        if has_lost_element(wire.lost, "choices"):
            raise WorkerFailed("The worker's answer has a choice that is no object.")
        report_lost_fields(wire.lost, events)
        usage = None if wire.usage is None else read_usage(wire.usage, self._usage_reader)
        counts = (
            split_token_count(choices, usage.completion_tokens)
            if is_unary and usage is not None
            else None
        )
        for position, choice in enumerate(choices):
            index = position if choice.index is None and is_unary else choice.index or 0
            if belongs:
                index = self._only_index
            if self._only_index or not 0 <= index < self._choice_count:
                index = self._correct_index(index, position, events)
                if index >= self._choice_count:
                    continue
            count = 1 if counts is None else counts[position]
            self._read_choice_at(index, choice, events, count=count, is_unary=is_unary)
        if not choices and not is_unary:
            events += self._take_ends()
        self._add_usage(usage, events)

    def _read_choice_at(
        self, index: int, wire: WireChoice, events: list[Event], *, count: int, is_unary: bool
    ) -> None:
        """Read a choice with this index, and its end."""
        is_new = index not in self._choices
        state = self._get_choice(index)
        self._add_extra(wire, index, events)
        count_before = len(events)
        self._read_choice(wire, state, events, count=count)
        may_go_on = not is_unary and (is_new or len(events) > count_before)
        if wire.finish_reason and may_go_on:
            self._keep_end(wire, state)
        elif wire.finish_reason or (is_unary and not state.is_ended):
            events += self._finish_choice(wire, state)

    def _check_unary(self, choices: Sequence[WireChoice]) -> None:
        """Raise WorkerFailed unless each requested choice is among these once."""
        indices = (
            position if choice.index is None or choice.index < 0 else choice.index
            for position, choice in enumerate(choices)
        )
        count = self._choice_count
        if count == len(choices) == 1:
            return  # it is the choice, whatever its index is
        check_indices((index for index in indices if index < count), count, "choice")

    def _correct_index(self, index: int, position: int, events: list[Event]) -> int:
        """The index of a choice that has not one of those requested; one beyond them is reported.

        If one choice was requested, it is the only one of a unary response, or the first of a
        stream, whatever its index is. Of several prompts an index beyond them is an error: a worker
        that sends another number of choices for each prompt means other prompts with its indices.
        """
        if self._only_index and index == self._only_index:
            return 0
        is_first = not self._choices and not self.unary_choices[1:]
        if index < 0 or (self._choice_count == 1 and is_first):
            report_lost_fields((((f"choices[{position}]", "index"), index),), events)
            if index < 0:
                index = position
            else:
                self._only_index = index
                return 0
        if self._only_index or index >= self._choice_count:
            if len(self._request.prompts) > 1:
                check_indices((*range(self._choice_count), index), self._choice_count, "choice")
            report_lost_fields((((f"choices[{index}]",), True),), events)
            return max(index, self._choice_count)
        return index

    def _add_extra(self, wire: WireChoice, index: int, events: list[Event]) -> None:
        """Add the keys of a choice and of its message that no other event tells the client."""
        extra, ids, stop = wire.extra, wire.token_ids, wire.stop_reason
        if (ids, stop, wire.matched_stop) != (None, None, None):
            has_ids = self._request.response_options.token_ids
            extra += list_unwritten_fields(wire, has_token_ids=has_ids)
        if extra:
            events.append(ResponseExtra(self._source, "choice", extra, index))
        message = wire.delta or wire.message
        if message is not None and message.extra:
            events.append(ResponseExtra(self._source, "message", message.extra, index))

    def _add_usage(self, usage: Usage | None, events: list[Event]) -> None:
        """Store the running usage, if the chunk has it."""
        if usage is not None:
            self._usage = usage
            if self._request.response_options.usage == "each":
                events.append(usage)

    def _add_metadata(self, wire: WireResponse, events: list[Event]) -> None:
        if self._has_metadata or (wire.id is None and wire.model is None):
            return
        self._has_metadata = True
        events.append(read_metadata(wire, self._source))

    def _get_choice(self, index: int) -> _ChoiceState:
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = _ChoiceState(index, self._find_echoed_prompt(index))
        return state

    def _find_echoed_prompt(self, index: int) -> str | None:
        """The prompt that the worker will return before a choice."""
        prompts = self._request.prompts
        position = index // (self._request.n or 1)
        if not self._expects_echo or position >= len(prompts):
            return None
        prompt = prompts[position]
        return prompt if isinstance(prompt, str) else None

    def _read_choice(
        self, wire: WireChoice, choice: _ChoiceState, events: list[Event], *, count: int
    ) -> None:
        own_events: list[Event] = []
        text, delta = read_required_text(wire.text), wire.delta or wire.message
        if _has_only_text(wire, delta) and choice.pending_prompt is None and not choice.is_ended:
            if delta is not None:
                text = read_required_text(delta.content)
            if text:
                events.append(TextDelta(text, choice.index, count))
            return
        if delta is not None:
            # The pieces of a stream are one text for a client that gets no stream.
            keeps_name = self._is_own and (self._request.stream or delta is wire.message)
            read_reasoning(delta, choice.index, self._source, own_events, keeps_name=keeps_name)
            content = delta.content
            if isinstance(content, list):
                text = read_content_parts(content, choice.index, own_events)
            else:
                text = read_required_text(content)
        own_events += self._build_text_events(wire, choice, text, count=count)
        if delta is not None:
            if delta.refusal:
                own_events.append(RefusalDelta(delta.refusal, choice.index))
            if delta.tool_calls or delta.function_call is not None:
                if choice.tool_calls is None:
                    choice.tool_calls = ToolCallAssembler(
                        choice.index,
                        self._source,
                        is_own=self._is_own,
                        keeps_custom=knows_custom_tools(self._request, self._source),
                    )
                is_message = delta is wire.message
                own_events += choice.tool_calls.read_delta(delta, is_message=is_message)
        if own_events and choice.pending_end is not None:
            choice.pending_end, choice.is_ended = None, False
        if own_events and choice.is_ended:
            raise StreamBroken(f"The worker went on with choice {choice.index} after its end.")
        events += own_events

    def _build_text_events(
        self, wire: WireChoice, choice: _ChoiceState, text: str, *, count: int
    ) -> list[Event]:
        """The text, and before it the prompt if the worker returned it."""
        logprobs, ids = read_logprobs(wire.logprobs), tuple(wire.token_ids or ())
        if not logprobs and wire.logprobs is not None and wire.logprobs.tokens:
            path = (f"choices[{choice.index}]", "logprobs")  # columns of different lengths
            return [ResponseExtra("", "response", ((path, True),)), TextDelta(text, choice.index)]
        if not text and not logprobs and not ids:
            return []
        index, prompt, choice.pending_prompt = choice.index, choice.pending_prompt, None
        if prompt is not None and text.startswith(prompt):
            echoed_count = count_echoed_tokens(prompt, logprobs)
            echo = PromptEcho(index, prompt, logprobs[:echoed_count])
            text, logprobs = text[len(prompt) :], logprobs[echoed_count:]
            if not text and not logprobs:
                return [echo]
            return [echo, TextDelta(text, index, len(logprobs) or len(ids) or count, ids, logprobs)]
        return [TextDelta(text, index, len(ids) or len(logprobs) or count, ids, logprobs)]

    def _keep_end(self, wire: WireChoice, choice: _ChoiceState) -> None:
        """Keep an end that came with a piece, or first of all, until the choice does not go on.

        Some servers send a finish reason with each chunk: the last one counts.
        """
        self._finish_reasons.read_word(wire.finish_reason, self._request.source)  # fails at once
        choice.pending_end, choice.is_ended = wire, True

    def _take_ends(self) -> list[Event]:
        """The ends that were kept."""
        events: list[Event] = []
        for choice in self._choices.values():
            if (wire := choice.pending_end) is not None:
                choice.pending_end, choice.is_ended = None, False
                events += self._finish_choice(wire, choice)
        return events

    def _finish_choice(self, wire: WireChoice, choice: _ChoiceState) -> list[Event]:
        """The end of a choice; of one that had ended, a report of another reason for that."""
        had_ended, choice.is_ended = choice.is_ended, True
        last = [] if had_ended or choice.tool_calls is None else choice.tool_calls.close()
        finish = self._finish_reasons.read_word(wire.finish_reason, self._request.source)
        if had_ended:
            is_same = finish == choice.finish
            lost = ((("finish_reason",), wire.finish_reason),)
            return [] if is_same else [ResponseExtra("", "choice", lost, choice.index)]
        choice.finish = finish
        stop_ids = self._request.stopping.stop_token_ids
        return [*last, read_choice_end(wire, finish, choice.index, stop_ids)]
