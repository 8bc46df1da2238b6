"""The meaning of workers' errors, and the part of their text that clients see."""

import json
import re
from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols.core.errors import (
    ClientError,
    ContentFiltered,
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    UnsupportedFeature,
    WorkerError,
    WorkerFailed,
    WorkerModelNotFound,
)
from protocols.openai.endpoints import OpenAI

WORKER = OpenAI()
LONG = "This model's maximum context length is 8 tokens. However, you requested 20 tokens."


def encode_error_body(**inner: Any) -> bytes:
    return json.dumps({"error": inner}).encode()


def encode_validation_error(text: str) -> bytes:
    return json.dumps({"detail": [{"loc": ["body", "n"], "msg": text}]}).encode()


TABLE: list[tuple[int, bytes, type[GatewayError], str]] = [
    (400, encode_error_body(message="no tools", code=400), UnsupportedFeature, "no tools"),
    (422, encode_validation_error("bad n"), UnsupportedFeature, "body.n: bad n"),
    (
        400,
        encode_error_body(message=LONG, code=400, type="BadRequestError"),
        ContextTooLong,
        "maximum",
    ),
    (400, encode_error_body(message="x", code="context_length_exceeded"), ContextTooLong, "x"),
    (400, encode_error_body(message="x", code="content_filter"), ContentFiltered, "x"),
    (
        404,
        encode_error_body(message="The model `m` does not exist.", code=404),
        WorkerModelNotFound,
        "know the model",
    ),
    (401, encode_error_body(message="key sk-123"), WorkerFailed, "gateway's key"),
    (429, encode_error_body(message="slow"), RateLimitExceeded, "limit|no more"),
    (503, b"", Overloaded, "busy"),
    (500, b"Traceback: secret", WorkerFailed, "500"),
    (502, b"<html>", WorkerFailed, "502"),
    (400, b"\xff not json", UnsupportedFeature, "refused"),
    (418, b"{}", WorkerFailed, "418"),
    (400, b'{"detail": "not so"}', UnsupportedFeature, "not so"),
    (422, b'{"detail": ["not so", {"msg": "but so"}]}', UnsupportedFeature, "but so"),
    (400, b'{"message": "not so"}', UnsupportedFeature, "not so"),
    (400, b'{"message": "an answer", "choices": []}', UnsupportedFeature, "refused"),
    (400, b'{"object": "error", "message": "not so"}', UnsupportedFeature, "not so"),
    (400, b'{"error": "not so"}', UnsupportedFeature, "not so"),
]


@pytest.mark.parametrize(("status", "body", "kind", "text"), TABLE)
def test_worker_status_and_body_map_to_error_type(
    status: int, body: bytes, kind: type[GatewayError], text: str
) -> None:
    error = WORKER.read_error(status, {}, body)
    assert type(error) is kind
    assert re.search(text, error.message)
    assert isinstance(error, ClientError | Overloaded | WorkerError)


def test_context_too_long_reports_the_limit() -> None:
    error = WORKER.read_error(400, {}, encode_error_body(message=LONG))
    assert isinstance(error, ContextTooLong)
    assert error.limit == 8


def test_worker_error_text_is_truncated_and_sanitized() -> None:
    error = WORKER.read_error(
        400, {}, encode_error_body(message="a\x00\n\x1b[31m\u2028b" + "x" * 9999)
    )
    assert error.message.startswith("a [31m b")
    assert len(error.message) == 300


def test_worker_failure_text_is_for_operators_only() -> None:
    error = WORKER.read_error(500, {}, encode_error_body(message="CUDA out of memory at /srv/x.py"))
    assert "CUDA" not in error.message
    assert error.worker_text == "CUDA out of memory at /srv/x.py"


@pytest.mark.parametrize(
    ("body", "unknown"),
    [
        (
            b'{"object":"error","message":"The model `m` does not exist.","type":"NotFoundError"}',
            "model",
        ),
        (b'{"error":{"message":"model \'m\' not found, try pulling it first"}}', "model"),
        (b'{"error":{"code":"DeploymentNotFound","message":"It does not exist."}}', "model"),
        (b'{"type":"error","error":{"type":"not_found_error","message":"model: m"}}', "model"),
        (b'{"error_code":"RESOURCE_DOES_NOT_EXIST","message":"no such endpoint"}', "model"),
        (b'{"error":{"message":"Invalid URL (POST /v1/models)","code":null}}', "gateway's path"),
        (b'{"detail":"Not Found"}', "gateway's path"),
        (
            b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
            "gateway's path",
        ),
        (b"404 page not found", "gateway's path"),
        (b"", "gateway's path"),
    ],
)
def test_status_404_of_a_worker_tells_an_unknown_model_from_an_unknown_path(
    body: bytes, unknown: str
) -> None:
    error = WORKER.read_error(404, {}, body)
    assert type(error) is (WorkerModelNotFound if unknown == "model" else WorkerFailed)
    assert error.status == 404
    assert unknown in error.message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, 360.0),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1h2m1.5s",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "20ms",
            },
            3721.5,
        ),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "59"}, 59.0),
        ({"x-ratelimit-remaining-requests": "7", "x-ratelimit-reset-requests": "1s"}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "soon"}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "99h"}, None),
        ({"x-ratelimit-remaining-requests": "0"}, None),
        (
            {
                "retry-after": "3",
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1s",
            },
            3.0,
        ),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "-1"}, None),
        ({}, None),
    ],
)
def test_retry_after_headers_of_worker_are_read(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert WORKER.read_error(429, headers, b"").retry_after == seconds
    assert WORKER.read_error(503, headers, b"").retry_after == (seconds or 1.0)


@pytest.mark.parametrize(
    "text",
    [
        (
            "This model's maximum context length is 8 tokens. However, you requested 20 tokens "
            "(15 in the messages, 5 in the completion)."
        ),
        (
            "This model's maximum context length is 8 tokens. However, your messages resulted in "
            "20 tokens."
        ),
        (
            "This model's maximum context length is 8 tokens. However, your request has 20 input "
            "tokens."
        ),
        "The input (20 tokens) is longer than the model's context length (8 tokens).",
        "the request exceeds the available context size (8 tokens): request (20 tokens)",
    ],
)
def test_the_token_counts_of_a_context_error_are_read(text: str) -> None:
    error = WORKER.read_error(400, {}, encode_error_body(message=text))

    assert isinstance(error, ContextTooLong)
    assert (error.tokens, error.limit) == (20, 8)


@pytest.mark.parametrize("count", ["9" * 18, "9" * 200])
def test_long_token_counts_of_a_context_error_are_cut(count: str) -> None:
    text = f"maximum context length is {count} tokens, you requested {count} tokens"
    error = WORKER.read_error(400, {}, encode_error_body(message=text[:290]))

    assert isinstance(error, ContextTooLong)
    assert error.limit == int("9" * 18)


@pytest.mark.parametrize("protocol", ["openai", "databricks", "ovms", "mindie"])
@pytest.mark.parametrize(
    ("worker", "text"),
    [
        ("openai", LONG),
        ("tgi", "`inputs` must have less than 8 tokens. Given: 20"),
        ("databricks", "Bad request: the prompt has 20 tokens, the model's limit is 8"),
        ("ovms", "Number of prompt tokens: 20 exceeds model max length: 8"),
    ],
)
def test_a_context_error_has_its_token_counts_in_every_protocol(
    protocol: str, worker: str, text: str
) -> None:
    body = {
        "openai": {"error": {"message": text, "code": 400}},
        "tgi": {"error": f"Input validation error: {text}", "error_type": "validation"},
        "databricks": {"error_code": "BAD_REQUEST", "message": text},
        "ovms": {"error": text},
    }[worker]
    status = 422 if worker == "tgi" else 400
    adapter: Any = build_adapter(worker, None, {})
    error = adapter.read_error(status, {}, json.dumps(body).encode())

    assert isinstance(error, ContextTooLong), error
    assert (error.tokens, error.limit) == (20, 8)

    client: Any = build_adapter(protocol, None, {})
    written = client.encode_error(error, None).body

    assert b"20" in written
    assert b"8" in written
    if protocol == "openai":
        assert b"maximum context length is 8 tokens. However, you requested 20 tokens" in written
