"""Errors: ``{"error": text}``, as a body or as the last line of a stream.

Source: ollama 0.9, server/routes.go; statuses of a gateway where the server has none.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from protocols.chat.errors import build_http_headers
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
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
    RequestTooLarge,
    Unauthorized,
    UnsupportedEncoding,
    WorkerError,
    WorkerUnreachable,
    find_entry,
)
from protocols.core.interfaces import Headers, HttpResponse
from protocols.core.json_text import encode_ascii

JSON_HEADERS: Headers = (("Content-Type", "application/json; charset=utf-8"),)
_BUSY: Final = "server busy, please try again.  maximum pending requests exceeded"
_EMBEDDING_OPERATIONS: Final = ("embed", "embeddings")


class OllamaError(Struct, frozen=True):
    """The body of every error."""

    error: str


_STATUSES: Final[Mapping[type[GatewayError], int]] = {
    ClientError: 400,
    ModelNotFound: 404,
    PathNotFound: 404,
    MethodNotAllowed: 405,
    RequestTooLarge: 413,
    UnsupportedEncoding: 415,
    Unauthorized: 401,
    RateLimitExceeded: 429,
    QuotaExceeded: 429,
    ClientDisconnected: 499,
    Overloaded: 503,
    DeadlineExceeded: 504,
    WorkerError: 502,
    WorkerUnreachable: 503,
    InternalError: 500,
    GatewayError: 500,
}
ERROR_STATUSES: Final = tuple(_STATUSES.items())
"""The status of each error class."""

_TEXTS: Final[Mapping[type[GatewayError], str | Callable[[GatewayError], str]]] = {
    MalformedRequest: lambda error: (
        "missing request body" if error.message == "the body is empty" else error.message
    ),
    PathNotFound: "404 page not found",
    MethodNotAllowed: "405 method not allowed",
    Unauthorized: "unauthorized",
    RateLimitExceeded: "rate limit exceeded",
    Overloaded: _BUSY,
    WorkerUnreachable: _BUSY,
    ClientDisconnected: "request canceled",
    GatewayError: lambda error: error.message,
}


def build_error_response(error: GatewayError, operation: str, model: str) -> HttpResponse:
    """The response to ``error``; ``model`` is the name that the client sent."""
    status = find_entry(_STATUSES, error)
    if operation in _NAMELESS and _is_missing_model(error):
        status = 404
    headers = (*JSON_HEADERS, *build_http_headers(error))
    text = get_error_text(error, operation, model)
    return HttpResponse(status, encode_ascii(OllamaError(text)), headers)


_NAMELESS: Final = ("generate", "embed")
"""The operations for which a missing model is one that was not found."""


def _is_missing_model(error: GatewayError) -> bool:
    return isinstance(error, InvalidParameter) and (error.param, error.problem) == _MISSING_MODEL


_MISSING_MODEL: Final = ("model", "missing")


def get_error_text(error: GatewayError, operation: str = "", model: str = "") -> str:
    """The text of an error, for a body or a stream."""
    match error:
        case ModelNotFound():
            name = model or error.model
            if operation in _EMBEDDING_OPERATIONS:
                return f'model "{name}" not found, try pulling it first'
            return f"model '{name}' not found"
        case InvalidParameter(param="model", problem="missing"):
            return "model '' not found" if operation in _NAMELESS else "model is required"
        case InvalidParameter(param="top_logprobs", problem="below" | "above"):
            return "top_logprobs must be between 0 and 20"
        case ContextTooLong(tokens=int() as tokens, limit=int() as limit):
            return f"the input length exceeds the context length ({tokens} tokens, limit {limit})"
        case ContextTooLong():
            return f"the input length exceeds the context length: {error.message}"
        case _:
            text = find_entry(_TEXTS, error)
            return text if isinstance(text, str) else text(error)
