"""What a dialect itself has a place for, and how it refuses: a perfect worker, as far as it knows.

A dialect that clients speak, too, can write what such a worker would. Of others nothing is known.
"""

from typing import Final, cast

from gateway.core.aggregate import folded
from gateway.core.context import Context, Deadline
from gateway.core.errors import GatewayError, InvalidParameter, Malformed
from gateway.core.ports import About, Call, Dialect, WorkerDialect
from gateway.core.types import Done, End, Event, GenerateRequest, Text, Usage
from gateway.paths import Mount, Paths

_FAULTS: Final = (
    Malformed("the body is no JSON"),
    InvalidParameter("a field is of another type", param="prompt", problem="type"),
)
_SAID: Final[tuple[Event, ...]] = (Text("hi"), End("eos"), Usage(3, 1), Done())


def tells_usage(dialect: WorkerDialect, request: GenerateRequest) -> bool:
    """Whether the answer to ``request`` has a place for usage."""
    client = _client(dialect)
    if client is None:
        return True
    try:
        decoder = dialect.decoder(request)
        read = [*decoder.feed(_written(client, dialect, request)), *decoder.close()]
    except GatewayError:
        return True
    return any(isinstance(event, Usage) for event in read)


def statuses(dialect: WorkerDialect) -> frozenset[int]:
    """Those by which the dialect refuses what can't be read."""
    client = _client(dialect)
    if client is None:
        return frozenset()
    return frozenset(client.refuse(fault, None).status for fault in _FAULTS)


def _client(dialect: WorkerDialect) -> Dialect | None:
    return cast("Dialect", dialect) if hasattr(dialect, "peek") else None


def _written(client: Dialect, dialect: WorkerDialect, request: GenerateRequest) -> bytes:
    wire = dialect.encode(request)
    found = Paths([Mount(client)]).find(wire.method, wire.path)
    headers = {name.lower(): value for name, value in wire.headers}
    call = Call(found.endpoint, found.params, headers, "", wire.body, wire.path)
    context = Context("ideal", Deadline(_still, 60.0), _still)
    about = About("ideal", 1, request.model, "1", request.model, context)
    encoder = client.encoder(call, client.decode(call), about)
    if request.stream:
        return encoder.write(_SAID)
    return encoder.whole(folded(_SAID)).body


def _still() -> float:
    return 0.0
