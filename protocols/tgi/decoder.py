"""Decode responses to prompts: streams and unary responses."""

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from protocols.chat.decoder import FINISH_REASONS
from protocols.core import sse
from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)
from protocols.core.fieldwise import decode_fields, report_lost_fields
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS
from protocols.tgi.errors import raise_worker_error

# Wire types of responses to a prompt: any key may be missing or null.
#
# ``/generate`` returns one object, related servers return an array of one; each event of
# ``/generate_stream`` holds one token, the last one also the whole text and the details. Source:
# text-generation-inference 3.3, ``router/src/lib.rs``.


_FINISH_REASONS: Final = FinishReasonTable("tgi", FINISH_REASONS)


class TgiToken(Struct, forbid_unknown_fields=True):
    """A generated token or, without ``special``, a prompt token. ``id`` may be a list."""

    id: int | list[int] | None = None
    text: str | None = None
    logprob: float | None = None
    special: bool | None = None

    @property
    def text_or_empty(self) -> str:
        """The text; empty if absent."""
        return self.text or ""

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids, usually one."""
        match self.id:
            case None:
                return ()
            case int(token_id):
                return (token_id,)
            case token_ids:
                return tuple(token_ids)


class TgiDetails(Struct, forbid_unknown_fields=True):
    """Details of a unary response, or of a stream's end. Related servers send ``input_length``."""

    finish_reason: Any = None
    generated_tokens: Any = None
    input_length: Any = None
    prompt_tokens: Any = None
    prefill: list[TgiToken] | None = None
    tokens: list[TgiToken] | None = None
    top_tokens: list[list[TgiToken]] | None = None
    seed: Any = None
    """That of a sampled response, which no client asks for."""

    @property
    def prompt_length(self) -> Any:
        """The number of prompt tokens; unary responses report it only on request."""
        if self.input_length is not None:
            return self.input_length
        return len(self.prefill) if self.prefill else self.prompt_tokens


class TgiResponse(Struct, forbid_unknown_fields=True):
    """A unary response, or one event of a stream."""

    token: TgiToken | None = None
    top_tokens: list[TgiToken] | None = None
    generated_text: str | None = None
    details: TgiDetails | None = None
    index: Any = None
    """The number of the event."""
    error: Any = None
    error_type: Any = None


class _TgiResponses(Struct, array_like=True):
    """A unary response in an array, of which the first counts."""

    first: TgiResponse | None = None


def build_token_logprob(sampled: TgiToken, top: Sequence[TgiToken] = ()) -> TokenLogprob:
    """Convert a token and its alternatives."""
    alternatives = tuple(
        TopLogprob(
            token.text_or_empty,
            float("-inf") if token.logprob is None else token.logprob,
            _get_first_id(token),
        )
        for token in top
    )
    token_id = _get_first_id(sampled)
    return TokenLogprob(sampled.text_or_empty, sampled.logprob, alternatives, token_id)


def _get_first_id(token: TgiToken) -> int | None:
    return next(iter(token.ids), None)


class GenerateDecoder(sse.StreamDecoder):
    """Decodes the response to one prompt, as a stream of events or one JSON body.

    The first byte decides which. The prompt comes first, if echo was requested; special tokens
    have no text unless requested.
    """

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(raise_worker_error, (b"{", b"["))
        self._request = request
        self._usage_reader = UsageReader(request)
        self._prompt_sent = not request.echo
        self._texts: list[str] = []

    @property
    def has_ignored_counts(self) -> bool:
        """Whether a token count of the worker was implausible."""
        return self._usage_reader.has_ignored

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done:
            return
        try:
            wire, lost = decode_fields(payload, TgiResponse)
        except JSON_ERRORS as e:
            raise _build_read_error(payload) from e
        if wire.error is not None:
            raise _build_read_error(payload)
        report_lost_fields(lost, events)
        self._add_prompt((), events)
        if wire.token is not None:
            self._add_token(wire.token, wire.top_tokens or (), events)
        if wire.generated_text is not None or wire.details is not None:
            self._add_end(wire, events)

    def _add_token(self, token: TgiToken, top: Sequence[TgiToken], events: list[Event]) -> None:
        hidden = self._is_hidden(token)
        text = "" if hidden else token.text_or_empty
        ids = token.ids if self._request.response_options.token_ids else ()
        wants_logprobs = self._request.logprobs is not None and not hidden
        logprobs = (build_token_logprob(token, top),) if wants_logprobs else ()
        if text or ids or logprobs:
            self._texts.append(text)
            events.append(TextDelta(text, token_ids=ids, logprobs=logprobs))

    def _add_end(self, wire: TgiResponse, events: list[Event]) -> None:
        """Add the end, preceded by text that no token held, such as half a character."""
        text, sent = wire.generated_text or "", "".join(self._texts)
        if text.startswith(sent) and (rest := text[len(sent) :]):
            count = 0 if sent else self._get_token_count(wire.details)
            events.append(TextDelta(rest, tokens=count))
        events += self._build_end_events(wire.details)
        self._is_done = True

    # --- one JSON body ----------------------------------------------------------------------------

    def _read_document(self, body: bytes | bytearray) -> Sequence[Event]:
        try:
            if body.startswith(b"["):
                found, lost = decode_fields(body, _TgiResponses)
                wire = found.first or TgiResponse()
            else:
                wire, lost = decode_fields(body, TgiResponse)
        except JSON_ERRORS as e:
            raise _build_read_error(body) from e
        if wire.generated_text is None:
            raise _build_read_error(body)
        details = wire.details or TgiDetails()
        events: list[Event] = []
        report_lost_fields(lost, events)
        prompt = tuple(map(build_token_logprob, details.prefill or ()))
        self._add_prompt(prompt if self._request.logprobs is not None else (), events)
        if details.top_tokens and len(details.top_tokens) != len(details.tokens or ()):
            report_lost_fields(((("details", "top_tokens"), True),), events)
            details.top_tokens = None
        events += self._build_text_events(wire.generated_text, details)
        return [*events, *self._build_end_events(wire.details)]

    def _build_text_events(self, text: str, details: TgiDetails) -> list[Event]:
        tokens = details.tokens or []
        top = details.top_tokens or [[]] * len(tokens)
        if self._request.stopping.skip_special_tokens is False and tokens:
            text = "".join(token.text_or_empty for token in tokens)
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._request.logprobs is not None:
            pairs = zip(tokens, top, strict=True)
            logprobs = tuple(
                build_token_logprob(*pair) for pair in pairs if not self._is_hidden(pair[0])
            )
        id_tokens = tokens if self._request.response_options.token_ids else ()
        ids = tuple(token_id for token in id_tokens for token_id in token.ids)
        if not (text or ids or logprobs):
            return []
        count = self._get_token_count(details)
        return [TextDelta(text, tokens=count, token_ids=ids, logprobs=logprobs)]

    # --- both -------------------------------------------------------------------------------------

    def _add_prompt(self, logprobs: Sequence[TokenLogprob], events: list[Event]) -> None:
        """Add the prompt, once. Its first token may be a special one without text."""
        if self._prompt_sent:
            return
        self._prompt_sent = True
        prompt = self._request.prompts[0]
        if isinstance(prompt, str):
            if logprobs and not prompt.startswith(logprobs[0].token):
                logprobs = logprobs[1:]
            events.append(PromptEcho(0, prompt, tuple(logprobs)))

    def _is_hidden(self, token: TgiToken) -> bool:
        return bool(token.special) and self._request.stopping.skip_special_tokens is not False

    def _build_end_events(self, details: TgiDetails | None) -> list[Event]:
        """Build a choice end, usage if known, and the end of the response."""
        source = self._request.source
        if details is None and source in ("", _FINISH_REASONS.source):
            return [ChoiceEnd("unknown"), StreamEnd()]  # the client need not ask for them
        details = details or TgiDetails()
        finish = _FINISH_REASONS.read_word(details.finish_reason, source)
        reader = self._usage_reader
        usage = reader.read_usage(details.prompt_length, details.generated_tokens)
        return [finish.build_end(), *reader.build_end(usage)]

    def _get_token_count(self, details: TgiDetails | None) -> int:
        """Return the token count of a unary response."""
        return (
            details and self._usage_reader.read_completion_tokens(details.generated_tokens)
        ) or 1


def _build_read_error(body: bytes | bytearray) -> GatewayError:
    """Raise the error in a body that is not a response; build one if it has none."""
    raise_worker_error(bytes(body))
    return WorkerFailed("The worker's answer can't be read.")
