"""Errors in the original's words, statuses and content types.

``strict`` is the original to the letter: a body that its JSON layer refuses is status 500, and a
few answers are labelled text/plain. ``sane`` calls the client's faults 400 and everything JSON.
"""

import math
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal

from msgspec import Struct, structs

from protocols.chat import errors
from protocols.chat.errors import WorkerErrorBody
from protocols.core import sse
from protocols.core.errors import (
    ClientError,
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
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
    VersionNotFound,
    WorkerError,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import ClientRequest, HttpResponse
from protocols.triton import params, rapidjson, requests
from protocols.triton.tensors import (
    CHUNKED_EVENT_HEADERS,
    JSON_HEADERS,
    PLAIN_TEXT_HEADERS,
    encode_json,
)

StatusMode = Literal["strict", "sane"]

ERROR_STATUSES: Final[tuple[tuple[type[GatewayError], int], ...]] = (
    (ModelNotFound, 404),
    (PathNotFound, 404),
    (MethodNotAllowed, 405),
    (Unauthorized, 403),
    (Forbidden, 403),
    (RateLimitExceeded, 429),
    (QuotaExceeded, 429),
    (ClientError, 400),
    (Overloaded, 503),
    (DeadlineExceeded, 503),
    (WorkerUnreachable, 503),
    (WorkerError, 400),
    (GatewayError, 500),
)
"""The first class that fits. The original calls every failure of a model 400."""

_PRE_BODY_PARAMS: Final = frozenset(
    {"version", params.JSON_LENGTH_HEADER, params.CONTENT_ENCODING_HEADER}
)
"""What is wrong before the body of infer is looked at."""

_PLAIN_TEXT_PATHS: Final = ("/health/live", "/ready", "/infer")
"""The ends of the paths on which the original calls its "Method Not Allowed" text."""


class ErrorBody(Struct):
    """Every error that this protocol has."""

    error: str


def encode_error_body(error: GatewayError, call: ClientRequest | None = None) -> bytes:
    """The error's JSON."""
    return encode_json(ErrorBody(get_error_message(error, call)))


def get_error_message(error: GatewayError, call: ClientRequest | None = None) -> str:
    """The original's sentence for this error, or the worker's own."""
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
        case RequestTooLarge():
            return f"request size exceeds the maximum allowed input size of {error.limit} bytes."
        case Overloaded():
            return f"{params.build_request_tag(_read_request_id(call))}Exceeds maximum queue size"
        case DeadlineExceeded():
            return "Request timeout expired"
        case _:
            return error.message


def build_error_response(
    error: GatewayError, call: ClientRequest | None, status: StatusMode
) -> HttpResponse:
    """The answer before anything was sent."""
    strict = status == "strict"
    if _is_decompression_error(error) and call is not None:
        error = _map_decompression_error(call) or error
    if strict and _is_model_error(error) and call and call.endpoint.operation == "generate_stream":
        code = 400 if error.upstream_error is None else error.upstream_error.status
        return HttpResponse(
            code, sse.format_event(encode_error_body(error, call)), CHUNKED_EVENT_HEADERS
        )
    headers = PLAIN_TEXT_HEADERS if strict and _is_plain_text(error, call) else JSON_HEADERS
    return HttpResponse(
        _get_status_code(error, call, strict=strict),
        encode_error_body(error, call),
        (*headers, *_iter_extra_headers(error, strict=strict)),
    )


def _get_status_code(error: GatewayError, call: ClientRequest | None, *, strict: bool) -> int:
    if strict and error.upstream_error is not None:
        return error.upstream_error.status
    if isinstance(error, MalformedRequest) or (
        isinstance(error, InvalidParameter) and error.problem == "type"
    ):
        return 500 if strict else 400
    if (
        error.param == params.CONTENT_ENCODING_HEADER
        and call
        and call.endpoint.operation == "infer"
    ):
        return 501
    return next(code for kind, code in ERROR_STATUSES if isinstance(error, kind))


def _is_decompression_error(error: GatewayError) -> bool:
    """Whether the body could not be decompressed, for which there is no class of its own."""
    return type(error) is ClientError or (
        isinstance(error, MalformedRequest) and error.problem == "encoding"
    )


def _map_decompression_error(call: ClientRequest) -> GatewayError | None:
    """What the original says, which does not try on all of its paths."""
    if call.endpoint.operation == "infer":
        return None if requests.has_supported_encoding(call) else params.build_compression_error()
    generates = call.endpoint.operation.startswith("generate")
    return params.build_encoding_error() if generates and requests.is_compressed(call) else None


def _is_model_error(error: GatewayError) -> bool:
    """Whether the original would hear of it from its model, as the first event of a stream."""
    if error.upstream_error is not None:
        return error.upstream_error.in_stream
    if isinstance(error, InvalidParameter):
        return error.problem == "conflict"
    return error.origin == "worker" and not isinstance(error, WorkerUnreachable)


def _is_plain_text(error: GatewayError, call: ClientRequest | None) -> bool:
    """The original labels what it says before it looks at a body, on some of its paths."""
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


def _read_request_id(call: ClientRequest | None) -> str | None:
    if call is None or not call.endpoint.operation.startswith("generate"):
        return None
    try:
        return requests.read_request_id(rapidjson.parse_fields(call.body))
    except ClientError:
        return None


# What a worker's error means.
#
# The original calls every failure of a model 400, whoever is to blame, and tells some inside a body
# of status 200: only the text says which it is.

_SERVER_ERROR_PATTERN: Final = re.compile(
    r"\[request id: |has invalid type\. It should|The schema can not convert"
)
"""What the server itself complains of is how it was asked, and no client's doing."""
_BUSY_PATTERN: Final = re.compile(
    r"maximum queue size|Request timeout expired|unavailable|not ready|out of memory",
    re.IGNORECASE,
)
_CONTEXT_LENGTH_PATTERN: Final = re.compile(
    r"exceeds? (?:the )?max(?:imum)?[ _](?:input|sequence|seq|context|prompt)[ _](?:length|len)"
    r"|prompt (?:is )?too long",
    re.IGNORECASE,
)
_PARAMETER_ERROR_PATTERN: Final = re.compile(
    r"\b(?:must (?:not )?be|should be|at (?:least|most)|(?:greater|less|larger|smaller) than"
    r"|out of range|not (?:supported|enabled|allowed)|invalid (?:value|parameter|argument))\b",
    re.IGNORECASE,
)
"""How models complain of a parameter."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """What an answer of this status means. A stream's first failure is framed as its event."""
    plain = body.removeprefix(b"data:").strip()
    return errors.read_worker_error(status, headers, plain, map_worker_error)


def raise_response_error(got: Any, text: str) -> None:
    """Raises what an answer tells of; returns if it has the output ``text`` and no error."""
    told = got.get("error") if isinstance(got, dict) else None
    if told is None and isinstance(got, dict) and text in got:
        return
    found = errors.find_worker_error(got)
    if found is not None or told is not None:
        raise map_model_error(found or WorkerErrorBody())


def raise_worker_error(body: bytes) -> None:
    """Raises what a line that is no event tells of; returns if it tells of nothing."""
    errors.raise_worker_error(body, map_worker_error)


def map_model_error(fault: WorkerErrorBody) -> GatewayError:
    """What the failure of a model, or a refusal of the server's, means."""
    text = fault.text
    if _BUSY_PATTERN.search(text):
        return errors.map_worker_error(HTTPStatus.SERVICE_UNAVAILABLE, fault)
    if _CONTEXT_LENGTH_PATTERN.search(text):
        fault = structs.replace(fault, code="context_length_exceeded")
    error = errors.map_worker_error(HTTPStatus.BAD_REQUEST, fault)
    if isinstance(error, ContextTooLong) or (
        _PARAMETER_ERROR_PATTERN.search(text) and not _SERVER_ERROR_PATTERN.search(text)
    ):
        return error
    failed = WorkerFailed("the worker answered with an error", status=HTTPStatus.BAD_REQUEST)
    if text:
        failed.add_note(f"the worker said: {text}")
    return failed


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """What a fault of this status means; 0: told inside an answer."""
    if status in (0, HTTPStatus.BAD_REQUEST):
        return map_model_error(fault)
    return errors.map_worker_error(status, fault, retry_after)
