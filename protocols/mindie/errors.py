"""Errors in the server's format: ``{"error": …, "error_type": …}`` by status.

Sources: MindIE-LLM 0695772, src/server/endpoint (statuses: utils/http_rest_resource.h; timeouts:
single_llm_pnd_req_handler.cpp; body limit: http_server.cpp); for 429 the coordinator in front of
the server, Ascend/MindIE-Motor 5dfb024, RequestListener.cpp. Where the server has no such case
(401, 403, no worker), the text is the gateway's own.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from protocols.chat import worker_errors
from protocols.chat.worker_errors import WorkerErrorBody, map_worker_error
from protocols.core.errors import (
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
    Unauthorized,
    UnsupportedEncoding,
    UnsupportedFeature,
    VersionNotFound,
    WorkerError,
    WorkerFailed,
    WorkerModelNotFound,
    WorkerUnreachable,
)
from protocols.core.interfaces import ClientRequest, Headers, HttpResponse
from protocols.mindie.params import get_field, read_body_fields, read_object_field

MISSING_INPUT_ERROR: Final = (
    '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, '
    'the request body must be valid json", "error_type": "validation"}'
)
"""Sent as a string that holds JSON."""


_encode = msgspec.json.Encoder().encode

CLOSE_HEADERS: Final[Headers] = (("Connection", "close"),)
JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"), *CLOSE_HEADERS)
SERVICE_STOPPED: Final = "The service has been stopped."
ERROR_TYPES: Final = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFoundError",
    415: "Unsupported Media Type",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}
_MODEL_IN_BODY_OPERATIONS = ("chat", "completion")
"""Operations whose body names the model."""
_MIB = 1 << 20
_MALFORMED_BODY_ERRORS = {
    "generate": MISSING_INPUT_ERROR,
    "root": "Failed to parse context to json body",
    "stop": "Failed to parse context to json body.",
    "tokenizer": "Req body converts to json fail.",
}


def keep_connection(headers: Headers) -> Headers:
    """The headers of a response after which the connection is kept."""
    return tuple(header for header in headers if header not in CLOSE_HEADERS)


def build_status_response(status: int, text: str) -> HttpResponse:
    """Build an error response in the common format."""
    return HttpResponse(
        status, _encode({"error": text, "error_type": ERROR_TYPES[status]}), JSON_HEADERS
    )


def build_engine_error_response() -> HttpResponse:
    """Build the response to a failed generation."""
    return build_status_response(500, "Failed to get engine response.")


def build_empty_response(status: int = 404) -> HttpResponse:
    """Build a response without a body, as for an unknown path."""
    return HttpResponse(status, b"", CLOSE_HEADERS)


def describe_unknown_model(name: str) -> str:
    """The error text for an unknown model in a body."""
    return f"Got model {name[:300]}, but not found in server"


def encode_stream_error(error: GatewayError, timeout: float | None) -> bytes:
    """Encode the plain text that ends a failed stream; ``timeout`` is the client's, in seconds."""
    if isinstance(error, DeadlineExceeded):
        return _describe_timeout(error.phase, client_timeout=timeout is not None).encode()
    return b"Failed to get engine response"


def build_error_response(error: GatewayError, call: ClientRequest | None) -> HttpResponse:
    """See ``protocols.core.interfaces.ClientAdapter``."""
    variant = call.endpoint.operation if call else ""
    match error:
        case RequestNotFound(id=name):
            return build_status_response(404, f"RequestId is {name} not found.")
        case PathNotFound() | MethodNotAllowed():
            return build_empty_response()
        case VersionNotFound() if variant not in _MODEL_IN_BODY_OPERATIONS:
            return build_empty_response()
        case ModelNotFound(model=model) if variant in _MODEL_IN_BODY_OPERATIONS:
            return build_status_response(422, describe_unknown_model(model))
        case ModelNotFound(model=model):
            return build_status_response(404, f"Model {model[:300]} not found.")
        case MalformedRequest():
            return build_status_response(
                422, _MALFORMED_BODY_ERRORS.get(variant, "Failed to parse request context to json")
            )
        case RequestTooLarge(limit=limit):
            return _build_too_large_response(error.message, limit)
        case RateLimitExceeded() | QuotaExceeded():
            return _build_rate_limit_response(error, variant)
        case DeadlineExceeded(phase=phase):
            client_timeout = call is not None and _has_client_timeout(call)
            text = _describe_timeout(phase, client_timeout=client_timeout)
            return build_status_response(500, text)
        case InternalError():
            return HttpResponse(500, b"Server internal error", JSON_HEADERS)
        case _:
            return _add_retry_after(_map_other_error(error), error)


def _map_other_error(error: GatewayError) -> HttpResponse:
    match error:
        case InvalidParameter() | UnsupportedFeature():
            return build_status_response(422, error.message)
        case ContextTooLong():
            return build_status_response(424, f"Failed to enqueue inferRequest. {error.message}")
        case Unauthorized():
            return build_status_response(401, error.message)
        case UnsupportedEncoding():
            return build_status_response(415, error.message)
        case ContentFiltered():
            return build_status_response(400, error.message)
        case Overloaded() | WorkerUnreachable():
            return build_status_response(503, error.message)
        case WorkerError():
            return build_engine_error_response()
        case _:
            return build_status_response(400 if error.origin == "client" else 500, error.message)


def _build_too_large_response(text: str, limit: int | None) -> HttpResponse:
    if limit is not None:
        text = f"Request body too large. Maximum allowed size is {limit / _MIB:g}MB."
    return HttpResponse(413, _encode({"message": text}), JSON_HEADERS)


def _build_rate_limit_response(error: GatewayError, variant: str) -> HttpResponse:
    body: dict[str, Any]
    match variant:
        case "chat" | "completion":
            body = {"error": {"message": error.message, "type": "server_error", "code": 429}}
        case "generate" | "generate_stream" | "root":
            body = {"error": error.message, "error_type": "overloaded"}
        case _:
            body = {"error": error.message, "code": 429}
    return _add_retry_after(HttpResponse(429, _encode(body), JSON_HEADERS), error)


def _add_retry_after(reply: HttpResponse, error: GatewayError) -> HttpResponse:
    if error.retry_after is None:
        return reply
    header = ("Retry-After", str(math.ceil(error.retry_after)))
    return HttpResponse(reply.status, reply.body, (*reply.headers, header))


def _describe_timeout(phase: str, *, client_timeout: bool) -> str:
    """Describe a timeout; ``client_timeout``: the client set the total one."""
    limit = "client timeout" if client_timeout else "server e2eTimeout"
    if phase in ("idle", "first_token"):
        limit = "server tokenTimeout"
    return f"Engine callback timeout: {limit}"


def _has_client_timeout(call: ClientRequest) -> bool:
    """Whether the client set a timeout. False if the body is incomplete or invalid."""
    try:
        parameters = read_object_field(read_body_fields(call), "parameters")
        return get_field(parameters, "timeout") is not None
    except (MalformedRequest, InvalidParameter):
        return False


# Worker errors that ``protocols.chat.errors`` does not cover.
#
# Sources: MindIE-LLM 0695772, http_rest_resource.h (names of errors), llm_manager_impl.cpp
# (VerifyInputTokenSize), single_llm_pnd_req_handler.cpp (what ends a stream); for the
# coordinator's 429 Ascend/MindIE-Motor 5dfb024.

_STATUS_BY_TYPE: Final = {name: status for status, name in ERROR_TYPES.items()} | {
    "overloaded": 429
}
_TOKEN_LIMIT_PATTERN = re.compile(
    r"maximum input ids length cannot be greater than (?:\w+ )?(?P<max_ids>\d{1,12}),\s*"
    r"the input ids length is (?P<ids>\d{1,12})"
    r"|token length must be in \(0, (?P<max_tokens>\d{1,12})\], but got (?P<tokens>\d{1,12})"
)
_TEXT_LIMIT_PATTERN = re.compile(
    r"(?:length|len not) in \(0, \d+\]?, but the length of inputs is [1-9]"
)
_UNKNOWN_MODEL_PATTERN = re.compile(r"Model .* not found\.|Got model .*, but not found in server")
_BODY_LIMIT_PATTERN = re.compile(r"Maximum allowed size is (\d{1,6}) ?MB")
_ENQUEUE_ERROR = "Failed to enqueue inferRequest."
_STREAM_ERROR_PATTERN = re.compile(
    rb"Engine callback timeout: (?:client timeout|server (?:token|e2e)Timeout)"
    rb"|Failed to get engine response"
)
"""The text that ends a failed stream."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """Map a worker's error response to an error. Names in ``headers`` are lower case."""
    return worker_errors.read_worker_error(status, headers, body, _map_worker_error)


def raise_worker_error(body: bytes) -> None:
    """Raise the error in a body, or in stream text outside an event.

    Returns if there is none.
    """
    worker_errors.raise_worker_error(body, _map_worker_error)
    if (match := _STREAM_ERROR_PATTERN.search(body)) is not None:
        error = WorkerFailed("The worker broke off its answer.")
        error.worker_text = match[0].decode()
        raise error


def _map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    status = status or _STATUS_BY_TYPE.get(fault.type, 0)
    return _map_mindie_error(status, fault) or map_worker_error(status, fault, retry_after)


def _map_mindie_error(status: int, fault: WorkerErrorBody) -> GatewayError | None:
    """Map the errors that only this server has."""
    text = fault.text
    if status in (404, 422) and _UNKNOWN_MODEL_PATTERN.fullmatch(text):
        return WorkerModelNotFound("The worker does not know the model.", status=status)
    if (match := _TOKEN_LIMIT_PATTERN.search(text)) is not None:
        tokens, limit = match["ids"] or match["tokens"], match["max_ids"] or match["max_tokens"]
        return ContextTooLong(text, tokens=int(tokens), limit=int(limit))
    if _TEXT_LIMIT_PATTERN.search(text):
        return ContextTooLong(text)
    if status == 413 and (match := _BODY_LIMIT_PATTERN.search(text)) is not None:  # noqa: PLR2004 - HTTP's
        return RequestTooLarge(text, limit=int(match[1]) << 20)
    if status == 424 and text.startswith(_ENQUEUE_ERROR):  # noqa: PLR2004 - HTTP's
        return UnsupportedFeature(text)  # the engine reports an invalid argument
    return None
