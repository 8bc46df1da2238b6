"""Feedback of clients on responses: ``POST /v1/feedback``, and the stage that notes their ids.

The endpoint belongs to no protocol: requests and errors look the same on every listener. A
judgement is stored beside the usage row of its request, so that a request is known only once it has
ended. Its row may come from another process or gateway, which writes it within moments: the
endpoint looks again for a second before it reports that there is none.
"""

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.auth.api_keys import Principal
from gateway.config.schema import JUDGE_FEEDBACK, FeedbackConfig
from gateway.observability.record import Feedback, FeedbackKind
from gateway.pipeline.http import HttpRequest
from gateway.pipeline.state import RequestState, RouteStage, Stage
from gateway.ratelimit.buckets import BucketState, TokenBucket
from protocols.core.errors import (
    ClientError,
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    MethodNotAllowed,
    Overloaded,
    RateLimitExceeded,
    RequestNotFound,
    RequestTooLarge,
    Unauthorized,
)
from protocols.core.interfaces import Clock, Headers, HttpResponse
from protocols.core.json_text import JsonDecoder
from protocols.json_body import JSON_ERRORS, read_object

MAX_ID_LENGTH: Final = 256
"""Characters of the id of a request or a response."""
_MAX_EVENT: Final = 1 << 20

FEEDBACK_PATH: Final = "/v1/feedback"
MAX_FEEDBACK_SIZE: Final = 64 << 10
"""Maximum bytes of a body: the longest comment, in escapes."""
_MAX_CATEGORY_LENGTH: Final = 64
_MAX_NUMBER: Final = 1e9
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_LOOKUP_DELAYS: Final = (0.1, 0.3, 0.6)
"""Seconds before each further search for a request."""
_MAX_KEYS: Final = 10_000
"""Keys whose limit is counted at a time; the least recent one is forgotten."""
_ERROR_FIELD = re.compile(r"`\$\.(\w+)`|field `([^`]*)`")
_JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"),)


class FeedbackForbidden(ClientError):
    """The API key has no right to send feedback."""


_STATUSES: Final[Mapping[type[GatewayError], int]] = {
    Unauthorized: 401,
    FeedbackForbidden: 403,
    RequestNotFound: 404,
    MethodNotAllowed: 405,
    RequestTooLarge: 413,
    RateLimitExceeded: 429,
    Overloaded: 503,
}
"""All others are the status 400 of a client's mistake, or 500."""


class FeedbackStore(Protocol):
    """Where feedback is stored, as ``gateway.observability.usage.UsageRecorder`` does."""

    def record_feedback(self, feedback: Feedback) -> None:
        """Queue a judgement for writing."""

    async def find_request(self, feedback: Feedback) -> bool | None:
        """Whether the request is known that this judges; None if that can't be told now."""


class _FeedbackBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request."""

    name: str
    value: bool | int | float | str
    request_id: str | UnsetType | None = UNSET
    response_id: str | UnsetType | None = UNSET
    comment: str | UnsetType | None = UNSET


_decode_body: Final = JsonDecoder(_FeedbackBody).decode


class FeedbackEndpoint:
    """Answers ``POST /v1/feedback``: an ``OwnEndpoint``. It outlives a configuration."""

    def __init__(
        self,
        settings: FeedbackConfig,
        store: FeedbackStore,
        clock: Clock,
        wall_clock: Callable[[], float],
    ) -> None:
        """``wall_clock`` gives Unix seconds."""
        self._settings = settings
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._limits = OrderedDict[str, TokenBucket]()
        """By the name of the API key."""
        self.results = Counter[str]()
        """The number of judgements that were accepted, and of errors by their class."""

    async def answer(self, http: HttpRequest, principal: Principal | None) -> HttpResponse:
        """Store a judgement. Raises GatewayError."""
        if http.method != "POST":
            raise MethodNotAllowed(
                f"{http.method} is not a method of this path", allowed=("POST",), path=http.path
            )
        if principal is not None and not principal.feedback:
            raise FeedbackForbidden(
                "this API key may not send feedback; the configuration allows it by "
                "'feedback: true'"
            )
        key = "" if principal is None else principal.name
        self._check_limit(key)
        if (http.headers.get("content-encoding") or "identity").lower() != "identity":
            raise ClientError("unsupported content encoding: this endpoint takes plain bodies only")
        body = read_feedback(await http.body(MAX_FEEDBACK_SIZE), self._settings.comment)
        feedback = self._build_feedback(body, key, principal)
        await self._check_request(feedback)
        self._store.record_feedback(feedback)
        self.results["accepted"] += 1
        field = "request_id" if feedback.column == "id" else "response_id"
        reply: dict[str, Any] = {"object": "feedback", field: feedback.target}
        reply |= {"name": body.name, "value": body.value}
        return HttpResponse(200, msgspec.json.encode(reply), _JSON_HEADERS)

    def build_error(self, error: GatewayError) -> HttpResponse:
        """The response for an error."""
        self.results[type(error).__name__] += 1
        default = 400 if isinstance(error, ClientError) else 500
        status = _STATUSES.get(type(error), default)
        headers = _JSON_HEADERS
        if error.retry_after is not None:
            headers += (("Retry-After", str(max(1, ceil(error.retry_after)))),)
        if isinstance(error, MethodNotAllowed):
            headers += (("Allow", ", ".join(error.allowed)),)
        if isinstance(error, Unauthorized):
            headers += (("WWW-Authenticate", "Bearer"),)
        content = {"message": error.message, "type": type(error).__name__, "param": error.param}
        return HttpResponse(status, msgspec.json.encode({"error": content}), headers)

    def _check_limit(self, key: str) -> None:
        """Raises RateLimitExceeded."""
        bucket = self._limits.pop(key, None)
        amount, period = self._settings.requests
        if bucket is None:
            bucket = TokenBucket(amount, period, BucketState(), by_token=False)
        self._limits[key] = bucket
        if len(self._limits) > _MAX_KEYS:
            self._limits.popitem(last=False)
        if wait := bucket.reserve(0, self._clock()):
            text = f"at most {amount} judgements in {period:g} s are allowed"
            raise RateLimitExceeded(text, retry_after=wait)

    def _build_feedback(
        self, body: _FeedbackBody, key: str, principal: Principal | None
    ) -> Feedback:
        any_key = principal is not None and principal.feedback_on_all_keys
        is_response = isinstance(body.response_id, str)
        target = body.response_id if is_response else body.request_id
        kind: FeedbackKind = "number"
        number, category = None, ""
        if isinstance(body.value, str):
            kind, category = "category", body.value
        else:
            kind = "boolean" if isinstance(body.value, bool) else "number"
            number = float(body.value)
        return Feedback(
            at=self._wall_clock(),
            key=key,
            any_key=any_key,
            column="response_id" if is_response else "id",
            target=str(target),
            name=body.name,
            kind=kind,
            number=number,
            category=category,
            comment=body.comment or "",
        )

    async def _check_request(self, feedback: Feedback) -> None:
        """Raises RequestNotFound if no request has the id, or only one of another key.

        If the database is unavailable, that is checked when the feedback is written.
        """
        found = await self._store.find_request(feedback)
        for delay in _LOOKUP_DELAYS:
            if found:
                return
            await asyncio.sleep(delay)
            before, found = found, await self._store.find_request(feedback)
            if before is None and found is None:
                return
        if found is False:
            field = "request_id" if feedback.column == "id" else "response_id"
            error = RequestNotFound(
                f"no finished request of this API key has the {field} {feedback.target!r}, or its "
                "usage row was removed; the id is that of the header x-request-id, or of the "
                "response",
                id=feedback.target,
            )
            error.param = field
            raise error


def read_feedback(body: bytes, max_comment: int) -> _FeedbackBody:
    """Read the body of a request. Raises MalformedRequest or InvalidParameter."""
    read_object(body)  # for better error messages
    try:
        feedback = _decode_body(body)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _ERROR_FIELD.search(text)
        field = (match[1] or match[2]) if match else "value"
        message = f"the field {field!r} is invalid: {text.partition(' - at ')[0]}"
        raise InvalidParameter(message, param=field) from None
    except JSON_ERRORS:
        raise MalformedRequest("the body is not JSON") from None
    _check_target(feedback)
    if _NAME.fullmatch(feedback.name) is None:
        _raise_invalid("name", feedback.name, "a letter, then at most 63 of A-Z a-z 0-9 _ . -")
    if feedback.name == JUDGE_FEEDBACK:
        _raise_invalid("name", feedback.name, "any other name: this one is of the model's judge")
    _check_value(feedback.value)
    comment = feedback.comment or ""
    if len(comment) > max_comment:
        text = f"the field 'comment' has {len(comment)} characters; at most {max_comment} are kept"
        raise InvalidParameter(text, param="comment", problem="too_long")
    return feedback


def _check_target(feedback: _FeedbackBody) -> None:
    named = {
        field: value
        for field in ("request_id", "response_id")
        if isinstance(value := getattr(feedback, field), str)
    }
    if len(named) != 1:
        text = f"give either request_id or response_id; the body has {len(named)} of them"
        raise InvalidParameter(text, param="request_id", problem="conflict" if named else "missing")
    [(field, value)] = named.items()
    if not 0 < len(value) <= MAX_ID_LENGTH or not value.isprintable():
        _raise_invalid(field, value, f"1 to {MAX_ID_LENGTH} printable characters")


def _check_value(value: float | str) -> None:
    if isinstance(value, str):
        if not 0 < len(value) <= _MAX_CATEGORY_LENGTH or not value.isprintable():
            accepted = f"a category of 1 to {_MAX_CATEGORY_LENGTH} printable characters"
            _raise_invalid("value", value, accepted)
    elif not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        _raise_invalid("value", value, f"a number from {-_MAX_NUMBER:.0f} to {_MAX_NUMBER:.0f}")


def _raise_invalid(field: str, value: object, accepted: str) -> None:
    shown = ascii(value)[:80]
    raise InvalidParameter(
        f"the field {field!r} is {shown}; accepted is {accepted}", param=field, got=value
    )


class FeedbackStage(RouteStage):
    """Notes what feedback names a response by: its id in the client's protocol, and the user."""

    def on_routed(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        bucket = request.route.reason.bucket
        if bucket is not None:
            request.record.user_hash = f"{bucket:013x}"
        if request.is_inference:
            request.add_stage(ResponseIdReader())


class _InnerObject(Struct):
    id: Any = ""


class _NestedObject(Struct):
    message: _InnerObject | None = None
    response: _InnerObject | None = None


_decode_id: Final = JsonDecoder(_InnerObject).decode
_decode_nested_id: Final = JsonDecoder(_NestedObject).decode


def find_response_id(body: bytes) -> str:
    """The id in a response, or in the first event of a stream; "" if there is none."""
    if not body.startswith(b"{"):
        _, _, body = body[:_MAX_EVENT].partition(b"data:")
        body = body.partition(b"\n")[0]
    for decode in (_decode_id, _decode_nested_id):
        try:
            found: Any = decode(body)
        except (*JSON_ERRORS, msgspec.ValidationError):
            continue
        inner = found if isinstance(found, _InnerObject) else found.message or found.response
        if inner is not None and isinstance(inner.id, str) and inner.id:
            return str(inner.id) if len(inner.id) <= MAX_ID_LENGTH else ""
    return ""


class ResponseIdReader(Stage):
    """Notes the id of one response. An error has none."""

    needs_body = False
    observes_response = True

    def __init__(self) -> None:
        self._is_first = True

    def on_data(self, request: RequestState, data: bytes, *, is_whole: bool) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if is_whole:
            if request.record.status == 200:  # noqa: PLR2004 - as above
                request.record.response_id = find_response_id(data)
        elif self._is_first and data:
            self._is_first = data.startswith(b":")  # a comment that keeps the stream alive
            if not self._is_first:
                request.record.response_id = find_response_id(data)
