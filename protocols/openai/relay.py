"""A client's own bytes for a worker of the same dialect, and the worker's own bytes back.

A body goes this way when it is plainly right: every field is of a kind that both sides take, within
the ranges of both, and nothing in it is the gateway's to do. Whatever else there is goes the long
way, and gets its error, its loss or its emulation there.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from gateway.core.ports import About, Call, Decoder, Headers, Passage, Relay, WireRequest
from gateway.core.types import Request
from protocols.body import WRONG, check_text, take_fields
from protocols.openai.passage import Names, passage, reader
from protocols.openai.profiles import Profile
from protocols.openai.relayed import Kind, request_of
from protocols.openai.requests import Reading
from protocols.openai.style import Style
from protocols.params import Param

_encode = msgspec.json.Encoder().encode

JSON: Final[Headers] = (("Content-Type", "application/json"),)
_STREAM: Final[Headers] = (("Content-Type", Style().content_type),)
_OURS: Final = frozenset(
    {"echo", "best_of", "suffix", "priority", "use_beam_search", "stream", "modalities"}
)
"""What the gateway does itself, or reads with something else."""
_UNREAD: Final = frozenset({"tools"})
"""Fields of whose texts a shape leaves some unread."""
_INT64: Final = 2**63 - 1
_NON_EMPTY = Annotated[str, Meta(min_length=1)]


# --- shapes ---------------------------------------------------------------------------------------


class _TextPart(Struct, forbid_unknown_fields=True, tag="text"):
    text: str


class _Message(Struct, forbid_unknown_fields=True):
    """A turn that every worker takes as it is."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Meta(min_length=1)]


class _PlainMessage(Struct, forbid_unknown_fields=True):
    """The same without parts."""

    role: Literal["system", "user", "assistant"]
    content: _NON_EMPTY


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Function(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | UnsetType = UNSET
    parameters: dict[str, Raw] | UnsetType = UNSET


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


def up_to(most: int) -> Any:
    """The type of a count that may be absent."""
    return Annotated[int, Meta(ge=0, le=most)] | UnsetType


FLAG: Final[Any] = bool | UnsetType
MESSAGES: Final[Any] = Annotated[list[_Message], Meta(min_length=1)]
PLAIN_MESSAGES: Final[Any] = Annotated[list[_PlainMessage], Meta(min_length=1)]
PROMPTS: Final[Any] = str | Annotated[list[_NON_EMPTY], Meta(min_length=1, max_length=2048)]
INPUTS: Final[Any] = _NON_EMPTY | Annotated[list[_NON_EMPTY], Meta(min_length=1, max_length=2048)]
OPTIONS: Final[Any] = _StreamOptions | UnsetType
LABEL: Final[Any] = str | UnsetType
ENCODINGS: Final[Any] = Literal["float", "base64"] | UnsetType
TOOLS: Final[Mapping[str, Any]] = {
    "tools": Annotated[list[_Tool], Meta(min_length=1, max_length=128)] | UnsetType,
    "tool_choice": Literal["auto", "none", "required"] | UnsetType,
}
"""Fields that hold more than a table's row says, each with the type of what is plainly right."""

Fits = Callable[[Any, AbstractSet[str]], bool]
"""Whether the fields of a body, each of which is right, go together; and of which it says anything.
"""
_TOOLED: Final = frozenset({"tool_choice", "parallel_tool_calls"})
_RULED: Final = _TOOLED | {"top_logprobs", "max_completion_tokens"}


def fits_chat(body: Any, said: AbstractSet[str]) -> bool:
    """OpenAI's rules for conversations: a ``Fits``."""
    if _RULED.isdisjoint(said):
        return True
    if "top_logprobs" in said and body.logprobs is not True:
        return False
    if "max_tokens" in said and "max_completion_tokens" in said:
        return False  # which of the two wins is for us to say
    return "tools" in said or _TOOLED.isdisjoint(said)


def _fits_text(body: Any, said: AbstractSet[str]) -> bool:
    """Each worker has its own default of what is missing."""
    del body
    return "max_tokens" in said


class Form(Struct, frozen=True, kw_only=True):
    """Calls of one kind, and which of their bodies are plainly right.

    ``path`` is where a worker takes them, with ``{model}`` where its name is not in the body.
    ``shapes`` are the fields that are in neither table, by name; a type without UnsetType is
    needed. ``ours`` are rows that don't pass all the same; ``forwards`` says of a field that is in
    neither whether workers may have it.
    """

    path: str
    field_types: Mapping[str, Any]
    worker_params: Sequence[Param]
    client_params: Sequence[Param]
    gateway_fields: frozenset[str] = _OURS
    forwards_field: Callable[[str], bool] = lambda _: False
    is_valid_body: Fits = lambda _body, _said: True


def checker(form: Form) -> msgspec.json.Decoder[Any]:
    """Decodes a body into a Struct of its shapes, and of the rows that both sides have alike."""
    theirs = {param.wire: param for param in form.client_params}
    fields = dict(form.field_types)
    for param in form.worker_params:
        other = theirs.get(param.wire)
        if (
            other is None
            or other.field != param.field
            or param.wire in form.gateway_fields
            or param.reason
        ):
            continue
        if (kind := _kind(param, other)) is not None:
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


def names(check: msgspec.json.Decoder[Any]) -> frozenset[str]:
    """The fields that it knows."""
    return frozenset(check.type.__struct_fields__)


def _kind(worker: Param, client: Param) -> Any:
    """The type of what both rows take; None where that is for the long way to say."""
    match client.type:
        case "bool":
            return bool
        case "str":
            return Literal[client.choices] if client.choices else str
        case "int" | "strict int" | "float" as name:
            return _number(worker, client, float if name == "float" else int)
        case "strings":
            most = min((p.max_items for p in (worker, client) if p.max_items), default=None)
            return _NON_EMPTY | Annotated[list[_NON_EMPTY], Meta(max_length=most)]
        case _:
            return None


def _number(worker: Param, client: Param, kind: type) -> Any:
    low = max((p.low for p in (worker, client) if p.low is not None), default=None)
    high = min((p.high for p in (worker, client) if p.high is not None), default=None)
    if kind is int and high is not None:
        high = min(high, _INT64)
    above = any(p.above_low and p.low == low for p in (worker, client))
    below = any(p.below_high and p.high == high for p in (worker, client))
    bounds: dict[str, Any] = {"gt" if above else "ge": low, "lt" if below else "le": high}
    return Annotated[kind, Meta(**bounds)]


# --- relays ---------------------------------------------------------------------------------------


class _Way(Struct, frozen=True):
    """What is worked out of a form."""

    rule: Form
    kind: Kind
    decode_body: Callable[[bytes], Any]
    known_fields: frozenset[str]
    """The fields that it knows."""
    checked_fields: frozenset[str]
    """Those of which ``check`` reads every text."""
    is_model_in_path: bool
    """Whether the path names the model."""


def _way(form: Form) -> _Way:
    # What is said of the model is told to workers in their own way.
    check = checker(replace(form, field_types={"model": Any | UnsetType, **form.field_types}))
    kind: Kind = "completion"
    if "prompt" not in form.field_types:
        kind = "chat" if "messages" in form.field_types else "embedding"
    taken = names(check)
    return _Way(form, kind, check.decode, taken, taken - _UNREAD, "{model}" in form.path)


class Relays:
    """Makes relays for workers of one dialect and profile.

    ``forms`` are the kinds of calls; ``read`` makes what reads an answer beside its being passed
    on; ``whole`` and ``stream`` are the first headers of answers of either kind.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        *,
        read: Callable[[Any], Decoder] = reader,
        whole: Headers = JSON,
        stream: Headers = _STREAM,
    ) -> None:
        self._rules = {name: _way(form) for name, form in forms.items()}
        self._create_decoder = read
        self._unary_headers = whole
        self._stream_headers = stream

    def __contains__(self, form: str) -> bool:
        return form in self._rules

    def prepare_passthrough(
        self,
        form: str,
        call: Call,
        about: About,
        headers: Callable[[Headers], Headers],
        *,
        names: Names | None = None,
        stream: bool | None = None,
        timeout: float | None = None,
    ) -> Relay | None:
        """See ``gateway.core.ports.Relaying``; the call is one of ``form``.

        ``headers`` puts those of any answer behind the first ones. ``names`` is what the client is
        to read in the answer, if not the model's public name. ``stream`` goes before what the body
        says; ``timeout`` it does not tell.
        """
        way = self._rules[form]
        try:
            fields = take_fields(call)
            body = way.decode_body(call.body)
            said: AbstractSet[str] = fields.keys()
            if not said <= way.checked_fields:
                check_text(call.body)
                if not _pass(way.rule, said - way.known_fields):
                    return None
                said &= way.known_fields
        except WRONG:
            return None
        if ("stream_options" in said and body.stream is not True) or not way.rule.is_valid_body(
            body, said
        ):
            return None
        if stream is None:
            stream = "stream" in said and body.stream
        shown = {"model": about.model} if names is None else names
        request = request_of(way.kind, body, about.backend_model, stream=stream, timeout=timeout)
        return Relay(
            request,
            _addressed(way, about.backend_model, fields),
            partial(headers, self._stream_headers if stream else self._unary_headers),
            partial(self._passage, request, shown),
        )

    def _passage(self, request: Request, names: Names) -> Passage:
        return passage(request, self._create_decoder(request), names)


def openai_relays(
    profile: Profile, prefix: str, forwards: Callable[[str], bool], reading: Reading
) -> Relays:
    """For the workers of one profile of OpenAI's dialect, under one path prefix.

    ``forwards`` says of an unknown field whether workers may have it.
    """
    both = {"stream": FLAG, "stream_options": OPTIONS, "user": LABEL}
    form = partial(Form, forwards_field=forwards)
    return Relays(
        {
            "chat": form(
                path=f"{prefix}/chat/completions",
                field_types={
                    "max_completion_tokens": Annotated[int, Meta(ge=1)] | UnsetType,
                    **both,
                    **TOOLS,
                    "messages": MESSAGES,
                    "logprobs": FLAG,
                    "top_logprobs": _at_most(profile.max_chat_logprobs, 20),
                },
                worker_params=profile.chat,
                client_params=reading.chat,
                is_valid_body=fits_chat,
            ),
            "completion": form(
                path=f"{prefix}/completions",
                field_types={
                    **both,
                    "prompt": PROMPTS,
                    "logprobs": _at_most(profile.max_completion_logprobs, 5),
                },
                worker_params=profile.completion,
                client_params=reading.completion,
                is_valid_body=_fits_text,
            ),
            "embedding": form(
                path=f"{prefix}/embeddings",
                field_types={"input": INPUTS, "encoding_format": ENCODINGS, "user": LABEL},
                worker_params=profile.embedding,
                client_params=reading.embedding,
            ),
        }
    )


def _at_most(most: int | None, promised: int) -> Any:
    return up_to(promised if most is None else min(most, promised))


def _pass(form: Form, others: AbstractSet[str]) -> bool:
    """Whether workers may have these fields, of which nothing is known here."""
    return form.gateway_fields.isdisjoint(others) and all(map(form.forwards_field, others))


def _addressed(way: _Way, model: str, fields: dict[str, Any]) -> WireRequest:
    """These fields for a worker. Where the path does not name the model, they do from now on."""
    path = way.rule.path
    if way.is_model_in_path:
        fields.pop("model", None)
        path = path.replace("{model}", quote(model, safe=""))
    else:
        fields["model"] = model
    return WireRequest(path, _encode(fields), JSON)
