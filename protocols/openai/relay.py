"""A client's own bytes for a worker of the same dialect, and the worker's own bytes back.

A body goes this way when it is plainly right: every field is of a kind that both sides take, within
the ranges of both, and nothing in it is the gateway's to do. Whatever else there is goes the long
way, and gets its error, its loss or its emulation there.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from gateway.core.errors import Malformed
from gateway.core.ports import About, Call, Headers, Relay, WireRequest
from gateway.core.types import EmbedRequest, GenerateRequest, Message, Request, TextPart
from protocols.body import read_object
from protocols.openai.passage import passage
from protocols.openai.profiles import Profile
from protocols.openai.requests import Reading
from protocols.openai.style import Style
from protocols.params import Param

_encode = msgspec.json.Encoder().encode

_OURS: Final = frozenset({"echo", "best_of", "suffix", "priority", "use_beam_search", "stream"})
"""What the gateway does itself, or reads with something else."""
_READ: Final = frozenset({"modalities"})
"""In no table, and read all the same."""
_PATHS: Final = {
    "chat": "chat/completions",
    "completion": "completions",
    "embedding": "embeddings",
}
_JSON: Final[Headers] = (("Content-Type", "application/json"),)
_STREAM: Final[Headers] = (("Content-Type", Style().content_type), *Style().stream_headers)
_NON_EMPTY = Annotated[str, Meta(min_length=1)]


class _TextPart(Struct, forbid_unknown_fields=True, tag="text"):
    text: str


class _Message(Struct, forbid_unknown_fields=True):
    """A turn that every worker takes as it is."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Meta(min_length=1)]


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Function(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | UnsetType = UNSET
    parameters: dict[str, Raw] | UnsetType = UNSET


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


_Tools = Annotated[list[_Tool], Meta(min_length=1, max_length=128)]
_Prompts = str | Annotated[list[_NON_EMPTY], Meta(min_length=1, max_length=2048)]
_Inputs = _NON_EMPTY | Annotated[list[_NON_EMPTY], Meta(min_length=1, max_length=2048)]

_CHAT: Final[Mapping[str, Any]] = {
    "messages": Annotated[list[_Message], Meta(min_length=1)],
    "stream": bool | UnsetType,
    "stream_options": _StreamOptions | UnsetType,
    "tools": _Tools | UnsetType,
    "tool_choice": Literal["auto", "none", "required"] | UnsetType,
    "logprobs": bool | UnsetType,
    "user": str | UnsetType,
}
_COMPLETION: Final[Mapping[str, Any]] = {
    "prompt": _Prompts,
    "stream": bool | UnsetType,
    "stream_options": _StreamOptions | UnsetType,
    "user": str | UnsetType,
}
_EMBEDDING: Final[Mapping[str, Any]] = {
    "input": _Inputs,
    "encoding_format": Literal["float", "base64"] | UnsetType,
    "user": str | UnsetType,
}
_REQUIRED: Final = frozenset({"messages", "prompt", "input"})


def _checker(shapes: Mapping[str, Any], worker: Sequence[Param], client: Sequence[Param]) -> Any:
    """Decodes a body into a Struct of these shapes, and of the rows that both sides have alike."""
    theirs = {param.wire: param for param in client}
    fields = dict(shapes)
    for param in worker:
        other = theirs.get(param.wire)
        if other is None or other.field != param.field or param.wire in _OURS or param.reason:
            continue
        if (kind := _kind(param, other)) is not None:
            fields.setdefault(param.wire, kind | UnsetType)
    body = msgspec.defstruct(
        "Body",
        [
            (name, kind) if name in _REQUIRED else (name, kind, UNSET)
            for name, kind in sorted(fields.items(), key=lambda one: one[0] not in _REQUIRED)
        ],
    )
    return msgspec.json.Decoder(body)


def _kind(worker: Param, client: Param) -> Any:
    """The type of what both rows take; None where that is for the long way to say."""
    match client.type:
        case "bool":
            return bool
        case "str":
            return Literal[client.choices] if client.choices else str
        case "int" | "strict int" | "float" as name:
            low = max((p.low for p in (worker, client) if p.low is not None), default=None)
            high = min((p.high for p in (worker, client) if p.high is not None), default=None)
            above = any(p.above_low and p.low == low for p in (worker, client))
            meta = Meta(gt=low, le=high) if above else Meta(ge=low, le=high)
            return Annotated[float if name == "float" else int, meta]
        case "strings":
            most = client.max_items
            return _NON_EMPTY | Annotated[list[_NON_EMPTY], Meta(max_length=most)]
        case _:
            return None


class Relays:
    """Makes relays for the workers of one profile, under one path prefix."""

    def __init__(
        self, profile: Profile, prefix: str, forwards: Callable[[str], bool], reading: Reading
    ) -> None:
        """``forwards`` says of an unknown field whether workers may have it."""
        self._prefix = prefix
        self._forwards = forwards
        tops = {"top_logprobs": _up_to(profile.chat_top, 20)}
        text_tops = {"logprobs": _up_to(profile.text_top, 5)}
        self._checkers = {
            "chat": _checker({**_CHAT, **tops}, profile.chat, reading.chat),
            "completion": _checker(
                {**_COMPLETION, **text_tops}, profile.completion, reading.completion
            ),
            "embedding": _checker(_EMBEDDING, profile.embedding, reading.embedding),
        }

    def relay(
        self, call: Call, about: About, timeout: float | None, headers: Callable[[], Headers]
    ) -> Relay | None:
        """See ``gateway.core.ports.Relaying``; the call is of this dialect.

        ``timeout`` is how many seconds the client waits; ``headers`` are those of any answer.
        """
        variant = call.endpoint.variant
        checker = self._checkers[variant]
        try:
            fields = read_object(call.body)
            body = checker.decode(call.body)
        except (Malformed, msgspec.DecodeError):
            return None
        if not all(n in body.__struct_fields__ or self._passes(n) for n in fields):
            return None
        request = _request(variant, body, about)
        if request is None:
            return None
        if timeout is not None:
            request = replace(request, timeout=timeout)
        fields["model"] = _name(about.served_model)
        wire = WireRequest(f"{self._prefix}/{_PATHS[variant]}", _encode(fields), _JSON)
        same = about.model == about.served_model
        rename = None if same else (_name(about.served_model), _name(about.model))
        kind = _STREAM if request.stream else _JSON
        return Relay(wire, request, lambda: kind + headers(), partial(passage, request, rename))

    def _passes(self, name: str) -> bool:
        return name == "model" or (name not in _READ and self._forwards(name))


def _up_to(most: int | None, promised: int) -> Any:
    top = promised if most is None else min(most, promised)
    return Annotated[int, Meta(ge=0, le=top)] | UnsetType


def _name(model: str) -> Raw:
    return Raw(_encode(model))


# --- what reading the answer needs ----------------------------------------------------------------


def _request(variant: str, body: Any, about: About) -> Request | None:
    """The request, as far as it matters; None where its fields do not fit together."""
    model = about.served_model
    labels = {} if body.user is UNSET else {"user": body.user}
    if variant == "embedding":
        return EmbedRequest(model=model, inputs=_several(body.input), labels=labels)
    stream = body.stream is True
    if body.stream_options is not UNSET and not stream:
        return None
    n = getattr(body, "n", UNSET) or None
    if variant == "chat":
        if not _fits(body):
            return None
        messages = tuple(Message(one.role, (TextPart(_said(one)),)) for one in body.messages)
        return GenerateRequest(
            model=model, kind="chat", messages=messages, n=n, stream=stream, labels=labels
        )
    if body.max_tokens is UNSET:
        return None  # each worker has its own default
    prompts = _several(body.prompt)
    return GenerateRequest(
        model=model, kind="completion", prompts=prompts, n=n, stream=stream, labels=labels
    )


def _several(texts: str | list[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _fits(body: Any) -> bool:
    if body.top_logprobs is not UNSET and body.logprobs is not True:
        return False
    tooled = body.tools is not UNSET
    return tooled or all(
        getattr(body, name, UNSET) is UNSET for name in ("tool_choice", "parallel_tool_calls")
    )


def _said(message: _Message) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content)
