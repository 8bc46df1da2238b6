"""The dialect itself: paths, and what answers each of them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.core.catalog import Catalog, ModelInfo
from gateway.core.errors import GatewayError
from gateway.core.loss import Loss
from gateway.core.ports import (
    About,
    Call,
    Decoder,
    Description,
    Dialect,
    Encoder,
    Endpoint,
    Envelope,
    Headers,
    Relay,
    Reply,
    Standing,
    WireRequest,
)
from gateway.core.types import EmbedRequest, Request
from protocols import params
from protocols.body import fields_of, unchecked_fields, value
from protocols.openai import described, errors, faults, standing
from protocols.openai.answers import ChatEncoder, Style, TextEncoder
from protocols.openai.chunks import heading
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.profiles import PROFILES
from protocols.openai.reading import given, wrong_type
from protocols.openai.relay import openai_relays
from protocols.openai.requests import (
    READING,
    Reading,
    read_chat,
    read_completion,
    read_embedding,
    read_model,
)
from protocols.openai.vectors import VectorDecoder, VectorEncoder
from protocols.openai.worker import Writer
from protocols.schema import Schema, answer, array, record, ref, refusals, structs

_encode = msgspec.json.Encoder().encode

_NAMES: Final[Mapping[str, str]] = {
    "tools": "tools",
    "tool_choice": "tool_choice",
    "parallel_tools": "parallel_tool_calls",
    "output": "response_format",
    "stopping.max_tokens": "max_tokens",
    "sampling.logit_bias": "logit_bias",
    "sampling.beam_width": "use_beam_search",
    "templating.arguments": "chat_template_kwargs",
    "logprobs.top": "top_logprobs",
    "logprobs.prompt": "logprobs",
}
"""What is no scalar of its own."""

_VERSION: Final[Headers] = (("openai-version", "2020-10-01"),)
"""On every answer and refusal, as clients' logs and proxies look for it."""


_WAITS: Final = "x-stainless-read-timeout"

_Name = Annotated[str, Meta(min_length=1)]


class _Peek(Struct):
    model: _Name
    stream: bool | None = None
    request_id: str | None = None


_peek = msgspec.json.Decoder(_Peek).decode
_name = msgspec.json.Decoder(_Name).decode
_flag = msgspec.json.Decoder(bool | None).decode


def endpoints(prefix: str) -> tuple[Endpoint, ...]:
    """The paths under ``prefix``, such as ``/v1``."""
    return (
        Endpoint("POST", f"{prefix}/chat/completions", operation="chat"),
        Endpoint("POST", f"{prefix}/completions", operation="completion"),
        Endpoint("POST", f"{prefix}/embeddings", operation="embedding"),
        Endpoint("GET", f"{prefix}/models", "inform", "models"),
        Endpoint("GET", f"{prefix}/models/{{model}}", "inform", "model"),
    )


def _any_peek(call: Call, client_id: str | None) -> Envelope:
    """The same as ``OpenAI.peek``, of any body."""
    try:
        found = _peek(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _careful_peek(call, client_id)
    return Envelope(found.model, None, found.stream is True, client_id or found.request_id)


def _careful_peek(call: Call, client_id: str | None) -> Envelope:
    """The same, to find out what exactly is wrong."""
    fields = fields_of(call)
    model = read_model(fields)
    raw = given(fields.get("stream"))
    stream = value(raw) if raw is not None else False
    if not isinstance(stream, bool):
        raise wrong_type("stream", "a boolean", stream)
    return Envelope(model, None, stream, client_id)


def timeout_in(headers: Mapping[str, str]) -> float | None:
    """How many seconds the client will wait, as its library tells; a hint, so never wrong."""
    told = headers.get(_WAITS)
    if told is None:
        return None
    try:
        seconds = float(told)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None  # noqa: PLR2004 - and no infinity


class OpenAI:
    """OpenAI's API: conversations, completions, embeddings and the list of models.

    ``profile`` says what the workers are. ``prefix`` stands before every path. ``unknown``: what
    becomes of fields that the dialect does not have. ``powers`` lets clients reach what steers a
    worker itself: a chat template of their own, priorities, caches.
    """

    name: str = "openai"
    profiles: ClassVar[tuple[str, ...]] = tuple(PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        profile: str | None = None,
        *,
        prefix: str = "/v1",
        unknown: Literal["forward", "ignore", "reject"] = "forward",
        powers: bool = False,
    ) -> None:
        chosen = PROFILES.get(profile or self.profiles[0])
        if chosen is None:
            known = ", ".join(self.profiles)
            raise ValueError(f"there is no profile {profile!r} of {self.name}; known: {known}")
        self.path_prefixes: tuple[str, ...] = (prefix,)
        self.endpoints: tuple[Endpoint, ...] = endpoints(prefix)
        self.health_request = WireRequest(f"{prefix}/models", b"", method="GET")
        self._has_default_rules = chosen.request_rules is READING
        self._allows_passthrough = self._has_default_rules and unknown == "forward"
        """Whether its clients' own bytes are for any worker: they mean what OpenAI's would."""
        self._request_rules: Reading = msgspec.structs.replace(
            chosen.request_rules, unknown_fields=unknown
        )
        self._response_style = Style(headers=_VERSION, elapsed_header="openai-processing-ms")
        self._request_writer = Writer(chosen, prefix, powers=powers)
        self._passthrough_rules = openai_relays(
            chosen, prefix, self._request_writer.forwards_field, READING
        )
        self._field_names: Mapping[str, Mapping[str, str]] = {
            "chat": {**params.names(self._request_rules.chat), **_NAMES},
            "completion": {**_NAMES, **params.names(self._request_rules.completion)},
            "embedding": params.names(self._request_rules.embedding),
        }
        self.param_tables: Mapping[str, tuple[params.Param, ...]] = {
            "chat": self._request_rules.chat,
            "completion": self._request_rules.completion,
            "embedding": self._request_rules.embedding,
        }

    # --- towards clients --------------------------------------------------------------------------

    def peek(self, call: Call) -> Envelope:
        """See ``gateway.core.ports.Dialect``."""
        client_id = call.headers.get("x-client-request-id")
        fields = unchecked_fields(call)
        if fields is None or "request_id" in fields:
            return _any_peek(call, client_id)
        try:
            model = _name(fields["model"])
            stream = "stream" in fields and _flag(fields["stream"]) is True
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _any_peek(call, client_id)
        return Envelope(model, None, stream, client_id or None)

    def decode_request(self, call: Call, model: ModelInfo | None = None) -> Request:
        """See ``gateway.core.ports.Dialect``."""
        del model
        client_id = call.headers.get("x-client-request-id")
        timeout = timeout_in(call.headers)
        variant = call.endpoint.operation
        fields = fields_of(call)
        match variant:
            case "chat":
                return read_chat(fields, self._request_rules, client_id=client_id, timeout=timeout)
            case "completion":
                return read_completion(
                    fields, self._request_rules, client_id=client_id, timeout=timeout
                )
            case _:
                return read_embedding(
                    fields, self._request_rules, client_id=client_id, timeout=timeout
                )

    def create_encoder(self, call: Call, request: Request, about: About) -> Encoder:
        """See ``gateway.core.ports.Dialect``."""
        del call
        if isinstance(request, EmbedRequest):
            return VectorEncoder(self._response_style, request, about)
        if request.kind == "chat":
            return ChatEncoder(self._response_style, request, about)
        return TextEncoder(self._response_style, request, about)

    def encode_error(self, error: GatewayError, call: Call | None) -> Reply:
        """See ``gateway.core.ports.Dialect``."""
        del call
        reply = errors.refuse(error)
        return msgspec.structs.replace(reply, headers=reply.headers + _VERSION)

    def rate_limit_headers(self, requests: Standing | None, tokens: Standing | None) -> Headers:
        """See ``gateway.core.ports.Metering``."""
        return standing.headers(requests, tokens)

    def handle_info_request(self, call: Call, catalog: Catalog) -> Reply:
        """See ``gateway.core.ports.Dialect``."""
        if call.endpoint.operation == "models":
            cards = [model_card(model, model.name) for model in catalog.list_models()]
            return _listed({"object": "list", "data": cards})
        name = call.path_params["model"]
        return _listed(model_card(catalog.find_model(name), name))

    def field_names(self, call: Call) -> Mapping[str, str]:
        """See ``gateway.core.ports.Dialect``."""
        return self._field_names.get(call.endpoint.operation, {})

    def openapi_fragment(self) -> Description:
        """See ``gateway.core.ports.Described``."""
        error = ref("ErrorAnswer")
        refused = refusals(errors.STATUSES, error)
        models: dict[str, Schema] = {"object": {"const": "list"}, "data": array(ref("ModelCard"))}
        return Description(
            {
                **described.operations(self._request_rules, refused, error),
                "models": {
                    "summary": "List the models.",
                    "responses": {"200": answer(record(models, *models)), **refused},
                },
                "model": {
                    "summary": "Tell of one model.",
                    "responses": {"200": answer(ref("ModelCard")), **refused},
                },
            },
            {
                **described.answers(self._response_style),
                **structs(ModelCard, errors.ErrorBody),
                "ErrorAnswer": record({"error": ref("ErrorBody")}, "error"),
            },
        )

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``."""
        known = self._remove_foreign_extra(request)
        told = self._request_writer.unsupported_parameters(known, names)
        if known is request:
            return told
        return told + tuple(Loss(name, "dropped") for name in request.extra)

    def encode_request(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._request_writer.encode_request(self._remove_foreign_extra(request))

    def _remove_foreign_extra(self, request: Request) -> Request:
        """Without what only another dialect's workers may know."""
        if not request.extra or request.source in ("", self.name):
            return request
        return msgspec.structs.replace(request, extra={})

    def prepare_passthrough(self, client: Dialect, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relaying``."""
        if not isinstance(client, OpenAI) or not client._allows_passthrough:  # noqa: SLF001
            return None
        headers = heading(client._response_style, about, ())  # noqa: SLF001
        timeout = timeout_in(call.headers) if _WAITS in call.headers else None
        return self._passthrough_rules.prepare_passthrough(
            call.endpoint.operation, call, about, headers, timeout=timeout
        )

    def create_decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        if isinstance(request, EmbedRequest):
            return VectorDecoder(request)
        return AnswerDecoder(request, echoes=self._request_writer.expects_echo(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``gateway.core.ports.WorkerDialect``."""
        return faults.read_error(status, headers, body)


def _listed(body: Any) -> Reply:
    return Reply(200, _encode(body), (("Content-Type", "application/json"), *_VERSION))


class ModelCard(Struct):
    """A model in the list of models; the last key is vLLM's, and load generators read it."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "interlingua"
    max_model_len: int | UnsetType = UNSET


def model_card(model: ModelInfo, name: str) -> ModelCard:
    """A model under the ``name`` by which it was asked for."""
    length = UNSET if model.context_length is None else model.context_length
    return ModelCard(name, model.created, max_model_len=length)
