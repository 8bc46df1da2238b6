"""What the admin listener answers, refuses, and reads."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from aiohttp import hdrs, web

from protocols.core.errors import MalformedRequest
from protocols.json_body import read_object

log = logging.getLogger("interlingua")

AiohttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What answers; aiohttp gives it to those that stand before it by the name ``handler``."""
BodyT = TypeVar("BodyT")

MAX_BODY_SIZE: Final = 64 << 10
"""Bytes of a body, at most."""
_BODY_TIMEOUT: Final = 10.0
"""How many seconds a body may take."""
_ERROR_FIELD = re.compile(r"`\$\.(\w+)`|field `([^`]*)`")
RESPONSE_HEADERS: Final = {
    hdrs.SERVER: "interlingua",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Those of every answer."""
_STATUS_MESSAGES: Final[Mapping[int, str]] = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: f"the body is larger than {MAX_BODY_SIZE} bytes",
}


class AdminError(Exception):
    """What is answered in place of what was asked for."""

    def __init__(
        self, status: HTTPStatus, message: str, field: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = headers


@web.middleware
async def error_middleware(request: web.Request, handler: AiohttpHandler) -> web.StreamResponse:
    """Every answer's headers, and what went wrong in the one form that this listener has."""
    try:
        answer = await handler(request)
    except AdminError as refused:
        answer = _error_response(refused.status, refused.message, refused.field, refused.headers)
    except web.HTTPException as refused:
        said = _STATUS_MESSAGES.get(refused.status, "it can't be answered")
        answer = _error_response(refused.status, said, None, {})
        if (allowed := refused.headers.get(hdrs.ALLOW)) is not None:
            answer.headers[hdrs.ALLOW] = allowed
    except Exception:
        log.exception("the admin listener broke")
        answer = _error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error", None, {})
    answer.headers.update(RESPONSE_HEADERS)
    return answer


async def read_json_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """The body. A form that a page elsewhere may send unasked is refused by its type."""
    encoded = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity"
    if request.content_type != "application/json" or encoded:
        raise AdminError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send it as application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            body = await request.read()
    except TimeoutError:
        raise AdminError(HTTPStatus.REQUEST_TIMEOUT, "the body took too long") from None
    try:
        read_object(body)  # tells better what is wrong with it
        return msgspec.json.decode(body, type=kind)
    except MalformedRequest as error:
        raise AdminError(HTTPStatus.BAD_REQUEST, error.message) from None
    except msgspec.ValidationError as error:
        text = str(error)
        found = _ERROR_FIELD.search(text)
        field = (found[1] or found[2]) if found else None
        message = text.partition(" - at ")[0]
        raise AdminError(HTTPStatus.BAD_REQUEST, message, field) from None


def json_response(status: int, told: object) -> web.Response:
    """An answer, as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(told), content_type="application/json"
    )


def _error_response(
    status: int, message: str, field: str | None, headers: Mapping[str, str]
) -> web.Response:
    made = json_response(status, {"error": {"message": message, "field": field}})
    made.headers.update(headers)
    return made
