"""Errors: the types and texts of the service, for clients and of workers.

Source: the vendor's documentation of errors, and the classes of anthropic (Python) 2.12.
Claude Code acts on two texts: ``prompt is too long: N tokens > M maximum``, and ``input length and
`max_tokens` exceed context limit: A + B > C``.
"""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.anthropic.params import TYPE_TEXTS, format_path, join_choices
from protocols.chat.worker_errors import WorkerErrorBody, map_worker_error
from protocols.chat.worker_errors import read_worker_error as read_chat_worker_error
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidParameter,
    MalformedRequest,
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
    UnknownParameter,
    UnsupportedEncoding,
    UnsupportedFeature,
    WorkerError,
    WorkerUnreachable,
    find_entry,
)
from protocols.core.interfaces import Headers, HttpResponse
from protocols.params import Param

_encode = msgspec.json.Encoder().encode

_INVALID: Final = "invalid_request_error"
_NOT_FOUND: Final = "not_found_error"
_OVERLOADED: Final = "overloaded_error"

_ERROR_ROWS: Final[Mapping[type[GatewayError], tuple[int, str]]] = {
    GatewayError: (500, "api_error"),
    ClientError: (400, _INVALID),
    MalformedRequest: (400, _INVALID),
    InvalidParameter: (400, _INVALID),
    UnknownParameter: (400, _INVALID),
    UnsupportedFeature: (400, _INVALID),
    ContextTooLong: (400, _INVALID),
    ContentFiltered: (400, _INVALID),
    ModelNotFound: (404, _NOT_FOUND),
    PathNotFound: (404, _NOT_FOUND),
    RequestNotFound: (404, _NOT_FOUND),
    StoredObjectNotFound: (404, _NOT_FOUND),
    MethodNotAllowed: (405, _INVALID),
    RequestTooLarge: (413, "request_too_large"),
    UnsupportedEncoding: (415, _INVALID),
    Unauthorized: (401, "authentication_error"),
    RateLimitExceeded: (429, "rate_limit_error"),
    QuotaExceeded: (402, "billing_error"),
    ClientDisconnected: (499, _INVALID),
    Overloaded: (529, _OVERLOADED),
    DeadlineExceeded: (504, "timeout_error"),
    WorkerError: (502, "api_error"),
    WorkerUnreachable: (529, _OVERLOADED),
    InternalError: (500, "api_error"),
}
ERROR_STATUSES: Final = tuple((kind, status) for kind, (status, _) in _ERROR_ROWS.items())
"""The status of each error class."""


class ErrorDetail(Struct, frozen=True, omit_defaults=True):
    """The ``error`` object."""

    type: str
    message: str
    details: Mapping[str, str] | None = None
    """``error_code``, by which clients know what to do."""


def format_request_id(request_id: str) -> str:
    """The id of a request as the service writes ids."""
    return request_id if request_id.startswith("req_") else f"req_{request_id}"


def build_error_response(error: GatewayError, request_id: str | None) -> HttpResponse:
    """The error response before the response has started."""
    status, body = _build_body(error)
    headers: Headers = (("Content-Type", "application/json"),)
    if shown := request_id or error.request_id:
        body["request_id"] = format_request_id(shown)
        headers += (("request-id", body["request_id"]),)
    return HttpResponse(status, _encode(body), headers + _build_error_headers(error))


def format_error_event(error: GatewayError) -> bytes:
    """The error as an event of a stream that has started."""
    return b"event: error\ndata: %b\n\n" % _encode(_build_body(error)[1])


def _build_body(error: GatewayError) -> tuple[int, dict[str, Any]]:
    status, kind = find_entry(_ERROR_ROWS, error)
    text = _build_message(error)
    if (passed := error.upstream_error) is not None:
        status, text = passed.status, passed.text
        kind = _TYPES_BY_STATUS.get(status, kind)
    is_thread = isinstance(error, StoredObjectNotFound)
    details = {"error_code": _THREAD_NOT_FOUND} if is_thread else None
    return status, {"type": "error", "error": ErrorDetail(kind, text, details)}


_THREAD_NOT_FOUND: Final = "thread_not_found"
"""Clients then send the whole conversation again."""
_THREAD_PREFIX: Final = "thread_"


_TYPES_BY_STATUS: Final[Mapping[int, str]] = {
    status: kind
    for status, kind in _ERROR_ROWS.values()
    if status != 400  # noqa: PLR2004
}


def _build_error_headers(error: GatewayError) -> Headers:
    match error:
        case MethodNotAllowed(allowed=allowed):
            return (("Allow", ", ".join(allowed)),)
        case QuotaExceeded():
            return (("x-should-retry", "false"),)
        case GatewayError(retry_after=float() | int() as seconds):
            return (("retry-after", str(max(1, ceil(seconds)))),)
        case WorkerUnreachable():
            return (("retry-after", "1"),)
        case _:
            return ()


def _build_message(error: GatewayError) -> str:
    match error:
        case UnknownParameter():
            return f"{error.param}: Extra inputs are not permitted"
        case InvalidParameter(expected=Param() as param):
            return _build_parameter_message(error, param)
        case MalformedRequest(problem="object"):
            return "The request body is not valid JSON: it must be an object"
        case MalformedRequest():
            return f"The request body is not valid JSON: {error.message}"
        case ModelNotFound(model=model):
            return f"model: {model}"
        case ContextTooLong():
            return _build_context_message(error)
        case Unauthorized(missing=True):
            return "x-api-key header is required"
        case UnsupportedFeature(param=str() as param):
            return f"{format_path(param)}: {error.message}"
        case _:
            return _FIXED_TEXTS.get(type(error), error.message)


_FIXED_TEXTS: Final[Mapping[type[GatewayError], str]] = {
    InternalError: "Internal server error",
    PathNotFound: "Not found",
    RequestTooLarge: "Request exceeds the maximum size",
    Unauthorized: "invalid x-api-key",
}


def _build_parameter_message(error: InvalidParameter, param: Param) -> str:
    match error.problem:
        case "below":
            text = f"Input should be greater than or equal to {param.minimum}"
        case "above":
            text = f"Input should be less than or equal to {param.maximum}"
        case "type":
            text = f"Input should be {TYPE_TEXTS[param.type]}"
        case "value" if param.choices:
            text = f"Input should be {join_choices(param.choices)}"
        case _:
            text = error.message
    return f"{error.param}: {text}"


# --- a context that is too short ------------------------------------------------------------------

_INPUT_AND_OUTPUT: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\((?P<input>\d+) in the messages, (?P<output>\d+) in the completion\)",
        r"requested (?P<output>\d+) output tokens .* contains (?:at least )?(?P<input>\d+) input",
        r"is too large: (?P<output>\d+)\..* request has (?P<input>\d+) input tokens",
    )
)
"""What OpenAI and vLLM say of a prompt that fits without its completion."""
MAX_TOKENS_TOO_LARGE: Final = "input length and `max_tokens` exceed context limit: "


def describe_overflow(prompt: int, completion: int, limit: int) -> str:
    """The text for a prompt that fits only without its completion, in tokens."""
    return (
        f"{MAX_TOKENS_TOO_LARGE}{prompt} + {completion} > {limit}, decrease input length or "
        "`max_tokens` and try again"
    )


def _build_context_message(error: ContextTooLong) -> str:
    if error.message.startswith(MAX_TOKENS_TOO_LARGE):
        return error.message
    limit, tokens = error.limit, error.tokens
    for pattern in _INPUT_AND_OUTPUT:
        found = pattern.search(error.message)
        if found is not None and limit is not None and int(found["input"]) < limit:
            return describe_overflow(int(found["input"]), int(found["output"]), limit)
    if tokens is not None and limit is not None:
        return f"prompt is too long: {tokens} tokens > {limit} maximum"
    return f"prompt is too long: {error.message}"


# --- errors of workers ----------------------------------------------------------------------------

_TOO_LONG: Final = re.compile(r"prompt is too long: (\d{1,18}) tokens > (\d{1,18}) maximum")
_TOO_LARGE: Final = re.compile(
    r"input length and `max_tokens` exceed context limit: (\d{1,18}) \+ (\d{1,18}) > (\d{1,18})"
)
_STATUS_BY_TYPE: Final[Mapping[str, int]] = {
    _INVALID: 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    _NOT_FOUND: 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    _OVERLOADED: 529,
}


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """The error for a worker's response of this status, in either error format."""
    return read_chat_worker_error(status, headers, body, _map_worker_error)


def _map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    if (found := _TOO_LARGE.search(fault.text)) is not None:
        prompt, completion, limit = map(int, found.groups())
        message = describe_overflow(prompt, completion, limit)
        return ContextTooLong(message, tokens=prompt + completion, limit=limit)
    if (found := _TOO_LONG.search(fault.text)) is not None:
        tokens, limit = map(int, found.groups())
        return ContextTooLong(found[0], tokens=tokens, limit=limit)
    match fault.body:
        case {"error": {"details": {"error_code": str() as code}}} if (
            code.startswith(_THREAD_PREFIX)  # clients then send another request
        ):
            if code == _THREAD_NOT_FOUND:
                return StoredObjectNotFound(fault.text, id="", param="thread")
            return ClientError(fault.text, param="thread")
        case _:
            return map_worker_error(status, fault, retry_after)


def read_event_error(payload: bytes, fields: Mapping[str, Any]) -> GatewayError:
    """The error for an error event inside a worker's stream."""
    inner = fields.get("error")
    kind = inner.get("type") if isinstance(inner, dict) else None
    status = _STATUS_BY_TYPE.get(kind, 500) if isinstance(kind, str) else 500
    return read_worker_error(status, {}, payload)
