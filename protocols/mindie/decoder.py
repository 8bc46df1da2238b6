"""Reading a server's answers: to generate in its own manner, and to conversations in OpenAI's.

A stream of generate ends with the event that names the finish reason, which comes only with
``details``. One that fails ends in bare text. Source: MindIE-LLM 0695772,
single_req_triton_text_infer_interface.cpp and single_req_vllm_openai_infer_interface.cpp; for what
1.0.RC1 does otherwise, its published pages.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.core import sse
from gateway.core.errors import GatewayError, StreamBroken, WorkerFailed
from gateway.core.types import (
    Done,
    End,
    Event,
    GenerateRequest,
    Served,
    Text,
    Usage,
)
from protocols.mindie.faults import complain
from protocols.mindie.incoming import (
    REASONS,
    WireDetails,
    WireText,
    read_wire,
    timings_of,
    tokens_of,
)
from protocols.openai.decoder import AnswerDecoder

_END_TOKEN = re.compile(r"</s>|<\|\w{1,32}\|>")
_BROKEN: Final = "The worker broke off its answer."


class TextDecoder:
    """Reads the answer to generate or generate_stream, in whichever of the two forms it comes.

    ``early``: the last event of a first release holds the text of the token that ended it.
    """

    def __init__(self, request: GenerateRequest, *, early: bool) -> None:
        self._timing = request.want.timing
        self._early = early
        self._body = sse.Body()
        self._splitter = sse.Splitter()
        self._tokens = 0
        self._served = False
        self._closing = False
        self._done = False
        self._failed: GatewayError | None = None

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        if self._failed is not None:
            raise self._failed
        if self._done:
            return ()
        return self._events(self._body.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        if self._failed is not None:
            raise self._failed
        self._closing = True
        if (whole := self._body.whole) is not None:
            return self._answer(bytes(whole))
        events = [] if self._done else self._events(b"\n\n")  # the last newline may be missing
        if not self._done:
            raise StreamBroken("The worker's stream stopped before its end.")
        return events

    # --- a stream ---------------------------------------------------------------------------------

    def _events(self, data: bytes) -> list[Event]:
        events, self._failed = sse.events_of(self._payloads(data), self._event)
        return events

    def _payloads(self, data: bytes) -> Iterator[bytes]:
        """Those that are there to be read. Raises what a line tells of that is no event."""
        for payload in self._splitter.feed(data):
            if payload.strip() and not self._done:
                yield payload
        if self._splitter.stray is not None and not self._done:
            complain(self._splitter.stray)
            raise WorkerFailed(_BROKEN)

    def _event(self, payload: bytes, events: list[Event]) -> None:
        wire = self._wire(payload)
        details = wire.details or WireDetails()
        made = tokens_of(details)
        count = 1 if made is None else max(made - self._tokens, 0)
        self._tokens += count
        reason = details.finish_reason or wire.finish_reason
        text = wire.text_output or ""
        if self._early and reason == "eos_token" and _END_TOKEN.fullmatch(text):
            text = ""
        self._tell(wire, details, events)
        events.append(Text(text, tokens=count))
        if reason:
            self._end(reason, events)

    # --- one JSON object --------------------------------------------------------------------------

    def _answer(self, body: bytes) -> list[Event]:
        wire = self._wire(body)
        details = wire.details or WireDetails()
        events: list[Event] = []
        self._tell(wire, details, events)
        made = tokens_of(details)
        events.append(Text(wire.text_output or "", tokens=1 if made is None else made))
        self._end(details.finish_reason or wire.finish_reason or "", events)
        return events

    # --- both -------------------------------------------------------------------------------------

    def _wire(self, body: bytes) -> WireText:
        try:
            wire = read_wire(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            complain(body)
            if self._closing and self._body.whole is None:
                raise StreamBroken("The worker's stream stopped inside an event.") from e
            raise WorkerFailed("The worker's answer can't be read.") from e
        if wire.text_output is None or wire.error is not None:
            complain(body)
            raise WorkerFailed("The worker's answer has no text.")
        return wire

    def _tell(self, wire: WireText, details: WireDetails, events: list[Event]) -> None:
        if not self._served:
            self._served = True
            model, name = wire.model_name, wire.id
            events.append(
                Served(
                    model if isinstance(model, str) else None,
                    id=name if isinstance(name, str) else None,
                )
            )
        if self._timing:
            events += timings_of(wire, details)

    def _end(self, reason: str, events: list[Event]) -> None:
        known = REASONS.get(reason, "unknown")
        if known is None:
            raise WorkerFailed(_BROKEN)
        self._done = True
        events += [End(known), Done()]


class TalkDecoder:
    """Reads an answer in OpenAI's manner, where the server goes its own ways.

    Each choice of a stream tells its own usage. ``early``: a first release's finish reason
    ``stop_sequence`` is that of a request that was stopped, or broke off.
    """

    def __init__(self, request: GenerateRequest, *, early: bool) -> None:
        self._running = request.want.usage == "each"
        self._early = early
        asked = replace(request.want, usage="each")
        self._inner = AnswerDecoder(replace(request, want=asked), complaint=complain)
        self._index = 0
        self._usages: dict[int, Usage] = {}
        self._failed: GatewayError | None = None

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        if self._failed is not None:
            raise self._failed
        return self._told(self._inner.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        if self._failed is not None:
            raise self._failed
        return self._told(self._inner.close())

    def _told(self, events: Sequence[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            match event:
                case Usage():
                    self._usages[self._index] = event
                    if self._running:
                        out.append(self._usage())
                case End("stop") if self._early:
                    self._failed = WorkerFailed(_BROKEN)
                    break
                case Done():
                    out += [] if self._running or not self._usages else [self._usage()]
                    out.append(event)
                case _:
                    self._index = getattr(event, "index", self._index)
                    out.append(event)
        if self._failed is not None and not out:
            raise self._failed
        return out

    def _usage(self) -> Usage:
        """Of all choices, which have the prompt in common."""
        told = self._usages.values()
        thought = [one.reasoning_tokens for one in told if one.reasoning_tokens is not None]
        last = next(reversed(told))
        return replace(
            last,
            completion_tokens=sum(one.completion_tokens for one in told),
            reasoning_tokens=sum(thought) if thought else None,
        )
