"""Events to responses: JSON, and streams with one event for each token.

The last token's event has the whole text and the details, so one token is held back until the end
is known. Streams are ASCII, since huggingface_hub splits them at Unicode's line ends, too.
Source: text-generation-inference 3.3, ``router/src/lib.rs`` and ``server.rs``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from protocols.chat.responses import ChatEncoder
from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.json_text import encode_ascii
from protocols.core.request import GenerationRequest
from protocols.core.response_losses import ONE_TEXT
from protocols.core.vectors import encode_array
from protocols.tgi.errors import JSON_HEADERS, build_error_body
from protocols.tgi.requests import GenerateOptions

SERVER_VERSION: Final = "3.3.6"
"""The release that the gateway behaves like."""
FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "eos_token",
    "stop": "stop_sequence",
    "length": "length",
    "tool_calls": "eos_token",
    "content_filter": "eos_token",
    "unknown": "eos_token",
}
_LEAST_LOGPROB: Final = -9999.0
"""For a probability of 0, which JSON can't express."""


class TokenItem(Struct):
    """A token. Without a worker's data the id is 0 and ``logprob`` null."""

    id: int
    text: str
    logprob: float | None
    special: bool = False


class PrefillToken(Struct):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None


class SequenceDetails(Struct):
    """The details of one sequence; ``generated_text`` if it is not the best one."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    generated_text: str | UnsetType = UNSET
    prefill: list[PrefillToken] = []
    tokens: list[TokenItem] = []
    top_tokens: list[list[TokenItem]] | UnsetType = UNSET
    best_of_sequences: "list[SequenceDetails] | UnsetType" = UNSET


class GenerateResponse(Struct):
    """The response of ``/generate``."""

    generated_text: str
    details: SequenceDetails | UnsetType = UNSET


class StreamDetails(Struct):
    """The details at the end of a stream."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """One event of ``/generate_stream``."""

    index: int
    token: TokenItem
    generated_text: str | None = None
    details: StreamDetails | None = None
    top_tokens: list[TokenItem] | UnsetType = UNSET


class GenerateEncoder:
    """Encodes a response to a prompt. ``is_listed``: a unary response is an array of one object."""

    content_type = "text/event-stream"
    hidden_reasons = frozenset({"content_filter"})
    content_losses = ONE_TEXT

    def __init__(
        self,
        request: GenerationRequest,
        options: GenerateOptions,
        context: ResponseContext,
        *,
        is_listed: bool,
    ) -> None:
        self._request = request
        self._options = options
        self._is_listed = is_listed
        self._clock = context.clock
        self._start = context.clock()
        self._texts: list[str] = []
        self._pending: StreamResponse | None = None
        self._token_count = 0
        self._event_count = 0
        self._usage: Usage | None = None
        self._end: ChoiceEnd | None = None
        self._headers: Headers = (
            ("x-compute-type", "gateway"),
            ("x-compute-characters", str(len(options.inputs))),
        )

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    # --- a stream ---------------------------------------------------------------------------------

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._flush_pending() + _format_event(build_error_body(error, in_stream=True))

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self._encode_text(event) if text or event.logprobs else b""
            case ReasoningDelta(text) | RefusalDelta(text):
                return self._add_token(TokenItem(0, text, None)) if text else b""
            case ChoiceEnd():
                self._end = event
            case Usage():
                self._usage = event
            case StreamEnd():
                return self._encode_end()
            case _:
                pass
        return b""

    def _encode_text(self, event: TextDelta) -> bytes:
        self._token_count += event.tokens
        logprobs = event.logprobs
        if len(logprobs) > 1 and "".join([one.token for one in logprobs]) == event.text:
            return b"".join([self._add_token(_build_token(one), one) for one in logprobs])
        single = logprobs[0] if len(logprobs) == 1 else None
        ids = event.token_ids
        token_id = ids[0] if len(ids) == 1 else (single and single.id) or 0
        logprob = None if single is None else _clip(single.logprob)
        return self._add_token(TokenItem(token_id, event.text, logprob), single)

    def _add_token(self, token: TokenItem, source: TokenLogprob | None = None) -> bytes:
        """The event before this token's, which is held back."""
        before = self._flush_pending()
        self._event_count += 1
        self._texts.append(token.text)
        self._pending = StreamResponse(self._event_count, token)
        if self._options.top_tokens and source is not None:
            self._pending.top_tokens = _build_top_tokens(source)
        return before

    def _encode_end(self) -> bytes:
        if self._pending is None:
            self._event_count += 1
            empty = TokenItem(0, "", None, special=True)
            self._pending = StreamResponse(self._event_count, empty)
        text = "".join(self._texts)
        self._pending.generated_text = self._build_text(text)
        if self._request.response_options.details:
            usage, end = self._usage, self._end or ChoiceEnd("unknown")
            tokens = self._token_count if usage is None else usage.completion_tokens
            self._pending.details = StreamDetails(
                self._find_finish_reason(end.finish_reason, end.own_word, text, tokens),
                tokens,
                self._request.sampling.seed,
                0 if usage is None else usage.prompt_tokens,
            )
        return self._flush_pending()

    def _flush_pending(self) -> bytes:
        if self._pending is None:
            return b""
        event, self._pending = self._pending, None
        return _format_event(event)

    # --- one JSON body ----------------------------------------------------------------------------

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choices = sorted(response.choices, key=_mean_logprob, reverse=True)
        best = choices[0] if choices else UnaryChoice(0)
        usage = self._usage = response.usage
        tokens = best.tokens if usage is None or len(choices) > 1 else usage.completion_tokens
        body = GenerateResponse(self._build_text(_join_text(best)))
        if self._request.response_options.details:
            body.details = self._build_details(best, tokens)
            if len(choices) > 1:
                body.details.best_of_sequences = [
                    self._build_sequence(choice) for choice in choices[1:]
                ]
        self._add_headers(usage, tokens)
        return HttpResponse(200, encode_ascii([body] if self._is_listed else body), JSON_HEADERS)

    def _build_sequence(self, choice: UnaryChoice) -> SequenceDetails:
        details = self._build_details(choice, choice.tokens)
        details.generated_text = self._build_text(_join_text(choice))
        return details

    def _build_details(self, choice: UnaryChoice, tokens: int) -> SequenceDetails:
        text = _join_text(choice)
        details = SequenceDetails(
            self._find_finish_reason(choice.finish_reason, choice.own_word, text, tokens),
            tokens,
            self._request.sampling.seed,
        )
        if choice.logprobs:
            details.tokens = [_build_token(one) for one in choice.logprobs]
        elif text:
            details.tokens = [TokenItem(0, text, None)]
        if self._options.top_tokens:
            details.top_tokens = [_build_top_tokens(one) for one in choice.logprobs]
        return details

    def _add_headers(self, usage: Usage | None, tokens: int) -> None:
        seconds = self._clock() - self._start
        milliseconds = str(round(seconds * 1000))
        self._headers += (
            ("x-compute-time", f"{seconds:.6f}"),
            ("x-total-time", milliseconds),
            ("x-inference-time", milliseconds),
            ("x-generated-tokens", str(tokens)),
        )
        if usage is not None:
            self._headers += (("x-prompt-tokens", str(usage.prompt_tokens)),)

    # --- both -------------------------------------------------------------------------------------

    def _build_text(self, text: str) -> str:
        return self._options.inputs + text if self._options.returns_inputs else text

    def _find_finish_reason(
        self, reason: FinishReason, own_word: str | None, text: str, tokens: int
    ) -> str:
        """The limit wins over a stop string at the same token, if the tokens were counted."""
        if own_word is not None:
            return own_word
        stopping, usage = self._request.stopping, self._usage
        limit = None if usage is not None and usage.source == "estimated" else stopping.max_tokens
        if reason == "length" or (limit is not None and tokens >= limit):
            return "length"
        if stopping.stop and text.endswith(stopping.stop):
            return "stop_sequence"
        return FINISH_REASONS[reason]


class V1ChatEncoder(ChatEncoder):
    """Encodes a chat response, in which text-generation requires ``system_fingerprint``."""

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        if answer.metadata.fingerprint is None:
            metadata = replace(answer.metadata, fingerprint=f"{SERVER_VERSION}-native")
            answer = replace(answer, metadata=metadata)
        return super().encode_unary(answer)


class _JsonEncoder(ABC):
    """The part of a ``ResponseEncoder`` that responses without streams share."""

    content_type = "application/json"

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Empty: there is nothing to stream."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """The error body."""
        return encode_ascii(build_error_body(error))

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        body = encode_array(self.build_body(response))
        return HttpResponse(200, encode_ascii(body), JSON_HEADERS)

    @abstractmethod
    def build_body(self, response: UnaryResponse) -> Sequence[Any]:
        """The items of the body, before they are encoded."""


class VectorEncoder(_JsonEncoder):
    """Encodes vectors as an array of arrays."""

    def build_body(self, response: UnaryResponse) -> Any:
        """The vectors."""
        return [*map(encode_array, response.embeddings)]


class TokensEncoder(_JsonEncoder):
    """Encodes the tokens of a text."""

    def build_body(self, response: UnaryResponse) -> Any:
        """The tokens with their places in the text, in bytes of UTF-8.

        Of several tokens that form one character each has a byte; the last one has the rest.
        """
        tokens = response.tokens
        if len(tokens.texts) != len(tokens.ids):
            raise WorkerFailed("The worker did not send the text of each token.")
        items: list[dict[str, Any]] = []
        position = 0
        pending = 0
        for token_id, text in zip(tokens.ids, tokens.texts, strict=True):
            size = len(text.encode("utf-8", "surrogatepass"))
            end = position + 1 if not text else max(position, position + size - pending)
            items.append({"id": token_id, "text": text, "start": position, "stop": end})
            pending = 0 if text else pending + 1
            position = end
        return items


def _format_event(body: Struct) -> bytes:
    """An event, without a blank after the colon, as the server writes it."""
    return b"data:" + encode_ascii(body) + b"\n\n"


def _join_text(choice: UnaryChoice) -> str:
    """The whole text, including reasoning, which has no field of its own."""
    return choice.reasoning + choice.text + choice.refusal


def _build_token(token: TokenLogprob) -> TokenItem:
    return TokenItem(token.id or 0, token.token, _clip(token.logprob))


def _build_top_tokens(token: TokenLogprob) -> list[TokenItem]:
    return [TokenItem(one.id or 0, one.token, _clip(one.logprob)) for one in token.top]


def _clip(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


def _mean_logprob(choice: UnaryChoice) -> float:
    """The mean log probability of a choice's tokens, by which the best one is chosen."""
    values = [_clip(one.logprob) or 0.0 for one in choice.logprobs]
    return fsum(values) / len(values) if values else _LEAST_LOGPROB
