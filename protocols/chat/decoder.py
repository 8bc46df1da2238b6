"""Decodes workers' responses, streaming and unary, to chat and completion requests."""

import base64
import binascii
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field

from protocols.chat.errors import raise_worker_error
from protocols.chat.extra_keys import EXTRA_KEY, separate_unknown_keys
from protocols.core import sse
from protocols.core.call_ids import CallIds
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FieldValues,
    FinishReason,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.request import EmbeddingRequest, GenerationRequest
from protocols.core.token_counts import MAX_TIMESTAMP, UsageReader, read_integer
from protocols.json_body import JSON_ERRORS

# Real workers vary, so any key may be missing or null.


class WireTokensDetails(Struct, gc=False):
    """Details of prompt or completion tokens."""

    cached_tokens: Any = None
    reasoning_tokens: Any = None


_NoObject = str | float | bool | list[Any] | None
"""Any JSON but an object: a worker's usage never makes its response invalid."""


class WireUsage(Struct, gc=False):
    """The usage object."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: WireTokensDetails | _NoObject = None
    completion_tokens_details: WireTokensDetails | _NoObject = None
    reasoning_tokens: Any = None


class WireFunction(Struct, gc=False):
    """The function of a tool call, or a delta of it; arguments may be an object."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class WireToolCall(Struct, gc=False):
    """A tool call, or a delta of one."""

    index: int | None = None
    id: str | None = None
    function: WireFunction | None = None
    custom: dict[str, Any] | None = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


class WireDelta(Struct, gc=False):
    """A message, or a delta of one."""

    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[WireToolCall] | WireToolCall | None = None
    """Some releases of TGI send the only call itself."""
    function_call: WireFunction | None = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


class WireTokenLogprob(Struct, gc=False):
    """The log probability of a token in a chat response."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list["WireTokenLogprob"] | None = None


class WireLogprobs(Struct, gc=False):
    """Log probabilities in both forms: of chat (``content``) and of completions (columns)."""

    content: list[WireTokenLogprob] | None = None
    refusal: list[WireTokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class WireChoice(Struct, gc=False):
    """A choice, complete or as a delta."""

    index: int | None = None
    delta: WireDelta | None = None
    message: WireDelta | None = None
    text: str | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    matched_stop: Any = None
    token_ids: list[int] | None = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


class WireResponse(Struct, gc=False):
    """A unary response, or a chunk of a stream."""

    id: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    choices: list[WireChoice] | None = None
    usage: WireUsage | _NoObject = None
    error: Any = None
    extra: FieldValues = field(default=(), name=EXTRA_KEY)


# The same, without unknown keys. Keys of type None are those that servers send without a value.


class _KnownFunction(WireFunction, gc=False, forbid_unknown_fields=True):
    pass


class _KnownToolCall(WireToolCall, gc=False, forbid_unknown_fields=True):
    function: _KnownFunction | None = None
    type: Any = None


class _KnownDelta(WireDelta, gc=False, forbid_unknown_fields=True):
    tool_calls: list[_KnownToolCall] | _KnownToolCall | None = None  # type: ignore[assignment]
    function_call: _KnownFunction | None = None
    role: Any = None
    audio: None = None
    annotations: None = None


class _KnownChoice(WireChoice, gc=False, forbid_unknown_fields=True):
    delta: _KnownDelta | None = None
    message: _KnownDelta | None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None
    routed_experts: None = None


class _KnownPromptDetails(WireTokensDetails, gc=False, forbid_unknown_fields=True):
    reasoning_tokens: None = None


class _KnownCompletionDetails(WireTokensDetails, gc=False, forbid_unknown_fields=True):
    cached_tokens: None = None


class _KnownUsage(WireUsage, gc=False, forbid_unknown_fields=True):
    prompt_tokens_details: _KnownPromptDetails | _NoObject = None
    completion_tokens_details: _KnownCompletionDetails | _NoObject = None
    total_tokens: Any = None


class _KnownResponse(WireResponse, gc=False, forbid_unknown_fields=True):
    choices: list[_KnownChoice] | None = None  # type: ignore[assignment]
    usage: _KnownUsage | _NoObject = None
    object: Any = None
    service_tier: None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None
    prompt_text: None = None
    kv_transfer_params: None = None


class _ChoiceWithoutLogprobs(WireChoice, gc=False):
    """A choice whose log probabilities are not decoded: the field has a name that none sends."""

    logprobs: WireLogprobs | None = field(default=None, name="(skipped)")


class _ResponseWithoutLogprobs(WireResponse, gc=False):
    choices: list[_ChoiceWithoutLogprobs] | None = None  # type: ignore[assignment]


class WireEmbedding(Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    embedding: list[float] | str
    index: int | None = None


class WireEmbeddingResponse(Struct):
    """A response to an embeddings request."""

    data: list[WireEmbedding]
    model: Any = None
    id: Any = None
    created: Any = None
    usage: WireUsage | _NoObject = None


class TextChunkDelta(Struct, gc=False):
    """The delta of a text chunk."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[Raw], Meta(max_length=0)] | None = None
    function_call: None = None


class TextChunkChoice(Struct, gc=False):
    """The choice of a text chunk."""

    index: Literal[0] | None = 0
    delta: TextChunkDelta | None = None
    text: str | None = None
    finish_reason: None = None
    message: None = None


class TextChunk(Struct, gc=False):
    """A chunk of the first choice with a piece of text, as most are; log probabilities are skipped.

    Its decoder accepts no other chunk, so that nothing else has to be looked at.
    """

    choices: tuple[TextChunkChoice]
    id: str | None = None
    model: str | None = None
    usage: None = None
    error: None = None


class _BareTextChunkDelta(TextChunkDelta, gc=False, forbid_unknown_fields=True):
    role: Any = None
    audio: None = None
    annotations: None = None


class _BareTextChunkChoice(TextChunkChoice, gc=False, forbid_unknown_fields=True):
    delta: _BareTextChunkDelta | None = None
    logprobs: None = None
    token_ids: None = None
    stop_reason: None = None
    matched_stop: None = None
    prompt_token_ids: None = None
    routed_experts: None = None


class _BareTextChunk(TextChunk, gc=False, forbid_unknown_fields=True):
    """A text chunk without log probabilities and unknown keys."""

    choices: tuple[_BareTextChunkChoice]
    object: Any = None
    created: Any = None
    system_fingerprint: Any = None
    service_tier: None = None
    prompt_token_ids: None = None
    kv_transfer_params: None = None


_decode_text_chunk = msgspec.json.Decoder(_BareTextChunk).decode
_decode_text_chunks = msgspec.json.Decoder(_BareTextChunk).decode_lines


def read_text_chunks(chunks: Iterable[TextChunk], events: list[Event]) -> None:
    """Add the events of text chunks."""
    for chunk in chunks:
        choice = chunk.choices[0]
        delta = choice.delta
        if delta is None:
            text = choice.text
        else:
            text = delta.content
            if reasoning := delta.reasoning_content or delta.reasoning:
                events.append(ReasoningDelta(reasoning))
        if text:
            events.append(TextDelta(text))


_LINE_NUMBER: Final = re.compile(r"`\$\[(\d+)\]")


def find_failed_line(error: Exception, count: int) -> int:
    """The number of lines before the one of ``count`` that ``decode_lines`` could not decode.

    Half of all if the error does not tell.
    """
    found = _LINE_NUMBER.search(str(error))
    return count // 2 if found is None else min(int(found[1]), count - 1)


class WireEmbeddingItem(Struct):
    """One embedding, without its vector."""

    index: int | None = None


class WireEmbeddingSummary(Struct):
    """A response to an embeddings request, without the vectors."""

    data: list[WireEmbeddingItem]
    model: Any = None
    usage: WireUsage | _NoObject = None


_decode_known_response = msgspec.json.Decoder(_KnownResponse).decode
decode_response_without_logprobs = msgspec.json.Decoder(_ResponseWithoutLogprobs).decode
decode_embedding_summary = msgspec.json.Decoder(WireEmbeddingSummary).decode
decode_embedding_response = msgspec.json.Decoder(WireEmbeddingResponse).decode


def decode_response(body: bytes | bytearray) -> WireResponse:
    """A response with the unknown keys of its objects. Raises one of JSON_ERRORS."""
    try:
        return _decode_known_response(body)
    except msgspec.ValidationError:
        return msgspec.convert(separate_unknown_keys(body), WireResponse)


def read_text(value: Any) -> str | None:
    """The value, if it is a string."""
    return value if type(value) is str else None


def read_metadata(wire: WireResponse) -> ResponseMetadata:
    """The worker's own metadata of the response."""
    return ResponseMetadata(
        read_text(wire.model),
        read_text(wire.system_fingerprint),
        read_text(wire.id),
        read_integer(wire.created, MAX_TIMESTAMP),
    )


def read_usage(
    usage: WireUsage | _NoObject, reader: UsageReader, *, embeds: bool = False
) -> Usage | None:
    """The usage reported by the worker, or None."""
    if not isinstance(usage, WireUsage):
        reader.has_ignored = reader.has_ignored or usage is not None
        return None
    prompt_details, completion_details = (
        usage.prompt_tokens_details,
        usage.completion_tokens_details,
    )
    completion, reasoning = usage.completion_tokens, usage.reasoning_tokens
    if isinstance(completion_details, WireTokensDetails):
        reasoning = completion_details.reasoning_tokens
    return reader.read_usage(
        usage.prompt_tokens,
        0 if embeds and completion is None else completion,
        prompt_details.cached_tokens if isinstance(prompt_details, WireTokensDetails) else None,
        reasoning or None,
    )


def split_token_count(choices: Sequence[WireChoice], tokens: int) -> list[int]:
    """Tokens of each choice of a unary response; usage reports only their sum.

    The sum is divided in proportion to the lengths of the texts.
    """
    if len(choices) == 1:
        return [tokens]
    sizes = [len(_read_choice_text(choice)) or 1 for choice in choices]
    size = sum(sizes)
    ends = [tokens * end // size for end in accumulate(sizes, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def _read_choice_text(choice: WireChoice) -> str:
    content = choice.text if choice.message is None else choice.message.content
    return content if isinstance(content, str) else ""


def read_choice_end(
    wire: WireChoice, reason: FinishReason, index: int, stops: Sequence[int]
) -> ChoiceEnd:
    """The end of a choice; ``stops`` are the ids of the request's stop tokens."""
    stop = wire.stop_reason if wire.stop_reason is not None else wire.matched_stop
    if reason != "eos":
        return ChoiceEnd(reason, index, stop if isinstance(stop, str) else None)
    if isinstance(stop, str) or (isinstance(stop, int) and stop in stops):
        return ChoiceEnd("stop", index, stop)
    return ChoiceEnd("eos", index)


def read_logprobs(logprobs: WireLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Internal log probabilities of either form."""
    if logprobs is None:
        return ()
    if logprobs.content or logprobs.refusal:
        return tuple(
            _read_token_logprob(token) for token in (logprobs.content or logprobs.refusal or ())
        )
    if not logprobs.tokens:
        return ()
    return tuple(_read_completion_logprobs(logprobs.tokens, logprobs))


def _read_token_logprob(wire: WireTokenLogprob) -> TokenLogprob:
    top = tuple(
        TopLogprob(
            one.token, _read_logprob(one.logprob), data=_read_token_bytes(one.token, one.bytes)
        )
        for one in wire.top_logprobs or ()
    )
    return TokenLogprob(
        wire.token, wire.logprob, top, data=_read_token_bytes(wire.token, wire.bytes)
    )


def _read_completion_logprobs(
    tokens: Sequence[str], logprobs: WireLogprobs
) -> Iterable[TokenLogprob]:
    values = logprobs.token_logprobs or [None] * len(tokens)
    tops = logprobs.top_logprobs or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise WorkerFailed("The worker's log probabilities do not fit together.")
    for token, logprob, top in zip(tokens, values, tops, strict=True):
        alternatives = tuple(
            TopLogprob(t, _read_logprob(value)) for t, value in (top or {}).items()
        )
        yield TokenLogprob(token, logprob, alternatives)


def count_echoed_tokens(prompt: str, logprobs: Sequence[TokenLogprob]) -> int:
    """The number of leading tokens that belong to the prompt."""
    at, count = 0, 0
    while count < len(logprobs) and at < len(prompt):
        at += len(logprobs[count].token)
        count += 1
    return count


def _read_logprob(logprob: float | None) -> float:
    return float("-inf") if logprob is None else logprob


def _read_token_bytes(token: str, data: list[int] | None) -> bytes | None:
    """A token's bytes, if its text does not represent them."""
    if data is None or any(not 0 <= byte <= 255 for byte in data):  # noqa: PLR2004 - a byte
        return None
    token_bytes = bytes(data)
    return None if token_bytes == token.encode() else token_bytes


def read_content_parts(
    content: Sequence[Mapping[str, Any]], index: int, events: list[Event]
) -> str:
    """The text of a content list; its reasoning parts become events."""
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "output_text", "text": str() as text}:
                texts.append(text)
            case {"type": "thinking", "thinking": str() as text}:
                events.append(ReasoningDelta(text, index))
            case {"type": "reasoning", "summary": list() as items}:
                events += [_read_reasoning_item(item, index) for item in items]
            case {"type": "refusal", "refusal": str() as text}:
                events.append(RefusalDelta(text, index))
            case _:
                pass
    return "".join(texts)


def _read_reasoning_item(item: Any, index: int) -> ReasoningDelta:
    """One item of a reasoning part's summary."""
    fields = item if isinstance(item, dict) else {}
    text, signature = fields.get("text"), fields.get("signature")
    return ReasoningDelta(
        text if isinstance(text, str) else "",
        index,
        signature if isinstance(signature, str) else None,
    )


def decode_embedding(wire: list[float] | str) -> tuple[float, ...]:
    """The numbers of an embedding."""
    if not isinstance(wire, str):
        return tuple(wire)
    try:
        data = base64.b64decode(wire, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (binascii.Error, struct.error) as e:
        raise WorkerFailed("The worker's vector can't be read.") from e


# Tool call deltas of workers may lack an index, an id or a name.

_encode = msgspec.json.Encoder().encode


class _PartialToolCall:
    __slots__ = ("arguments", "call_index", "id", "pending_extra")

    def __init__(self) -> None:
        self.id: str | None = None
        self.call_index: int | None = None
        """Its position in the choice, once its name is known."""
        self.arguments: list[str] = []
        """The pieces of its arguments so far."""
        self.pending_extra: FieldValues = ()
        """Unknown keys that came before the name."""


class ToolCallAssembler:
    """Orders the tool calls of one choice, and keeps them apart whatever their ids and indices are.

    Each element of a message is a call of its own. A fragment of a stream with a name begins a new
    call if its place is taken by a call that it can't continue.
    """

    def __init__(self, index: int, source: str = "") -> None:
        self._choice_index = index
        self._source = source
        self._calls: dict[int, _PartialToolCall] = {}
        """The latest call of each key."""
        self._ids = CallIds()
        self._keys_by_id: dict[str, int] = {}
        self._last_key = -1
        """The largest key of a call."""
        self._started_count = 0
        self._has_nameless = False
        """Whether a call was replaced by another before its name was known."""

    def read_delta(self, delta: WireDelta, *, is_message: bool = False) -> list[Event]:
        """The events of the calls in a message or delta."""
        events: list[Event] = []
        found, seen = delta.tool_calls or [], set[int]()
        for position, wire in enumerate(found if isinstance(found, list) else [found]):
            key = position if is_message else self._find_key(wire, position)
            self._drop_finished(key, wire, is_repeated=key in seen)
            seen.add(key)
            self._read_fragment(key, wire, events)
        if delta.function_call is not None:
            self._read_fragment(0, WireToolCall(function=delta.function_call), events)
        return events

    @property
    def started_count(self) -> int:
        """The number of calls with a name."""
        return self._started_count

    def close(self) -> None:
        """End the choice. Raises StreamBroken for a call without a name."""
        nameless = [call for call in self._calls.values() if call.call_index is None]
        if nameless or self._has_nameless:
            raise StreamBroken("The worker called a tool without its name.")

    def _find_key(self, wire: WireToolCall, position: int) -> int:
        """The call of a delta: by index, else by id, else by position."""
        if wire.index is not None:
            return wire.index
        if wire.id:
            key = self._keys_by_id.get(wire.id)
            return self._last_key + 1 if key is None else key
        started = bool(wire.function and wire.function.name)
        if started and position in self._calls:
            return self._last_key + 1
        return position if position in self._calls or started else max(self._last_key, 0)

    def _drop_finished(self, key: int, wire: WireToolCall, *, is_repeated: bool) -> None:
        """Forget the call of a key if this fragment begins another one.

        ``is_repeated``: an earlier fragment of the same delta has the key.
        """
        call = self._calls.get(key)
        name, arguments = _read_function(wire)
        if call is None or not name:
            return
        has_other_id = bool(wire.id and call.id and wire.id != call.id)
        if is_repeated or has_other_id or (arguments.strip() and _is_complete(call.arguments)):
            self._has_nameless = self._has_nameless or call.call_index is None
            del self._calls[key]

    def _read_fragment(self, key: int, wire: WireToolCall, events: list[Event]) -> None:
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _PartialToolCall()
            self._last_key = max(self._last_key, key)
        if wire.id and not call.id:
            call.id = wire.id
            self._keys_by_id.setdefault(wire.id, key)
        name, arguments = _read_function(wire)
        call.pending_extra += wire.extra
        call.arguments.append(arguments)
        if call.call_index is None:
            if not name:
                return
            call.call_index, arguments = self._started_count, "".join(call.arguments)
            self._started_count += 1
            call_id = self._ids.claim(call.id, self._choice_index, call.call_index)
            self._add_extra(call, events)
            events.append(ToolCallStart(self._choice_index, call.call_index, call_id, name))
        elif call.pending_extra:
            self._add_extra(call, events)
        if arguments:
            events.append(ToolCallDelta(self._choice_index, call.call_index, arguments))

    def _add_extra(self, call: _PartialToolCall, events: list[Event]) -> None:
        """Add the unknown keys of a call, whose number is known."""
        if call.pending_extra and call.call_index is not None:
            place = self._choice_index, call.call_index
            events.append(ResponseExtra(self._source, "tool_call", call.pending_extra, *place))
            call.pending_extra = ()


def _is_complete(arguments: Sequence[str]) -> bool:
    """Whether these pieces are a whole JSON object."""
    text = "".join(arguments)
    if not text.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(text)
    except JSON_ERRORS:
        return False
    return True


def _read_function(wire: WireToolCall) -> tuple[str, str]:
    """The name and the arguments in a delta."""
    function = wire.function
    if function is None and wire.custom is not None:
        name, text = wire.custom.get("name"), wire.custom.get("input")
        function = WireFunction(name if isinstance(name, str) else None)
        function.arguments = text if isinstance(text, str) else None
    if function is None:
        return "", ""
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = _encode(arguments).decode()
    return function.name or "", arguments or ""


FINISH_REASONS: Final[Mapping[str, FinishReason | None]] = {
    "stop": "eos",
    "eos": "eos",
    "eos_token": "eos",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "invalid flag": None,
    "insufficient_system_resource": None,
    "repetition": "length",
}
"""Finish reasons by wire name, also of related workers (``model_length``: Mistral, ``repetition``:
vLLM, ``insufficient_system_resource``: DeepSeek); None is a worker failure."""
_DONE_PAYLOAD: Final = b"[DONE]"
_MIN_BATCH: Final = 16
_MAX_BATCH: Final = 128
"""How many text chunks are decoded together, at first and at most."""


class _ChoiceState:
    """The state of one choice."""

    __slots__ = ("index", "is_ended", "pending_prompt", "tool_calls")

    def __init__(self, index: int, prompt: str | None) -> None:
        self.index = index
        self.tool_calls: ToolCallAssembler | None = None  # from its first call on
        self.is_ended = False
        self.pending_prompt = prompt  # what is still to come back of it, where it was asked for


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


class EmbeddingCounter:
    """Decodes only the number, the model and the usage of embeddings."""

    unary_choices: Sequence[WireChoice] = ()

    def __init__(self, request: EmbeddingRequest, complaint: Callable[[bytes], None]) -> None:
        self._request = request
        self._raise_if_error = complaint
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._body += data
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = bytes(self._body)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        try:
            wire = decode_embedding_summary(body)
        except JSON_ERRORS as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if len(wire.data) != len(self._request.inputs):
            raise WorkerFailed("The worker did not answer each input with one vector.")
        reader = UsageReader(self._request)
        usage = read_usage(wire.usage, reader, embeds=True)
        metadata = ResponseMetadata(read_text(wire.model))
        return [metadata, *reader.build_end(usage)]


class GenerationDecoder:
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
        self._request = request
        self._finish_reasons = FinishReasonTable(source, FINISH_REASONS)
        self._decode = decode_response_without_logprobs if skips_logprobs else decode_response
        self._source = source
        self._response_extra: FieldValues = ()
        """The unknown keys of the last chunk that had any, which further chunks may repeat."""
        self._expects_echo = echoes
        self._raise_if_error = complaint
        self._end_closes_tool_calls = ends_calls
        self._body_reader = sse.ResponseBodyReader()
        self._sse_parser = sse.SseParser()
        self._is_done = False
        self._has_metadata = False
        self._usage_reader = UsageReader(request)
        self._usage: Usage | None = None
        self._choices: dict[int, _ChoiceState] = {}
        self._pending_error: GatewayError | None = None
        self.unary_choices: Sequence[WireChoice] = ()
        """The choices of a unary response, as the worker wrote them."""
        self._accepts_texts = False
        """Whether the first choice is in its text, so that text chunks may follow."""

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        events: list[Event] = []
        if (
            self._accepts_texts
            and sse.is_plain_event(data)
            and self._sse_parser.is_between_events
            and self._read_texts((data[6:-2],), events)
        ):
            return events
        if not (data := self._body_reader.feed(data)):
            return events
        payloads = self._sse_parser.feed(data)
        try:
            if type(payloads) is list:
                self._read_payloads(payloads, events)
            else:
                for payload in payloads:  # they may end in an error
                    self._read_payloads((payload,), events)
        except GatewayError as error:
            if not events:
                raise
            self._pending_error = error
        return events

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if self._pending_error is not None:
            raise self._pending_error
        if self._is_done:
            return ()
        if (body := self._body_reader.unary_body) is not None:
            events: list[Event] = []
            self._read_json(body, events, is_unary=True)
            return events + self._build_end_events()
        try:
            last = sse.read_last_event(self._sse_parser, self._read_payload)
        except StreamBroken:
            if not self._is_complete():
                raise
            last = []
        if last and type(last[-1]) is StreamEnd:
            return last
        if self._is_complete():
            return last + self._build_end_events()
        if self._sse_parser.stray_line is not None:
            self._raise_if_error(self._sse_parser.stray_line)
        raise StreamBroken("The worker's stream stopped before its end.")

    # --- a stream ---------------------------------------------------------------------------------

    def _read_payloads(self, payloads: Sequence[bytes], events: list[Event]) -> None:
        """Decode text chunks together, and each other chunk alone."""
        start, size = 0, _MIN_BATCH
        while start < len(payloads):
            count = self._read_texts(payloads[start : start + size], events)
            if count == 0:
                self._read_payload(payloads[start], events)
            size = min(2 * size, _MAX_BATCH) if count == size else _MIN_BATCH
            start += count or 1

    def _read_texts(self, payloads: Sequence[bytes], events: list[Event]) -> int:
        """Decode the first of these chunks that are text chunks of a choice that goes on.

        Returns their number.
        """
        if not self._accepts_texts:
            return 0
        count = len(payloads)
        try:
            if count == 1:
                chunks: Sequence[TextChunk] = (_decode_text_chunk(payloads[0]),)
            else:
                chunks = _decode_text_chunks(b"\n".join(payloads))
        except JSON_ERRORS as e:
            fewer = find_failed_line(e, count)
            return self._read_texts(payloads[:fewer], events) if fewer else 0
        if len(chunks) != count:
            return self._read_texts(payloads[: count // 2], events)
        read_text_chunks(chunks, events)
        return count

    def _read_payload(self, payload: bytes, events: list[Event]) -> None:
        if self._is_done or not (text := payload.strip()):
            return
        if text != _DONE_PAYLOAD:
            self._read_json(payload, events, is_unary=False)
            return
        if self._end_closes_tool_calls:
            events += self._end_tool_calling_choices()
        if not self._choices or self._count_ended() < len(self._choices):
            raise StreamBroken("The worker ended its stream without a finish reason.")
        events += self._build_end_events()

    def _end_tool_calling_choices(self) -> list[Event]:
        """End the choices whose last event was a tool call."""
        events: list[Event] = []
        for index, choice in self._choices.items():
            calls = choice.tool_calls
            if not choice.is_ended and calls is not None and calls.started_count:
                choice.is_ended = True
                calls.close()
                events.append(ChoiceEnd("tool_calls", index))
        return events

    def _is_complete(self) -> bool:
        ended_count = self._count_ended()
        return ended_count == len(self._choices) and ended_count >= self._request.choice_count

    def _count_ended(self) -> int:
        """The number of ended choices."""
        return len([True for choice in self._choices.values() if choice.is_ended])

    def _build_end_events(self) -> list[Event]:
        self._is_done = True
        running = self._request.response_options.usage == "each"
        return self._usage_reader.build_end(None if running else self._usage)

    # --- one JSON object --------------------------------------------------------------------------

    def _read_json(self, body: bytes | bytearray, events: list[Event], *, is_unary: bool) -> None:
        try:
            wire = self._decode(body)
        except JSON_ERRORS as e:
            self._raise_if_error(bytes(body))
            raise WorkerFailed("The worker's answer can't be read.") from e
        if wire.choices is None or wire.error is not None:
            self._raise_if_error(bytes(body))
        choices = wire.choices or []
        if is_unary:
            if not choices:
                raise WorkerFailed("The worker's answer has no choices.")
            self.unary_choices = choices
        self._add_metadata(wire, events)
        if wire.extra and wire.extra != self._response_extra:
            self._response_extra = wire.extra
            events.append(ResponseExtra(self._source, "response", wire.extra))
        usage = None if wire.usage is None else read_usage(wire.usage, self._usage_reader)
        counts = (
            split_token_count(choices, usage.completion_tokens)
            if is_unary and usage is not None
            else None
        )
        for position, choice in enumerate(choices):
            index = position if choice.index is None and is_unary else choice.index or 0
            state = self._get_choice(index)
            self._add_extra(choice, index, events)
            self._read_choice(
                choice, state, events, count=1 if counts is None else counts[position]
            )
            if (choice.finish_reason or is_unary) and not state.is_ended:
                events.append(self._finish_choice(choice, state))
        self._add_usage(usage, events)
        if is_unary:
            return
        first = self._choices.get(0)
        self._accepts_texts = (
            self._has_metadata
            and self._request.logprobs is None
            and first is not None
            and not first.is_ended
            and first.pending_prompt is None
            and first.tool_calls is None
        )

    def _add_extra(self, wire: WireChoice, index: int, events: list[Event]) -> None:
        """Add the unknown keys of a choice and of its message."""
        if wire.extra:
            events.append(ResponseExtra(self._source, "choice", wire.extra, index))
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
        events.append(read_metadata(wire))

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
        text, delta = wire.text or "", wire.delta or wire.message
        if _has_only_text(wire, delta) and choice.pending_prompt is None and not choice.is_ended:
            if delta is not None:
                text = delta.content or ""  # type: ignore[assignment] # never a list here
            if text:
                events.append(TextDelta(text, choice.index, count))
            return
        if delta is not None:
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning and isinstance(reasoning, str):
                own_events.append(ReasoningDelta(reasoning, choice.index))
            content = delta.content
            if isinstance(content, list):
                text = read_content_parts(content, choice.index, own_events)
            else:
                text = content or ""
        own_events += self._build_text_events(wire, choice, text, count=count)
        if delta is not None:
            if delta.refusal:
                own_events.append(RefusalDelta(delta.refusal, choice.index))
            if delta.tool_calls or delta.function_call is not None:
                if choice.tool_calls is None:
                    choice.tool_calls = ToolCallAssembler(choice.index, self._source)
                is_message = delta is wire.message
                own_events += choice.tool_calls.read_delta(delta, is_message=is_message)
        if own_events and choice.is_ended:
            raise StreamBroken(f"The worker went on with choice {choice.index} after its end.")
        events += own_events

    def _build_text_events(
        self, wire: WireChoice, choice: _ChoiceState, text: str, *, count: int
    ) -> list[Event]:
        """The text, and before it the prompt if the worker returned it."""
        logprobs, ids = read_logprobs(wire.logprobs), tuple(wire.token_ids or ())
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

    def _finish_choice(self, wire: WireChoice, choice: _ChoiceState) -> ChoiceEnd:
        choice.is_ended = True
        if choice.tool_calls is not None:
            choice.tool_calls.close()
        reason, word = self._finish_reasons.read_word(wire.finish_reason, self._request.source)
        if word is not None:
            return ChoiceEnd(reason, choice.index, unknown_word=word)
        return read_choice_end(wire, reason, choice.index, self._request.stopping.stop_token_ids)
