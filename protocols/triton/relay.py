"""A client's own bytes for a worker of the same dialect.

The protocol has hardly any fields of its own: a model is what its server says it is. So a body goes
on whatever it holds, and what is wrong with it the server says.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import (
    ClientRequest,
    PassthroughRequest,
    ResponseContext,
    UpstreamRequest,
)
from protocols.core.request import GenerationRequest
from protocols.triton import document, generate
from protocols.triton.answer import GenerateEncoder
from protocols.triton.document import OrderedFields
from protocols.triton.passage import (
    ModelNames,
    TritonStreamPassthroughReader,
    TritonUnaryPassthroughReader,
    read_passthrough_error,
)
from protocols.triton.tensors import flatten_values
from protocols.triton.vocabulary import PROMPT_INPUT, TritonProfile
from protocols.triton.wire import CHUNKED_JSON_HEADERS, EVENT_STREAM, JSON_HEADERS
from protocols.triton.worker import build_model_path, get_model_name

_PARAMETERS_KEY: Final = "parameters"
_NON_PROMPT_FIELDS: Final = frozenset({"id", _PARAMETERS_KEY})
_NO_FIELDS: Final = OrderedFields([], [])


def build_passthrough(
    call: ClientRequest, about: ResponseContext, profile: TritonProfile
) -> PassthroughRequest | None:
    """See ``protocols.core.interfaces.SupportsPassthrough``; client and worker are of this profile."""
    variant = call.endpoint.operation
    if variant not in {"generate", "generate_stream"} or generate.is_compressed(call):
        return None
    try:
        fields = document.fields_of(call)
    except MalformedRequest:
        fields = _NO_FIELDS
    if profile.cancel_flag and profile.cancel_flag in _iter_field_names(fields):
        return None  # it may be another client's request that it ends
    streams = variant == "generate_stream"
    model = about.backend_model
    request = GenerationRequest(
        model=model, kind="completion", prompts=_find_prompts(fields), stream=streams
    )
    names = ModelNames(get_model_name(model), about.model)
    headers = (("Content-Type", EVENT_STREAM),) if streams else CHUNKED_JSON_HEADERS
    return PassthroughRequest(
        request,
        UpstreamRequest(f"{build_model_path(model)}/{variant}", call.body, JSON_HEADERS),
        lambda: headers,
        partial(TritonStreamPassthroughReader if streams else TritonUnaryPassthroughReader, names),
        partial(GenerateEncoder, request, about, profile, framed=streams),
        partial(read_passthrough_error, names),
    )


def _parse_readable_fields(body: bytes) -> OrderedFields:
    """What of the body can be read."""
    try:
        return document.parse_fields(body)
    except MalformedRequest:
        return _NO_FIELDS


def _iter_field_names(fields: OrderedFields) -> Iterator[str]:
    """The names of all fields, those of the parameters among them."""
    yield from fields.names
    if (nested := fields.get(_PARAMETERS_KEY)) is not None:
        yield from _parse_readable_fields(bytes(nested)).names


def _find_prompts(fields: OrderedFields) -> tuple[str, ...]:
    """What the prompt seems to be: the first text, unless one is called so."""
    for name in (PROMPT_INPUT, *(one for one in fields.names if one not in _NON_PROMPT_FIELDS)):
        if (raw := fields.get(name)) is not None:
            texts = [
                one for one in flatten_values(document.parse_value(raw)) if isinstance(one, str)
            ]
            if texts:
                return tuple(texts)
    return ()
