"""Error bodies in OpenAI's format, for clients, with their HTTP statuses.

Protocols with this format use ``build_error_response`` and ``format_error_event``; others put
status, type and code into a format of their own.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from protocols.chat.params import describe_type
from protocols.chat.worker_errors import CONTEXT_LENGTH
from protocols.core import sse
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    ContentFiltered,
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
    StoredObjectNotFound,
    Unauthorized,
    UnknownParameter,
    UnsupportedEncoding,
    UnsupportedEndpoint,
    UnsupportedFeature,
    WorkerError,
    WorkerUnreachable,
    find_entry,
)
from protocols.core.interfaces import Headers, HttpResponse
from protocols.params import Param

_encode = msgspec.json.Encoder().encode

_INVALID_REQUEST_ERROR = "invalid_request_error"
_SERVER_ERROR = "server_error"


class ErrorBody(Struct):
    """The ``error`` object. All four keys are always present."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class _ErrorRow(Struct, frozen=True):
    status: int
    type: str = _INVALID_REQUEST_ERROR
    code: str | None = None
    param: str | None = None


_ERROR_ROWS: Mapping[type[GatewayError], _ErrorRow] = {
    GatewayError: _ErrorRow(500, _SERVER_ERROR, "internal_error"),
    ClientError: _ErrorRow(400),
    MalformedRequest: _ErrorRow(400),
    InvalidParameter: _ErrorRow(400),
    UnknownParameter: _ErrorRow(400, code="unknown_parameter"),
    UnsupportedFeature: _ErrorRow(400, code="unsupported_parameter"),
    UnsupportedEndpoint: _ErrorRow(404, code="unknown_url"),
    ContextTooLong: _ErrorRow(400, code="context_length_exceeded", param="messages"),
    ContentFiltered: _ErrorRow(400, code="content_filter"),
    ModelNotFound: _ErrorRow(404, code="model_not_found", param="model"),
    PathNotFound: _ErrorRow(404, code="unknown_url"),
    StoredObjectNotFound: _ErrorRow(404),
    MethodNotAllowed: _ErrorRow(405, code="method_not_supported"),
    RequestTooLarge: _ErrorRow(413, code="request_too_large"),
    UnsupportedEncoding: _ErrorRow(415, code="unsupported_content_encoding"),
    Unauthorized: _ErrorRow(401, code="invalid_api_key"),
    RateLimitExceeded: _ErrorRow(429, "requests", "rate_limit_exceeded"),
    QuotaExceeded: _ErrorRow(429, "insufficient_quota", "insufficient_quota"),
    ClientDisconnected: _ErrorRow(499),
    Overloaded: _ErrorRow(503, _SERVER_ERROR, "service_unavailable"),
    DeadlineExceeded: _ErrorRow(504, _SERVER_ERROR, "timeout"),
    WorkerError: _ErrorRow(502, _SERVER_ERROR, "bad_gateway"),
    WorkerUnreachable: _ErrorRow(503, _SERVER_ERROR, "service_unavailable"),
}

_UNIVERSAL_PARAMS = frozenset(
    {"messages", "prompt", "input", "model", "n", "response_format", "tool_choice"}
)
"""Parameters that every model has: if one is unsupported, its value is the problem."""


ERROR_STATUSES = tuple((cls, row.status) for cls, row in _ERROR_ROWS.items())
"""The status of each error class."""


def build_error_body(error: GatewayError) -> tuple[int, ErrorBody]:
    """The status and the body of an error."""
    entry = find_entry(_ERROR_ROWS, error)
    code, kind_, param = entry.code, entry.type, error.param or entry.param
    match error:
        case UnknownParameter() | UnsupportedEndpoint():
            pass
        case InvalidParameter():
            code = _find_error_code(error)
        case UnsupportedFeature() if error.worker_protocol:
            code = None  # only the worker knows
        case UnsupportedFeature() if param is not None and _is_value_error(param):
            code = "unsupported_value"
        case Unauthorized(missing=True):
            code = None
        case RateLimitExceeded(scope="tokens"):
            kind_ = "tokens"
        case _:
            pass
    return entry.status, ErrorBody(_build_message(error), kind_, param, code)


def build_error_response(error: GatewayError) -> HttpResponse:
    """The error response before the response has started."""
    status, body = build_error_body(error)
    headers = (("Content-Type", "application/json"), *build_error_headers(error))
    return HttpResponse(status, _encode({"error": body}), headers)


def format_error_event(error: GatewayError) -> bytes:
    """The error as an event of a stream that has started."""
    return sse.format_event(_encode({"error": build_error_body(error)[1]}))


def build_error_headers(error: GatewayError) -> Headers:
    """The headers of an error for OpenAI's clients, which retry unless a header forbids it."""
    if isinstance(error, QuotaExceeded):
        return (("x-should-retry", "false"),)
    return build_http_headers(error)


def build_http_headers(error: GatewayError) -> Headers:
    """The headers that HTTP defines for an error: what is allowed, and when to try again."""
    match error:
        case Unauthorized():
            return (("WWW-Authenticate", "Bearer"),)
        case MethodNotAllowed(allowed=allowed):
            return (("Allow", ", ".join(allowed)),)
        case GatewayError(retry_after=float() | int() as seconds):
            return (("Retry-After", str(max(1, math.ceil(seconds)))),)
        case WorkerUnreachable():
            return (("Retry-After", "1"),)
        case _:
            return ()


def _is_value_error(param: str) -> bool:
    return "." in param or "[" in param or param in _UNIVERSAL_PARAMS


_PROBLEM_CODES = {
    "missing": "missing_required_parameter",
    "type": "invalid_type",
    "value": "invalid_value",
}


_RANGE_CODES = {"below": "below_min", "above": "above_max"}


def _find_error_code(error: InvalidParameter) -> str | None:
    match error.problem, error.value:
        case "below" | "above" as side, _:
            return f"{_describe_number(error)}_{_RANGE_CODES[side]}_value"
        case "empty", str():
            return "empty_string"
        case "empty", _:
            return "empty_array"
        case "too_long", str():
            return "string_above_max_length"
        case "too_long", _:
            return "array_above_max_length"
        case _:
            return _PROBLEM_CODES.get(error.problem)


def _describe_number(error: InvalidParameter) -> str:
    if isinstance(error.expected, Param):
        return "decimal" if error.expected.type == "float" else "integer"
    return "integer" if isinstance(error.value, int) else "decimal"


def _build_message(error: GatewayError) -> str:
    match error:
        case UnknownParameter():
            return f"Unrecognized request argument supplied: {error.param}"
        case InvalidParameter(expected=Param() as param):
            return _build_parameter_message(error, param)
        case MalformedRequest(problem="object"):
            return "We could not parse the JSON body of your request: it must be a JSON object."
        case MalformedRequest(problem="form"):
            return f"We could not parse the form of your request: {error.message}"
        case MalformedRequest():
            return f"We could not parse the JSON body of your request: {error.message}"
        case ModelNotFound(model=model):
            return f"The model `{model}` does not exist or you do not have access to it."
        case ContextTooLong(tokens=int() as tokens, limit=int() as limit) if (
            not CONTEXT_LENGTH.search(error.message)
        ):
            return (
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{tokens} tokens. Please reduce the length of the messages or completion."
            )
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


_TYPE_TEXTS = {
    "int": "an integer",
    "strict int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "str": "a string",
    "strings": "one of a string or array of strings",
    "string list": "an array of strings",
    "ints": "an array of integers",
}


def _build_parameter_message(error: InvalidParameter, param: Param) -> str:
    at, value = error.param, error.value
    match error.problem:
        case "below" | "above":
            return _build_range_message(error, param)
        case "type":
            expected = _TYPE_TEXTS[param.type]
            actual = describe_type(value)
            return f"Invalid type for '{at}': expected {expected}, but got {actual} instead."
        case "value":
            names = ", ".join(f"'{name}'" for name in param.choices)
            return f"Invalid value: '{_shorten_value(value)}'. Supported values are: {names}."
        case "too_long":
            return (
                f"Invalid '{at}': array too long. Expected an array with maximum length "
                f"{param.max_items}, but got an array with length {len(value)} instead."
            )
        case _:
            return error.message


def _build_range_message(error: InvalidParameter, param: Param) -> str:
    below = error.problem == "below"
    side = "below minimum" if below else "above maximum"
    limit = param.minimum if below else param.maximum
    strict = param.exclusive_minimum if below else param.exclusive_maximum
    sign = (">" if below else "<") + ("" if strict else "=")
    return (
        f"Invalid '{error.param}': {_describe_number(error)} {side} value. "
        f"Expected a value {sign} {limit}, but got {_shorten_value(error.value)} instead."
    )


def _shorten_value(value: Any) -> str:
    return str(value)[:64]
