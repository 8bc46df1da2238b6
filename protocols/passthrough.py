"""Pass-through: a client's own bytes go to a worker of the same protocol, and the worker's back.

A request is forwarded if it is certainly valid: every field has a type and a range that both sides
accept, and the gateway has nothing to do with any of them. Rules say which fields a protocol has.
Every other request is translated, and gets its error, loss or emulation there.

The response is read by ``passthrough_readers``.

What must never happen: a request that is forwarded although a worker might read it otherwise than
the gateway: another model, a limit, a second key of the same name.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import Any, Final, Literal, get_args
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from protocols.chat.decoder import GenerationDecoder
from protocols.chat.embeddings import EmbeddingCounter, EmbeddingDecoder
from protocols.chat.field_types import convert_messages
from protocols.chat.messages import check_tool_results
from protocols.chat.responses import ResponseStyle
from protocols.chat.worker_errors import raise_worker_error
from protocols.core.errors import ClientError, InvalidParameter
from protocols.core.interfaces import (
    NO_SETTINGS,
    ClientRequest,
    Headers,
    ModelSettings,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.request import EmbeddingRequest, GenerationRequest, Request, ResponseOptions
from protocols.json_body import JSON_ERRORS, check_unicode, pop_fields
from protocols.params import Param, clamp_value, find_common_type
from protocols.passthrough_readers import (
    DecoderFactory,
    NameReplacer,
    StandardUnaryReader,
    StreamPassthroughReader,
    UnaryDecoder,
)

_encode = msgspec.json.Encoder().encode

_GATEWAY_FIELDS: Final = frozenset(
    {"echo", "best_of", "suffix", "priority", "use_beam_search", "stream", "modalities"}
)
_PARTLY_DECODED_FIELDS: Final = frozenset({"tools", "response_format"})
"""Fields whose type leaves some strings undecoded."""

BodyCheck = Callable[[Any, AbstractSet[str]], bool]
"""Whether the fields of a body, each valid, are valid together; gets the body and its fields."""


class PassthroughRule(Struct, frozen=True, kw_only=True):
    """The requests of one kind that may be forwarded.

    ``path`` is the worker's path, with ``{model}`` if the path names the model. ``field_types`` are
    the types of fields without a table row; one without UnsetType is required. ``gateway_fields``
    are those that the gateway must handle; ``forwards_field`` decides about fields that are in
    neither table. ``default_usage`` is what a stream reports if the client does not say.
    """

    path: str
    field_types: Mapping[str, Any]
    worker_params: Sequence[Param]
    client_params: Sequence[Param]
    gateway_fields: frozenset[str] = _GATEWAY_FIELDS
    forwards_field: Callable[[str], bool] = lambda _: False
    is_valid_body: BodyCheck = lambda _body, _fields: True
    default_usage: Literal["none", "final"] = "none"


def build_body_decoder(rule: PassthroughRule, *, skims: bool = False) -> JsonDecoder[Any]:
    """A decoder of a body with the field types and the rows that both sides share.

    ``skims``: see ``JsonDecoder``.
    """
    client_params = {param.wire: param for param in rule.client_params}
    types = dict(rule.field_types)
    for param in rule.worker_params:
        other = client_params.get(param.wire)
        if (
            other is None
            or other.field != param.field
            or param.wire in rule.gateway_fields
            or param.loss_reason
        ):
            continue
        if (shared := find_common_type(param, other)) is not None:
            types.setdefault(param.wire, shared | UnsetType)
    required = {name for name, kind in types.items() if UnsetType not in get_args(kind)}
    body = msgspec.defstruct(
        "Body",
        [
            (name, kind) if name in required else (name, kind, UNSET)
            for name, kind in sorted(types.items(), key=lambda item: item[0] not in required)
        ],
    )
    return JsonDecoder(body, skims=skims)


def list_body_fields(decoder: JsonDecoder[Any]) -> frozenset[str]:
    """The fields that the decoder knows."""
    return frozenset(decoder.kind.__struct_fields__)


EncoderFactory = Callable[[Any], ResponseEncoder]
"""Creates the encoder of the events that are decoded, from the request.

The encoder keeps the worker's id and time, so that all events of a stream have the same.
"""


class _CompiledRule(Struct, frozen=True):
    """A rule with its decoder."""

    rule: PassthroughRule
    kind: Literal["chat", "completion", "embedding"]
    decode_body: Callable[[bytes], Any]
    known_fields: frozenset[str]
    """The fields that the decoder knows."""
    decoded_fields: frozenset[str]
    """The fields whose strings ``decode_body`` decodes completely."""

    @classmethod
    def compile(cls, rule: PassthroughRule) -> "_CompiledRule":
        # The model's name is replaced by the worker's.
        types = {"model": Any | UnsetType, **rule.field_types}
        # The depth of the text is counted where its fields are read.
        decoder = build_body_decoder(replace(rule, field_types=types), skims=True)
        known = list_body_fields(decoder)
        kind: Literal["chat", "completion", "embedding"] = "completion"
        if "prompt" not in types:
            kind = "chat" if "messages" in types else "embedding"
        return cls(rule, kind, decoder.decode, known, known - _PARTLY_DECODED_FIELDS)

    def build_request(
        self, body: Any, about: ResponseContext, *, stream: bool, timeout: float | None
    ) -> Request:
        """The request, with the fields for load balancing, metrics and the response.

        Other fields are not set. Raises InvalidParameter if tool calls and results do not match.
        """
        model, context_length = about.backend_model, about.context_length
        user, n = getattr(body, "user", UNSET), getattr(body, "n", UNSET)
        labels = {} if user is UNSET else {"user": user}
        if self.kind == "embedding":
            inputs = _as_tuple(body.input)
            return EmbeddingRequest(
                model=model,
                inputs=inputs,
                encoding=getattr(body, "encoding_format", None) or "float",
                timeout=timeout,
                labels=labels,
                context_length=context_length,
            )
        usage: Literal["none", "final"] = self.rule.default_usage if stream else "final"
        if stream and (options := getattr(body, "stream_options", None)):
            usage = "final" if options.include_usage else "none"
        messages = convert_messages(body.messages) if self.kind == "chat" else ()
        if messages is None:
            raise InvalidParameter("a message without content", param="messages")
        check_tool_results(messages)
        return GenerationRequest(
            model=model,
            kind=self.kind,
            messages=tuple(messages),
            prompts=_as_tuple(body.prompt) if self.kind == "completion" else (),
            n=None if n is UNSET else n,
            stream=stream,
            timeout=timeout,
            labels=labels,
            response_options=ResponseOptions(usage=usage),
            context_length=context_length,
        )

    def build_upstream_request(self, model: str, fields: dict[str, Any]) -> UpstreamRequest:
        """The request with these fields. A model name is added unless the path has it."""
        path = self.rule.path
        if "{model}" in path:
            fields.pop("model", None)
            path = path.replace("{model}", quote(model, safe=""))
        else:
            fields["model"] = model
        return UpstreamRequest(path, _encode(fields), JSON_HEADERS)


def _as_tuple(texts: str | list[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"),)
_STREAM_HEADERS: Final[Headers] = (("Content-Type", ResponseStyle().content_type),)
FINISH_REASONS: Final = frozenset(
    {"stop", "length", "tool_calls", "content_filter", "function_call"}
)


_MAX_TOKENS: Final = "stopping.max_tokens"


def apply_model_settings(
    fields: dict[str, Any],
    settings: ModelSettings,
    client_params: Sequence[Param],
    worker_params: Sequence[Param],
) -> bool:
    """Add the model's defaults and its limit to a client's own fields.

    Returns False if they can't be written as they are, or the client asks for more than the limit:
    then the request must be translated.
    """
    if settings is NO_SETTINGS:
        return True
    sent = [row for row in client_params if not is_null(fields.get(row.wire))]
    paths = {row.field for row in sent}
    values = {path: one for path, one in settings.defaults.items() if path not in paths}
    if settings.max_tokens is not None:
        limit = settings.max_tokens
        requested = [
            (row, decode_json(fields[row.wire])) for row in sent if row.field == _MAX_TOKENS
        ]
        if values.get(_MAX_TOKENS, 0) > limit or any(
            row.exceeds_limit(value, limit) for row, value in requested
        ):
            return False
        if not requested:
            values.setdefault(_MAX_TOKENS, settings.max_tokens)
    rows = {row.field: row for row in reversed(worker_params)}
    for path, value in values.items():
        row = rows.get(path)
        if row is None or row.loss_reason or clamp_value(row, value) != value:
            return False
        fields[row.wire] = value
    return True


def is_null(raw: Any) -> bool:
    """Whether a field is absent or null."""
    return raw is None or raw == b"null"


class PassthroughResponse(Struct, frozen=True):
    """How a response is written to the client.

    ``build_headers`` adds those of any response to the first ones. ``names`` are the values of keys
    of a unary response.
    """

    build_headers: Callable[[Headers], Headers]
    create_encoder: EncoderFactory
    names: Mapping[str, str]


class PassthroughRules:
    """Prepares pass-through requests for workers of one protocol and profile.

    ``rules`` are by operation; what has no rule is translated. ``create_decoder`` makes the decoder
    of responses; for ``reads_text`` see ``StandardUnaryReader``. ``finish_reasons`` are the words
    of the protocol; ``unary_headers`` and ``stream_headers`` are the first headers of responses.
    """

    def __init__(
        self,
        rules: Mapping[str, PassthroughRule],
        *,
        create_decoder: "DecoderFactory | None" = None,
        reads_text: bool = True,
        finish_reasons: frozenset[str] = FINISH_REASONS,
        unary_headers: Headers = JSON_HEADERS,
        stream_headers: Headers = _STREAM_HEADERS,
    ) -> None:
        self._rules = rules
        self._compile_rule = cache(lambda name: _CompiledRule.compile(rules[name]))
        """Compiled when a request needs it: most listeners and workers use few of their rules."""
        self._create_decoder = create_decoder or create_passthrough_decoder
        self._reads_text = reads_text
        self._finish_reasons = finish_reasons
        self._unary_headers = unary_headers
        self._stream_headers = stream_headers

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def prepare_passthrough(
        self,
        name: str,
        call: ClientRequest,
        about: ResponseContext,
        response: PassthroughResponse,
        *,
        stream: bool | None = None,
        timeout: float | None = None,
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``; ``name`` is that of the rule.

        ``stream`` overrides the body's; ``timeout`` is not in the body.
        """
        if name not in self._rules:
            return None
        compiled = self._compile_rule(name)
        try:
            fields = pop_fields(call)
            body = compiled.decode_body(call.body)
            known: AbstractSet[str] = fields.keys()
            if not known <= compiled.decoded_fields:
                check_unicode(call.body)
                if not _can_forward(compiled.rule, known - compiled.known_fields):
                    return None
                known &= compiled.known_fields
            if "stream_options" in known and body.stream is not True:
                return None
            if not compiled.rule.is_valid_body(body, known):
                return None
            if stream is None:
                stream = "stream" in known and body.stream
            request = compiled.build_request(body, about, stream=stream, timeout=timeout)
            rule = compiled.rule
            if stream and about.settings.stream_usage and "stream_options" in rule.field_types:
                _request_usage(fields)
            if (
                about.settings is not NO_SETTINGS
                and isinstance(request, GenerationRequest)
                and not apply_model_settings(
                    fields, about.settings, rule.client_params, rule.worker_params
                )
            ):
                return None
        except (*JSON_ERRORS, ClientError):
            return None
        # Offsets of log probabilities, and choices that never end, need every event.
        needs_events = ("n" in known and body.n > 1) or ("prompt" in known and "logprobs" in known)
        return PassthroughRequest(
            request,
            compiled.build_upstream_request(about.backend_model, fields),
            partial(
                response.build_headers, self._stream_headers if stream else self._unary_headers
            ),
            partial(self._create_reader, request, response, forwards=not needs_events),
            partial(response.create_encoder, request) if stream else None,
            encodes_events=stream is True,
        )

    def _create_reader(
        self, request: Request, response: PassthroughResponse, *, forwards: bool
    ) -> PassthroughReader:
        if not request.stream:
            has_one_text = type(request) is GenerationRequest and request.choice_count == 1
            return StandardUnaryReader(
                request,
                self._create_decoder,
                NameReplacer(response.names),
                self._finish_reasons,
                self._reads_text and has_one_text,
            )
        return StreamPassthroughReader(
            self._create_decoder(request),
            partial(response.create_encoder, request),
            forwards=forwards,
        )


def _request_usage(fields: dict[str, Any]) -> None:
    """Have the worker report the usage of a stream, for accounting.

    A client that did not ask for it does not get it: the event is decoded, and the encoder, which
    knows what the client asked for, does not write it.
    """
    options = fields.get("stream_options")
    given = {} if options is None else decode_json(options)
    fields["stream_options"] = {**given, "include_usage": True}


def _can_forward(rule: PassthroughRule, unknown_fields: AbstractSet[str]) -> bool:
    """Whether workers may get these unknown fields."""
    return rule.gateway_fields.isdisjoint(unknown_fields) and all(
        map(rule.forwards_field, unknown_fields)
    )


def create_passthrough_decoder(
    request: Request,
    complaint: Callable[[bytes], None] = raise_worker_error,
    *,
    skims: bool = False,
    source: str = "",
) -> "UnaryDecoder":
    """A ``DecoderFactory`` for responses in the manner of OpenAI."""
    if not isinstance(request, EmbeddingRequest):
        return GenerationDecoder(request, complaint=complaint, skips_logprobs=skims, source=source)
    if skims:
        return EmbeddingCounter(request, complaint)
    return EmbeddingDecoder(request, complaint, source)
