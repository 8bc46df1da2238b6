"""Workers' refusals, and what they mean to a client."""

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
)
from protocols.mindie.endpoints import MindIE


def error(status: int, body: str, **headers: str) -> GatewayError:
    return MindIE().read_error(status, headers, body.encode())


def told(text: str, kind: str) -> str:
    return '{"error":"' + text + '","error_type":"' + kind + '"}'


INVALID = "Input Validation Error"
FULL = (
    "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (422, told("Parameter top_k must be in -1", INVALID), UnsupportedFeature),
        (422, told("Failed to parse request context to json", INVALID), UnsupportedFeature),
        (422, told("Got model X, but not found in server", INVALID), WorkerFailed),
        (404, told("Model nope not found.", "NotFoundError"), WorkerFailed),
        (404, "", WorkerFailed),
        (422, told("Prompt token length must be in (0, 9], but got 12", INVALID), ContextTooLong),
        (422, told("Messages len not in (0, 10, but the length of inputs is 40", INVALID),
         ContextTooLong),
        (422, told("text_input must be necessary and data type must be string and length in "
                   "(0, 10], but the length of inputs is 40", INVALID), ContextTooLong),
        (422, told("text_input must be necessary and data type must be string and length in "
                   "(0, 10], but the length of inputs is 0", INVALID), UnsupportedFeature),
        (424, told(FULL + "2048,the input ids length is 3000", "Generation Error"),
         ContextTooLong),
        (424, told("Failed to enqueue inferRequest. Invalid Input Ids", "Generation Error"),
         UnsupportedFeature),
        (424, told("Failed to generate infer request", "Generation Error"), WorkerFailed),
        (500, told("Failed to enqueue inferRequest. Engine has been stopped. Cannot add request.",
                   "Incomplete Generation"), WorkerFailed),
        (500, told("Engine callback timeout: client timeout", "Incomplete Generation"),
         WorkerFailed),
        (500, "Server internal error", WorkerFailed),
        (413, '{"message":"Request body too large. Maximum allowed size is 4MB."}',
         RequestTooLarge),
        (413, '{"message":"too large"}', UnsupportedFeature),
        (503, told("The service has been stopped.", "Service Unavailable"), Overloaded),
        (503, '{"message":"Service is alive but busy. Consider reducing request frequency"}',
         Overloaded),
        (503, "", Overloaded),
        (429, '{"error":"Memory limit exceeded","code":429}', RateLimitExceeded),
        (429, '{"error":{"message":"Memory limit exceeded","type":"server_error","code":429}}',
         RateLimitExceeded),
        (401, "", WorkerFailed),
        (403, told("no", "Forbidden"), WorkerFailed),
        (502, "<html>", WorkerFailed),
    ],
)  # fmt: skip
def test_what_a_status_means(status: int, body: str, kind: type[GatewayError]) -> None:
    assert type(error(status, body)) is kind


def test_how_long_the_prompt_is_and_may_be() -> None:
    for body in (
        told(FULL + "2048,the input ids length is 3000", "Generation Error"),
        told(FULL + "maxSeqLen 2048,the input ids length is 3000", "Generation Error"),
        told("text_input token length must be in (0, 2048], but got 3000", INVALID),
    ):
        found = error(424, body)
        assert isinstance(found, ContextTooLong)
        assert (found.tokens, found.limit) == (3000, 2048)


def test_how_large_a_body_may_be() -> None:
    found = error(413, '{"message":"Request body too large. Maximum allowed size is 4MB."}')

    assert isinstance(found, RequestTooLarge)
    assert found.limit == 4 << 20


def test_when_to_come_again() -> None:
    found = error(429, '{"error":"Memory limit exceeded","code":429}', **{"retry-after": "7"})

    assert found.retry_after == 7


def test_who_does_not_know_the_model_keeps_its_status() -> None:
    found = error(422, told("Got model X, but not found in server", INVALID))

    assert isinstance(found, WorkerFailed)
    assert (found.status, found.message) == (422, "The worker does not know the model.")


@given(st.integers(400, 599), st.binary(max_size=60))
def test_no_refusal_is_more_than_an_error(status: int, body: bytes) -> None:
    assert isinstance(MindIE().read_error(status, {}, body), GatewayError)
