"""The meaning of workers' errors."""

import pytest

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    RequestTooLarge,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.tgi import TGI

BOTH = (
    b'{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. '
    b'Given: 2000 `inputs` tokens and 100 `max_new_tokens`","error_type":"validation"}'
)
INPUT = (
    b'{"error":"Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",'
    b'"error_type":"validation"}'
)
STOPS = (
    b'{"error":"Input validation error: `stop` supports up to 4 stop sequences. Given: 5",'
    b'"error_type":"validation"}'
)

REFUSALS: list[tuple[int, bytes, type[GatewayError], str]] = [
    (422, BOTH, ContextTooLong, "must be <= 2048"),
    (422, INPUT, ContextTooLong, "less than 1024"),
    (422, STOPS, UnsupportedFeature, "up to 4 stop sequences"),
    (
        422,
        b"Failed to deserialize the JSON body: <secret>",
        UnsupportedFeature,
        "refused the request",
    ),
    (413, b"length limit exceeded", RequestTooLarge, "larger than a worker"),
    (
        429,
        b'{"error":"Model is overloaded","error_type":"overloaded"}',
        RateLimitExceeded,
        "no more",
    ),
    (424, b'{"error":"Request failed during generation: x"}', WorkerFailed, "(424)"),
    (500, b'{"error":"Incomplete generation","error_type":"x"}', WorkerFailed, "(500)"),
    (503, b'{"error":"unhealthy","error_type":"healthcheck"}', Overloaded, "busy"),
    (401, b"", WorkerFailed, "gateway's key"),
    (404, b"", WorkerFailed, "does not know"),
    (502, b"\xff", WorkerFailed, "(502)"),
]


@pytest.mark.parametrize(("status", "body", "kind", "message"), REFUSALS)
def test_worker_status_and_body_map_to_error_type(
    status: int, body: bytes, kind: type[GatewayError], message: str
) -> None:
    error = TGI().read_error(status, {}, body)

    assert type(error) is kind
    assert message in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(("body", "tokens", "limit"), [(BOTH, 2100, 2048), (INPUT, 2000, 1024)])
def test_context_too_long_reports_tokens_and_limit(body: bytes, tokens: int, limit: int) -> None:
    error = TGI().read_error(422, {}, body)

    assert isinstance(error, ContextTooLong)
    assert (error.tokens, error.limit) == (tokens, limit)


def test_retry_after_of_worker_is_kept() -> None:
    error = TGI().read_error(429, {"retry-after": "7"}, b"")
    assert error.retry_after == 7
