"""Our errors in TGI's form, and worker errors.

TGI's own endpoints return errors as ``{"error", "error_type"}``, with a status or, in a stream of
``/generate_stream``, without one. A stream of ``/v1`` sends ``{"error": {"message"}}`` with 422 for
any error, so only the text tells errors apart (``router/src/infer/mod.rs``).
"""

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from protocols.chat import errors, worker_errors
from protocols.chat.worker_errors import WorkerErrorBody, map_worker_error
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
    StreamBroken,
    Unauthorized,
    UnsupportedEncoding,
    WorkerError,
    WorkerUnreachable,
    find_entry,
)
from protocols.core.interfaces import Headers, HttpResponse
from protocols.core.json_text import encode_ascii
from protocols.params import Param

# Errors for clients.

JSON_HEADERS: Headers = (("Content-Type", "application/json"),)
_OVERLOADED: Final = "Model is overloaded"
_FAILED: Final = "Request failed during generation: "


class TgiError(Struct, frozen=True):
    """The body of every error. Clients choose an exception by ``error_type``."""

    error: str
    error_type: str


_STATUSES: Final[Mapping[type[GatewayError], tuple[int, str]]] = {
    ClientError: (422, "validation"),
    MalformedRequest: (400, "validation"),
    ModelNotFound: (404, "not_found"),
    PathNotFound: (404, "not_found"),
    MethodNotAllowed: (405, "method_not_allowed"),
    RequestTooLarge: (413, "validation"),
    UnsupportedEncoding: (415, "validation"),
    Unauthorized: (401, "authentication"),
    RateLimitExceeded: (429, "overloaded"),
    QuotaExceeded: (429, "overloaded"),
    ClientDisconnected: (499, "generation"),
    Overloaded: (503, "overloaded"),
    DeadlineExceeded: (504, "generation"),
    StreamBroken: (500, "incomplete_generation"),
    WorkerError: (424, "generation"),
    WorkerUnreachable: (503, "overloaded"),
    InternalError: (500, "internal"),
    GatewayError: (500, "internal"),
}
ERROR_STATUSES: Final = tuple((kind, status) for kind, (status, _) in _STATUSES.items())
"""The status of each error class."""

_RANGE_TEXTS: Final[Mapping[str, str]] = {
    "best_of": "`best_of` must be > 0 and <= {limit}. Given: {value}",
    "temperature": "`temperature` must be strictly positive",
    "repetition_penalty": "`repetition_penalty` must be strictly positive",
    "frequency_penalty": "`frequency_penalty` must be >= -2.0 and <= 2.0",
    "top_k": "`top_k` must be strictly positive",
    "top_p": "`top_p` must be > 0.0 and < 1.0",
    "typical_p": "`typical_p` must be > 0.0 and < 1.0",
    "max_new_tokens": "`max_new_tokens` must be strictly positive",
    "truncate": "`truncate` must be strictly positive and less than {limit}. Given: {value}",
    "top_n_tokens": "`top_n_tokens` must be >= 0 and <= {limit}. Given: {value}",
}
"""The texts of values outside a parameter's range."""


def build_error_body(error: GatewayError, *, in_stream: bool = False) -> TgiError:
    """The body of an error; ``in_stream``: after the response has begun."""
    _, kind = find_entry(_STATUSES, error)
    text = _get_error_text(error)
    return TgiError(
        f"{text} stream" if in_stream and isinstance(error, StreamBroken) else text, kind
    )


def build_error_response(error: GatewayError) -> HttpResponse:
    """The response to ``error``."""
    status, _ = find_entry(_STATUSES, error)
    headers = (*JSON_HEADERS, *errors.build_http_headers(error))
    return HttpResponse(status, encode_ascii(build_error_body(error)), headers)


def _get_error_text(error: GatewayError) -> str:
    match error:
        case InvalidParameter(expected=Param() as row, problem="below" | "above" | "too_long"):
            return f"Input validation error: {_describe_range(error, row)}"
        case ContextTooLong(tokens=int() as tokens, limit=int() as limit):
            text = f"`inputs` must have less than {limit} tokens. Given: {tokens}"
            return f"Input validation error: {text}"
        case Unauthorized():
            return "unauthorized"
        case RateLimitExceeded() | QuotaExceeded() | Overloaded() | WorkerUnreachable():
            return _OVERLOADED
        case DeadlineExceeded():
            return f"{_FAILED}timeout"
        case StreamBroken():
            return "Incomplete generation"
        case WorkerError():
            return f"{_FAILED}{error.message}"
        case _:
            return error.message


def _describe_range(error: InvalidParameter, row: Param) -> str:
    if row.wire == "stop":
        count = len(error.value)
        return f"`stop` supports up to {row.max_items} stop sequences. Given: {count}"
    text = _RANGE_TEXTS.get(row.wire)
    if text is None:
        return error.message
    return text.format(limit=row.maximum, value=error.value)


# Errors of workers.

_CONTEXT_LENGTH_PATTERN = re.compile(
    r"`inputs` must have less than (?P<limit>\d+) tokens\. Given: (?P<prompt>\d+)"
    r"|`max_new_tokens` must be <= (?P<whole>\d+)\. Given: (?P<inputs>\d+) `inputs` tokens"
    r" and (?P<new>\d+)"
)
_STATUS_BY_PREFIX: Final[Mapping[str, int]] = {
    "Input validation error": 422,
    "Template error": 422,
    "Missing template vatiable": 422,  # TGI's spelling
    "Tool error": 422,
    "Model is overloaded": 429,
    "Request failed during generation": 424,
}
"""Statuses by the start of the text; 500 is an interrupted response."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    return worker_errors.read_worker_error(status, headers, body, _map_worker_error)


def raise_worker_error(body: bytes) -> None:
    """Raise the error in a body; returns if there is none."""
    worker_errors.raise_worker_error(body, _map_worker_error)


def _map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    text = fault.text
    statuses = (known for prefix, known in _STATUS_BY_PREFIX.items() if text.startswith(prefix))
    context_error = _read_context_error(fault)
    return context_error or map_worker_error(status or next(statuses, 500), fault, retry_after)


def _read_context_error(fault: WorkerErrorBody) -> GatewayError | None:
    match = _CONTEXT_LENGTH_PATTERN.search(fault.text)
    if match is None:
        return None
    counts = {name: int(count[:18]) for name, count in match.groupdict().items() if count}
    if "whole" in counts:
        tokens, limit = counts["inputs"] + counts["new"], counts["whole"]
    else:
        tokens, limit = counts["prompt"], counts["limit"]
    return ContextTooLong(fault.text, tokens=tokens, limit=limit)
