"""Pass-through between servers of one release of MindIE. See ``protocols.passthrough``.

A generate request must already ask for details: without them, neither the end of a stream nor an
interrupted response can be detected. A request with a client's id is translated, since workers
must know it by the gateway's id, which cancels it.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

import msgspec
from msgspec import Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols.chat.field_types import OPTIONAL_BOOL, PLAIN_MESSAGES, TOOL_FIELDS, build_count_type
from protocols.chat.tools import is_valid_chat
from protocols.chat.upstream import RequestWriter
from protocols.core.errors import MalformedRequest
from protocols.core.events import Event, TextDelta, Usage
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder
from protocols.core.request import GenerationRequest, ResponseOptions
from protocols.json_body import read_object
from protocols.mindie import errors, openai_responses
from protocols.mindie.decoder import OpenAiStyleDecoder, TextDecoder
from protocols.mindie.params import COMPLETION_PARAMS, INT32_MAX, MindieConfig, list_params
from protocols.mindie.request_adaptation import MindieCapabilities, get_capabilities
from protocols.mindie.requests import PRIORITY_STEP
from protocols.mindie.responses import STREAM_CONTENT_TYPE, TextEncoder, build_headers
from protocols.mindie.upstream import ChatMode
from protocols.passthrough import (
    JSON_HEADERS,
    PassthroughResponse,
    PassthroughRule,
    PassthroughRules,
    build_body_decoder,
    list_body_fields,
)
from protocols.passthrough_readers import (
    NameReplacer,
    RunningCountCorrection,
    UnaryPassthroughReader,
    VerbatimStreamReader,
)

_encode = msgspec.json.Encoder().encode

_GATEWAY_CHECKED_FIELDS: Final = frozenset({"n", "best_of", "use_beam_search", "stream"})
"""Fields that are checked together with others, or read separately."""
_GENERATE_FIELDS: Final = {"text_input", "parameters"}
_FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls"})
_EARLY_FINISH_REASONS: Final = frozenset({"eos_token", "length"})
_EVENT_STREAM_HEADERS: Final[Headers] = (("Content-Type", STREAM_CONTENT_TYPE),)
_INVALID_REQUEST_ID_CHARS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_PREFIX_LENGTH: Final = 200
_StopString = Annotated[str, Meta(min_length=1, max_length=512)]
_STOP_FIELD_TYPE: Final[Any] = (
    _StopString | Annotated[list[_StopString], Meta(max_length=32)] | UnsetType
)
"""The text length that is within every limit, with two units for each character."""
_PromptString = Annotated[str, Meta(min_length=1)]
_PARAMETER_TYPES: Final[Mapping[str, Any]] = {
    "details": bool,
    "priority": Annotated[int, Meta(ge=1, le=5)] | UnsetType,
    "timeout": Annotated[int, Meta(ge=1, le=65535)] | UnsetType,
    "batch_size": Annotated[int, Meta(ge=1, le=INT32_MAX)] | UnsetType,
}

_COUNT_KEY: Final = "generated_tokens"

_decode_prompt = JsonDecoder(_PromptString).decode


class _TokenCounter(Struct):
    """Counts the tokens that were passed on."""

    tokens: int = 0


class MindiePassthrough:
    """Prepares pass-through to one kind of worker."""

    def __init__(self, setup: MindieConfig, chats: ChatMode) -> None:
        """``chats``: chat requests go as messages; otherwise they are rendered to text."""
        self._config = setup
        self._early = setup.profile.early
        taken = get_capabilities(setup)
        self._openai_passthrough = PassthroughRules(
            _build_endpoint_rules(setup, taken, chats),
            create_decoder=self._build_openai_decoder,
            reads_text=False,
            finish_reasons=_EARLY_FINISH_REASONS if self._early else _FINISH_REASONS,
            unary_headers=errors.JSON_HEADERS,
            stream_headers=_EVENT_STREAM_HEADERS,
        )
        self._text_param_names = {param.wire for param in list_params(setup.profile.text_params)}
        table = list_params(setup.profile.text_params)
        self._parameters_checker = check = build_body_decoder(
            PassthroughRule(
                path="",
                field_types=_PARAMETER_TYPES,
                worker_params=taken.text_params,
                client_params=table,
            )
        )
        self._checked_names = list_body_fields(check)
        self._request_numbers = itertools.count()

    def prepare_passthrough(
        self, client: MindieConfig, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``protocols.core.interfaces.SupportsPassthrough``. ``client`` has its setup."""
        if not self._is_same_server(client) or "req-id" in call.headers:
            return None
        if len(call.body) > self._config.profile.max_text_length:
            return None
        name = self._build_unique_request_id(about)
        match call.endpoint.operation:
            case "chat" | "completion" as variant:
                return self._prepare_openai(variant, call, about, name)
            case "text" | "text_stream" as variant if client.templating.mode == "raw":
                return self._prepare_generate(call, about, name, stream=variant == "text_stream")
            case _:
                return None

    def _is_same_server(self, client: MindieConfig) -> bool:
        mine = self._config
        return (
            client.profile is mine.profile
            and client.vllm_validator == mine.vllm_validator
            and client.max_iter_times is None
            and mine.max_iter_times is None
        )

    def _build_unique_request_id(self, about: ResponseContext) -> str:
        """A unique request id: the id of the client request may be chosen by the client."""
        shown = _INVALID_REQUEST_ID_CHARS.sub("_", about.id)[:_MAX_ID_PREFIX_LENGTH]
        return f"{shown}-{about.created:x}-{next(self._request_numbers):x}"

    # --- OpenAI style -----------------------------------------------------------------------------

    def _prepare_openai(
        self, variant: str, call: ClientRequest, about: ResponseContext, name: str
    ) -> PassthroughRequest | None:
        headers = build_headers(call)
        style = openai_responses.ResponseVariant(is_chat=variant == "chat", early=self._early)

        def create_encoder(request: GenerationRequest) -> ResponseEncoder:
            named = replace(request, client_id=name)
            return openai_responses.create_openai_style_encoder(style, named, about, headers)

        passthrough = self._openai_passthrough.prepare_passthrough(
            variant,
            call,
            about,
            PassthroughResponse(
                lambda first: first + headers,
                create_encoder,
                {"model": about.model, "id": name},
            ),
        )
        if passthrough is None:
            return None
        request = replace(cast("GenerationRequest", passthrough.request), client_id=name)
        wire = passthrough.upstream_request
        return replace(
            passthrough,
            request=request,
            upstream_request=replace(wire, headers=(*wire.headers, ("req-id", name))),
            create_encoder=lambda: create_encoder(request),
        )

    def _build_openai_decoder(
        self, request: GenerationRequest, *, skims: bool = False
    ) -> OpenAiStyleDecoder:
        del skims
        return OpenAiStyleDecoder(request, early=self._early)

    # --- generate ---------------------------------------------------------------------------------

    def _prepare_generate(
        self, call: ClientRequest, about: ResponseContext, name: str, *, stream: bool
    ) -> PassthroughRequest | None:
        try:
            fields = read_object(call.body)
            if fields.keys() != _GENERATE_FIELDS:
                return None
            prompt = _decode_prompt(fields["text_input"])
            parameters = read_object(bytes(fields["parameters"]))
            body = self._parameters_checker.decode(fields["parameters"])
        except (MalformedRequest, msgspec.DecodeError):
            return None
        checked = parameters.keys() & self._checked_names
        if not (body.details and self._text_param_names.isdisjoint(parameters.keys() - checked)):
            return None
        fields["parameters"] = Raw(_encode(parameters))
        request = GenerationRequest(
            model=about.backend_model,
            kind="completion",
            prompts=(prompt,),
            stream=stream,
            client_id=name,
            priority=(body.priority - 1) * PRIORITY_STEP if "priority" in checked else None,
            timeout=float(body.timeout) if "timeout" in checked else None,
            response_options=ResponseOptions(details=True),
            context_length=about.context_length,
        )
        way = "generate_stream" if stream else "generate"
        path = f"/v2/models/{quote(about.backend_model, safe='')}/{way}"
        wire = UpstreamRequest(path, _encode(fields | {"id": name}), JSON_HEADERS)
        return self._build_passthrough(wire, request, call, about)

    def _build_passthrough(
        self,
        wire: UpstreamRequest,
        request: GenerationRequest,
        call: ClientRequest,
        about: ResponseContext,
    ) -> PassthroughRequest:
        headers, counter = build_headers(call), _TokenCounter()
        first = _EVENT_STREAM_HEADERS if request.stream else errors.JSON_HEADERS
        names = {"model_name": about.model, "id": request.client_id or ""}

        def create_reader() -> PassthroughReader:
            counter.tokens = 0
            decoder = TextDecoder(request, early=self._early)
            counting = _TokenCountingDecoder(decoder, counter)
            if not request.stream:
                return UnaryPassthroughReader(counting, NameReplacer(names))

            counts = RunningCountCorrection(_COUNT_KEY, lambda: decoder.has_ignored_counts)
            return VerbatimStreamReader(counting, NameReplacer(names), counts)

        def create_encoder() -> ResponseEncoder:
            encoder = TextEncoder(self._config.profile, request, about, headers)
            # Reported in the event that ends a cancelled request.
            encoder.encode_events([Usage(0, counter.tokens)])
            return encoder

        return PassthroughRequest(
            request, wire, lambda: first + headers, create_reader, create_encoder
        )


class _TokenCountingDecoder:
    """A decoder that counts tokens."""

    def __init__(self, decoder: ResponseDecoder, counter: _TokenCounter) -> None:
        self._decoder = decoder
        self._counter = counter

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._decoder.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._decoder.close())

    def _count_tokens(self, events: Sequence[Event]) -> Sequence[Event]:
        self._counter.tokens += sum(one.tokens for one in events if isinstance(one, TextDelta))
        return events


def _build_endpoint_rules(
    setup: MindieConfig, taken: MindieCapabilities, chats: ChatMode
) -> dict[str, PassthroughRule]:
    """The OpenAI-style endpoints that the workers have."""
    forwards: Callable[[str], bool] = RequestWriter(
        taken.openai_profile, "/v1", powers=False
    ).forwards_field
    later = (
        {} if taken.early else {**TOOL_FIELDS, "stop": _STOP_FIELD_TYPE, "logprobs": OPTIONAL_BOOL}
    )
    forms = {}
    if chats == "messages":
        top = {} if taken.early else {"top_logprobs": build_count_type(20)}
        forms["chat"] = PassthroughRule(
            path="/v1/chat/completions",
            field_types={"messages": PLAIN_MESSAGES, "stream": OPTIONAL_BOOL, **later, **top},
            worker_params=taken.openai_profile.chat,
            client_params=list_params(setup.chat_params),
            gateway_fields=_GATEWAY_CHECKED_FIELDS,
            forwards_field=forwards,
            is_valid_body=is_valid_chat,
        )
    if taken.has_completions:
        forms["completion"] = PassthroughRule(
            path="/v1/completions",
            field_types={
                "prompt": _PromptString,
                "stream": OPTIONAL_BOOL,
                "stop": _STOP_FIELD_TYPE,
                "logprobs": build_count_type(5),
            },
            worker_params=taken.openai_profile.completion,
            client_params=list_params(COMPLETION_PARAMS),
            gateway_fields=_GATEWAY_CHECKED_FIELDS,
            forwards_field=forwards,
        )
    return forms
