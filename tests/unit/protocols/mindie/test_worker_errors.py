"""The meaning of workers' errors for a client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    RequestTooLarge,
    UnsupportedFeature,
    WorkerFailed,
    WorkerModelNotFound,
)
from protocols.mindie.endpoints import MindIE


def read_error(status: int, body: str, **headers: str) -> GatewayError:
    return MindIE().read_error(status, headers, body.encode())


def make_error(text: str, kind: str) -> str:
    return '{"error":"' + text + '","error_type":"' + kind + '"}'


INVALID = "Input Validation Error"
FULL = (
    "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (422, make_error("Parameter top_k must be in -1", INVALID), UnsupportedFeature),
        (422, make_error("Failed to parse request context to json", INVALID), UnsupportedFeature),
        (422, make_error("Got model X, but not found in server", INVALID), WorkerModelNotFound),
        (404, make_error("Model nope not found.", "NotFoundError"), WorkerModelNotFound),
        (404, "", WorkerFailed),
        (
            422,
            make_error("Prompt token length must be in (0, 9], but got 12", INVALID),
            ContextTooLong,
        ),
        (
            422,
            make_error("Messages len not in (0, 10, but the length of inputs is 40", INVALID),
            ContextTooLong,
        ),
        (
            422,
            make_error(
                "text_input must be necessary and data type must be string and length in "
                "(0, 10], but the length of inputs is 40",
                INVALID,
            ),
            ContextTooLong,
        ),
        (
            422,
            make_error(
                "text_input must be necessary and data type must be string and length in "
                "(0, 10], but the length of inputs is 0",
                INVALID,
            ),
            UnsupportedFeature,
        ),
        (
            424,
            make_error(FULL + "2048,the input ids length is 3000", "Generation Error"),
            ContextTooLong,
        ),
        (
            424,
            make_error("Failed to enqueue inferRequest. Invalid Input Ids", "Generation Error"),
            UnsupportedFeature,
        ),
        (424, make_error("Failed to generate infer request", "Generation Error"), WorkerFailed),
        (
            500,
            make_error(
                "Failed to enqueue inferRequest. Engine has been stopped. Cannot add request.",
                "Incomplete Generation",
            ),
            WorkerFailed,
        ),
        (
            500,
            make_error("Engine callback timeout: client timeout", "Incomplete Generation"),
            WorkerFailed,
        ),
        (500, "Server internal error", WorkerFailed),
        (
            413,
            '{"message":"Request body too large. Maximum allowed size is 4MB."}',
            RequestTooLarge,
        ),
        (413, '{"message":"too large"}', RequestTooLarge),
        (503, make_error("The service has been stopped.", "Service Unavailable"), Overloaded),
        (
            503,
            '{"message":"Service is alive but busy. Consider reducing request frequency"}',
            Overloaded,
        ),
        (503, "", Overloaded),
        (429, '{"error":"Memory limit exceeded","code":429}', RateLimitExceeded),
        (
            429,
            '{"error":{"message":"Memory limit exceeded","type":"server_error","code":429}}',
            RateLimitExceeded,
        ),
        (401, "", WorkerFailed),
        (403, make_error("no", "Forbidden"), WorkerFailed),
        (502, "<html>", WorkerFailed),
    ],
)
def test_worker_status_and_body_map_to_error_type(
    status: int, body: str, kind: type[GatewayError]
) -> None:
    assert type(read_error(status, body)) is kind


def test_context_too_long_reports_prompt_tokens_and_limit() -> None:
    for body in (
        make_error(FULL + "2048,the input ids length is 3000", "Generation Error"),
        make_error(FULL + "maxSeqLen 2048,the input ids length is 3000", "Generation Error"),
        make_error("text_input token length must be in (0, 2048], but got 3000", INVALID),
    ):
        error = read_error(424, body)
        assert isinstance(error, ContextTooLong)
        assert (error.tokens, error.limit) == (3000, 2048)


def test_status_413_reports_the_body_size_limit() -> None:
    error = read_error(413, '{"message":"Request body too large. Maximum allowed size is 4MB."}')

    assert isinstance(error, RequestTooLarge)
    assert error.limit == 4 << 20


def test_retry_after_of_worker_is_kept() -> None:
    error = read_error(429, '{"error":"Memory limit exceeded","code":429}', **{"retry-after": "7"})

    assert error.retry_after == 7


def test_unknown_model_error_of_worker_keeps_its_status() -> None:
    error = read_error(422, make_error("Got model X, but not found in server", INVALID))

    assert isinstance(error, WorkerFailed)
    assert (error.status, error.message) == (422, "The worker does not know the model.")


@given(st.integers(400, 599), st.binary(max_size=60))
def test_any_worker_error_response_is_read_as_a_gateway_error(status: int, body: bytes) -> None:
    assert isinstance(MindIE().read_error(status, {}, body), GatewayError)
