"""A client's own bytes for a server of the same release. See ``protocols.openai.relay``.

What goes to generate asks for details already: without them neither the end of a stream nor an
answer that broke off would show. A request that its client has named is translated, since workers
know requests by names of the gateway's own, by which they are stopped.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

import msgspec
from msgspec import Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols.body import read_object
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
from protocols.core.request import GenerationRequest, ResponseOptions
from protocols.mindie import chunks, errors
from protocols.mindie.checks import list_params
from protocols.mindie.decoder import OpenAiStyleDecoder, TextDecoder
from protocols.mindie.profiles import MindieConfig
from protocols.mindie.requests import PRIORITY_STEP
from protocols.mindie.tables import COMPLETION_PARAMS, INT32_MAX
from protocols.mindie.takes import MindieCapabilities, get_capabilities
from protocols.mindie.texts import STREAM_CONTENT_TYPE, TextEncoder, build_headers
from protocols.mindie.worker import ChatMode
from protocols.openai.passage import create_passthrough_reader
from protocols.openai.relay import (
    JSON_HEADERS,
    OPTIONAL_BOOL,
    PLAIN_MESSAGES,
    TOOL_FIELDS,
    PassthroughRule,
    PassthroughRules,
    build_body_decoder,
    build_count_type,
    is_valid_chat,
    list_body_fields,
)
from protocols.openai.worker import RequestWriter

_encode = msgspec.json.Encoder().encode

_GATEWAY_CHECKED_FIELDS: Final = frozenset({"n", "best_of", "use_beam_search", "stream"})
"""What is judged together with something else, or read apart."""
_GENERATE_FIELDS: Final = {"text_input", "parameters"}
_EVENT_STREAM_HEADERS: Final[Headers] = (("Content-Type", STREAM_CONTENT_TYPE),)
_INVALID_REQUEST_ID_CHARS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_PREFIX_LENGTH: Final = 200
_StopString = Annotated[str, Meta(min_length=1, max_length=512)]
_STOP_FIELD_TYPE: Final[Any] = (
    _StopString | Annotated[list[_StopString], Meta(max_length=32)] | UnsetType
)
"""Within every limit, however many units the characters have."""
_PromptString = Annotated[str, Meta(min_length=1)]
_PARAMETER_TYPES: Final[Mapping[str, Any]] = {
    "details": bool,
    "priority": Annotated[int, Meta(ge=1, le=5)] | UnsetType,
    "timeout": Annotated[int, Meta(ge=1, le=65535)] | UnsetType,
    "batch_size": Annotated[int, Meta(ge=1, le=INT32_MAX)] | UnsetType,
}

_decode_prompt = msgspec.json.Decoder(_PromptString).decode


class _TokenCounter(Struct):
    """How many tokens were passed on."""

    tokens: int = 0


class MindiePassthrough:
    """Makes relays for one kind of server."""

    def __init__(self, setup: MindieConfig, chats: ChatMode) -> None:
        """``chats``: conversations go as messages, or else are made into text."""
        self._config = setup
        self._early = setup.profile.early
        taken = get_capabilities(setup)
        self._openai_passthrough = PassthroughRules(
            _build_endpoint_rules(setup, taken, chats),
            read=self._build_openai_decoder,
            whole=errors.JSON_HEADERS,
            stream=_EVENT_STREAM_HEADERS,
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
        """See ``protocols.core.interfaces.SupportsPassthrough``; ``client`` is the setup that the call came by."""
        if not self._is_same_server(client) or "req-id" in call.headers:
            return None
        if len(call.body) > self._config.profile.max_text_length:
            return None
        name = self._build_unique_request_id(about)
        match call.endpoint.operation:
            case "chat" | "completion" as variant if variant in self._openai_passthrough:
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
        """A request's name that no other has: an exchange's may be its client's choice."""
        shown = _INVALID_REQUEST_ID_CHARS.sub("_", about.id)[:_MAX_ID_PREFIX_LENGTH]
        return f"{shown}-{about.created:x}-{next(self._request_numbers):x}"

    # --- in OpenAI's manner -----------------------------------------------------------------------

    def _prepare_openai(
        self, variant: str, call: ClientRequest, about: ResponseContext, name: str
    ) -> PassthroughRequest | None:
        headers = build_headers(call)
        relay = self._openai_passthrough.prepare_passthrough(
            variant,
            call,
            about,
            lambda first: first + headers,
            names={"model": about.model, "id": name},
        )
        if relay is None:
            return None

        request = replace(relay.request, client_id=name)
        form = chunks.ResponseVariant(is_chat=variant == "chat", early=self._early)
        return replace(
            relay,
            request=request,
            upstream_request=replace(
                relay.upstream_request, headers=(*relay.upstream_request.headers, ("req-id", name))
            ),
            create_encoder=lambda: chunks.OpenAiStyleEncoder(
                form, cast("GenerationRequest", request), about, headers
            ),
        )

    def _build_openai_decoder(self, request: GenerationRequest) -> ResponseDecoder:
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
        said = parameters.keys() & self._checked_names
        if not (body.details and self._text_param_names.isdisjoint(parameters.keys() - said)):
            return None
        fields["parameters"] = Raw(_encode(parameters))
        request = GenerationRequest(
            model=about.backend_model,
            kind="completion",
            prompts=(prompt,),
            stream=stream,
            client_id=name,
            priority=(body.priority - 1) * PRIORITY_STEP if "priority" in said else None,
            timeout=float(body.timeout) if "timeout" in said else None,
            want=ResponseOptions(details=True),
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
        headers, tally = build_headers(call), _TokenCounter()
        first = _EVENT_STREAM_HEADERS if request.stream else errors.JSON_HEADERS
        names = {"model_name": about.model, "id": request.client_id or ""}

        def passed() -> PassthroughReader:
            tally.tokens = 0
            decoder = _TokenCountingDecoder(TextDecoder(request, early=self._early), tally)
            return create_passthrough_reader(request, decoder, names, b"")

        def encoder() -> ResponseEncoder:
            made = TextEncoder(self._config.profile, request, about, headers)
            made.encode_events(
                [Usage(0, tally.tokens)]
            )  # told in the event that ends what is stopped
            return made

        return PassthroughRequest(request, wire, lambda: first + headers, passed, encoder)


class _TokenCountingDecoder:
    """A decoder whose tokens are counted."""

    def __init__(self, inner: ResponseDecoder, tally: _TokenCounter) -> None:
        self._inner = inner
        self._counter = tally

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._inner.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._count_tokens(self._inner.close())

    def _count_tokens(self, events: Sequence[Event]) -> Sequence[Event]:
        self._counter.tokens += sum(one.tokens for one in events if isinstance(one, TextDelta))
        return events


def _build_endpoint_rules(
    setup: MindieConfig, taken: MindieCapabilities, chats: ChatMode
) -> dict[str, PassthroughRule]:
    """The endpoints in OpenAI's manner, as far as the workers have them."""
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
