"""Every error in OpenAI's format: status, type, code, param and headers."""

import json

import pytest

from protocols.core import errors
from protocols.core.interfaces import HttpResponse
from protocols.openai.endpoints import OpenAI
from protocols.params import Param

ADAPTER = OpenAI()
INVALID, SERVER = "invalid_request_error", "server_error"

TABLE: list[tuple[errors.GatewayError, int, str, str | None, str | None]] = [
    (errors.MalformedRequest("x"), 400, INVALID, None, None),
    (errors.MalformedRequest("x", problem="object"), 400, INVALID, None, None),
    (
        errors.InvalidParameter("x", param="a", problem="missing"),
        400,
        INVALID,
        "missing_required_parameter",
        "a",
    ),
    (errors.InvalidParameter("x", param="a", problem="type"), 400, INVALID, "invalid_type", "a"),
    (errors.InvalidParameter("x", param="a", problem="value"), 400, INVALID, "invalid_value", "a"),
    (errors.InvalidParameter("x", param="a", problem="conflict"), 400, INVALID, None, "a"),
    (
        errors.InvalidParameter("x", param="a", problem="above", got=3),
        400,
        INVALID,
        "integer_above_max_value",
        "a",
    ),
    (
        errors.InvalidParameter("x", param="a", problem="below", got=0.1),
        400,
        INVALID,
        "decimal_below_min_value",
        "a",
    ),
    (errors.UnknownParameter("x", param="foo"), 400, INVALID, "unknown_parameter", "foo"),
    (errors.UnsupportedFeature("x", param="tools"), 400, INVALID, "unsupported_parameter", "tools"),
    (errors.UnsupportedFeature("x", param="prompt"), 400, INVALID, "unsupported_value", "prompt"),
    (
        errors.UnsupportedFeature("x", param="messages[0].content[0].type"),
        400,
        INVALID,
        "unsupported_value",
        "messages[0].content[0].type",
    ),
    (errors.ContextTooLong("x"), 400, INVALID, "context_length_exceeded", "messages"),
    (errors.ContentFiltered("x"), 400, INVALID, "content_filter", None),
    (errors.Unauthorized("x", missing=True), 401, INVALID, None, None),
    (errors.Unauthorized("x", missing=False), 401, INVALID, "invalid_api_key", None),
    (errors.Forbidden("x", model="none"), 404, INVALID, "model_not_found", "model"),
    (errors.ModelNotFound("x", model="none"), 404, INVALID, "model_not_found", "model"),
    (
        errors.VersionNotFound("x", model="m", version="9"),
        404,
        INVALID,
        "model_not_found",
        "model",
    ),
    (errors.PathNotFound("x"), 404, INVALID, "unknown_url", None),
    (errors.MethodNotAllowed("x", allowed=("POST",)), 405, INVALID, "method_not_supported", None),
    (errors.RequestTooLarge("x", limit=1), 413, INVALID, "request_too_large", None),
    (errors.RateLimitExceeded("x"), 429, "requests", "rate_limit_exceeded", None),
    (errors.RateLimitExceeded("x", scope="tokens"), 429, "tokens", "rate_limit_exceeded", None),
    (errors.QuotaExceeded("x"), 429, "insufficient_quota", "insufficient_quota", None),
    (errors.InternalError("x"), 500, SERVER, "internal_error", None),
    (errors.WorkerFailed("x"), 502, SERVER, "bad_gateway", None),
    (errors.WorkerUnreachable("x"), 503, SERVER, "service_unavailable", None),
    (errors.StreamBroken("x"), 502, SERVER, "bad_gateway", None),
    (errors.Overloaded("x"), 503, SERVER, "service_unavailable", None),
    (errors.DeadlineExceeded("x"), 504, SERVER, "timeout", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), TABLE)
def test_error_status_type_code_and_param(
    error: errors.GatewayError, status: int, kind: str, code: str | None, param: str | None
) -> None:
    reply = ADAPTER.encode_error(error, None)
    body = json.loads(reply.body)

    assert reply.status == status
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert body["error"]["param"] == param


ROW = Param(wire="a", field="a", type="ints", min_items=1, max_items=2)
TEXTS: list[tuple[errors.GatewayError, str]] = [
    (errors.PathNotFound("x", method="POST", path="/v1/nope"), "Invalid URL (POST /v1/nope)"),
    (errors.PathNotFound("x"), "x"),
    (errors.InvalidParameter("x", param="a", problem="empty", expected=ROW, got=[]), "x"),
    (
        errors.InvalidParameter("x", param="a", problem="too_long", expected=ROW, got=[1, 2, 3]),
        (
            "Invalid 'a': array too long. Expected an array with maximum length 2, "
            "but got an array with length 3 instead."
        ),
    ),
]


@pytest.mark.parametrize(("error", "text"), TEXTS)
def test_error_message_texts(error: errors.GatewayError, text: str) -> None:
    assert json.loads(ADAPTER.encode_error(error, None).body)["error"]["message"] == text


def get_header(reply: HttpResponse, name: str) -> str | None:
    return dict(reply.headers).get(name)


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (errors.Unauthorized("x", missing=True), "WWW-Authenticate", "Bearer"),
        (errors.MethodNotAllowed("x", allowed=("GET", "POST")), "Allow", "GET, POST"),
        (errors.Overloaded("x"), "Retry-After", "1"),
        (errors.Overloaded("x", retry_after=0.2), "Retry-After", "1"),
        (errors.RateLimitExceeded("x", retry_after=2), "Retry-After", "2"),
        (errors.RateLimitExceeded("x", retry_after=2.1), "Retry-After", "3"),
        (errors.RateLimitExceeded("x"), "Retry-After", None),
        (errors.WorkerUnreachable("x"), "Retry-After", "1"),
        (errors.InternalError("x"), "openai-version", "2020-10-01"),
        (errors.QuotaExceeded("x"), "x-should-retry", "false"),
    ],
)
def test_error_headers(error: errors.GatewayError, name: str, text: str | None) -> None:
    reply = ADAPTER.encode_error(error, None)
    assert get_header(reply, name) == text
    assert get_header(reply, "Content-Type") == "application/json"
