"""What can be wrong with a request, in the words of the original.

Clients match on these sentences, so they stand here once. ``problem="type"`` marks what the
original's JSON layer refuses; ``problem="conflict"`` marks what its model refuses.
"""

from protocols.core.errors import InvalidParameter, MalformedRequest, UnsupportedFeature

UNKNOWN_ID = "<id_unknown>"
JSON_LENGTH_HEADER = "inference-header-content-length"
CONTENT_ENCODING_HEADER = "content-encoding"


def build_request_tag(request_id: str | None) -> str:
    """What stands in front of the complaints of the original's core."""
    return f"[request id: {request_id or UNKNOWN_ID}] "


def build_json_error(reason: str, at: int) -> MalformedRequest:
    """The body is not JSON; ``at`` is a byte offset."""
    return MalformedRequest(f"failed to parse the request JSON buffer: {reason} at {at}", at=at)


def build_depth_error() -> MalformedRequest:
    """The body is JSON, and nested beyond reason."""
    return MalformedRequest(
        "failed to parse the request JSON buffer: nested too deep", problem="depth"
    )


def build_not_object_error() -> MalformedRequest:
    """The body is JSON, and has no members."""
    return MalformedRequest("attempt to get members for non-object", problem="object")


def build_type_error(param: str, text: str) -> InvalidParameter:
    """A value that the JSON layer can't take as what it must be."""
    return InvalidParameter(text, param=param, problem="type")


def build_value_error(param: str, text: str) -> InvalidParameter:
    """A value of a good JSON type that can't be used."""
    return InvalidParameter(text, param=param, problem="value")


def build_model_error(param: str, text: str) -> InvalidParameter:
    """What the original's model would refuse, after the front end took it."""
    return InvalidParameter(text, param=param, problem="conflict")


def build_encoding_error() -> InvalidParameter:
    """A body of generate that is compressed."""
    text = "Unsupported content-encoding, only 'identity' is supported."
    return build_value_error(CONTENT_ENCODING_HEADER, text)


def build_compression_error() -> UnsupportedFeature:
    """A body of infer that is compressed in a way of which the original knows nothing."""
    return UnsupportedFeature("Unsupported compression type", param=CONTENT_ENCODING_HEADER)


def build_parameter_type_error(name: str) -> InvalidParameter:
    """A null, list or object where a parameter must be a scalar."""
    return build_value_error(
        name,
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )
