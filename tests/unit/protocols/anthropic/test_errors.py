"""Errors for clients, and the meaning of workers' errors."""

import msgspec
import pytest

from protocols.anthropic.endpoints import Anthropic
from protocols.core.errors import (
    ContextTooLong,
    Forbidden,
    GatewayError,
    InternalError,
    InvalidParameter,
    MalformedRequest,
    MethodNotAllowed,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimitExceeded,
    RequestTooLarge,
    Unauthorized,
    UnknownParameter,
    UnsupportedFeature,
    UpstreamErrorText,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.params import Param
from tests.unit.protocols.anthropic.conftest import MakeCall

OPENAI_TEXT = (
    "This model's maximum context length is 10 tokens. However, you requested 104 tokens "
    "(4 in the messages, 100 in the completion)."
)
VLLM_TEXT = (
    "This model's maximum context length is 10 tokens. However, you requested 100 output tokens "
    "and your prompt contains at least 4 input tokens, for a total of at least 104 tokens."
)
OLDER_VLLM_TEXT = (
    "'max_tokens' or 'max_completion_tokens' is too large: 100. This model's maximum context "
    "length is 10 tokens and your request has 4 input tokens (100 > 10 - 4)."
)
TOO_LARGE = (
    "input length and `max_tokens` exceed context limit: 4 + 100 > 10, decrease input length or "
    "`max_tokens` and try again"
)
LONG_PROMPT = OPENAI_TEXT.replace("(4 in", "(40 in")
ROW = Param("p", "x", "str", choices=("a", "b"))


def encode(error: GatewayError) -> tuple[int, str, str]:
    reply = Anthropic().encode_error(error, None)
    body = msgspec.json.decode(reply.body)["error"]
    return reply.status, body["type"], body["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (MalformedRequest("x", problem="object"), 400, "invalid_request_error",
         "The request body is not valid JSON: it must be an object"),
        (MalformedRequest("x"), 400, "invalid_request_error",
         "The request body is not valid JSON: x"),
        (UnknownParameter("x", param="foo"), 400, "invalid_request_error",
         "foo: Extra inputs are not permitted"),
        (InvalidParameter("x", param="p", problem="value", expected=ROW, got=5), 400,
         "invalid_request_error", "p: Input should be 'a' or 'b'"),
        (InvalidParameter("x", param="p", problem="too_long", expected=ROW), 400,
         "invalid_request_error", "p: x"),
        (UnsupportedFeature("no", param="tools[0].name"), 400, "invalid_request_error",
         "tools.0.name: no"),
        (UnsupportedFeature("no"), 400, "invalid_request_error", "no"),
        (Forbidden("x", model="m"), 404, "not_found_error", "model: m"),
        (PathNotFound("x"), 404, "not_found_error", "Not found"),
        (MethodNotAllowed("x", allowed=("POST",)), 405, "invalid_request_error", "x"),
        (RequestTooLarge("x", limit=1), 413, "request_too_large",
         "Request exceeds the maximum size"),
        (Unauthorized("x", missing=True), 401, "authentication_error",
         "x-api-key header is required"),
        (Unauthorized("x", missing=False), 401, "authentication_error", "invalid x-api-key"),
        (QuotaExceeded("x"), 402, "billing_error", "x"),
        (InternalError("x"), 500, "api_error", "Internal server error"),
        (WorkerFailed("x"), 502, "api_error", "x"),
        (ContextTooLong("x"), 400, "invalid_request_error", "prompt is too long: x"),
        (ContextTooLong("x", tokens=9, limit=8), 400, "invalid_request_error",
         "prompt is too long: 9 tokens > 8 maximum"),
        (ContextTooLong(OPENAI_TEXT, tokens=104, limit=10), 400, "invalid_request_error",
         TOO_LARGE),
        (ContextTooLong(VLLM_TEXT, limit=10), 400, "invalid_request_error", TOO_LARGE),
        (ContextTooLong(OLDER_VLLM_TEXT, limit=10), 400, "invalid_request_error", TOO_LARGE),
        (ContextTooLong(LONG_PROMPT, tokens=140, limit=10), 400, "invalid_request_error",
         "prompt is too long: 140 tokens > 10 maximum"),
        (ContextTooLong(TOO_LARGE, tokens=104, limit=10), 400, "invalid_request_error", TOO_LARGE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_error_has_the_type_and_text_of_the_service(
    error: GatewayError, status: int, kind: str, message: str
) -> None:
    assert encode(error) == (status, kind, message)


def test_error_of_a_worker_of_the_same_protocol_is_passed_on() -> None:
    error = WorkerFailed("x")
    error.upstream_error = UpstreamErrorText(429, "slow down")

    assert encode(error) == (429, "rate_limit_error", "slow down")


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (MethodNotAllowed("x", allowed=("GET", "POST")), {"Allow": "GET, POST"}),
        (QuotaExceeded("x"), {"x-should-retry": "false"}),
        (RateLimitExceeded("x", retry_after=0.2), {"retry-after": "1"}),
        (Overloaded("x", retry_after=1.5), {"retry-after": "2"}),
        (WorkerUnreachable("x"), {"retry-after": "1"}),
        (WorkerFailed("x"), {}),
    ],
)
def test_error_headers(error: GatewayError, headers: dict[str, str]) -> None:
    sent_headers = dict(Anthropic().encode_error(error, None).headers)

    assert sent_headers == {"Content-Type": "application/json", **headers}


def test_error_names_the_request(make: MakeCall) -> None:
    with_id, unknown = WorkerFailed("x"), WorkerFailed("x")
    unknown.request_id = "req_8"

    for error, call, shown in ((with_id, make(), "req_7f"), (unknown, None, "req_8")):
        reply = Anthropic().encode_error(error, call)
        assert dict(reply.headers)["request-id"] == shown
        assert msgspec.json.decode(reply.body)["request_id"] == shown


def test_path_of_what_is_not_supported_is_joined_by_dots(make: MakeCall) -> None:
    error = UnsupportedFeature("no", param="messages[1].content[0].type")

    reply = Anthropic().encode_error(error, make({"messages": []}))

    message = msgspec.json.decode(reply.body)["error"]["message"]
    assert message == "messages.1.content.0.type: no"


# --- errors of workers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "max_tokens: no", UnsupportedFeature),
        (401, "invalid x-api-key", WorkerFailed),
        (429, "slow", RateLimitExceeded),
        (500, "broken", WorkerFailed),
        (529, "Overloaded", Overloaded),
    ],
)
def test_worker_status_decides(status: int, message: str, kind: type[GatewayError]) -> None:
    body = msgspec.json.encode({"type": "error", "error": {"type": "x", "message": message}})

    assert type(Anthropic().read_error(status, {}, body)) is kind


def test_worker_error_that_the_prompt_is_too_long() -> None:
    message = "prompt is too long: 20 tokens > 10 maximum"

    error = Anthropic().read_error(400, {}, msgspec.json.encode({"error": {"message": message}}))

    assert isinstance(error, ContextTooLong)
    assert (error.tokens, error.limit) == (20, 10)
    assert encode(error)[2] == message


def test_worker_error_that_the_completion_is_too_long() -> None:
    error = Anthropic().read_error(400, {}, msgspec.json.encode({"error": {"message": TOO_LARGE}}))

    assert isinstance(error, ContextTooLong)
    assert (error.tokens, error.limit) == (104, 10)
    assert encode(error)[2] == TOO_LARGE
