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

from protocols.body import JSON_ERRORS, check_unicode, pop_fields
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    UpstreamRequest,
)
from protocols.core.request import Request
from protocols.openai.passage import (
    NameReplacements,
    create_passthrough_decoder,
    create_passthrough_reader,
)
from protocols.openai.profiles import WorkerProfile
from protocols.openai.relayed import RequestKind, request_of
from protocols.openai.requests import RequestRules
from protocols.openai.style import ResponseStyle
from protocols.params import Param

_encode = msgspec.json.Encoder().encode

JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"),)
_STREAM_HEADERS: Final[Headers] = (("Content-Type", ResponseStyle().content_type),)
_GATEWAY_FIELDS: Final = frozenset(
    {"echo", "best_of", "suffix", "priority", "use_beam_search", "stream", "modalities"}
)
"""What the gateway does itself, or reads with something else."""
_UNCHECKED_FIELDS: Final = frozenset({"tools"})
"""Fields of whose texts a shape leaves some unread."""
_INT64_MAX: Final = 2**63 - 1
_NONEMPTY_STRING = Annotated[str, Meta(min_length=1)]


# --- shapes ---------------------------------------------------------------------------------------


class _PassthroughTextPart(Struct, forbid_unknown_fields=True, tag="text"):
    text: str


class _PassthroughMessage(Struct, forbid_unknown_fields=True):
    """A turn that every worker takes as it is."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_PassthroughTextPart], Meta(min_length=1)]


class _PassthroughPlainMessage(Struct, forbid_unknown_fields=True):
    """The same without parts."""

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
    """The type of a count that may be absent."""
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
"""Fields that hold more than a table's row says, each with the type of what is plainly right."""

BodyCheck = Callable[[Any, AbstractSet[str]], bool]
"""Whether the fields of a body, each of which is right, go together; and of which it says anything.
"""
_TOOL_DEPENDENT_FIELDS: Final = frozenset({"tool_choice", "parallel_tool_calls"})
_CHECKED_FIELDS: Final = _TOOL_DEPENDENT_FIELDS | {"top_logprobs", "max_completion_tokens"}


def is_valid_chat(body: Any, said: AbstractSet[str]) -> bool:
    """OpenAI's rules for conversations: a ``Fits``."""
    if _CHECKED_FIELDS.isdisjoint(said):
        return True
    if "top_logprobs" in said and body.logprobs is not True:
        return False
    if "max_tokens" in said and "max_completion_tokens" in said:
        return False  # which of the two wins is for us to say
    return "tools" in said or _TOOL_DEPENDENT_FIELDS.isdisjoint(said)


def _has_max_tokens(body: Any, said: AbstractSet[str]) -> bool:
    """Each worker has its own default of what is missing."""
    del body
    return "max_tokens" in said


class PassthroughRule(Struct, frozen=True, kw_only=True):
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
    gateway_fields: frozenset[str] = _GATEWAY_FIELDS
    forwards_field: Callable[[str], bool] = lambda _: False
    is_valid_body: BodyCheck = lambda _body, _said: True


def build_body_decoder(form: PassthroughRule) -> msgspec.json.Decoder[Any]:
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
    """The fields that it knows."""
    return frozenset(check.type.__struct_fields__)


def _find_common_type(worker: Param, client: Param) -> Any:
    """The type of what both rows take; None where that is for the long way to say."""
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
    low = max((p.low for p in (worker, client) if p.low is not None), default=None)
    high = min((p.high for p in (worker, client) if p.high is not None), default=None)
    if kind is int and high is not None:
        high = min(high, _INT64_MAX)
    above = any(p.above_low and p.low == low for p in (worker, client))
    below = any(p.below_high and p.high == high for p in (worker, client))
    bounds: dict[str, Any] = {"gt" if above else "ge": low, "lt" if below else "le": high}
    return Annotated[kind, Meta(**bounds)]


# --- relays ---------------------------------------------------------------------------------------


class _CompiledRule(Struct, frozen=True):
    """What is worked out of a form."""

    rule: PassthroughRule
    kind: RequestKind
    decode_body: Callable[[bytes], Any]
    known_fields: frozenset[str]
    """The fields that it knows."""
    checked_fields: frozenset[str]
    """Those of which ``check`` reads every text."""
    is_model_in_path: bool
    """Whether the path names the model."""


def _compile_rule(form: PassthroughRule) -> _CompiledRule:
    # What is said of the model is told to workers in their own way.
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
    """Makes relays for workers of one dialect and profile.

    ``forms`` are the kinds of calls; ``read`` makes what reads an answer beside its being passed
    on; ``whole`` and ``stream`` are the first headers of answers of either kind.
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
    """For the workers of one profile of OpenAI's dialect, under one path prefix.

    ``forwards`` says of an unknown field whether workers may have it.
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
    """Whether workers may have these fields, of which nothing is known here."""
    return form.gateway_fields.isdisjoint(others) and all(map(form.forwards_field, others))


def _build_upstream_request(
    way: _CompiledRule, model: str, fields: dict[str, Any]
) -> UpstreamRequest:
    """These fields for a worker. Where the path does not name the model, they do from now on."""
    path = way.rule.path
    if way.is_model_in_path:
        fields.pop("model", None)
        path = path.replace("{model}", quote(model, safe=""))
    else:
        fields["model"] = model
    return UpstreamRequest(path, _encode(fields), JSON_HEADERS)
