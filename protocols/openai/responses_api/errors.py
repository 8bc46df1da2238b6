"""Errors of the Responses API: those of chat completions, with this API's parameters."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from protocols.chat.errors import build_error_body, build_error_response
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StoredObjectNotFound,
    WorkerUnreachable,
)
from protocols.core.interfaces import HttpResponse

_encode = msgspec.json.Encoder().encode

_OVERLOAD_AGENT: Final = "codex"
_OVERLOAD_CODE: Final = "server_is_overloaded"
"""Makes Codex stop with a message after 5 requests; for another code it makes 30."""


def encode_error(error: GatewayError, headers: Mapping[str, str]) -> HttpResponse:
    """The error response; ``headers`` are the request's.

    A 429 always says when to try again: Codex gives up without.
    """
    status, body = build_error_body(error)
    if body.param is not None and body.param.split("[")[0].split(".")[0] == "messages":
        body = replace(body, param="input")
    match error:
        case StoredObjectNotFound(param="previous_response_id"):
            status, body = 400, replace(body, code="previous_response_not_found")
        case ContextTooLong():
            body = replace(body, param="input")
        case Overloaded() | WorkerUnreachable() if (
            headers.get("user-agent", "").lower().startswith(_OVERLOAD_AGENT)
        ):
            body = replace(body, code=_OVERLOAD_CODE)
        case _:
            pass
    response = build_error_response(error)
    more = response.headers
    if isinstance(error, RateLimitExceeded) and error.retry_after is None:
        more = (*more, ("Retry-After", "1"))
    return HttpResponse(status, _encode({"error": body}), more)
