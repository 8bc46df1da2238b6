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
        self._setup = setup
        self._early = setup.profile.early
        taken = takes(setup)
        self._relays = Relays(
            _forms(setup, taken, chats),
            read=self._talk,
            whole=errors.JSON,
            stream=_EVENTS,
        )
        self._wires = {param.wire for param in rows(setup.profile.text)}
        table = rows(setup.profile.text)
        self._parameters = check = checker(
            Form(path="", shapes=_PARAMETERS, worker=taken.text, client=table)
        )
        self._known = names(check)
        self._numbers = itertools.count()

    def relay(self, client: Setup, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relaying``; ``client`` is the setup that the call came by."""
        if not self._alike(client) or "req-id" in call.headers:
            return None
        if len(call.body) > self._setup.profile.limit:
            return None
        name = self._name(about)
        match call.endpoint.variant:
            case "chat" | "completion" as variant if variant in self._relays:
                return self._said(variant, call, about, name)
            case "text" | "text_stream" as variant if client.templating.mode == "raw":
                return self._text(call, about, name, stream=variant == "text_stream")
            case _:
                return None

    def _alike(self, client: Setup) -> bool:
        mine = self._setup
        return (
            client.profile is mine.profile
            and client.vllm_validator == mine.vllm_validator
            and client.max_iter_times is None
            and mine.max_iter_times is None
        )

    def _name(self, about: About) -> str:
        """A request's name that no other has: an exchange's may be its client's choice."""
        shown = _NOT_IN_ID.sub("_", about.id)[:_LONGEST]
        return f"{shown}-{about.created:x}-{next(self._numbers):x}"

    # --- in OpenAI's manner -----------------------------------------------------------------------

    def _said(self, variant: str, call: Call, about: About, name: str) -> Relay | None:
        headers = headers_of(call)
        relay = self._relays.relay(
            variant,
            call,
            about,
            lambda first: first + headers,
            names={"model": about.model, "id": name},
        )
        if relay is None:
            return None

        request = replace(relay.request, client_id=name)
        form = chunks.Form(chat=variant == "chat", early=self._early)
        return replace(
            relay,
            request=request,
            wire=replace(relay.wire, headers=(*relay.wire.headers, ("req-id", name))),
            encoder=lambda: chunks.Encoder(form, cast("GenerateRequest", request), about, headers),
        )

    def _talk(self, request: GenerateRequest) -> Decoder:
        return TalkDecoder(request, early=self._early)

    # --- generate ---------------------------------------------------------------------------------

    def _text(self, call: Call, about: About, name: str, *, stream: bool) -> Relay | None:
        try:
            fields = read_object(call.body)
            if fields.keys() != _TEXT_FIELDS:
                return None
            prompt = _prompt(fields["text_input"])
            parameters = read_object(bytes(fields["parameters"]))
            body = self._parameters.decode(fields["parameters"])
        except (Malformed, msgspec.DecodeError):
            return None
        said = parameters.keys() & self._known
        if not (body.details and self._wires.isdisjoint(parameters.keys() - said)):
            return None
        fields["parameters"] = Raw(_encode(parameters))
        request = GenerateRequest(
            model=about.served_model,
            kind="completion",
            prompts=(prompt,),
            stream=stream,
            client_id=name,
            priority=(body.priority - 1) * PRIORITY_STEP if "priority" in said else None,
            timeout=float(body.timeout) if "timeout" in said else None,
            want=Want(details=True),
        )
        way = "generate_stream" if stream else "generate"
        path = f"/v2/models/{quote(about.served_model, safe='')}/{way}"
        wire = WireRequest(path, _encode(fields | {"id": name}), JSON)
        return self._relayed(wire, request, call, about)

    def _relayed(
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
            made = TextEncoder(self._setup.profile, request, about, headers)
            made.write([Usage(0, tally.tokens)])  # told in the event that ends what is stopped
            return made

        return Relay(request, wire, lambda: first + headers, passed, encoder)


class _Counted:
    """A decoder whose tokens are counted."""

    def __init__(self, inner: Decoder, tally: _Tally) -> None:
        self._inner = inner
        self._tally = tally

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        return self._noted(self._inner.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        return self._noted(self._inner.close())

    def _noted(self, events: Sequence[Event]) -> Sequence[Event]:
        self._tally.tokens += sum(one.tokens for one in events if isinstance(one, Text))
        return events


def _forms(setup: Setup, taken: Takes, chats: Chats) -> dict[str, Form]:
    """The endpoints in OpenAI's manner, as far as the workers have them."""
    forwards: Callable[[str], bool] = Writer(taken.talk, "/v1", powers=False).forwards
    later = {} if taken.early else {**TOOLS, "stop": _STOPS, "logprobs": FLAG}
    forms = {}
    if chats == "messages":
        top = {} if taken.early else {"top_logprobs": up_to(20)}
        forms["chat"] = Form(
            path="/v1/chat/completions",
            shapes={"messages": PLAIN_MESSAGES, "stream": FLAG, **later, **top},
            worker=taken.talk.chat,
            client=rows(setup.chat),
            ours=_OURS,
            forwards=forwards,
            fits=fits_chat,
        )
    if taken.completions:
        forms["completion"] = Form(
            path="/v1/completions",
            shapes={"prompt": _PROMPT, "stream": FLAG, "stop": _STOPS, "logprobs": up_to(5)},
            worker=taken.talk.completion,
            client=rows(COMPLETION),
            ours=_OURS,
            forwards=forwards,
        )
    return forms
