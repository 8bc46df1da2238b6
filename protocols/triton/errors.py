"""Errors with Triton's texts, statuses and content types.

``strict`` reproduces Triton exactly: status 500 for a body that its JSON parser rejects, and
text/plain for some responses. ``sane`` uses 400 for client errors, and JSON everywhere.
"""

import math
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal

from msgspec import Struct, structs

from protocols.chat import worker_errors
from protocols.chat.worker_errors import WorkerErrorBody
from protocols.core import sse
from protocols.core.errors import (
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
    ResponseAborted,
    Unauthorized,
    UnsupportedFeature,
    VersionNotFound,
    WorkerError,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import ClientRequest, HttpResponse
from protocols.core.json_text import MAX_DEPTH
from protocols.triton.formats import (
    CHUNKED_EVENT_HEADERS,
    JSON_HEADERS,
    PLAIN_TEXT_HEADERS,
    encode_json,
)

StatusMode = Literal["strict", "sane"]

JSON_LENGTH_HEADER: Final = "inference-header-content-length"
CONTENT_ENCODING_HEADER: Final = "content-encoding"

ERROR_STATUSES: Final[tuple[tuple[type[GatewayError], int], ...]] = (
    (ModelNotFound, 404),
    (PathNotFound, 404),
    (MethodNotAllowed, 405),
    (Unauthorized, 403),
    (RateLimitExceeded, 429),
    (QuotaExceeded, 429),
    (ClientError, 400),
    (Overloaded, 503),
    (DeadlineExceeded, 503),
    (WorkerUnreachable, 503),
    (ResponseAborted, 502),
    (WorkerError, 400),
    (GatewayError, 500),
)
"""Statuses by error class; the first match counts. Triton uses 400 for any model failure."""

_PRE_BODY_PARAMS: Final = frozenset({"version", JSON_LENGTH_HEADER, CONTENT_ENCODING_HEADER})
"""Errors that are detected before the body of infer is read."""

_PLAIN_TEXT_PATHS: Final = ("/health/live", "/ready", "/infer")
"""Path suffixes whose "Method Not Allowed" response Triton labels as text."""


class ErrorBody(Struct):
    """Every error of this protocol."""

    error: str


def encode_error_body(error: GatewayError, request_id: str | None = None) -> bytes:
    """Encode the JSON body of an error."""
    return encode_json(ErrorBody(get_error_message(error, request_id)))


def get_error_message(error: GatewayError, request_id: str | None = None) -> str:
    """Return Triton's text for this error, or the worker's own."""
    if error.upstream_error is not None:
        return error.upstream_error.text
    match error:
        case VersionNotFound():
            return (
                f"Request for unknown model: '{error.model}' version {error.version} is not found"
            )
        case ModelNotFound():
            return f"Request for unknown model: '{error.model}' is not found"
        case PathNotFound():
            return "Not Found"
        case MethodNotAllowed():
            return "Method Not Allowed"
        case Unauthorized():
            return "This API is restricted, expecting header 'Authorization'"
        case RequestTooLarge(limit=int()):
            return f"request size exceeds the maximum allowed input size of {error.limit} bytes."
        case Overloaded():
            return f"{build_request_tag(request_id)}Exceeds maximum queue size"
        case DeadlineExceeded():
            return "Request timeout expired"
        case _:
            return error.message


def build_error_response(
    error: GatewayError, call: ClientRequest | None, status: StatusMode, request_id: str | None
) -> HttpResponse:
    """Build the error response before a stream has started."""
    strict = status == "strict"
    body = encode_error_body(error, request_id)
    if strict and _is_model_error(error) and call and call.endpoint.operation == "generate_stream":
        code = 400 if error.upstream_error is None else error.upstream_error.status
        return HttpResponse(code, sse.format_event(body), CHUNKED_EVENT_HEADERS)
    headers = PLAIN_TEXT_HEADERS if strict and _is_plain_text(error, call) else JSON_HEADERS
    return HttpResponse(
        _get_status_code(error, call, strict=strict),
        body,
        (*headers, *_iter_extra_headers(error, strict=strict)),
    )


def _get_status_code(error: GatewayError, call: ClientRequest | None, *, strict: bool) -> int:
    if strict and error.upstream_error is not None:
        return error.upstream_error.status
    if isinstance(error, MalformedRequest) or (
        isinstance(error, InvalidParameter) and error.problem == "type"
    ):
        return 500 if strict else 400
    if error.param == CONTENT_ENCODING_HEADER and call and call.endpoint.operation == "infer":
        return 501
    return next(code for kind, code in ERROR_STATUSES if isinstance(error, kind))


def _is_model_error(error: GatewayError) -> bool:
    """Whether Triton gets this error from the model, as the first event of a stream."""
    if error.upstream_error is not None:
        return error.upstream_error.in_stream
    if isinstance(error, InvalidParameter):
        return error.problem == "conflict"
    return error.origin == "worker" and not isinstance(error, WorkerUnreachable | ResponseAborted)


def _is_plain_text(error: GatewayError, call: ClientRequest | None) -> bool:
    """Whether Triton labels this error as text: some paths, before the body is read."""
    if isinstance(error, PathNotFound):
        return True
    if isinstance(error, MethodNotAllowed):
        return error.path.endswith(_PLAIN_TEXT_PATHS)
    if call is None:
        return False
    match call.endpoint.operation:
        case "live" | "ready" | "model_ready":
            return True
        case "infer":
            return isinstance(error, ModelNotFound) or error.param in _PRE_BODY_PARAMS
        case _:
            return False


def _iter_extra_headers(error: GatewayError, *, strict: bool) -> Iterator[tuple[str, str]]:
    if error.retry_after is not None:
        yield "Retry-After", str(math.ceil(error.retry_after))
    if isinstance(error, MethodNotAllowed) and not strict:
        yield "Allow", ", ".join(error.allowed)


# Errors in requests, with Triton's texts.
#
# Clients match on these texts, so they are defined once. ``problem="type"`` marks errors of
# Triton's JSON parser, ``problem="conflict"`` marks errors of its models.


def build_request_tag(request_id: str | None) -> str:
    """The prefix of error texts of Triton's core."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def build_json_error(reason: str, at: int) -> MalformedRequest:
    """The body is not JSON; ``at`` is a byte offset."""
    return MalformedRequest(f"failed to parse the request JSON buffer: {reason} at {at}", at=at)


def build_depth_error() -> MalformedRequest:
    """The JSON body is nested deeper than MAX_DEPTH."""
    return MalformedRequest(
        f"failed to parse the request JSON buffer: nested too deep, more than {MAX_DEPTH} levels",
        problem="depth",
    )


def build_not_object_error() -> MalformedRequest:
    """The JSON body is an empty object."""
    return MalformedRequest("attempt to get members for non-object", problem="object")


def build_type_error(param: str, text: str) -> InvalidParameter:
    """A value of the wrong JSON type."""
    return InvalidParameter(text, param=param, problem="type")


def build_value_error(param: str, text: str) -> InvalidParameter:
    """A value of the right type that is not valid."""
    return InvalidParameter(text, param=param, problem="value")


def build_core_error(request_id: str | None, param: str, text: str) -> InvalidParameter:
    """An error of Triton's core, whose text names the request."""
    return build_value_error(param, build_request_tag(request_id) + text)


def build_model_error(param: str, text: str) -> InvalidParameter:
    """An error that Triton's model would report after the front end accepted the request."""
    return InvalidParameter(text, param=param, problem="conflict")


def build_encoding_error() -> InvalidParameter:
    """A compressed generate body."""
    text = "Unsupported content-encoding, only 'identity' is supported."
    return build_value_error(CONTENT_ENCODING_HEADER, text)


def build_compression_error() -> UnsupportedFeature:
    """An infer body with an unknown compression."""
    return UnsupportedFeature("Unsupported compression type", param=CONTENT_ENCODING_HEADER)


def build_parameter_type_error(name: str) -> InvalidParameter:
    """A null, list or object where a parameter must be a scalar."""
    return build_value_error(
        name,
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )


# Worker errors.
#
# Triton uses 400 for any model failure, and reports some failures in a body with status 200: only
# the text tells client errors from worker errors.

_SERVER_ERROR_PATTERN: Final = re.compile(
    r"\[request id: |has invalid type\. It should|The schema can not convert"
)
"""Triton rejected the gateway's request; not the client's fault."""
_BUSY_PATTERN: Final = re.compile(
    r"maximum queue size|Request timeout expired|unavailable|not ready|out of memory",
    re.IGNORECASE,
)
_CONTEXT_LENGTH_PATTERN: Final = re.compile(
    r"exceeds? (?:the )?max(?:imum)?[ _](?:input|sequence|seq|context|prompt)[ _](?:length|len)"
    r"|prompt (?:is )?too long",
    re.IGNORECASE,
)
_STREAM_ONLY_PATTERN: Final = re.compile(r"generate expects model to produce exactly 1 response")
_PARAMETER_ERROR_PATTERN: Final = re.compile(
    r"\b(?:must (?:not )?be|should be|at (?:least|most)|(?:greater|less|larger|smaller) than"
    r"|out of range|not (?:supported|enabled|allowed)|invalid (?:value|parameter|argument))\b",
    re.IGNORECASE,
)
"""How models report an invalid parameter."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """Map a worker's error response. The first failure of a stream has the format of an event."""
    payload = body.removeprefix(b"data:").strip()
    return worker_errors.read_worker_error(status, headers, payload, map_worker_error)


def needs_stream(error: GatewayError) -> bool:
    """Whether the error of generate says that the model may only be streamed."""
    return _STREAM_ONLY_PATTERN.search(error.worker_text or error.message) is not None


def raise_response_error(response: Any, text: str) -> None:
    """Raise the error in a response; returns if it has the output ``text`` and no error."""
    error = response.get("error") if isinstance(response, dict) else None
    if error is None and isinstance(response, dict) and text in response:
        return
    fault = worker_errors.find_worker_error(response)
    if fault is not None or error is not None:
        raise worker_errors.apply_mapper(map_worker_error, 0, fault or WorkerErrorBody())


def raise_worker_error(body: bytes) -> None:
    """Raise the error in a line that is not an event; returns if there is none."""
    worker_errors.raise_worker_error(body, map_worker_error)


def map_model_error(fault: WorkerErrorBody) -> GatewayError:
    """Map a failure of a model or of the server."""
    text = fault.text
    if _BUSY_PATTERN.search(text):
        return worker_errors.map_worker_error(HTTPStatus.SERVICE_UNAVAILABLE, fault)
    if _CONTEXT_LENGTH_PATTERN.search(text):
        fault = structs.replace(fault, code="context_length_exceeded")
    error = worker_errors.map_worker_error(HTTPStatus.BAD_REQUEST, fault)
    if isinstance(error, ContextTooLong) or (
        _PARAMETER_ERROR_PATTERN.search(text) and not _SERVER_ERROR_PATTERN.search(text)
    ):
        return error
    failed = WorkerFailed("the worker answered with an error", status=HTTPStatus.BAD_REQUEST)
    failed.worker_text = text
    return failed


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """Map an error text with this status; 0: reported inside a response."""
    if status in (0, HTTPStatus.BAD_REQUEST):
        return map_model_error(fault)
    return worker_errors.map_worker_error(status, fault, retry_after)
