"""Refusals: the statuses and sentences of the server's status table, and of the graph inside it.

Source: openvinotoolkit/model_server, src/status.cpp, src/http_rest_api_handler.cpp.
"""

from collections.abc import Callable
from math import ceil

from msgspec import Struct, json

from gateway.core.errors import (
    ContextTooLong,
    Forbidden,
    GatewayError,
    InternalError,
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
    WorkerUnreachable,
)
from gateway.core.ports import Headers, Reply

GENERATOR = "LLMExecutor"
EMBEDDER = "EmbeddingsExecutor"
"""The names that the nodes of an exported graph have."""

FRONT_DOOR = frozenset({"model", "stream"})
"""The two fields that are read before the graph is: what is wrong with them is wrong JSON."""

_encode = json.Encoder().encode
_JSON = ("Content-Type", "application/json")
_EVENTS = ("Content-Type", "text/event-stream")
_DETAILS = {
    "json": "Cannot parse JSON body",
    "encoding": "Cannot parse JSON body",
    "object": "JSON body must be an object",
    "depth": "JSON body exceeds maximum nesting depth",
}


class Body(Struct, frozen=True):
    """Every error's body."""

    error: str


def body(text: str) -> bytes:
    """``{"error": text}``."""
    return _encode(Body(text))


def sentence(inner: str, node: str = GENERATOR) -> str:
    """What the graph says around what its node said."""
    return (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "{node}" failed: {inner}'
    )


def told(error: GatewayError, node: str) -> str:
    """The text of an error, as it stands in a body or in a stream."""
    said = _status(error)
    return said[1] if said else sentence(_inner(error), node)


def refuse(error: GatewayError, *, node: str = GENERATOR, stream: bool = False) -> Reply:
    """The answer that tells of ``error``.

    The graph's own errors come as ``text/event-stream`` where a stream was asked for: the header is
    written before the graph runs.
    """
    said = _status(error)
    if said is None:
        kind = _EVENTS if stream else _JSON
        return Reply(400, body(sentence(_inner(error), node)), (kind,))
    status, text = said
    return Reply(status, body(text), (_JSON, *_retry(error)))


def unknown_model() -> Reply:
    """A model asked about by name, and not known."""
    return Reply(500, body("Model not found"))


def _retry(error: GatewayError) -> Headers:
    if error.retry_after is None:
        return ()
    return (("Retry-After", str(max(1, ceil(error.retry_after)))),)


def _inner(error: GatewayError) -> str:
    if isinstance(error, ContextTooLong) and error.tokens is not None and error.limit is not None:
        return f"Number of prompt tokens: {error.tokens} exceeds model max length: {error.limit}"
    return error.message


def _status(error: GatewayError) -> tuple[int, str] | None:
    """Status and text of what is judged outside the graph; None for what the graph says."""
    if isinstance(error, Malformed):
        return 412, f"The file is not valid json - {_DETAILS[error.problem]}"
    if isinstance(error, InvalidParameter):
        if error.param not in FRONT_DOOR:
            return None
        return 412, f"The file is not valid json - {error.message}"
    if isinstance(error, PathNotFound) and error.method not in _METHODS:
        return _UNKNOWN_METHOD
    for kind, status, text in _TABLE:
        if isinstance(error, kind):
            return status, text(error) if callable(text) else text
    return None


def _message(error: GatewayError) -> str:
    return error.message


_METHODS = ("", "GET", "POST", "OPTIONS")
_UNKNOWN_METHOD = (406, "Unsupported method")
_TABLE: tuple[tuple[type[GatewayError], int, str | Callable[[GatewayError], str]], ...] = (
    (ModelNotFound, 404, "Mediapipe graph definition with requested name is not found"),
    (PathNotFound, 400, "Invalid request URL"),
    (MethodNotAllowed, *_UNKNOWN_METHOD),
    (Unauthorized, 500, "Unauthorized request due to invalid or missing api-key"),
    (Forbidden, 403, _message),
    (TooLarge, 413, _message),
    (RateLimited, 429, _message),
    (QuotaExceeded, 429, _message),
    (Overloaded, 503, "Server is not ready"),
    (WorkerUnreachable, 503, "Server is not ready"),
    (InternalError, 500, _message),
)
STATUSES = (
    (Malformed, 412),
    (InvalidParameter, 412),
    *((kind, status) for kind, status, _ in _TABLE),
    (GatewayError, 400),
)
"""The status of each class of errors; what the graph says is 400."""
