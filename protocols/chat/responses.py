"""Encodes chat and completion responses, unary and streaming, in a configurable style.

Each protocol has a ``ResponseStyle`` and passes it to the encoders::

    STYLE = ResponseStyle(
        unary_keys=("choices", "created", "model", "object", "usage"),  # in their order
        first_delta=b'{"role":"assistant","content":null}',
        usage_position="finish",
        encode_error_event=lambda error: ...,
    )
    encoder = ChatEncoder(STYLE, request, about, model=about.backend_model)

Bytes in a style are JSON. The constant parts of a chunk are encoded once for each choice, so that a
token costs one string and three joins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from protocols.chat import errors
from protocols.chat.extra_keys import ExtraKeyWriter
from protocols.core import sse
from protocols.core.aggregate import UnaryChoice, UnaryResponse, is_end_of_calls
from protocols.core.errors import GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
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
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest, ToolCall
from protocols.core.response_losses import ALL_WRITTEN, FINGERPRINT, USAGE_DETAILS, CallLosses

# Objects inside responses: usage, tool calls, log probabilities.

encode_json = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Replaces a log probability that JSON can't hold (minus infinity), as in OpenAI's responses."""


def format_object(keys: tuple[str, ...], values: Mapping[str, bytes]) -> bytes:
    """A JSON object of the ``keys`` that have a value, in their order; values are JSON."""
    form, present = _build_object_template(keys, tuple(values))
    return form % tuple(map(values.__getitem__, present))


@lru_cache(maxsize=256)
def _build_object_template(
    keys: tuple[str, ...], names: tuple[str, ...]
) -> tuple[bytes, list[str]]:
    """A template of the object, and the keys that it has."""
    present = [key for key in keys if key in names]
    fields = [b'"%b":%%b' % key.encode().replace(b"%", b"%%") for key in present]
    return b"{%b}" % b",".join(fields), present


ObjectFactory = Callable[..., Struct]
"""Creates an object for encoding from values passed by keyword."""
MappingFactory = Callable[[Mapping[str, Any]], Struct]
"""Creates an object for encoding from a mapping. Keys that the style lacks are left out."""


@lru_cache(maxsize=256)
def create_object_factory(keys: tuple[str, ...], *constants: tuple[str, bytes]) -> ObjectFactory:
    """A factory of objects with ``keys`` in their order; ``constants`` are JSON values.

    The result is cached for all styles with the same keys.
    """
    values = dict(constants)
    fields = [(key, Any, Raw(values[key]) if key in values else UNSET) for key in keys]
    return msgspec.defstruct("Shaped", fields)


@lru_cache(maxsize=256)
def create_mapping_factory(keys: tuple[str, ...], *constants: tuple[str, bytes]) -> MappingFactory:
    """A factory of the same objects, from mappings that may have other keys."""
    names, create_object = frozenset(keys), create_object_factory(keys, *constants)

    def shaped(values: Mapping[str, Any]) -> Struct:
        if not names.issuperset(values):
            values = {key: value for key, value in values.items() if key in names}
        return create_object(**values)

    return shaped


# --- usage ----------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int | UnsetType = UNSET
    cache_write_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """Details of the completion's tokens."""

    reasoning_tokens: int


class GenerationUsage(Struct):
    """The usage of a chat or completion response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class EmbeddingUsage(Struct):
    """The usage of embeddings, which have no completion tokens."""

    prompt_tokens: int
    total_tokens: int


def build_prompt_details(usage: Usage) -> PromptTokensDetails | UnsetType:
    """Details of the prompt's tokens, if the worker reported any."""
    cached, written = usage.cached_tokens, usage.cache_write_tokens
    if cached is None and written is None:
        return UNSET
    return PromptTokensDetails(
        UNSET if cached is None else cached, UNSET if written is None else written
    )


def build_usage(usage: Usage) -> GenerationUsage:
    """The usage object; details only if the worker reported them."""
    thought = usage.reasoning_tokens
    return GenerationUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        build_prompt_details(usage),
        UNSET if thought is None else CompletionTokensDetails(thought),
    )


# --- tool calls -----------------------------------------------------------------------------------


class FunctionCallItem(Struct, omit_defaults=True):
    """A call's name and arguments; later deltas of a stream only have arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomCallItem(Struct, omit_defaults=True):
    """The same of a call of a custom tool, whose arguments are text."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallItem(Struct):
    """A tool call; in a stream with its ``index``, and later deltas without id and type."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallItem | UnsetType = UNSET
    custom: CustomCallItem | UnsetType = UNSET


def build_tool_calls(calls: Sequence[ToolCall]) -> list[ToolCallItem]:
    """The tool calls of a unary response."""
    return [
        ToolCallItem(id=call.id, type="custom", custom=CustomCallItem(call.name, call.arguments))
        if call.kind == "custom"
        else ToolCallItem(
            id=call.id, type="function", function=FunctionCallItem(call.name, call.arguments)
        )
        for call in calls
    ]


def map_finish_reason(
    reasons: Mapping[FinishReason, str],
    end: ChoiceEnd | UnaryChoice,
    *,
    called: bool = False,
    legacy: bool = False,
) -> str:
    """The finish reason's wire name: an end after a tool call is ``tool_calls``."""
    if end.own_word is not None:
        return end.own_word
    reason = end.finish_reason
    if reason in ("eos", "stop", "tool_calls") and is_end_of_calls(end, called=called):
        return "function_call" if legacy else reasons["tool_calls"]
    return reasons[reason]


# --- log probabilities ----------------------------------------------------------------------------


class TopLogprobItem(Struct):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """The log probability of a token in a chat response."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobItem]


class ChatLogprobs(Struct):
    """Both keys are required."""

    content: list[ChatTokenLogprob] | None
    refusal: list[ChatTokenLogprob] | None = None


def build_chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Log probabilities in the chat format."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                t.token,
                _clip_logprob(t.logprob),
                list(t.data if t.data is not None else t.token.encode()),
                [
                    TopLogprobItem(
                        top.token,
                        _clip_logprob(top.logprob),
                        list(top.data if top.data is not None else top.token.encode()),
                    )
                    for top in t.top
                ],
            )
            for t in tokens
        ]
    )


class CompletionLogprobs(Struct):
    """The older format, of completions: columns, with the offset of each token in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def build_completion_logprobs(
    tokens: Sequence[TokenLogprob], offset: int = 0
) -> CompletionLogprobs:
    """The completion format; ``offset`` is the first token's position in the choice's text."""
    offsets = []
    for t in tokens:
        offsets.append(offset)
        offset += len(t.token)
    return CompletionLogprobs(
        [_format_token(t.token, t.data) for t in tokens],
        [None if t.logprob is None else _clip_logprob(t.logprob) for t in tokens],
        [
            {_format_token(top.token, top.data): _clip_logprob(top.logprob) for top in t.top}
            or None
            for t in tokens
        ]
        if any(t.top for t in tokens)
        else None,
        offsets,
    )


def _format_token(token: str, data: bytes | None) -> str:
    """A token that is not valid text is shown by its bytes, as in OpenAI's responses."""
    return token if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _clip_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None or not logprob > MIN_LOGPROB else logprob


# The style of a protocol's responses.

FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "unknown": "stop",
}
_DEFAULT_VALUES: Final = {"refusal": b"null", "logprobs": b"null"}


CHAT_OBJECT: Final = "chat.completion"
CHAT_CHUNK_OBJECT: Final = "chat.completion.chunk"
TEXT_OBJECT: Final = "text_completion"
_FIRST_TOOL_CALL_DELTA: Final = b'{"role":"assistant","content":null}'
"""The delta of the first chunk of a choice that starts with a tool call."""


class ResponseFactories(Struct, frozen=True):
    """The object factories of a unary response."""

    response: MappingFactory
    choice: MappingFactory
    message: MappingFactory


class ResponseStyle(Struct, frozen=True, kw_only=True, dict=True):
    """The format of a protocol's responses. Tuples of keys give the keys and their order."""

    unary_keys: tuple[str, ...] = (
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "system_fingerprint",
    )
    chat_choice_keys: tuple[str, ...] = (
        "index",
        "message",
        "logprobs",
        "finish_reason",
        "token_ids",
    )
    message_keys: tuple[str, ...] = (
        "role",
        "content",
        "refusal",
        "reasoning_content",
        "tool_calls",
        "function_call",
    )
    text_choice_keys: tuple[str, ...] = ("text", "index", "logprobs", "finish_reason", "token_ids")
    chunk_keys: tuple[str, ...] = (
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    )
    chat_chunk_keys: tuple[str, ...] = ("index", "delta", "logprobs", "finish_reason", "token_ids")
    text_chunk_keys: tuple[str, ...] = ("text", "index", "logprobs", "finish_reason", "token_ids")
    index_scope: Literal["choice", "prompt"] = "choice"
    """An index per choice, or per prompt: the choices of a prompt then share one."""
    default_values: Mapping[str, bytes] = field(default_factory=lambda: _DEFAULT_VALUES)
    """The value of a key of a choice, message or delta without a value; other keys are left out."""
    first_delta: bytes = b'{"role":"assistant","content":""}'
    """The delta of each choice's first chunk."""
    last_delta: bytes = b"{}"
    """The delta of the chunk with the finish reason."""
    usage_position: Literal["separate", "finish"] = "separate"
    """Where a stream has usage, if the request wants it: in a chunk without choices, or in the last
    finish chunk. Running usage, if requested, is in every chunk.
    """
    empty_content: bytes = b"null"
    """The content of a unary message that only calls tools or refuses."""
    finish_reasons: Mapping[FinishReason, str] = field(default_factory=lambda: FINISH_REASONS)
    content_type: str = "text/event-stream; charset=utf-8"
    event_prefix: bytes = b"data: "
    encode_error_event: Callable[[GatewayError], bytes] = errors.format_error_event
    headers: Headers = ()
    """Headers of every response, unary or streaming."""
    elapsed_header: str | None = None
    """The header with the duration in milliseconds: of the response, or until a stream starts."""
    version_header: str | None = "x-served-model"
    """The header with the name of the version that answered."""
    source: str = ""
    """The protocol whose unknown keys are written."""

    @cached_property
    def written_details(self) -> frozenset[str]:
        """See ``protocols.core.interfaces.WritesDetails``."""
        return USAGE_DETAILS | {FINGERPRINT}.intersection(self.unary_keys)

    @cached_property
    def chat_factories(self) -> ResponseFactories:
        """The object factories of a unary chat response."""
        return self._build_factories(CHAT_OBJECT, self.chat_choice_keys)

    @cached_property
    def text_factories(self) -> ResponseFactories:
        """The object factories of a unary completion response."""
        return self._build_factories(TEXT_OBJECT, self.text_choice_keys)

    def _build_factories(self, name: str, choice: tuple[str, ...]) -> ResponseFactories:
        absent = tuple(self.default_values.items())
        whole = (self.unary_keys, ("object", encode_json(name)))
        choices = (choice, *absent)
        message = (self.message_keys, *absent, ("role", encode_json("assistant")))
        return ResponseFactories(
            create_mapping_factory(*whole),
            create_mapping_factory(*choices),
            create_mapping_factory(*message),
        )


# Framing and usage, shared by chat and completion responses.

_PLACEHOLDER: Final = b"\0"
"""JSON never contains this byte, so a template can be split at it."""


def build_common_fields(
    prefix: str, about: ResponseContext, model: str | None
) -> dict[str, str | int]:
    """The keys with the same value in every chunk and in the unary response."""
    return {
        "id": prefix + about.id,
        "created": about.created,
        "model": about.model if model is None else model,
    }


class HeaderBuilder(Protocol):
    """Builds the headers of a response."""

    def __call__(self, first: Headers = (), /) -> Headers:
        """All headers, those of the style first."""


def create_header_builder(
    style: ResponseStyle, about: ResponseContext, headers: Headers
) -> HeaderBuilder:
    """A builder of response headers, called at the start: one may hold the duration.

    ``headers`` are added to those of the style.
    """
    started_at = 0.0 if style.elapsed_header is None else about.clock()
    return partial(_build_headers, style, about, headers, started_at)


def _build_headers(
    style: ResponseStyle,
    about: ResponseContext,
    headers: Headers,
    started_at: float,
    first: Headers = (),
) -> Headers:
    all_headers = first + style.headers
    if style.version_header is not None:
        all_headers += ((style.version_header, about.version),)
    if headers:
        all_headers += headers
    if style.elapsed_header is not None:
        elapsed = about.clock() - started_at
        all_headers += ((style.elapsed_header, str(int(elapsed * 1000))),)
    return all_headers


def count_choices_per_index(style: ResponseStyle, request: GenerationRequest) -> int:
    """How many choices share an index."""
    return (request.n or 1) if style.index_scope == "prompt" else 1


def build_choice_fields(
    style: ResponseStyle, request: GenerationRequest, choice: UnaryChoice
) -> dict[str, Any]:
    """The fields that chat and completion choices share."""
    values: dict[str, Any] = {"index": choice.index // count_choices_per_index(style, request)}
    if choice.token_ids and request.response_options.token_ids:
        values["token_ids"] = choice.token_ids
    return values


def build_unary_response(
    style: ResponseStyle,
    shapes: ResponseFactories,
    response: UnaryResponse,
    choices: list[Struct],
    shared: Mapping[str, str | int],
) -> HttpResponse:
    """The unary response."""
    identity = response.metadata.get_identity(style.source)
    values: dict[str, Any] = {**shared, **identity, "choices": choices}
    if response.usage is not None:
        values["usage"] = build_usage(response.usage)
    if response.metadata.fingerprint is not None:
        values["system_fingerprint"] = response.metadata.fingerprint
    body = encode_json(shapes.response(values))
    unwritten: tuple[ResponseExtra, ...] = ()
    if response.metadata.fingerprint is not None:
        unwritten = response.metadata.list_unwritten(style.source, style.unary_keys)
    if response.extra or unwritten:
        writer = ExtraKeyWriter(style.source)
        for event in (*unwritten, *response.extra):
            writer.add(event)
        body = writer.merge_body(body)
    return HttpResponse(200, body)


class ChunkWriter:
    """Writes chunks: the fields that all chunks share, and the position of usage."""

    def __init__(
        self,
        style: ResponseStyle,
        request: GenerationRequest,
        shared: Mapping[str, str | int],
        *,
        chat: bool,
    ) -> None:
        self._response_style = style
        self._common_fields = {key: encode_json(value) for key, value in shared.items()}
        self._choice_keys = style.chat_chunk_keys if chat else style.text_chunk_keys
        self._delta_key = "delta" if chat else "text"
        wanted = request.response_options.usage
        self._usage_mode = style.usage_position if wanted == "final" else wanted
        self._choices_per_index = count_choices_per_index(style, request)
        self._writes_total_usage = self._usage_mode in ("each", "separate")
        self._usage: Usage | None = None
        self._pending_finish: tuple[int, bytes, dict[str, bytes]] | None = None
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self.text_templates: dict[int, tuple[bytes, bytes]] = {}
        """Chunks of a text without log probabilities, split at the text, of choices with text."""

    def build_template(self, index: int) -> tuple[bytes, bytes]:
        """The chunk of this choice, split where its delta or text belongs."""
        if index not in self._templates:
            head, _, tail = self.write_chunk(index, _PLACEHOLDER).partition(_PLACEHOLDER)
            self._templates[index] = head, tail
        return self._templates[index]

    def write_chunk(self, index: int, body: bytes, **more: bytes) -> bytes:
        """One chunk; ``more`` are further keys of the choice."""
        piece = {"finish_reason": b"null", **self._response_style.default_values, **more}
        piece["index"] = self._format_index(index)
        piece[self._delta_key] = body
        return self._format_chunk(
            b"[" + format_object(self._choice_keys, piece) + b"]", self._format_running_usage()
        )

    def write_finish(self, index: int, body: bytes, more: dict[str, bytes]) -> bytes:
        """A choice's last chunk, held back if usage will go into it."""
        if self._usage_mode not in ("finish", "each"):
            return self.write_chunk(index, body, **more)
        pending = self._write_pending_finish()
        self._pending_finish = index, body, more
        return pending

    def set_usage(self, usage: Usage) -> None:
        """Store the usage."""
        self._usage = usage
        if self._usage_mode == "each":
            self._clear_templates()

    def set_metadata(self, served: ResponseMetadata) -> Sequence[ResponseExtra]:
        """Store the worker's id and time, if clients get them, and its fingerprint.

        Returns what of these no chunk has a key for.
        """
        fields = served.get_identity(self._response_style.source)
        if served.fingerprint is not None:
            fields["system_fingerprint"] = served.fingerprint
        self._common_fields |= {key: encode_json(value) for key, value in fields.items()}
        if fields and self._templates:
            self._clear_templates()
        if served.fingerprint is None:
            return ()
        return served.list_unwritten(self._response_style.source, self._response_style.chunk_keys)

    def _clear_templates(self) -> None:
        self._templates.clear()
        self.text_templates.clear()

    def write_end(self, *, has_extra: bool = False) -> bytes:
        """The remaining chunks: a finish chunk held back, the usage chunk, the end marker.

        ``has_extra``: unknown keys need a chunk. Only a client that asked for usage gets one
        without choices.
        """
        chunks = self._write_pending_finish(final=True)
        if self._writes_total_usage and (self._usage is not None or has_extra):
            usage = b"null" if self._usage is None else encode_json(build_usage(self._usage))
            chunks += self._format_chunk(b"[]", usage)
        return chunks + sse.DONE_EVENT

    def _write_pending_finish(self, *, final: bool = False) -> bytes:
        if self._pending_finish is None:
            return b""
        (index, body, more), self._pending_finish = self._pending_finish, None
        if final and self._usage_mode == "finish" and self._usage is not None:
            piece = {
                **self._response_style.default_values,
                **more,
                "index": self._format_index(index),
                self._delta_key: body,
            }
            usage = encode_json(build_usage(self._usage))
            return self._format_chunk(b"[" + format_object(self._choice_keys, piece) + b"]", usage)
        return self.write_chunk(index, body, **more)

    def _format_index(self, index: int) -> bytes:
        return b"%d" % (index // self._choices_per_index)

    def _format_running_usage(self) -> bytes | None:
        if self._usage_mode == "each":
            return b"null" if self._usage is None else encode_json(build_usage(self._usage))
        return b"null" if self._usage_mode == "separate" else None

    def _format_chunk(self, choices: bytes, usage: bytes | None) -> bytes:
        values = {**self._common_fields, "choices": choices}
        if usage is not None:
            values["usage"] = usage
        return (
            self._response_style.event_prefix
            + format_object(self._response_style.chunk_keys, values)
            + b"\n\n"
        )


class ChatEncoder:
    """Encodes the response to a chat request.

    ``model`` replaces that of ``about``; ``headers`` are added to those of the style. The id and
    the time are the worker's, if it has the style's protocol.
    """

    content_losses = ALL_WRITTEN

    def __init__(
        self,
        style: ResponseStyle,
        request: GenerationRequest,
        about: ResponseContext,
        *,
        model: str | None = None,
        headers: Headers = (),
    ) -> None:
        self.content_type = style.content_type
        self.losses = CallLosses()
        self._response_style, self._request = style, request
        self._common_fields = build_common_fields("chatcmpl-", about, model)
        self._build_headers = create_header_builder(style, about, headers)
        self.written_details = style.written_details
        self.extra_source = style.source
        self._extra_writer = ExtraKeyWriter(style.source)
        self._open_choices: set[int] = set()
        self._tool_calling_choices: set[int] = set()
        self._custom_calls: set[tuple[int, int]] = set()
        """Choice and number of each call of a custom tool."""

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        templates = self._chunk_writer.text_templates
        out: list[bytes] = []
        for event in events:
            if (
                type(event) is TextDelta
                and event.text
                and event.index in templates
                and not event.logprobs
                and not event.token_ids
            ):
                head, tail = templates[event.index]
                out += (head, encode_json(event.text), tail)
            else:
                out.append(self._encode_event(event))
                if self._extra_writer.pending:
                    out[-1] = self._extra_writer.merge_events(out[-1])
        if self._extra_writer.pending:
            out += self._write_missing_deltas()
        return b"".join(out)

    def _write_missing_deltas(self) -> Iterator[bytes]:
        """A delta for each object of which only unknown keys came."""
        for index, fields in self._extra_writer.take_missing_deltas():
            yield self._extra_writer.merge_events(self._encode_delta(index, fields))

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._response_style.encode_error_event(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choices = [self._build_choice(choice) for choice in answer.choices]
        return build_unary_response(
            self._response_style,
            self._response_style.chat_factories,
            answer,
            choices,
            self._common_fields,
        )

    @cached_property
    def _chunk_writer(self) -> ChunkWriter:
        """Writes the chunks of a stream; a unary response needs none."""
        shared = {**self._common_fields, "object": CHAT_CHUNK_OBJECT}
        return ChunkWriter(self._response_style, self._request, shared, chat=True)

    def _encode_event(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            return (
                self._encode_text(event) if event.text or event.logprobs or event.token_ids else b""
            )
        match event:
            case ResponseMetadata():
                for extra in self._chunk_writer.set_metadata(event):
                    self._extra_writer.add(extra)
            case ResponseExtra():
                self._extra_writer.add(event)
                self._chunk_writer.text_templates.clear()  # the next text has to be looked at
            case ChoiceEnd():
                return self._encode_choice_end(event)
            case Usage():
                self._chunk_writer.set_usage(event)
            case StreamEnd():
                return self._chunk_writer.write_end(has_extra=self._extra_writer.has_response_keys)
            case ReasoningDelta(text, index) if text:
                return self._encode_delta(index, b'"reasoning_content":' + encode_json(text))
            case RefusalDelta(text, index) if text:
                return self._encode_delta(index, b'"refusal":' + encode_json(text))
            case PromptEcho(index, text):
                return self._encode_delta(index, b'"content":' + encode_json(text))
            case ToolCallStart() | ToolCallDelta():
                return self._encode_tool_call(event)
            case _:
                pass
        return b""

    def _encode_text(self, event: TextDelta) -> bytes:
        index = event.index
        opening = b"" if index in self._open_choices else self._encode_first_delta(index)
        if not event.logprobs and not event.token_ids:
            head, tail = self._chunk_writer.build_template(index)
            head, tail = self._chunk_writer.text_templates[index] = (
                head + b'{"content":',
                b"}" + tail,
            )
            return b"%b%b%b%b" % (opening, head, encode_json(event.text), tail)
        more = {}
        if event.logprobs:
            more["logprobs"] = encode_json(build_chat_logprobs(event.logprobs))
        if event.token_ids and self._request.response_options.token_ids:
            more["token_ids"] = encode_json(event.token_ids)
        delta = b'{"content":%b}' % encode_json(event.text)
        return opening + self._chunk_writer.write_chunk(index, delta, **more)

    def _encode_delta(self, index: int, fields: bytes) -> bytes:
        opening = b"" if index in self._open_choices else self._encode_first_delta(index)
        head, tail = self._chunk_writer.build_template(index)
        return b"%b%b{%b}%b" % (opening, head, fields, tail)

    def _encode_first_delta(self, index: int, *, call: bool = False) -> bytes:
        self._open_choices.add(index)
        delta = _FIRST_TOOL_CALL_DELTA if call else self._response_style.first_delta
        head, tail = self._chunk_writer.build_template(index)
        return head + delta + tail

    def _encode_tool_call(self, event: ToolCallStart | ToolCallDelta) -> bytes:
        index = event.index
        if self._request.legacy_functions and event.call_index:  # a message has one function_call
            if isinstance(event, ToolCallStart):
                self.losses.add(event.call_index, index)
            return b""
        before = b"" if index in self._open_choices else self._encode_first_delta(index, call=True)
        self._tool_calling_choices.add(index)
        if isinstance(event, ToolCallStart) and event.kind == "custom":
            self._custom_calls.add((index, event.call_index))
        if (index, event.call_index) in self._custom_calls:
            return before + self._encode_custom_call(event)
        if isinstance(event, ToolCallStart):
            function = FunctionCallItem(event.name, "")
            piece = ToolCallItem(event.call_index, event.id, "function", function)
        else:
            function = FunctionCallItem(arguments=event.text)
            piece = ToolCallItem(event.call_index, function=function)
        if self._request.legacy_functions:
            return before + self._encode_delta(index, b'"function_call":' + encode_json(function))
        return before + self._encode_delta(index, b'"tool_calls":[' + encode_json(piece) + b"]")

    def _encode_custom_call(self, event: ToolCallStart | ToolCallDelta) -> bytes:
        if isinstance(event, ToolCallStart):
            custom = CustomCallItem(event.name, "")
            piece = ToolCallItem(event.call_index, event.id, "custom", custom=custom)
        else:
            piece = ToolCallItem(event.call_index, custom=CustomCallItem(input=event.text))
        return self._encode_delta(event.index, b'"tool_calls":[' + encode_json(piece) + b"]")

    def _encode_choice_end(self, event: ChoiceEnd) -> bytes:
        index = event.index
        before = b"" if index in self._open_choices else self._encode_first_delta(index)
        reason = self._map_finish_reason(event, called=index in self._tool_calling_choices)
        more = {"finish_reason": encode_json(reason)}
        return before + self._chunk_writer.write_finish(
            index, self._response_style.last_delta, more
        )

    def _map_finish_reason(self, end: ChoiceEnd | UnaryChoice, *, called: bool) -> str:
        legacy = self._request.legacy_functions
        return map_finish_reason(
            self._response_style.finish_reasons, end, called=called, legacy=legacy
        )

    def _build_choice(self, choice: UnaryChoice) -> Struct:
        values = build_choice_fields(self._response_style, self._request, choice)
        values["message"] = self._build_message(choice)
        values["finish_reason"] = self._map_finish_reason(choice, called=bool(choice.tool_calls))
        if choice.logprobs:
            values["logprobs"] = build_chat_logprobs(choice.logprobs)
        return self._response_style.chat_factories.choice(values)

    def _build_message(self, choice: UnaryChoice) -> Struct:
        silent = not choice.text and bool(choice.tool_calls or choice.refusal)
        values: dict[str, Any] = {
            "content": Raw(self._response_style.empty_content) if silent else choice.text
        }
        if choice.reasoning:
            values["reasoning_content"] = choice.reasoning
        if choice.refusal:
            values["refusal"] = choice.refusal
        if choice.tool_calls and self._request.legacy_functions:
            call = choice.tool_calls[0]
            for one in range(1, len(choice.tool_calls)):
                self.losses.add(one, choice.index)
            values["function_call"] = FunctionCallItem(call.name, call.arguments)
        elif choice.tool_calls:
            values["tool_calls"] = build_tool_calls(choice.tool_calls)
        return self._response_style.chat_factories.message(values)


class CompletionEncoder:
    """Encodes the response to a completion request; arguments as for ``ChatEncoder``."""

    def __init__(
        self,
        style: ResponseStyle,
        request: GenerationRequest,
        about: ResponseContext,
        *,
        model: str | None = None,
        headers: Headers = (),
    ) -> None:
        self.content_type = style.content_type
        self._response_style, self._request = style, request
        self._common_fields = build_common_fields("cmpl-", about, model)
        self._build_headers = create_header_builder(style, about, headers)
        self.written_details = style.written_details
        self.extra_source = style.source
        self._extra_writer = ExtraKeyWriter(style.source)
        self._offsets: dict[int, int] = {}

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        templates, offsets = self._chunk_writer.text_templates, self._offsets
        out: list[bytes] = []
        for event in events:
            if (
                type(event) is TextDelta
                and event.text
                and event.index in templates
                and not event.logprobs
                and not event.token_ids
            ):
                head, tail = templates[event.index]
                offsets[event.index] += len(event.text)
                out += (head, encode_json(event.text), tail)
            else:
                out.append(self._encode_event(event))
                if self._extra_writer.pending:
                    out[-1] = self._extra_writer.merge_events(out[-1])
        return b"".join(out)

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._response_style.encode_error_event(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choices = [self._build_choice(choice) for choice in answer.choices]
        return build_unary_response(
            self._response_style,
            self._response_style.text_factories,
            answer,
            choices,
            self._common_fields,
        )

    @cached_property
    def _chunk_writer(self) -> ChunkWriter:
        """Writes the chunks of a stream; a unary response needs none."""
        shared = {**self._common_fields, "object": TEXT_OBJECT}
        return ChunkWriter(self._response_style, self._request, shared, chat=False)

    def _encode_event(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            ids = event.token_ids if self._request.response_options.token_ids else ()
            return self._encode_text(event.index, event.text, event.logprobs, ids)
        match event:
            case PromptEcho(index, text, logprobs):
                return self._encode_text(index, text, logprobs, ())
            case ChoiceEnd():
                reason = map_finish_reason(self._response_style.finish_reasons, event)
                more = {"finish_reason": encode_json(reason)}
                return self._chunk_writer.write_finish(event.index, b'""', more)
            case Usage():
                self._chunk_writer.set_usage(event)
            case ResponseMetadata():
                for extra in self._chunk_writer.set_metadata(event):
                    self._extra_writer.add(extra)
            case ResponseExtra():
                self._extra_writer.add(event)
                self._chunk_writer.text_templates.clear()  # the next text has to be looked at
            case StreamEnd():
                return self._chunk_writer.write_end()
            case _:
                pass
        return b""

    def _encode_text(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], ids: Sequence[int]
    ) -> bytes:
        if not text and not logprobs and not ids:
            return b""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        if not logprobs and not ids:
            template = self._chunk_writer.build_template(index)
            head, tail = self._chunk_writer.text_templates[index] = template
            return b"%b%b%b" % (head, encode_json(text), tail)
        more = {}
        if logprobs:
            more["logprobs"] = encode_json(build_completion_logprobs(logprobs, offset))
        if ids:
            more["token_ids"] = encode_json(ids)
        return self._chunk_writer.write_chunk(index, encode_json(text), **more)

    def _build_choice(self, choice: UnaryChoice) -> Struct:
        values = build_choice_fields(self._response_style, self._request, choice)
        values["text"] = choice.text
        values["finish_reason"] = map_finish_reason(self._response_style.finish_reasons, choice)
        if choice.logprobs:
            values["logprobs"] = build_completion_logprobs(choice.logprobs)
        return self._response_style.text_factories.choice(values)
