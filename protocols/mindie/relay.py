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

from gateway.core.errors import Malformed
from gateway.core.ports import About, Call, Decoder, Encoder, Headers, Passage, Relay, WireRequest
from gateway.core.types import Event, GenerateRequest, Text, Usage, Want
from protocols.body import read_object
from protocols.mindie import chunks, errors
from protocols.mindie.checks import rows
from protocols.mindie.decoder import TalkDecoder, TextDecoder
from protocols.mindie.profiles import Setup
from protocols.mindie.requests import PRIORITY_STEP
from protocols.mindie.tables import COMPLETION, INT32
from protocols.mindie.takes import Takes, takes
from protocols.mindie.texts import CONTENT_TYPE, TextEncoder, headers_of
from protocols.mindie.worker import Chats
from protocols.openai.passage import passage
from protocols.openai.relay import (
    FLAG,
    JSON,
    PLAIN_MESSAGES,
    TOOLS,
    Form,
    Relays,
    checker,
    fits_chat,
    names,
    up_to,
)
from protocols.openai.worker import Writer

_encode = msgspec.json.Encoder().encode

_OURS: Final = frozenset({"n", "best_of", "use_beam_search", "stream"})
"""What is judged together with something else, or read apart."""
_TEXT_FIELDS: Final = {"text_input", "parameters"}
_EVENTS: Final[Headers] = (("Content-Type", CONTENT_TYPE),)
_NOT_IN_ID: Final = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST: Final = 200
_STOP = Annotated[str, Meta(min_length=1, max_length=512)]
_STOPS: Final[Any] = _STOP | Annotated[list[_STOP], Meta(max_length=32)] | UnsetType
"""Within every limit, however many units the characters have."""
_PROMPT = Annotated[str, Meta(min_length=1)]
_PARAMETERS: Final[Mapping[str, Any]] = {
    "details": bool,
    "priority": Annotated[int, Meta(ge=1, le=5)] | UnsetType,
    "timeout": Annotated[int, Meta(ge=1, le=65535)] | UnsetType,
    "batch_size": Annotated[int, Meta(ge=1, le=INT32)] | UnsetType,
}

_prompt = msgspec.json.Decoder(_PROMPT).decode


class _Tally(Struct):
    """How many tokens were passed on."""

    tokens: int = 0


class ServerRelays:
    """Makes relays for one kind of server."""

    def __init__(self, setup: Setup, chats: Chats) -> None:
        """``chats``: conversations go as messages, or else are made into text."""
        self._config = setup
        self._early = setup.profile.early
        taken = takes(setup)
        self._openai_passthrough = Relays(
            _forms(setup, taken, chats),
            read=self._build_openai_decoder,
            whole=errors.JSON,
            stream=_EVENTS,
        )
        self._text_param_names = {param.wire for param in rows(setup.profile.text_params)}
        table = rows(setup.profile.text_params)
        self._parameters_checker = check = checker(
            Form(
                path="",
                field_types=_PARAMETERS,
                worker_params=taken.text_params,
                client_params=table,
            )
        )
        self._checked_names = names(check)
        self._request_numbers = itertools.count()

    def prepare_passthrough(self, client: Setup, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relaying``; ``client`` is the setup that the call came by."""
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

    def _is_same_server(self, client: Setup) -> bool:
        mine = self._config
        return (
            client.profile is mine.profile
            and client.vllm_validator == mine.vllm_validator
            and client.max_iter_times is None
            and mine.max_iter_times is None
        )

    def _build_unique_request_id(self, about: About) -> str:
        """A request's name that no other has: an exchange's may be its client's choice."""
        shown = _NOT_IN_ID.sub("_", about.id)[:_LONGEST]
        return f"{shown}-{about.created:x}-{next(self._request_numbers):x}"

    # --- in OpenAI's manner -----------------------------------------------------------------------

    def _prepare_openai(self, variant: str, call: Call, about: About, name: str) -> Relay | None:
        headers = headers_of(call)
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
        form = chunks.Form(is_chat=variant == "chat", early=self._early)
        return replace(
            relay,
            request=request,
            upstream_request=replace(
                relay.upstream_request, headers=(*relay.upstream_request.headers, ("req-id", name))
            ),
            create_encoder=lambda: chunks.Encoder(
                form, cast("GenerateRequest", request), about, headers
            ),
        )

    def _build_openai_decoder(self, request: GenerateRequest) -> Decoder:
        return TalkDecoder(request, early=self._early)

    # --- generate ---------------------------------------------------------------------------------

    def _prepare_generate(
        self, call: Call, about: About, name: str, *, stream: bool
    ) -> Relay | None:
        try:
            fields = read_object(call.body)
            if fields.keys() != _TEXT_FIELDS:
                return None
            prompt = _prompt(fields["text_input"])
            parameters = read_object(bytes(fields["parameters"]))
            body = self._parameters_checker.decode(fields["parameters"])
        except (Malformed, msgspec.DecodeError):
            return None
        said = parameters.keys() & self._checked_names
        if not (body.details and self._text_param_names.isdisjoint(parameters.keys() - said)):
            return None
        fields["parameters"] = Raw(_encode(parameters))
        request = GenerateRequest(
            model=about.backend_model,
            kind="completion",
            prompts=(prompt,),
            stream=stream,
            client_id=name,
            priority=(body.priority - 1) * PRIORITY_STEP if "priority" in said else None,
            timeout=float(body.timeout) if "timeout" in said else None,
            want=Want(details=True),
        )
        way = "generate_stream" if stream else "generate"
        path = f"/v2/models/{quote(about.backend_model, safe='')}/{way}"
        wire = WireRequest(path, _encode(fields | {"id": name}), JSON)
        return self._build_passthrough(wire, request, call, about)

    def _build_passthrough(
        self, wire: WireRequest, request: GenerateRequest, call: Call, about: About
    ) -> Relay:
        headers, tally = headers_of(call), _Tally()
        first = _EVENTS if request.stream else errors.JSON
        names = {"model_name": about.model, "id": request.client_id or ""}

        def passed() -> Passage:
            tally.tokens = 0
            decoder = _Counted(TextDecoder(request, early=self._early), tally)
            return passage(request, decoder, names, b"")

        def encoder() -> Encoder:
            made = TextEncoder(self._config.profile, request, about, headers)
            made.encode_events(
                [Usage(0, tally.tokens)]
            )  # told in the event that ends what is stopped
            return made

        return Relay(request, wire, lambda: first + headers, passed, encoder)


class _Counted:
    """A decoder whose tokens are counted."""

    def __init__(self, inner: Decoder, tally: _Tally) -> None:
        self._inner = inner
        self._counter = tally

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        return self._count_tokens(self._inner.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        return self._count_tokens(self._inner.close())

    def _count_tokens(self, events: Sequence[Event]) -> Sequence[Event]:
        self._counter.tokens += sum(one.tokens for one in events if isinstance(one, Text))
        return events


def _forms(setup: Setup, taken: Takes, chats: Chats) -> dict[str, Form]:
    """The endpoints in OpenAI's manner, as far as the workers have them."""
    forwards: Callable[[str], bool] = Writer(
        taken.openai_profile, "/v1", powers=False
    ).forwards_field
    later = {} if taken.early else {**TOOLS, "stop": _STOPS, "logprobs": FLAG}
    forms = {}
    if chats == "messages":
        top = {} if taken.early else {"top_logprobs": up_to(20)}
        forms["chat"] = Form(
            path="/v1/chat/completions",
            field_types={"messages": PLAIN_MESSAGES, "stream": FLAG, **later, **top},
            worker_params=taken.openai_profile.chat,
            client_params=rows(setup.chat_params),
            gateway_fields=_OURS,
            forwards_field=forwards,
            is_valid_body=fits_chat,
        )
    if taken.has_completions:
        forms["completion"] = Form(
            path="/v1/completions",
            field_types={"prompt": _PROMPT, "stream": FLAG, "stop": _STOPS, "logprobs": up_to(5)},
            worker_params=taken.openai_profile.completion,
            client_params=rows(COMPLETION),
            gateway_fields=_OURS,
            forwards_field=forwards,
        )
    return forms
