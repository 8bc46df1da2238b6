"""Refusals in OpenAI's words: the only place here that knows HTTP statuses and error bodies.

A family that answers in the same shape uses ``refuse`` and ``event`` as they are, or ``describe``
to put status, type and code into a shape of its own.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from gateway.core import sse
from gateway.core.errors import (
    ClientError,
    ClientGone,
    ContentRefused,
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
from protocols.openai.reading import kind
from protocols.params import Param

_encode = msgspec.json.Encoder().encode

_INVALID = "invalid_request_error"
_SERVER = "server_error"


class ErrorBody(Struct):
    """What stands under ``error``. All four keys are always there."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class _Row(Struct, frozen=True):
    status: int
    type: str = _INVALID
    code: str | None = None
    param: str | None = None


_ROWS: Mapping[type[GatewayError], _Row] = {
    GatewayError: _Row(500, _SERVER, "internal_error"),
    ClientError: _Row(400),
    Malformed: _Row(400),
    InvalidParameter: _Row(400),
    UnknownParameter: _Row(400, code="unknown_parameter"),
    Unsupported: _Row(400, code="unsupported_parameter"),
    ContextTooLong: _Row(400, code="context_length_exceeded", param="messages"),
    ContentRefused: _Row(400, code="content_filter"),
    ModelNotFound: _Row(404, code="model_not_found", param="model"),
    PathNotFound: _Row(404, code="unknown_url"),
    MethodNotAllowed: _Row(405, code="method_not_supported"),
    TooLarge: _Row(413, code="request_too_large"),
    Unauthorized: _Row(401, code="invalid_api_key"),
    Forbidden: _Row(403, "permission_error", "insufficient_permissions"),
    RateLimited: _Row(429, "requests", "rate_limit_exceeded"),
    QuotaExceeded: _Row(429, "insufficient_quota", "insufficient_quota"),
    ClientGone: _Row(499),
    Overloaded: _Row(503, _SERVER, "service_unavailable"),
    DeadlineExceeded: _Row(504, _SERVER, "timeout"),
    WorkerError: _Row(502, _SERVER, "bad_gateway"),
    WorkerUnreachable: _Row(503, _SERVER, "service_unavailable"),
}

_VALUES = frozenset({"messages", "prompt", "input", "model", "n", "response_format", "tool_choice"})
"""Parameters every model has: where one is not supported, its value is meant."""


STATUSES = tuple((cls, row.status) for cls, row in _ROWS.items())
"""The status of each class of errors."""


def describe(error: GatewayError) -> tuple[int, ErrorBody]:
    """The status and the body of an error."""
    found = next(row for cls in type(error).__mro__ if (row := _ROWS.get(cls)))
    code, kind_, param = found.code, found.type, error.param or found.param
    match error:
        case UnknownParameter():
            pass
        case InvalidParameter():
            code = _code(error)
        case Unsupported() if param is not None and _is_value(param):
            code = "unsupported_value"
        case Unauthorized(missing=True):
            code = None
        case RateLimited(scope="tokens"):
            kind_ = "tokens"
        case _:
            pass
    return found.status, ErrorBody(_message(error), kind_, param, code)


def refuse(error: GatewayError) -> Reply:
    """The answer that tells of an error before anything was sent."""
    status, body = describe(error)
    headers = (("Content-Type", "application/json"), *_headers(error))
    return Reply(status, _encode({"error": body}), headers)


def event(error: GatewayError) -> bytes:
    """The error as an event of a stream that has begun."""
    return sse.event(_encode({"error": describe(error)[1]}))


def _headers(error: GatewayError) -> Headers:
    match error:
        case Unauthorized():
            return (("WWW-Authenticate", "Bearer"),)
        case MethodNotAllowed(allowed=allowed):
            return (("Allow", ", ".join(allowed)),)
        case QuotaExceeded():
            return (("x-should-retry", "false"),)
        case GatewayError(retry_after=float() | int() as seconds):
            return (("Retry-After", str(max(1, -int(-seconds // 1)))),)
        case WorkerUnreachable():
            return (("Retry-After", "1"),)
        case _:
            return ()


def _is_value(param: str) -> bool:
    return "." in param or "[" in param or param in _VALUES


_CODES = {
    "missing": "missing_required_parameter",
    "type": "invalid_type",
    "value": "invalid_value",
}


_SIDES = {"below": "below_min", "above": "above_max"}


def _code(error: InvalidParameter) -> str | None:
    match error.problem, error.value:
        case "below" | "above" as side, _:
            return f"{_number(error)}_{_SIDES[side]}_value"
        case "empty", str():
            return "empty_string"
        case "empty", _:
            return "empty_array"
        case "too_long", str():
            return "string_above_max_length"
        case "too_long", _:
            return "array_above_max_length"
        case _:
            return _CODES.get(error.problem)


def _number(error: InvalidParameter) -> str:
    if isinstance(error.expected, Param):
        return "decimal" if error.expected.type == "float" else "integer"
    return "integer" if isinstance(error.value, int) else "decimal"


def _message(error: GatewayError) -> str:
    match error:
        case UnknownParameter():
            return f"Unrecognized request argument supplied: {error.param}"
        case InvalidParameter(expected=Param() as param):
            return _parameter(error, param)
        case Malformed(problem="object"):
            return "We could not parse the JSON body of your request: it must be a JSON object."
        case Malformed():
            return f"We could not parse the JSON body of your request: {error.message}"
        case ModelNotFound(model=model):
            return f"The model `{model}` does not exist or you do not have access to it."
        case PathNotFound(method=method, path=path) if path:
            return f"Invalid URL ({method} {path[:256]})"
        case Unauthorized(missing=True):
            return (
                "You didn't provide an API key. You need to provide your API key in an "
                "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
        case Unauthorized():
            return "Incorrect API key provided."
        case _:
            return error.message


_EXPECTED = {
    "int": "an integer",
    "strict int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "str": "a string",
    "strings": "one of a string or array of strings",
    "string list": "an array of strings",
    "ints": "an array of integers",
}


def _parameter(error: InvalidParameter, param: Param) -> str:
    at, got = error.param, error.value
    match error.problem:
        case "below" | "above":
            return _range(error, param)
        case "type":
            expected = _EXPECTED[param.type]
            return f"Invalid type for '{at}': expected {expected}, but got {kind(got)} instead."
        case "value":
            names = ", ".join(f"'{name}'" for name in param.choices)
            return f"Invalid value: '{_shown(got)}'. Supported values are: {names}."
        case "too_long":
            return (
                f"Invalid '{at}': array too long. Expected an array with maximum length "
                f"{param.max_items}, but got an array with length {len(got)} instead."
            )
        case _:
            return error.message


def _range(error: InvalidParameter, param: Param) -> str:
    below = error.problem == "below"
    side = "below minimum" if below else "above maximum"
    limit = param.low if below else param.high
    strict = param.above_low if below else param.below_high
    sign = (">" if below else "<") + ("" if strict else "=")
    return (
        f"Invalid '{error.param}': {_number(error)} {side} value. "
        f"Expected a value {sign} {limit}, but got {_shown(error.value)} instead."
    )


def _shown(got: Any) -> str:
    return str(got)[:64]
