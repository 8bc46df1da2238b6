"""Refusals: ``{"error_code", "message"}``, and nothing else beside them.

Clients judge by ``error_code`` and not by the status, take a body with ``error`` for something
else, and try 429 and 503 again for minutes, after as many whole seconds as ``Retry-After`` says;
500 and 504 they do not. In a stream the error is an event in the manner of OpenAI: this dialect's
own shape would be passed over in silence there.
"""

from collections.abc import Mapping
from math import ceil

from msgspec import Struct, json

from gateway.core.errors import (
    ClientError,
    ClientGone,
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    InvalidParameter,
    Malformed,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimited,
    TooLarge,
    Unauthorized,
    UnknownParameter,
    Unsupported,
    WorkerError,
    WorkerUnreachable,
)
from gateway.core.ports import Headers, Reply
from protocols.params import Param

_encode = json.Encoder().encode
_JSON = ("Content-Type", "application/json")
_RETRIED = (429, 503)
_NO_ENDPOINT = (
    "The given endpoint does not exist, please retry after checking the specified model and "
    "version deployment exists."
)


class Body(Struct, frozen=True):
    """Every refusal's body: exactly these keys."""

    error_code: str
    message: str


_ROWS: Mapping[type[GatewayError], tuple[int, str]] = {
    GatewayError: (500, "INTERNAL_ERROR"),
    ClientError: (400, "BAD_REQUEST"),
    Malformed: (400, "BAD_REQUEST"),
    InvalidParameter: (400, "INVALID_PARAMETER_VALUE"),
    UnknownParameter: (400, "BAD_REQUEST"),
    Unsupported: (400, "INVALID_PARAMETER_VALUE"),
    ContextTooLong: (400, "BAD_REQUEST"),
    ModelNotFound: (404, "RESOURCE_DOES_NOT_EXIST"),
    PathNotFound: (404, "ENDPOINT_NOT_FOUND"),
    MethodNotAllowed: (405, "BAD_REQUEST"),
    TooLarge: (413, "BAD_REQUEST"),
    Unauthorized: (401, "UNAUTHENTICATED"),
    Forbidden: (403, "PERMISSION_DENIED"),
    RateLimited: (429, "REQUEST_LIMIT_EXCEEDED"),
    QuotaExceeded: (403, "PERMISSION_DENIED"),  # a 429 would be tried again, for minutes, in vain
    ClientGone: (499, "CANCELLED"),
    Overloaded: (503, "TEMPORARILY_UNAVAILABLE"),
    DeadlineExceeded: (504, "DEADLINE_EXCEEDED"),
    WorkerError: (500, "INTERNAL_ERROR"),
    WorkerUnreachable: (503, "TEMPORARILY_UNAVAILABLE"),
}


STATUSES = tuple((cls, status) for cls, (status, _) in _ROWS.items())
"""The status of each class of errors."""


def refuse(error: GatewayError) -> Reply:
    """The answer that tells of ``error``."""
    status, code = next(row for kind in type(error).__mro__ if (row := _ROWS.get(kind)))
    body = _encode(Body(code, _message(error)))
    return Reply(status, body, (_JSON, *_headers(error, status)))


def _headers(error: GatewayError, status: int) -> Headers:
    if status in _RETRIED:
        return (("Retry-After", str(max(1, ceil(error.retry_after or 1)))),)
    if isinstance(error, MethodNotAllowed):
        return (("Allow", ", ".join(error.allowed)),)
    return ()


def _message(error: GatewayError) -> str:
    match error:
        case Malformed():
            return f"Bad request: json: {error.message}"
        case UnknownParameter():
            return f'Bad request: json: unknown field "{error.param}"'
        case ModelNotFound():
            return _NO_ENDPOINT
        case ContextTooLong(tokens=int() as tokens, limit=int() as limit):
            return f"Bad request: the prompt has {tokens} tokens, the model's limit is {limit}"
        case InvalidParameter(expected=Param() as row, problem="below" | "above"):
            got = str(error.value).removesuffix(".0")
            return f"{error.param} must be {_range(row)}, got {got}"
        case _:
            return error.message


def _range(row: Param) -> str:
    if row.low is not None and row.high is not None:
        left, right = "(" if row.above_low else "[", ")" if row.below_high else "]"
        return f"in {left}{row.low:g}, {row.high:g}{right}"
    return f"at least {row.low:g}" if row.low is not None else f"at most {row.high:g}"
