"""A small request in any dialect: what its workers would be asked to say Hello to."""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.errors import ClientError
from protocols.core.interfaces import UpstreamAdapter, UpstreamRequest
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Request,
    StopConditions,
    TextPart,
)

_SAMPLE_TEXT: Final = "Hello"


def build_sample_request(
    mount: AdapterMount, model: str, variant: str | None, *, stream: bool
) -> UpstreamRequest | None:
    """A request for ``model``, to an endpoint of this variant, or else to the first that will do.

    None where none can be made up.
    """
    dialect = mount.adapter
    if not isinstance(dialect, UpstreamAdapter):
        return None
    paths = PathRouter([mount])
    for request in _list_sample_requests(model, stream=stream):
        try:
            wire = dialect.encode_request(request)
            wire = replace(wire, path=mount.prefix + wire.path)
            found = paths.find_endpoint(wire.method, wire.path)
        except ClientError:
            continue
        if found.endpoint.operation == variant or variant is None:
            return wire
    return None


def _list_sample_requests(model: str, *, stream: bool) -> Iterator[Request]:
    conversation = (Message("user", (TextPart(_SAMPLE_TEXT),)),)
    yield GenerationRequest(kind="chat", model=model, messages=conversation, stream=stream)
    stopping = StopConditions(max_tokens=16)
    yield GenerationRequest(
        kind="completion", model=model, prompts=(_SAMPLE_TEXT,), stopping=stopping, stream=stream
    )
    yield EmbeddingRequest(model=model, inputs=(_SAMPLE_TEXT,))
