"""What goes wrong, in the server's words: ``{"error": …, "error_type": …}`` by status.

Sources: MindIE-LLM 0695772, src/server/endpoint (statuses: utils/http_rest_resource.h; timeouts:
single_llm_pnd_req_handler.cpp; too large a body: http_server.cpp); for 429 the coordinator that
stands before the server, Ascend/MindIE-Motor 5dfb024, RequestListener.cpp. Where the server has no
such case (401, 403, no worker) the words are our own.
"""

import math
from typing import Any, Final

import msgspec

from gateway.core.errors import (
    ContentRefused,
    ContextTooLong,
    DeadlineExceeded,
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
    RequestNotFound,
    TooLarge,
    Unauthorized,
    Unsupported,
    VersionNotFound,
    WorkerError,
    WorkerUnreachable,
)
from gateway.core.ports import Call, Headers, Reply
from protocols.mindie.checks import body, get, inner
from protocols.mindie.inputs import NEITHER

_encode = msgspec.json.Encoder().encode

CLOSE: Final[Headers] = (("Connection", "close"),)
JSON: Final[Headers] = (("Content-Type", "application/json"), *CLOSE)
STOPPED: Final = "The service has been stopped."
TYPES: Final = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFoundError",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}
_IN_BODY = ("chat", "completion")
"""The endpoints whose model stands in the body."""
_MIB = 1 << 20
_MALFORMED = {
    "generate": NEITHER,
    "root": "Failed to parse context to json body",
    "stop": "Failed to parse context to json body.",
    "tokenizer": "Req body converts to json fail.",
}


def told(status: int, text: str) -> Reply:
    """An error in the usual shape."""
    return Reply(status, _encode({"error": text, "error_type": TYPES[status]}), JSON)


def failed() -> Reply:
    """The answer could not be made."""
    return told(500, "Failed to get engine response.")


def nothing(status: int = 404) -> Reply:
    """No body, as for a path that the server does not have."""
    return Reply(status, b"", CLOSE)


def unknown_model(name: str) -> str:
    """What is said of a model that a body names and nobody has."""
    return f"Got model {name[:300]}, but not found in server"


def broken(error: GatewayError, timeout: float | None) -> bytes:
    """The bare text at the end of a stream that fails; ``timeout`` is the client's own."""
    match error:
        case DeadlineExceeded(phase=which):
            return _timeout(which, timeout is not None).encode()
        case _:
            return b"Failed to get engine response"


def refuse(error: GatewayError, call: Call | None) -> Reply:
    """See ``gateway.core.ports.Dialect``."""
    variant = call.endpoint.operation if call else ""
    match error:
        case RequestNotFound(id=name):
            return told(404, f"RequestId is {name} not found.")
        case PathNotFound() | MethodNotAllowed():
            return nothing()
        case VersionNotFound() if variant not in _IN_BODY:
            return nothing()
        case ModelNotFound(model=model) if variant in _IN_BODY:
            return told(422, unknown_model(model))
        case ModelNotFound(model=model):
            return told(404, f"Model {model[:300]} not found.")
        case Malformed():
            return told(422, _MALFORMED.get(variant, "Failed to parse request context to json"))
        case TooLarge(limit=limit):
            return _too_large(limit)
        case RateLimited() | QuotaExceeded():
            return _busy(error, variant)
        case DeadlineExceeded(phase=which):
            own = call is not None and _has_timeout(call)
            return told(500, _timeout(which, own))
        case InternalError():
            return Reply(500, b"Server internal error", JSON)
        case _:
            return _retry_after(_other(error), error)


def _other(error: GatewayError) -> Reply:
    match error:
        case InvalidParameter() | Unsupported():
            return told(422, error.message)
        case ContextTooLong():
            return told(424, f"Failed to enqueue inferRequest. {error.message}")
        case Unauthorized():
            return told(401, error.message)
        case Forbidden():
            return told(403, error.message)
        case ContentRefused():
            return told(400, error.message)
        case Overloaded() | WorkerUnreachable():
            return told(503, error.message)
        case WorkerError():
            return failed()
        case _:
            return told(400 if error.origin == "client" else 500, error.message)


def _too_large(limit: int) -> Reply:
    text = f"Request body too large. Maximum allowed size is {limit / _MIB:g}MB."
    return Reply(413, _encode({"message": text}), JSON)


def _busy(error: GatewayError, variant: str) -> Reply:
    shape: dict[str, Any]
    match variant:
        case "chat" | "completion":
            inside = {"message": error.message, "type": "server_error", "code": 429}
            shape = {"error": inside}
        case "generate" | "generate_stream" | "root":
            shape = {"error": error.message, "error_type": "overloaded"}
        case _:
            shape = {"error": error.message, "code": 429}
    return _retry_after(Reply(429, _encode(shape), JSON), error)


def _retry_after(reply: Reply, error: GatewayError) -> Reply:
    if error.retry_after is None:
        return reply
    after = ("Retry-After", str(math.ceil(error.retry_after)))
    return Reply(reply.status, reply.body, (*reply.headers, after))


def _timeout(which: str, own: bool) -> str:  # noqa: FBT001 - whether the limit was the client's
    names = {"idle": "server tokenTimeout", "first_token": "server tokenTimeout"}
    limit = names.get(which) or ("client timeout" if own else "server e2eTimeout")
    return f"Engine callback timeout: {limit}"


def _has_timeout(call: Call) -> bool:
    """Whether the client set a limit. The request was read before, unless it never came whole."""
    try:
        return get(inner(body(call), "parameters"), "timeout") is not None
    except (Malformed, InvalidParameter):
        return False
