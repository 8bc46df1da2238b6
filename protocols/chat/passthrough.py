"""Forwards a client's own bytes to a worker of the same protocol, and the worker's bytes back.

A body is forwarded if it is certainly valid: every field has a type that both sides accept and is
within both ranges, and the gateway has nothing to do with any of them. Every other body is
translated, and gets its error, loss or emulation there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols.chat.decoder import GenerationDecoder, WireUsage, read_usage
from protocols.chat.errors import raise_worker_error
from protocols.chat.requests import RequestRules
from protocols.chat.responses import ResponseStyle
from protocols.chat.upstream import WorkerProfile
from protocols.core import sse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Event, ResponseMetadata, StreamEnd
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    UpstreamRequest,
)
from protocols.core.request import EmbeddingRequest, GenerationRequest, Message, Request, TextPart
from protocols.json_body import JSON_ERRORS, check_unicode, pop_fields
from protocols.params import Param

# --- the internal request of a forwarded body -----------------------------------------------------

RequestKind = Literal["chat", "completion", "embedding"]


def request_of(
    kind: RequestKind, body: Any, model: str, *, stream: bool, timeout: float | None
) -> Request:
    """The request, with the fields for load balancing, metrics and decoding.

    ``body`` was validated by its type; other fields are not set.
    """
    user, n = getattr(body, "user", UNSET), getattr(body, "n", UNSET)
    labels = {} if user is UNSET else {"user": user}
    if kind == "embedding":
        inputs = _as_tuple(body.input)
        return EmbeddingRequest(model=model, inputs=inputs, timeout=timeout, labels=labels)
    return GenerationRequest(
        model=model,
        kind=kind,
        messages=_read_messages(body.messages) if kind == "chat" else (),
        prompts=_as_tuple(body.prompt) if kind == "completion" else (),
        n=None if n is UNSET else n,
        stream=stream,
        timeout=timeout,
        labels=labels,
    )


def _as_tuple(texts: str | list[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(
        [
            Message(
                one.role,
                (
                    TextPart(
                        one.content
                        if isinstance(one.content, str)
                        else _join_text_parts(one.content)
                    ),
                ),
            )
            for one in messages
        ]
    )


def _join_text_parts(parts: Sequence[Any]) -> str:
    return "".join([part.text for part in parts])


# --- responses ------------------------------------------------------------------------------------

NameReplacements = Mapping[str, str]
"""The names for the client, by key of the response: ``id``, or a key with the model's name."""

_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode

_EVENT_BOUNDARY: Final = re.compile(rb"\n\r?\n")
_STRAY_LINE: Final = re.compile(
    rb"^(?!(?:\xef\xbb\xbf)?data:|:|event|id|retry|\r?$).*\n", re.MULTILINE
)
"""A line that is no field of an event: some workers report errors like this."""
_MAX_EVENT_BYTES: Final = 1 << 20
"""Bytes of one event."""
_FRAME: Final = len(sse.format_event(b""))


def create_passthrough_decoder(
    request: Request, complaint: Callable[[bytes], None] = raise_worker_error
) -> ResponseDecoder:
    """The decoder beside the forwarded bytes; embeddings are only counted."""
    if isinstance(request, EmbeddingRequest):
        return _EmbeddingCounter(len(request.inputs), complaint)
    return GenerationDecoder(request, complaint=complaint)


def create_passthrough_reader(
    request: Request, decoder: ResponseDecoder, names: NameReplacements, end: bytes = sse.DONE_EVENT
) -> PassthroughReader:
    """The reader of the response to ``request``, with ``decoder``.

    ``end`` is as for ``StreamPassthroughReader``.
    """
    if request.stream:
        return StreamPassthroughReader(decoder, names, request.model, end)
    return UnaryPassthroughReader(decoder, names)


def _find_metadata(events: Sequence[Event]) -> ResponseMetadata | None:
    """The worker's metadata, if the events have them."""
    for event in events:
        if type(event) is ResponseMetadata:
            return event
    return None


def _find_replacements(
    names: NameReplacements, served: ResponseMetadata
) -> dict[str, tuple[str, str]]:
    """The worker's names that the client must not see, each with its replacement."""
    renamed = {}
    for key, name in names.items():
        old = served.id if key == "id" else served.model
        if old is not None and old != name:
            renamed[key] = old, name
    return renamed


class UnaryPassthroughReader(Struct, eq=False):
    """Reads a unary response. If the worker sends a stream instead, the encoder writes it."""

    _decoder: ResponseDecoder
    _replacements: NameReplacements
    _chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._chunks += pieces
        return b"", self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        body = b"".join(self._chunks).strip()
        events = self._decoder.close()
        if not body.startswith(b"{"):
            return None, events
        served = _find_metadata(events)
        if served is not None and (renamed := _find_replacements(self._replacements, served)):
            fields = _decode_fields(body)
            body = _encode(fields | {key: new for key, (_, new) in renamed.items()})
        return body, events


class StreamPassthroughReader:
    """Reads a stream by complete events. An error event is never forwarded."""

    def __init__(
        self,
        decoder: ResponseDecoder,
        names: NameReplacements,
        model: str,
        end: bytes = sse.DONE_EVENT,
    ) -> None:
        """``model`` is what the worker was asked for, and is likely to call itself.

        ``end`` is what the stream ends with; empty where its last event says so.
        """
        self._decoder = decoder
        self._read_event = (
            decoder.read_event if isinstance(decoder, GenerationDecoder) else self._feed_payload
        )
        self._replacements = names
        self._end_marker = end
        self._byte_replacements: dict[bytes, bytes] = {}
        self._add_replacements(ResponseMetadata(model))
        self._pending = b""
        self._started = False
        self._is_translated = False
        self._pending_error: GatewayError | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        held = b"".join(pieces)
        if self._pending:
            held = self._pending + held
        if self._is_translated or (not self._started and held.lstrip()[:1] == b"{"):
            self._is_translated, self._pending = True, b""
            return None, self._decoder.feed(held)
        events: list[Event] = []
        return self._read_events(held, events), events

    def _read_events(self, held: bytes, events: list[Event]) -> bytes:
        """Read each whole event; gives what may be passed on."""
        end, clean, over = 0, True, False
        try:
            for payload in sse.split_plain_events(held) or ():
                self._read_event(payload, events)
                end += len(payload) + _FRAME
                if over := bool(events) and type(events[-1]) is StreamEnd:
                    break
            while end < len(held) and not over:
                found = sse.match_plain_event(held, end)
                if found is not None:
                    self._read_event(found[1], events)
                elif (found := _EVENT_BOUNDARY.search(held, end)) is not None:
                    clean = False
                    self._feed_event(held[end : found.end()], events)
                else:
                    break
                end = found.end()
                if events and type(events[-1]) is StreamEnd:
                    over = True
                    break
        except GatewayError as error:
            if not events:
                raise
            self._pending_error = error  # told when what came before it is passed on
        self._started = self._started or end > 0
        self._pending = b"" if over else held[end:]
        if len(self._pending) > _MAX_EVENT_BYTES:
            raise WorkerFailed(f"The worker sent an event of more than {_MAX_EVENT_BYTES} bytes.")
        self._add_replacements(_find_metadata(events))
        passed = self._replace_names(held[:end])
        return passed if clean else _STRAY_LINE.sub(b"", passed)

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        rest = self._decoder.feed(self._pending)
        events = [*rest, *self._decoder.close()]
        self._add_replacements(_find_metadata(events))
        if self._is_translated:
            return None, events
        if self._end_marker:
            return self._end_marker, events
        return _STRAY_LINE.sub(b"", self._replace_names(self._pending.strip() + b"\n\n")), events

    def _feed_payload(self, payload: bytes, events: list[Event]) -> None:
        """What ``AnswerDecoder.event`` does, by any decoder."""
        self._feed_event(sse.format_event(payload), events)

    def _feed_event(self, block: bytes, events: list[Event]) -> None:
        """Read an event as it stands. Raises also what its decoder would have told only later."""
        said = self._decoder.feed(block)
        self._decoder.feed(b"")
        events += said

    def _add_replacements(self, served: ResponseMetadata | None) -> None:
        if served is not None and (renamed := _find_replacements(self._replacements, served)):
            self._byte_replacements |= _encode_replacements(renamed)

    def _replace_names(self, data: bytes) -> bytes:
        """Whole events as the client may have them."""
        for old, new in self._byte_replacements.items():
            data = data.replace(old, new)
        return data


def _encode_replacements(renamed: Mapping[str, tuple[str, str]]) -> dict[bytes, bytes]:
    """The replacement bytes of each key and name. Inside a JSON string the quotes are escaped."""
    return {
        b'"%b":%b%b' % (key.encode(), blank, _encode(old)): b'"%b":%b%b'
        % (key.encode(), blank, _encode(new))
        for key, (old, new) in renamed.items()
        for blank in (b"", b" ")
    }


class _EmbeddingItem(Struct):
    index: int | None = None


class _EmbeddingSummary(Struct):
    data: list[_EmbeddingItem]
    model: Any = None
    usage: WireUsage | None = None


_decode_embedding_summary = msgspec.json.Decoder(_EmbeddingSummary).decode


class _EmbeddingCounter:
    """Reads only the number, the model and the usage of embeddings."""

    def __init__(self, count: int, complaint: Callable[[bytes], None]) -> None:
        self._input_count = count
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
            wire = _decode_embedding_summary(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if len(wire.data) != self._input_count:
            raise WorkerFailed("The worker did not answer each input with one vector.")
        served = ResponseMetadata(wire.model if isinstance(wire.model, str) else None)
        usage = None if wire.usage is None else read_usage(wire.usage, embeds=True)
        return [served, *([] if usage is None else [usage]), StreamEnd()]


JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"),)
_STREAM_HEADERS: Final[Headers] = (("Content-Type", ResponseStyle().content_type),)
_GATEWAY_FIELDS: Final = frozenset(
    {"echo", "best_of", "suffix", "priority", "use_beam_search", "stream", "modalities"}
)
"""Fields that the gateway handles itself, or reads together with another."""
_UNCHECKED_FIELDS: Final = frozenset({"tools"})
"""Fields whose type leaves some strings undecoded."""
_INT64_MAX: Final = 2**63 - 1
_NONEMPTY_STRING = Annotated[str, Meta(min_length=1)]


# --- shapes ---------------------------------------------------------------------------------------


class _PassthroughTextPart(Struct, forbid_unknown_fields=True, tag="text"):
    text: str


class _PassthroughMessage(Struct, forbid_unknown_fields=True):
    """A message that every worker accepts unchanged."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_PassthroughTextPart], Meta(min_length=1)]


class _PassthroughPlainMessage(Struct, forbid_unknown_fields=True):
    """The same without content parts."""

    role: Literal["system", "user", "assistant"]
    content: _NONEMPTY_STRING


class _PassthroughStreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _PassthroughFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | UnsetType = UNSET
    parameters: dict[str, Raw] | UnsetType = UNSET


class _PassthroughTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _PassthroughFunction


def build_count_type(most: int) -> Any:
    """The type of an optional count."""
    return Annotated[int, Meta(ge=0, le=most)] | UnsetType


OPTIONAL_BOOL: Final[Any] = bool | UnsetType
MESSAGES: Final[Any] = Annotated[list[_PassthroughMessage], Meta(min_length=1)]
PLAIN_MESSAGES: Final[Any] = Annotated[list[_PassthroughPlainMessage], Meta(min_length=1)]
PROMPTS: Final[Any] = str | Annotated[list[_NONEMPTY_STRING], Meta(min_length=1, max_length=2048)]
INPUTS: Final[Any] = (
    _NONEMPTY_STRING | Annotated[list[_NONEMPTY_STRING], Meta(min_length=1, max_length=2048)]
)
STREAM_OPTIONS: Final[Any] = _PassthroughStreamOptions | UnsetType
OPTIONAL_STRING: Final[Any] = str | UnsetType
ENCODINGS: Final[Any] = Literal["float", "base64"] | UnsetType
TOOL_FIELDS: Final[Mapping[str, Any]] = {
    "tools": Annotated[list[_PassthroughTool], Meta(min_length=1, max_length=128)] | UnsetType,
    "tool_choice": Literal["auto", "none", "required"] | UnsetType,
}
"""Types of fields that are not scalars; they accept only what is certainly valid."""

BodyCheck = Callable[[Any, AbstractSet[str]], bool]
"""Whether the fields of a body, each valid, are valid together; gets the body and its fields."""
_TOOL_DEPENDENT_FIELDS: Final = frozenset({"tool_choice", "parallel_tool_calls"})
_CHECKED_FIELDS: Final = _TOOL_DEPENDENT_FIELDS | {"top_logprobs", "max_completion_tokens"}


def is_valid_chat(body: Any, said: AbstractSet[str]) -> bool:
    """OpenAI's rules between fields of a chat request: a ``BodyCheck``."""
    if _CHECKED_FIELDS.isdisjoint(said):
        return True
    if "top_logprobs" in said and body.logprobs is not True:
        return False
    if "max_tokens" in said and "max_completion_tokens" in said:
        return False  # which of the two wins is for us to say
    return "tools" in said or _TOOL_DEPENDENT_FIELDS.isdisjoint(said)


def _has_max_tokens(body: Any, said: AbstractSet[str]) -> bool:
    """Workers differ in their default of ``max_tokens``, so it must be set."""
    del body
    return "max_tokens" in said


class PassthroughRule(Struct, frozen=True, kw_only=True):
    """The requests of one kind that may be forwarded.

    ``path`` is the worker's path, with ``{model}`` if the path names the model. ``field_types`` are
    the types of fields without a table row; one without UnsetType is required. ``gateway_fields``
    are rows that are not forwarded; ``forwards_field`` decides about fields that are in neither
    table.
    """

    path: str
    field_types: Mapping[str, Any]
    worker_params: Sequence[Param]
    client_params: Sequence[Param]
    gateway_fields: frozenset[str] = _GATEWAY_FIELDS
    forwards_field: Callable[[str], bool] = lambda _: False
    is_valid_body: BodyCheck = lambda _body, _said: True


def build_body_decoder(form: PassthroughRule) -> msgspec.json.Decoder[Any]:
    """A decoder of a body with the field types and the rows that both sides share."""
    theirs = {param.wire: param for param in form.client_params}
    fields = dict(form.field_types)
    for param in form.worker_params:
        other = theirs.get(param.wire)
        if (
            other is None
            or other.field != param.field
            or param.wire in form.gateway_fields
            or param.loss_reason
        ):
            continue
        if (kind := _find_common_type(param, other)) is not None:
            fields.setdefault(param.wire, kind | UnsetType)
    needed = {name for name, kind in fields.items() if UnsetType not in get_args(kind)}
    body = msgspec.defstruct(
        "Body",
        [
            (name, kind) if name in needed else (name, kind, UNSET)
            for name, kind in sorted(fields.items(), key=lambda one: one[0] not in needed)
        ],
    )
    return msgspec.json.Decoder(body)


def list_body_fields(check: msgspec.json.Decoder[Any]) -> frozenset[str]:
    """The fields that the decoder knows."""
    return frozenset(check.type.__struct_fields__)


def _find_common_type(worker: Param, client: Param) -> Any:
    """The type that both rows accept; None if only a translation can decide."""
    match client.type:
        case "bool":
            return bool
        case "str":
            return Literal[client.choices] if client.choices else str
        case "int" | "strict int" | "float" as name:
            return _build_number_type(worker, client, float if name == "float" else int)
        case "strings":
            most = min((p.max_items for p in (worker, client) if p.max_items), default=None)
            return _NONEMPTY_STRING | Annotated[list[_NONEMPTY_STRING], Meta(max_length=most)]
        case _:
            return None


def _build_number_type(worker: Param, client: Param, kind: type) -> Any:
    low = max((p.minimum for p in (worker, client) if p.minimum is not None), default=None)
    high = min((p.maximum for p in (worker, client) if p.maximum is not None), default=None)
    if kind is int and high is not None:
        high = min(high, _INT64_MAX)
    above = any(p.exclusive_minimum and p.minimum == low for p in (worker, client))
    below = any(p.exclusive_maximum and p.maximum == high for p in (worker, client))
    bounds: dict[str, Any] = {"gt" if above else "ge": low, "lt" if below else "le": high}
    return Annotated[kind, Meta(**bounds)]


# --- relays ---------------------------------------------------------------------------------------


class _CompiledRule(Struct, frozen=True):
    """A rule with its decoder."""

    rule: PassthroughRule
    kind: RequestKind
    decode_body: Callable[[bytes], Any]
    known_fields: frozenset[str]
    """The fields that the decoder knows."""
    checked_fields: frozenset[str]
    """The fields whose strings ``decode_body`` decodes completely."""
    is_model_in_path: bool
    """Whether the path names the model."""


def _compile_rule(form: PassthroughRule) -> _CompiledRule:
    # The model's name is replaced by the worker's.
    check = build_body_decoder(
        replace(form, field_types={"model": Any | UnsetType, **form.field_types})
    )
    kind: RequestKind = "completion"
    if "prompt" not in form.field_types:
        kind = "chat" if "messages" in form.field_types else "embedding"
    taken = list_body_fields(check)
    return _CompiledRule(
        form, kind, check.decode, taken, taken - _UNCHECKED_FIELDS, "{model}" in form.path
    )


class PassthroughRules:
    """Prepares pass-through requests for workers of one protocol and profile.

    ``forms`` are the rules by kind; ``read`` creates the decoder beside the forwarded bytes;
    ``whole`` and ``stream`` are the first headers of unary and streaming responses.
    """

    def __init__(
        self,
        forms: Mapping[str, PassthroughRule],
        *,
        read: Callable[[Any], ResponseDecoder] = create_passthrough_decoder,
        whole: Headers = JSON_HEADERS,
        stream: Headers = _STREAM_HEADERS,
    ) -> None:
        self._rules = {name: _compile_rule(form) for name, form in forms.items()}
        self._create_decoder = read
        self._unary_headers = whole
        self._stream_headers = stream

    def __contains__(self, form: str) -> bool:
        return form in self._rules

    def prepare_passthrough(
        self,
        form: str,
        call: ClientRequest,
        about: ResponseContext,
        headers: Callable[[Headers], Headers],
        *,
        names: NameReplacements | None = None,
        stream: bool | None = None,
        timeout: float | None = None,
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``; the call is one of ``form``.

        ``headers`` puts those of any answer behind the first ones. ``names`` is what the client is
        to read in the answer, if not the model's public name. ``stream`` goes before what the body
        says; ``timeout`` it does not tell.
        """
        way = self._rules[form]
        try:
            fields = pop_fields(call)
            body = way.decode_body(call.body)
            said: AbstractSet[str] = fields.keys()
            if not said <= way.checked_fields:
                check_unicode(call.body)
                if not _can_forward(way.rule, said - way.known_fields):
                    return None
                said &= way.known_fields
        except JSON_ERRORS:
            return None
        if ("stream_options" in said and body.stream is not True) or not way.rule.is_valid_body(
            body, said
        ):
            return None
        if stream is None:
            stream = "stream" in said and body.stream
        shown = {"model": about.model} if names is None else names
        request = request_of(way.kind, body, about.backend_model, stream=stream, timeout=timeout)
        return PassthroughRequest(
            request,
            _build_upstream_request(way, about.backend_model, fields),
            partial(headers, self._stream_headers if stream else self._unary_headers),
            partial(self._passage, request, shown),
        )

    def _passage(self, request: Request, names: NameReplacements) -> PassthroughReader:
        return create_passthrough_reader(request, self._create_decoder(request), names)


def build_openai_passthrough(
    profile: WorkerProfile, prefix: str, forwards: Callable[[str], bool], reading: RequestRules
) -> PassthroughRules:
    """The rules for workers of one OpenAI profile, under one path prefix.

    ``forwards`` decides whether workers may get an unknown field.
    """
    both = {"stream": OPTIONAL_BOOL, "stream_options": STREAM_OPTIONS, "user": OPTIONAL_STRING}
    form = partial(PassthroughRule, forwards_field=forwards)
    return PassthroughRules(
        {
            "chat": form(
                path=f"{prefix}/chat/completions",
                field_types={
                    "max_completion_tokens": Annotated[int, Meta(ge=1)] | UnsetType,
                    **both,
                    **TOOL_FIELDS,
                    "messages": MESSAGES,
                    "logprobs": OPTIONAL_BOOL,
                    "top_logprobs": _build_limited_count_type(profile.max_chat_logprobs, 20),
                },
                worker_params=profile.chat,
                client_params=reading.chat,
                is_valid_body=is_valid_chat,
            ),
            "completion": form(
                path=f"{prefix}/completions",
                field_types={
                    **both,
                    "prompt": PROMPTS,
                    "logprobs": _build_limited_count_type(profile.max_completion_logprobs, 5),
                },
                worker_params=profile.completion,
                client_params=reading.completion,
                is_valid_body=_has_max_tokens,
            ),
            "embedding": form(
                path=f"{prefix}/embeddings",
                field_types={
                    "input": INPUTS,
                    "encoding_format": ENCODINGS,
                    "user": OPTIONAL_STRING,
                },
                worker_params=profile.embedding,
                client_params=reading.embedding,
            ),
        }
    )


def _build_limited_count_type(most: int | None, promised: int) -> Any:
    return build_count_type(promised if most is None else min(most, promised))


def _can_forward(form: PassthroughRule, others: AbstractSet[str]) -> bool:
    """Whether workers may get these unknown fields."""
    return form.gateway_fields.isdisjoint(others) and all(map(form.forwards_field, others))


def _build_upstream_request(
    way: _CompiledRule, model: str, fields: dict[str, Any]
) -> UpstreamRequest:
    """The request with these fields. A model name is added unless the path has it."""
    path = way.rule.path
    if way.is_model_in_path:
        fields.pop("model", None)
        path = path.replace("{model}", quote(model, safe=""))
    else:
        fields["model"] = model
    return UpstreamRequest(path, _encode(fields), JSON_HEADERS)
