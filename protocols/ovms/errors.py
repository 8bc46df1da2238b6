"""Errors: the statuses and texts of the server's status table, and of the graph.

Source: openvinotoolkit/model_server, src/status.cpp, src/http_rest_api_handler.cpp.
"""

from collections.abc import Callable
from math import ceil

from msgspec import Struct, json

from protocols.core.errors import (
    ContextTooLong,
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
    WorkerUnreachable,
)
from protocols.core.interfaces import Headers, HttpResponse

GENERATION_NODE = "LLMExecutor"
EMBEDDING_NODE = "EmbeddingsExecutor"
RERANK_NODE = "RerankExecutor"
"""The node names of an exported graph."""
NODES = {"embedding": EMBEDDING_NODE, "rerank": RERANK_NODE}
"""By operation; the others are of the node of text generation."""

PRE_GRAPH_FIELDS = frozenset({"model", "stream"})
"""The fields that are read before the graph: errors in them are JSON errors."""

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
    """The body of every error."""

    error: str


def encode_error_body(text: str) -> bytes:
    """Encode ``{"error": text}``."""
    return _encode(ErrorBody(text))


def build_graph_error_text(inner: str, node: str = GENERATION_NODE) -> str:
    """Return the graph's text around a node's error text."""
    return (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "{node}" failed: {inner}'
    )


def get_error_text(error: GatewayError, node: str) -> str:
    """Return the text of an error, for a body or a stream."""
    status_and_text = _map_error_status(error)
    return (
        status_and_text[1]
        if status_and_text
        else build_graph_error_text(_get_node_error_text(error), node)
    )


def build_error_response(
    error: GatewayError, *, node: str = GENERATION_NODE, stream: bool = False
) -> HttpResponse:
    """Build the response to ``error``.

    The graph's own errors have content type ``text/event-stream`` if a stream was requested: the
    server writes the header before the graph runs.
    """
    status_and_text = _map_error_status(error)
    if status_and_text is None:
        kind = _EVENT_STREAM_HEADER if stream else _JSON_HEADER
        return HttpResponse(
            400,
            encode_error_body(build_graph_error_text(_get_node_error_text(error), node)),
            (kind,),
        )
    status, text = status_and_text
    return HttpResponse(
        status, encode_error_body(text), (_JSON_HEADER, *_build_retry_headers(error))
    )


def build_unknown_model_response() -> HttpResponse:
    """Build the response to a request for an unknown model."""
    return HttpResponse(500, encode_error_body("Model not found"))


def _build_retry_headers(error: GatewayError) -> Headers:
    if error.retry_after is None:
        return ()
    return (("Retry-After", str(max(1, ceil(error.retry_after)))),)


def _get_node_error_text(error: GatewayError) -> str:
    if isinstance(error, ContextTooLong) and error.tokens is not None and error.limit is not None:
        prompt, most = error.tokens - error.max_tokens, error.max_tokens
        added = f" + max tokens value: {most}" if most and prompt <= error.limit else ""
        return f"Number of prompt tokens: {prompt}{added} exceeds model max length: {error.limit}"
    return error.message


def _map_error_status(error: GatewayError) -> tuple[int, str] | None:
    """Return status and text of an error outside the graph; None for an error of the graph."""
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
    (RequestTooLarge, 413, _get_message),
    (UnsupportedEncoding, 415, _get_message),
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
"""Return the status of an error class; 400 for errors of the graph."""
