"""Refusals: the statuses and sentences of the server's status table, and of the graph inside it.

Source: openvinotoolkit/model_server, src/status.cpp, src/http_rest_api_handler.cpp.
"""

from collections.abc import Callable
from math import ceil

from msgspec import Struct, json

from protocols.core.errors import (
    ContextTooLong,
    Forbidden,
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
    WorkerUnreachable,
)
from protocols.core.interfaces import Headers, HttpResponse

GENERATION_NODE = "LLMExecutor"
EMBEDDING_NODE = "EmbeddingsExecutor"
"""The names that the nodes of an exported graph have."""

PRE_GRAPH_FIELDS = frozenset({"model", "stream"})
"""The two fields that are read before the graph is: what is wrong with them is wrong JSON."""

_encode = json.Encoder().encode
_JSON_HEADER = ("Content-Type", "application/json")
_EVENT_STREAM_HEADER = ("Content-Type", "text/event-stream")
_MALFORMED_DETAILS = {
    "json": "Cannot parse JSON body",
    "encoding": "Cannot parse JSON body",
    "object": "JSON body must be an object",
    "depth": "JSON body exceeds maximum nesting depth",
}


class ErrorBody(Struct, frozen=True):
    """Every error's body."""

    error: str


def encode_error_body(text: str) -> bytes:
    """``{"error": text}``."""
    return _encode(ErrorBody(text))


def build_graph_error_text(inner: str, node: str = GENERATION_NODE) -> str:
    """What the graph says around what its node said."""
    return (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "{node}" failed: {inner}'
    )


def get_error_text(error: GatewayError, node: str) -> str:
    """The text of an error, as it stands in a body or in a stream."""
    said = _map_error_status(error)
    return said[1] if said else build_graph_error_text(_get_node_error_text(error), node)


def build_error_response(
    error: GatewayError, *, node: str = GENERATION_NODE, stream: bool = False
) -> HttpResponse:
    """The answer that tells of ``error``.

    The graph's own errors come as ``text/event-stream`` where a stream was asked for: the header is
    written before the graph runs.
    """
    said = _map_error_status(error)
    if said is None:
        kind = _EVENT_STREAM_HEADER if stream else _JSON_HEADER
        return HttpResponse(
            400,
            encode_error_body(build_graph_error_text(_get_node_error_text(error), node)),
            (kind,),
        )
    status, text = said
    return HttpResponse(
        status, encode_error_body(text), (_JSON_HEADER, *_build_retry_headers(error))
    )


def build_unknown_model_response() -> HttpResponse:
    """A model asked about by name, and not known."""
    return HttpResponse(500, encode_error_body("Model not found"))


def _build_retry_headers(error: GatewayError) -> Headers:
    if error.retry_after is None:
        return ()
    return (("Retry-After", str(max(1, ceil(error.retry_after)))),)


def _get_node_error_text(error: GatewayError) -> str:
    if isinstance(error, ContextTooLong) and error.tokens is not None and error.limit is not None:
        return f"Number of prompt tokens: {error.tokens} exceeds model max length: {error.limit}"
    return error.message


def _map_error_status(error: GatewayError) -> tuple[int, str] | None:
    """Status and text of what is judged outside the graph; None for what the graph says."""
    if isinstance(error, MalformedRequest):
        return 412, f"The file is not valid json - {_MALFORMED_DETAILS[error.problem]}"
    if isinstance(error, InvalidParameter):
        if error.param not in PRE_GRAPH_FIELDS:
            return None
        return 412, f"The file is not valid json - {error.message}"
    if isinstance(error, PathNotFound) and error.method not in _KNOWN_METHODS:
        return _UNSUPPORTED_METHOD
    for kind, status, text in _ERROR_TABLE:
        if isinstance(error, kind):
            return status, text(error) if callable(text) else text
    return None


def _get_message(error: GatewayError) -> str:
    return error.message


_KNOWN_METHODS = ("", "GET", "POST", "OPTIONS")
_UNSUPPORTED_METHOD = (406, "Unsupported method")
_ERROR_TABLE: tuple[tuple[type[GatewayError], int, str | Callable[[GatewayError], str]], ...] = (
    (ModelNotFound, 404, "Mediapipe graph definition with requested name is not found"),
    (PathNotFound, 400, "Invalid request URL"),
    (MethodNotAllowed, *_UNSUPPORTED_METHOD),
    (Unauthorized, 500, "Unauthorized request due to invalid or missing api-key"),
    (Forbidden, 403, _get_message),
    (RequestTooLarge, 413, _get_message),
    (RateLimitExceeded, 429, _get_message),
    (QuotaExceeded, 429, _get_message),
    (Overloaded, 503, "Server is not ready"),
    (WorkerUnreachable, 503, "Server is not ready"),
    (InternalError, 500, _get_message),
)
ERROR_STATUSES = (
    (MalformedRequest, 412),
    (InvalidParameter, 412),
    *((kind, status) for kind, status, _ in _ERROR_TABLE),
    (GatewayError, 400),
)
"""The status of each class of errors; what the graph says is 400."""
