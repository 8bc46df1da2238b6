"""A client's own bytes for a worker of the same dialect.

The protocol has hardly any fields of its own: a model is what its server says it is. So a body goes
on whatever it holds, and what is wrong with it the server says.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from gateway.core.errors import Malformed
from gateway.core.ports import About, Call, Relay, WireRequest
from gateway.core.types import GenerateRequest
from protocols.triton import document, generate
from protocols.triton.answer import GenerateEncoder
from protocols.triton.document import Fields
from protocols.triton.passage import Names, StreamPassage, WholePassage, refused
from protocols.triton.tensors import flat
from protocols.triton.vocabulary import PROMPT, Profile
from protocols.triton.wire import EVENTS, JSON, SAID
from protocols.triton.worker import name_of, path_of

_NESTED: Final = "parameters"
_NO_PROMPT: Final = frozenset({"id", _NESTED})
_NOTHING: Final = Fields([], [])


def relay(call: Call, about: About, profile: Profile) -> Relay | None:
    """See ``gateway.core.ports.Relaying``; client and worker are of this profile."""
    variant = call.endpoint.operation
    if variant not in {"generate", "generate_stream"} or generate.encoded(call):
        return None
    try:
        fields = document.fields_of(call)
    except Malformed:
        fields = _NOTHING
    if profile.cancel_flag and profile.cancel_flag in _named(fields):
        return None  # it may be another client's request that it ends
    streams = variant == "generate_stream"
    model = about.backend_model
    request = GenerateRequest(
        model=model, kind="completion", prompts=_prompts(fields), stream=streams
    )
    names = Names(name_of(model), about.model)
    headers = (("Content-Type", EVENTS),) if streams else SAID
    return Relay(
        request,
        WireRequest(f"{path_of(model)}/{variant}", call.body, JSON),
        lambda: headers,
        partial(StreamPassage if streams else WholePassage, names),
        partial(GenerateEncoder, request, about, profile, framed=streams),
        partial(refused, names),
    )


def _fields(body: bytes) -> Fields:
    """What of the body can be read."""
    try:
        return document.fields(body)
    except Malformed:
        return _NOTHING


def _named(fields: Fields) -> Iterator[str]:
    """The names of all fields, those of the parameters among them."""
    yield from fields.names
    if (nested := fields.get(_NESTED)) is not None:
        yield from _fields(bytes(nested)).names


def _prompts(fields: Fields) -> tuple[str, ...]:
    """What the prompt seems to be: the first text, unless one is called so."""
    for name in (PROMPT, *(one for one in fields.names if one not in _NO_PROMPT)):
        if (raw := fields.get(name)) is not None:
            texts = [one for one in flat(document.value(raw)) if isinstance(one, str)]
            if texts:
                return tuple(texts)
    return ()
