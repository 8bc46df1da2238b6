"""What can be wrong with a request, in the words of the original.

Clients match on these sentences, so they stand here once. ``problem="type"`` marks what the
original's JSON layer refuses; ``problem="conflict"`` marks what its model refuses.
"""

from gateway.core.errors import InvalidParameter, Malformed, Unsupported

UNKNOWN_ID = "<id_unknown>"
HEADER = "inference-header-content-length"
ENCODING = "content-encoding"


def tag(request_id: str | None) -> str:
    """What stands in front of the complaints of the original's core."""
    return f"[request id: {request_id or UNKNOWN_ID}] "


def unreadable(reason: str, at: int) -> Malformed:
    """The body is not JSON; ``at`` is a byte offset."""
    return Malformed(f"failed to parse the request JSON buffer: {reason} at {at}", at=at)


def too_deep() -> Malformed:
    """The body is JSON, and nested beyond reason."""
    return Malformed("failed to parse the request JSON buffer: nested too deep", problem="depth")


def no_object() -> Malformed:
    """The body is JSON, and has no members."""
    return Malformed("attempt to get members for non-object", problem="object")


def wrong_type(param: str, text: str) -> InvalidParameter:
    """A value that the JSON layer can't take as what it must be."""
    return InvalidParameter(text, param=param, problem="type")


def wrong_value(param: str, text: str) -> InvalidParameter:
    """A value of a good JSON type that can't be used."""
    return InvalidParameter(text, param=param, problem="value")


def refused_by_model(param: str, text: str) -> InvalidParameter:
    """What the original's model would refuse, after the front end took it."""
    return InvalidParameter(text, param=param, problem="conflict")


def encoded() -> InvalidParameter:
    """A body of generate that is compressed."""
    text = "Unsupported content-encoding, only 'identity' is supported."
    return wrong_value(ENCODING, text)


def compressed() -> Unsupported:
    """A body of infer that is compressed in a way of which the original knows nothing."""
    return Unsupported("Unsupported compression type", param=ENCODING)


def not_parameter(name: str) -> InvalidParameter:
    """A null, list or object where a parameter must be a scalar."""
    return wrong_value(
        name,
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )
