"""Conversations that are asked for as most are: plain texts, and the usual parameters.

They are read far faster than whatever a request may hold. Any other, and any that is wrong, is for
``protocols.openai.requests.read_chat``.
"""

from collections.abc import Iterable
from operator import itemgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.core.types import GenerateRequest, Message, Sampling, Stopping, TextPart, Want

_Name = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stops = Annotated[tuple[_Name, ...], Meta(max_length=4)]


class _Message(Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _Options(Struct, forbid_unknown_fields=True, gc=False):
    include_usage: bool | None = None


class _Conversation(Struct, forbid_unknown_fields=True, repr_omit_defaults=True):
    """``null`` is as good as absent, and ranges are those of ``protocols.openai.tables``.

    The fields stand in the order in which a request says them.
    """

    model: _Name
    messages: Annotated[list[_Message], Meta(min_length=1)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: _Name | _Stops | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: _Options | None = None
    user: str | None = None


_name: Final = itemgetter(0)
_TOLD, _UNTOLD = Want(), Want(usage="none")

_PATHS: Final = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "seed": "sampling.seed",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "max_tokens": "stopping.max_tokens",
    "max_completion_tokens": "stopping.max_tokens",
}
"""Of what is said as it was sent."""

_read = msgspec.json.Decoder(_Conversation).decode


def read_usual(
    body: bytes, *, client_id: str | None = None, timeout: float | None = None
) -> GenerateRequest | None:
    """The same as ``read_chat`` gives for a body; None where that must be asked."""
    try:
        wire = _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    stream, options, stop = bool(wire.stream), wire.stream_options, wire.stop
    if options is not None and not stream:
        return None
    told = not stream or (options is not None and options.include_usage)
    most, sent = wire.max_completion_tokens, wire.__rich_repr__()  # but for what is None
    turns = tuple([Message(one.role, (TextPart(one.content),)) for one in wire.messages])
    sampling = Sampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        seed=wire.seed,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
    )
    stopping = Stopping(
        max_tokens=wire.max_tokens if most is None else most,
        stop=(stop,) if isinstance(stop, str) else stop or (),
    )
    request = GenerateRequest(
        model=wire.model,
        kind="chat",
        messages=turns,
        sampling=sampling,
        stopping=stopping,
        n=wire.n,
        stream=stream,
        want=_TOLD if told else _UNTOLD,
        timeout=timeout,
        client_id=client_id,
        labels={} if wire.user is None else {"user": wire.user},
        given=frozenset(map(_name, sent)),
    )
    return request.saying(_said(request, sent))


def _said(request: GenerateRequest, sent: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """See ``GenerateRequest.said``, of what a usual one may hold, which was ``sent`` so."""
    said: dict[str, Any] = {"model": request.model, "kind": "chat", "messages": request.messages}
    for name, value in sent:
        if name in _PATHS:
            said[_PATHS[name]] = value
    if request.stopping.stop:
        said["stopping.stop"] = request.stopping.stop
    if request.n is not None:
        said["n"] = request.n
    if request.stream:
        said["stream"] = True
        if request.want is _UNTOLD:
            said["want.usage"] = "none"
    if request.timeout is not None:
        said["timeout"] = request.timeout
    if request.client_id is not None:
        said["client_id"] = request.client_id
    if request.labels:
        said["labels"] = request.labels
    said["given"] = request.given
    return said
