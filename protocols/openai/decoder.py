"""Reading workers' answers: streams and whole ones, to conversations and completions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from protocols.core import sse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    Usage,
)
from protocols.core.request import GenerationRequest
from protocols.openai.calls import ToolCallAssembler
from protocols.openai.faults import raise_worker_error
from protocols.openai.incoming import (
    WireChoice,
    WireDelta,
    WireResponse,
    count_echoed_tokens,
    decode_response,
    read_choice_end,
    read_content_parts,
    read_logprobs,
    read_metadata,
    read_usage,
    split_token_count,
)

WORKER_FINISH_REASONS: Final[Mapping[str, FinishReason | None]] = {
    "stop": "eos",
    "eos": "eos",
    "eos_token": "eos",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "invalid flag": None,
}
"""By their names, of which some are those of workers akin; None is a failure of the worker."""
_DONE_PAYLOAD: Final = b"[DONE]"


class _ChoiceState:
    """What is known of one choice so far."""

    __slots__ = ("index", "is_ended", "pending_prompt", "tool_calls")

    def __init__(self, index: int, prompt: str | None) -> None:
        self.index = index
        self.tool_calls = ToolCallAssembler(index)
        self.is_ended = False
        self.pending_prompt = prompt  # what is still to come back of it, where it was asked for


class GenerationDecoder:
    """Reads the answer to a GenerateRequest, as a stream of events or as one JSON body.

    Which of the two it is shows in the first byte: see ``sse.Body``. ``echoes``: the worker was
    asked to give the prompt back. ``complaint`` raises what a body that is no answer tells of.
    ``ends_calls``: the stream's end also ends a choice that called a tool and tells no reason.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        echoes: bool = False,
        complaint: Callable[[bytes], None] = raise_worker_error,
        ends_calls: bool = False,
    ) -> None:
        self._request = request
        self._expects_echo = echoes
        self._raise_if_error = complaint
        self._end_closes_tool_calls = ends_calls
        self._body_reader = sse.ResponseBodyReader()
        self._sse_parser = sse.SseParser()
        self._is_done = False
        self._has_metadata = False
        self._usage: Usage | None = None
        self._choices: dict[int, _ChoiceState] = {}
        self._pending_error: GatewayError | None = None

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        payloads = self._sse_parser.feed(self._body_reader.feed(data))
        events, self._pending_error = sse.collect_events(payloads, self._read_payload)
        return events

    def read_event(self, payload: bytes, events: list[Event]) -> None:
        """Read the data of one event of a stream of which no part of another was fed before.

        Raises at once what ``feed`` would raise behind what was there before.
        """
        self._body_reader.is_detected = True
        before = len(events)
        try:
            self._read_payload(payload, events)
        except GatewayError:
            del events[before:]
            raise

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        if self._is_done:
            return ()
        if (whole := self._body_reader.unary_body) is not None:
            events: list[Event] = []
            self._read_json(bytes(whole), events, whole=True)
            return [*events, *self._build_end_events()]
        try:
            self._sse_parser.close()
        except StreamBroken:
            if not self._is_complete():
                raise
        if self._is_complete():
            return self._build_end_events()
        if self._sse_parser.stray_line is not None:
            self._raise_if_error(self._sse_parser.stray_line)
        raise StreamBroken("The worker's stream stopped before its end.")

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done or not (said := payload.strip()):
            return
        if said != _DONE_PAYLOAD:
            self._read_json(payload, events, whole=False)
            return
        if self._end_closes_tool_calls:
            events += self._end_tool_calling_choices()
        if not self._choices or self._count_ended() < len(self._choices):
            raise StreamBroken("The worker ended its stream without a finish reason.")
        events += self._build_end_events()

    def _end_tool_calling_choices(self) -> list[Event]:
        """The ends of the choices whose last word was a call."""
        ended: list[Event] = []
        for index, choice in self._choices.items():
            if not choice.is_ended and choice.tool_calls.started_count:
                choice.is_ended = True
                choice.tool_calls.close()
                ended.append(ChoiceEnd("tool_calls", index))
        return ended

    def _is_complete(self) -> bool:
        ended = self._count_ended()
        return ended == len(self._choices) and ended >= self._request.choice_count

    def _count_ended(self) -> int:
        """How many choices are over."""
        return len([True for choice in self._choices.values() if choice.is_ended])

    def _build_end_events(self) -> list[Event]:
        self._is_done = True
        running = self._request.want.usage == "each"
        usage = [] if self._usage is None or running else [self._usage]
        return [*usage, StreamEnd()]

    # --- one JSON object --------------------------------------------------------------------------

    def _read_json(self, body: bytes, events: list[Event], *, whole: bool) -> None:
        try:
            wire = decode_response(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if wire.choices is None or wire.error is not None:
            self._raise_if_error(body)
        choices = wire.choices or []
        if self._has_metadata and len(choices) == 1 and self._is_text(wire, choices[0], events):
            return
        if whole and not choices:
            raise WorkerFailed("The worker's answer has no choices.")
        self._add_metadata(wire, events)
        usage = None if wire.usage is None else read_usage(wire.usage)
        counts = (
            split_token_count(choices, usage.completion_tokens)
            if whole and usage is not None
            else None
        )
        for position, choice in enumerate(choices):
            index = position if choice.index is None and whole else choice.index or 0
            known = self._get_choice(index)
            self._read_choice(
                choice, known, events, count=1 if counts is None else counts[position]
            )
            if (choice.finish_reason or whole) and not known.is_ended:
                events.append(self._finish_choice(choice, known))
        self._add_usage(usage, events)

    def _is_text(self, wire: WireResponse, choice: WireChoice, events: list[Event]) -> bool:
        """Tell what a chunk says that holds a piece of text alone, as most do; whether it does."""
        known = self._choices.get(choice.index or 0)
        if (
            known is None
            or known.is_ended
            or known.pending_prompt is not None
            or wire.usage is not None
        ):
            return False
        index, delta = choice.index, choice.delta
        if delta is None:
            alone = WireChoice(index, text=choice.text)
        else:
            alone = WireChoice(index, WireDelta(delta.content))
        text = choice.text if delta is None else delta.content
        if type(text) is not str or choice != alone:
            return False
        if text:
            events.append(TextDelta(text, known.index))
        return True

    def _add_usage(self, usage: Usage | None, events: list[Event]) -> None:
        """This is how much it was so far, where that is known."""
        if usage is not None:
            self._usage = usage
            if self._request.want.usage == "each":
                events.append(usage)

    def _add_metadata(self, wire: WireResponse, events: list[Event]) -> None:
        if self._has_metadata or (wire.id is None and wire.model is None):
            return
        self._has_metadata = True
        events.append(read_metadata(wire))

    def _get_choice(self, index: int) -> _ChoiceState:
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = _ChoiceState(index, self._find_echoed_prompt(index))
        return known

    def _find_echoed_prompt(self, index: int) -> str | None:
        """The prompt that will come back in front of a choice."""
        prompts = self._request.prompts
        position = index // (self._request.n or 1)
        if not self._expects_echo or position >= len(prompts):
            return None
        prompt = prompts[position]
        return prompt if isinstance(prompt, str) else None

    def _read_choice(
        self, wire: WireChoice, choice: _ChoiceState, events: list[Event], *, count: int
    ) -> None:
        said: list[Event] = []
        text, delta = wire.text or "", wire.delta or wire.message
        if delta is not None:
            thought = delta.reasoning_content or delta.reasoning
            if thought and isinstance(thought, str):
                said.append(ReasoningDelta(thought, choice.index))
            content = delta.content
            if isinstance(content, list):
                text = read_content_parts(content, choice.index, said)
            else:
                text = content or ""
        said += self._build_text_events(wire, choice, text, count=count)
        if delta is not None:
            if delta.refusal:
                said.append(RefusalDelta(delta.refusal, choice.index))
            if delta.tool_calls or delta.function_call is not None:
                said += choice.tool_calls.read_delta(delta)
        if said and choice.is_ended:
            raise StreamBroken(f"The worker went on with choice {choice.index} after its end.")
        events += said

    def _build_text_events(
        self, wire: WireChoice, choice: _ChoiceState, text: str, *, count: int
    ) -> list[Event]:
        """The text, and before it the prompt where the worker gave it back."""
        logprobs, ids = read_logprobs(wire.logprobs), tuple(wire.token_ids or ())
        if not text and not logprobs and not ids:
            return []
        index, prompt, choice.pending_prompt = choice.index, choice.pending_prompt, None
        if prompt is not None and text.startswith(prompt):
            kept = count_echoed_tokens(prompt, logprobs)
            echo = PromptEcho(index, prompt, logprobs[:kept])
            text, logprobs = text[len(prompt) :], logprobs[kept:]
            if not text and not logprobs:
                return [echo]
            return [echo, TextDelta(text, index, len(logprobs) or len(ids) or count, ids, logprobs)]
        return [TextDelta(text, index, len(ids) or len(logprobs) or count, ids, logprobs)]

    def _finish_choice(self, wire: WireChoice, choice: _ChoiceState) -> ChoiceEnd:
        choice.is_ended = True
        choice.tool_calls.close()
        reason = WORKER_FINISH_REASONS.get(wire.finish_reason or "", "unknown")
        if reason is None:
            raise WorkerFailed(f"The worker broke off ({(wire.finish_reason or '')[:32]}).")
        return read_choice_end(wire, reason, choice.index, self._request.stopping.stop_token_ids)
