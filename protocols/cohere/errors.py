"""Errors: ``{"id", "message"}``, and the end of a stream that failed.

A stream has no error event: it ends with a message-end whose reason is ERROR or TIMEOUT.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from protocols.chat.errors import build_error_body, build_error_headers
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    ContentFiltered,
    DeadlineExceeded,
    GatewayError,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimitExceeded,
    RequestNotFound,
    RequestTooLarge,
    StoredObjectNotFound,
    Unauthorized,
    UnsupportedEncoding,
    UnsupportedEndpoint,
    WorkerError,
    WorkerUnreachable,
    find_entry,
)
from protocols.core.interfaces import HttpResponse
from protocols.core.json_text import encode_ascii

_STATUSES: Final[Mapping[type[GatewayError], int]] = {
    GatewayError: 500,
    ClientError: 400,
    UnsupportedEndpoint: 501,
    ContentFiltered: 498,
    ModelNotFound: 404,
    PathNotFound: 404,
    RequestNotFound: 404,
    StoredObjectNotFound: 404,
    MethodNotAllowed: 405,
    RequestTooLarge: 413,
    UnsupportedEncoding: 415,
    Unauthorized: 401,
    RateLimitExceeded: 429,
    QuotaExceeded: 402,
    ClientDisconnected: 499,
    Overloaded: 503,
    DeadlineExceeded: 504,
    WorkerError: 502,
    WorkerUnreachable: 503,
}
ERROR_STATUSES: Final = tuple(_STATUSES.items())
"""The status of each error class."""


class ErrorBody(Struct, omit_defaults=True):
    """The body of every error."""

    message: str
    id: str | None = None


def build_error_response(error: GatewayError, request_id: str | None) -> HttpResponse:
    """The error response before the response has started."""
    status = find_entry(_STATUSES, error)
    body = ErrorBody(_build_message(error), request_id or error.request_id)
    headers = (("Content-Type", "application/json"), *build_error_headers(error))
    return HttpResponse(status, encode_ascii(body), headers)


def format_error_event(error: GatewayError) -> bytes:
    """The end of a stream that has started and failed."""
    reason = "TIMEOUT" if isinstance(error, DeadlineExceeded) else "ERROR"
    delta = {"error": _build_message(error), "finish_reason": reason}
    return format_event({"type": "message-end", "delta": delta})


def format_event(fields: Mapping[str, Any]) -> bytes:
    """An event of a stream, with its type as its name.

    In ASCII: clients may split lines at any of Unicode's line ends.
    """
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), encode_ascii(fields))


def _build_message(error: GatewayError) -> str:
    match error:
        case ModelNotFound(model=model):
            return (
                f"model '{model}' not found, make sure the correct model ID was used and that you "
                "have access to the model."
            )
        case Unauthorized(missing=True):
            return "no api key supplied"
        case Unauthorized():
            return "invalid api token"
        case _:
            return build_error_body(error)[1].message
