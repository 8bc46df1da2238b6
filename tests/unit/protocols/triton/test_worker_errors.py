"""The meaning of a worker's response with another status than 200."""

import json

import pytest

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    UnsupportedFeature,
    WorkerFailed,
    WorkerModelNotFound,
)
from protocols.triton.endpoints import Triton


def read_worker_error(status: int, text: str | None = None, **headers: str) -> GatewayError:
    body = b"" if text is None else json.dumps({"error": text}).encode()
    sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return Triton().read_error(status, sent_headers, body)


@pytest.mark.parametrize(
    ("status", "text", "meaning"),
    [
        (404, "Request for unknown model: 'M' is not found", WorkerModelNotFound),
        (404, "Request for unknown model: 'M' version 9 is not found", WorkerModelNotFound),
        (400, "engine exploded", WorkerFailed),
        (400, None, WorkerFailed),
        (400, "[request id: x] inference request batch-size must be <= 4 for 'M'", WorkerFailed),
        (400, "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
         WorkerFailed),
        (400, "Error generating stream: temperature must be non-negative, got -1.0.",
         UnsupportedFeature),
        (400, "LoRA x is not supported, we currently support []", UnsupportedFeature),
        (400, "top_p must not be above 1", UnsupportedFeature),
        (400, "The decoder prompt (length 9) is longer than the maximum model length of 8.",
         ContextTooLong),
        (400, "Prompt length (9) exceeds maximum input length (8).", ContextTooLong),
        (400, "Request timeout expired", Overloaded),
        (400, "Model is unavailable due to unhealthy vLLM engine", Overloaded),
        (503, "[request id: <id_unknown>] Exceeds maximum queue size", Overloaded),
        (503, None, Overloaded),
        (429, None, RateLimitExceeded),
        (500, "failed to parse the request JSON buffer: Invalid value. at 0", WorkerFailed),
        (403, "This API is restricted, expecting header 'H'", WorkerFailed),
        (401, None, WorkerFailed),
        (501, "doesn't support models with decoupled transaction policy", WorkerFailed),
    ],
)  # fmt: skip
def test_worker_status_and_text_map_to_error_type(
    status: int, text: str | None, meaning: type[GatewayError]
) -> None:
    worker_error = read_worker_error(status, text)

    assert type(worker_error) is meaning
    if text is not None:
        assert text in worker_error.message or worker_error.worker_text == text


def test_retry_after_of_worker_is_kept() -> None:
    assert read_worker_error(503, None, retry_after="7").retry_after == 7
    assert read_worker_error(429, None, retry_after="7").retry_after == 7
    assert read_worker_error(400, "Request timeout expired").retry_after == 1


def test_sse_framed_error_body_is_read() -> None:
    body = b'data: {"error":"x must be at least 1"}\n\n'

    error = Triton().read_error(400, {}, body)

    assert isinstance(error, UnsupportedFeature)
    assert error.message == "x must be at least 1"


def test_worker_error_text_is_truncated_and_sanitized() -> None:
    worker_error = read_worker_error(400, "a\x00\nb must be " + "x" * 1000)

    assert worker_error.message.startswith("a b must be x")
    assert len(worker_error.message) <= 300


@pytest.mark.parametrize("body", [b"\xff", b"<html>", b"[]", b'{"error": [1]}', b"[" * 9000])
def test_malformed_error_body_is_worker_failed(body: bytes) -> None:
    assert type(Triton().read_error(400, {}, body)) is WorkerFailed
