"""Errors in the original's words, statuses and content types.

``strict`` is the original to the letter: a body that its JSON layer refuses is status 500, and a
few answers are labelled text/plain. ``sane`` calls the client's faults 400 and everything JSON.
"""

import math
from collections.abc import Iterator
from typing import Final, Literal

from msgspec import Struct

from gateway.core import sse
from gateway.core.errors import (
    ClientError,
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
    VersionNotFound,
    WorkerError,
    WorkerUnreachable,
)
from gateway.core.ports import Call, Reply
from protocols.triton import document, faults, generate, infer
from protocols.triton.wire import JSON, PLAIN, SAID_AS_EVENTS, encode

Status = Literal["strict", "sane"]

STATUSES: Final[tuple[tuple[type[GatewayError], int], ...]] = (
    (ModelNotFound, 404),
    (PathNotFound, 404),
    (MethodNotAllowed, 405),
    (Unauthorized, 403),
    (Forbidden, 403),
    (RateLimited, 429),
    (QuotaExceeded, 429),
    (ClientError, 400),
    (Overloaded, 503),
    (DeadlineExceeded, 503),
    (WorkerUnreachable, 503),
    (WorkerError, 400),
    (GatewayError, 500),
)
"""The first class that fits. The original calls every failure of a model 400."""

_EARLY: Final = frozenset({"version", faults.HEADER, faults.ENCODING})
"""What is wrong before the body of infer is looked at."""

_LABELLED: Final = ("/health/live", "/ready", "/infer")
"""The ends of the paths on which the original calls its "Method Not Allowed" text."""


class ErrorBody(Struct):
    """Every error that this protocol has."""

    error: str


def body(error: GatewayError, call: Call | None = None) -> bytes:
    """The error's JSON."""
    return encode(ErrorBody(message(error, call)))


def message(error: GatewayError, call: Call | None = None) -> str:
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
        case TooLarge():
            return f"request size exceeds the maximum allowed input size of {error.limit} bytes."
        case Overloaded():
            return f"{faults.tag(_request_id(call))}Exceeds maximum queue size"
        case DeadlineExceeded():
            return "Request timeout expired"
        case _:
            return error.message


def refuse(error: GatewayError, call: Call | None, status: Status) -> Reply:
    """The answer before anything was sent."""
    strict = status == "strict"
    if _packed(error) and call is not None:
        error = _of_packing(call) or error
    if strict and _by_model(error) and call and call.endpoint.operation == "generate_stream":
        code = 400 if error.upstream_error is None else error.upstream_error.status
        return Reply(code, sse.event(body(error, call)), SAID_AS_EVENTS)
    headers = PLAIN if strict and _plain(error, call) else JSON
    return Reply(
        _code(error, call, strict=strict),
        body(error, call),
        (*headers, *_more(error, strict=strict)),
    )


def _code(error: GatewayError, call: Call | None, *, strict: bool) -> int:
    if strict and error.upstream_error is not None:
        return error.upstream_error.status
    if isinstance(error, Malformed) or (
        isinstance(error, InvalidParameter) and error.problem == "type"
    ):
        return 500 if strict else 400
    if error.param == faults.ENCODING and call and call.endpoint.operation == "infer":
        return 501
    return next(code for kind, code in STATUSES if isinstance(error, kind))


def _packed(error: GatewayError) -> bool:
    """Whether the body could not be decompressed, for which there is no class of its own."""
    return type(error) is ClientError or (
        isinstance(error, Malformed) and error.problem == "encoding"
    )


def _of_packing(call: Call) -> GatewayError | None:
    """What the original says, which does not try on all of its paths."""
    if call.endpoint.operation == "infer":
        return None if infer.takes(call) else faults.compressed()
    generates = call.endpoint.operation.startswith("generate")
    return faults.encoded() if generates and generate.encoded(call) else None


def _by_model(error: GatewayError) -> bool:
    """Whether the original would hear of it from its model, as the first event of a stream."""
    if error.upstream_error is not None:
        return error.upstream_error.in_stream
    if isinstance(error, InvalidParameter):
        return error.problem == "conflict"
    return error.origin == "worker" and not isinstance(error, WorkerUnreachable)


def _plain(error: GatewayError, call: Call | None) -> bool:
    """The original labels what it says before it looks at a body, on some of its paths."""
    if isinstance(error, PathNotFound):
        return True
    if isinstance(error, MethodNotAllowed):
        return error.path.endswith(_LABELLED)
    if call is None:
        return False
    match call.endpoint.operation:
        case "live" | "ready" | "model_ready":
            return True
        case "infer":
            return isinstance(error, ModelNotFound) or error.param in _EARLY
        case _:
            return False


def _more(error: GatewayError, *, strict: bool) -> Iterator[tuple[str, str]]:
    if error.retry_after is not None:
        yield "Retry-After", str(math.ceil(error.retry_after))
    if isinstance(error, MethodNotAllowed) and not strict:
        yield "Allow", ", ".join(error.allowed)


def _request_id(call: Call | None) -> str | None:
    if call is None or not call.endpoint.operation.startswith("generate"):
        return None
    try:
        return generate.request_id(document.fields(call.body))
    except ClientError:
        return None
