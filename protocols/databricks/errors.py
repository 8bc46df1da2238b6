"""Error bodies: ``{"error_code", "message"}`` and no other key.

Clients look at ``error_code`` instead of the status, misread a body with ``error``, and retry 429
and 503 for minutes, after the whole seconds of ``Retry-After``; they do not retry 500 and 504. In a
stream the error is an event in OpenAI's format: clients would silently ignore the other one.
"""

from collections.abc import Mapping
from math import ceil

from msgspec import Struct, json

from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimitExceeded,
    RequestTooLarge,
    Unauthorized,
    UnknownParameter,
    UnsupportedEncoding,
    UnsupportedFeature,
    WorkerError,
    WorkerUnreachable,
    find_entry,
)
from protocols.core.interfaces import Headers, HttpResponse
from protocols.params import Param

_encode = json.Encoder().encode
_JSON_HEADER = ("Content-Type", "application/json")
_RETRYABLE_STATUSES = (429, 503)
_ENDPOINT_NOT_FOUND = (
    "The given endpoint does not exist, please retry after checking the specified model and "
    "version deployment exists."
)


class DatabricksErrorBody(Struct, frozen=True):
    """The body of every error: exactly these keys."""

    error_code: str
    message: str


_ERROR_CODES: Mapping[type[GatewayError], tuple[int, str]] = {
    GatewayError: (500, "INTERNAL_ERROR"),
    ClientError: (400, "BAD_REQUEST"),
    MalformedRequest: (400, "BAD_REQUEST"),
    InvalidParameter: (400, "INVALID_PARAMETER_VALUE"),
    UnknownParameter: (400, "BAD_REQUEST"),
    UnsupportedFeature: (400, "INVALID_PARAMETER_VALUE"),
    ContextTooLong: (400, "BAD_REQUEST"),
    ModelNotFound: (404, "RESOURCE_DOES_NOT_EXIST"),
    PathNotFound: (404, "ENDPOINT_NOT_FOUND"),
    MethodNotAllowed: (405, "BAD_REQUEST"),
    RequestTooLarge: (413, "BAD_REQUEST"),
    UnsupportedEncoding: (415, "BAD_REQUEST"),
    Unauthorized: (401, "UNAUTHENTICATED"),
    RateLimitExceeded: (429, "REQUEST_LIMIT_EXCEEDED"),
    QuotaExceeded: (403, "PERMISSION_DENIED"),  # a 429 would be tried again, for minutes, in vain
    ClientDisconnected: (499, "CANCELLED"),
    Overloaded: (503, "TEMPORARILY_UNAVAILABLE"),
    DeadlineExceeded: (504, "DEADLINE_EXCEEDED"),
    WorkerError: (500, "INTERNAL_ERROR"),
    WorkerUnreachable: (503, "TEMPORARILY_UNAVAILABLE"),
}


ERROR_STATUSES = tuple((cls, status) for cls, (status, _) in _ERROR_CODES.items())
"""The status of each error class."""


def build_error_response(error: GatewayError) -> HttpResponse:
    """The error as a response."""
    status, code = find_entry(_ERROR_CODES, error)
    body = _encode(DatabricksErrorBody(code, _build_message(error)))
    return HttpResponse(status, body, (_JSON_HEADER, *_build_headers(error, status)))


def _build_headers(error: GatewayError, status: int) -> Headers:
    if status in _RETRYABLE_STATUSES:
        return (("Retry-After", str(max(1, ceil(error.retry_after or 1)))),)
    if isinstance(error, MethodNotAllowed):
        return (("Allow", ", ".join(error.allowed)),)
    return ()


def _build_message(error: GatewayError) -> str:
    match error:
        case MalformedRequest():
            return f"Bad request: json: {error.message}"
        case UnknownParameter():
            return f'Bad request: json: unknown field "{error.param}"'
        case ModelNotFound():
            return _ENDPOINT_NOT_FOUND
        case ContextTooLong(tokens=int() as tokens, limit=int() as limit):
            return f"Bad request: the prompt has {tokens} tokens, the model's limit is {limit}"
        case InvalidParameter(expected=Param() as row, problem="below" | "above"):
            value = str(error.value).removesuffix(".0")
            return f"{error.param} must be {_describe_range(row)}, got {value}"
        case _:
            return error.message


def _describe_range(row: Param) -> str:
    if row.minimum is not None and row.maximum is not None:
        opening, closing = (
            "(" if row.exclusive_minimum else "[",
            ")" if row.exclusive_maximum else "]",
        )
        return f"in {opening}{_format_bound(row.minimum)}, {_format_bound(row.maximum)}{closing}"
    return f"at least {row.minimum:g}" if row.minimum is not None else f"at most {row.maximum:g}"


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
