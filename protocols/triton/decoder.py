"""Reading workers' answers: streams and whole ones.

A stream has no last event, and may have none at all: its end is the end of the body, which is sure
where the connection says that the body is whole. A worker that tells finish reasons has to tell one
before; of another's end nothing more is known.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from protocols.core import sse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    Usage,
)
from protocols.core.request import GenerationRequest
from protocols.triton.failures import raise_worker_error
from protocols.triton.incoming import FINISH_REASONS, NO_REASON, ParsedResponse, parse_response
from protocols.triton.plan import ModelAdapter

_MAX_EVENT_BYTES: Final = 1 << 24
"""A model that does not stream tells all in one event."""


class GenerateDecoder:
    """Reads the answer to a GenerateRequest, as a stream of events or as one JSON body.

    Which of the two it is shows in the first byte. ``known`` are the model's ``incoming.outputs``,
    ``plan`` is how it was asked. ``prompt`` may stand in front of each choice, and is cut off.
    """

    def __init__(
        self,
        request: GenerationRequest,
        known: Mapping[str, str],
        plan: ModelAdapter,
        prompt: str | None,
    ) -> None:
        self._body_reader = sse.ResponseBodyReader()
        self._reader = _ResponseReader(request, known, plan, prompt)

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        share = self._body_reader.feed(data)
        return self._reader.feed(share) if share else ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = self._body_reader.unary_body
        if body is None:
            return self._reader.close(self._body_reader.feed(b"\n\n"))
        return self._reader.read_unary(bytes(body))


class _ResponseReader:
    """Reads any answer; see ``AnswerDecoder``."""

    def __init__(
        self,
        request: GenerationRequest,
        known: Mapping[str, str],
        plan: ModelAdapter,
        prompt: str | None,
    ) -> None:
        self._request = request
        self._output_names = known
        self._token_per_event = plan.is_streaming(request)
        """Whether each event is a token's, as far as nothing else is told."""
        self._is_unary = False
        self._choice_count = request.n or 1
        self._sse_parser = sse.SseParser(limit=_MAX_EVENT_BYTES)
        self._pending_prompts = [prompt] * self._choice_count
        self._seen_choices: set[int] = set()
        self._ended_choices: set[int] = set()
        self._may_be_empty = plan.may_be_empty(request)
        """Whether a body without events is an answer without text."""
        self._reports_finish_reason = False
        self._prompt_tokens: int | None = None
        self._token_count: int | None = None
        self._has_metadata = False
        self._pending_error: GatewayError | None = None

    def feed(self, data: bytes) -> Sequence[Event]:
        """What the next bytes of a stream tell."""
        if self._pending_error is not None:
            raise self._pending_error
        payloads = filter(bytes.strip, self._sse_parser.feed(data))
        events, self._pending_error = sse.collect_events(payloads, self._read_object)
        return events

    def close(self, rest: bytes) -> Sequence[Event]:
        """What a stream's end tells; ``rest`` ends an event whose newlines are missing."""
        if self._pending_error is not None:
            raise self._pending_error
        events = self._read_remainder(rest)
        untold = self._list_open_choices()
        if untold:
            self._check_end(untold)
        return self._finish_events(events, untold)

    def read_unary(self, body: bytes) -> Sequence[Event]:
        """What an answer in one piece tells."""
        self._is_unary = True
        events: list[Event] = []
        self._read_object(body, events)
        untold = self._list_open_choices()
        if not self._seen_choices.issuperset(untold):
            raise WorkerFailed("The worker did not answer as often as it was asked to.")
        return self._finish_events(events, untold)

    def _list_open_choices(self) -> Sequence[int]:
        return [i for i in range(self._choice_count) if i not in self._ended_choices]

    def _finish_events(self, events: Sequence[Event], untold: Sequence[int]) -> Sequence[Event]:
        usage = [] if self._request.want.usage == "each" else self._build_usage()
        return [*events, *[ChoiceEnd("unknown", i) for i in untold], *usage, StreamEnd()]

    def _check_end(self, untold: Sequence[int]) -> None:
        """Raises unless these choices of a stream are complete, though nothing said so."""
        complete = self._seen_choices.issuperset(untold) and not self._reports_finish_reason
        if not self._seen_choices:
            complete = self._may_be_empty
        if self._sse_parser.stray_line is not None:
            raise_worker_error(self._sse_parser.stray_line)
            complete = False
        if not complete:
            raise StreamBroken("The worker's stream stopped before its end.")

    # --- events -----------------------------------------------------------------------------------

    def _read_remainder(self, data: bytes) -> Sequence[Event]:
        """An event whose newlines are missing, which are ``data``."""
        try:
            events = self.feed(data)
        except WorkerFailed as error:
            if error.__cause__ is None:  # it could be read, and is a complaint
                raise
            raise StreamBroken("The worker's stream stopped inside an event.") from error
        if self._pending_error is not None:
            raise self._pending_error
        return events

    def _read_object(self, body: bytes, events: list[Event]) -> None:
        said = parse_response(body, self._request, self._output_names)
        self._add_counts(said, events)
        if said.finish_reasons:
            self._reports_finish_reason = True
        for index, text in enumerate(said.texts[: self._choice_count]):
            self._seen_choices.add(index)
            self._add_choice(said, index, text, events)
        if said.token_counts and self._request.want.usage == "each":
            events += self._build_usage()

    def _add_counts(self, said: ParsedResponse, events: list[Event]) -> None:
        if not self._has_metadata and said.model is not None:
            self._has_metadata = True
            events.append(ResponseMetadata(said.model))
        if said.prompt_tokens is not None:
            if self._prompt_tokens is None and not self._is_unary:
                events.append(StreamStart(said.prompt_tokens))
            self._prompt_tokens = said.prompt_tokens
        if said.token_counts:
            self._token_count = (self._token_count or 0) + sum(said.token_counts)

    def _build_usage(self) -> list[Event]:
        """What the worker counted, if it counted both."""
        if self._prompt_tokens is None or self._token_count is None:
            return []
        return [Usage(self._prompt_tokens, self._token_count)]

    # --- one choice -------------------------------------------------------------------------------

    def _add_choice(self, said: ParsedResponse, index: int, text: str, events: list[Event]) -> None:
        prompt = self._pending_prompts[index]
        if prompt is not None:
            self._pending_prompts[index] = None
            text = text.removeprefix(prompt)
        logprobs = said.logprobs[index] if index < len(said.logprobs) else ()
        reason = said.finish_reasons[index] if index < len(said.finish_reasons) else NO_REASON
        if index in self._ended_choices:
            if text or logprobs:
                raise StreamBroken(f"The worker went on with choice {index} after its end.")
            return
        if text or logprobs:
            tokens = self._count_tokens(said, index, text, logprobs)
            events.append(TextDelta(text, index, tokens, logprobs=logprobs))
        if reason != NO_REASON:
            events.append(self._build_choice_end(reason, index, said))

    def _count_tokens(
        self, said: ParsedResponse, index: int, text: str, logprobs: tuple[TokenLogprob, ...]
    ) -> int:
        """How many tokens a text is, from whatever tells most of it."""
        if len(said.token_counts) == len(said.texts):
            return said.token_counts[index]
        if logprobs:
            return len(logprobs)
        return 1 if self._token_per_event and not self._is_unary else math.ceil(len(text) / 4)

    def _build_choice_end(self, wire: str, index: int, said: ParsedResponse) -> ChoiceEnd:
        reason = FINISH_REASONS.get(wire, "unknown")
        if reason is None:
            raise WorkerFailed(f"The worker broke off ({wire}).")
        self._ended_choices.add(index)
        stop = said.stop_reasons[index] if index < len(said.stop_reasons) else NO_REASON
        if reason != "eos" or stop == NO_REASON:
            return ChoiceEnd(reason, index)
        ids = self._request.stopping.stop_token_ids
        number = next((one for one in ids if str(one) == stop), None)
        return ChoiceEnd("stop", index, stop if number is None else number)
