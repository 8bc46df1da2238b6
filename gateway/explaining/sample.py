"""A small request in any dialect: what its workers would be asked to say Hello to."""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from gateway.core.errors import ClientError
from gateway.core.ports import WireRequest, WorkerDialect
from gateway.core.types import (
    EmbedRequest,
    GenerateRequest,
    Message,
    Request,
    Stopping,
    TextPart,
)
from gateway.paths import Mount, Paths

_HELLO: Final = "Hello"


def sample(mount: Mount, model: str, variant: str | None, *, stream: bool) -> WireRequest | None:
    """A request for ``model``, to an endpoint of this variant, or else to the first that will do.

    None where none can be made up.
    """
    dialect = mount.adapter
    if not isinstance(dialect, WorkerDialect):
        return None
    paths = Paths([mount])
    for request in _requests(model, stream=stream):
        try:
            wire = dialect.encode_request(request)
            wire = replace(wire, path=mount.prefix + wire.path)
            found = paths.find_endpoint(wire.method, wire.path)
        except ClientError:
            continue
        if found.endpoint.operation == variant or variant is None:
            return wire
    return None


def _requests(model: str, *, stream: bool) -> Iterator[Request]:
    conversation = (Message("user", (TextPart(_HELLO),)),)
    yield GenerateRequest(kind="chat", model=model, messages=conversation, stream=stream)
    stopping = Stopping(max_tokens=16)
    yield GenerateRequest(
        kind="completion", model=model, prompts=(_HELLO,), stopping=stopping, stream=stream
    )
    yield EmbedRequest(model=model, inputs=(_HELLO,))
