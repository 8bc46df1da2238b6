"""Bodies and errors of the admin API: JSON in, JSON out, one form of every error.

Handlers raise AdminError; ``error_middleware`` answers it, and everything else that is raised.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from aiohttp import hdrs, web

from gateway.config.schema import ServerLimitsConfig
from protocols.core.errors import MalformedRequest
from protocols.core.json_text import decode_json
from protocols.json_body import read_object

log = logging.getLogger("interlingua")

AiohttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""A request handler; aiohttp passes it to middlewares as ``handler``."""
BodyT = TypeVar("BodyT")

MAX_BODY_SIZE: Final = 64 << 10
"""Maximum bytes of a body."""
_BODY_TIMEOUT: Final = 10.0
"""Seconds to receive a body."""
CONNECTION_LIMITS: Final = ServerLimitsConfig(
    header=8 << 10,
    connections=64,
    connections_per_address=1 << 16,  # none: operators may share an address, and they have the key
    header_timeout=5.0,
    body_timeout=_BODY_TIMEOUT,
)
"""The admin listener's own, apart from those of clients."""
_ERROR_FIELD = re.compile(r"`\$\.(\w+)`|field `([^`]*)`")
RESPONSE_HEADERS: Final = {
    hdrs.SERVER: "interlingua",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response."""
_STATUS_MESSAGES: Final[Mapping[int, str]] = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: f"the body is larger than {MAX_BODY_SIZE} bytes",
}


class AdminError(Exception):
    """An error response."""

    def __init__(
        self, status: HTTPStatus, message: str, field: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = headers


@web.middleware
async def error_middleware(request: web.Request, handler: AiohttpHandler) -> web.StreamResponse:
    """Add the common headers, and turn exceptions into JSON errors."""
    try:
        response = await handler(request)
    except AdminError as error:
        response = _error_response(error.status, error.message, error.field, error.headers)
    except web.HTTPException as error:
        message = _STATUS_MESSAGES.get(error.status, "the request cannot be handled")
        response = _error_response(error.status, message, None, {})
        if (allowed_methods := error.headers.get(hdrs.ALLOW)) is not None:
            response.headers[hdrs.ALLOW] = allowed_methods
    except Exception:
        log.exception("an admin request failed")
        response = _error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error", None, {})
    response.headers.update(RESPONSE_HEADERS)
    return response


async def read_json_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Decode a JSON body. The content type check rejects cross-site HTML forms."""
    encoded = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity"
    if request.content_type != "application/json" or encoded:
        message = "the content type must be application/json"
        raise AdminError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            body = await request.read()
    except TimeoutError:
        raise AdminError(HTTPStatus.REQUEST_TIMEOUT, "the body took too long") from None
    try:
        read_object(body)  # for better error messages
        return decode_json(body, kind=kind)
    except MalformedRequest as error:
        raise AdminError(HTTPStatus.BAD_REQUEST, error.message) from None
    except msgspec.ValidationError as error:
        text = str(error)
        match = _ERROR_FIELD.search(text)
        field = (match[1] or match[2]) if match else None
        message = text.partition(" - at ")[0]
        raise AdminError(HTTPStatus.BAD_REQUEST, message, field) from None


def json_response(status: int, payload: object) -> web.Response:
    """Build a JSON response."""
    return web.Response(
        status=status, body=msgspec.json.encode(payload), content_type="application/json"
    )


def _error_response(
    status: int, message: str, field: str | None, headers: Mapping[str, str]
) -> web.Response:
    response = json_response(status, {"error": {"message": message, "field": field}})
    response.headers.update(headers)
    return response
