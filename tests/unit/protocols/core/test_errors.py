"""Errors whose texts a worker may have written."""

import weakref

import pytest

from protocols.core.errors import (
    GatewayError,
    UpstreamErrorText,
    WorkerFailed,
    drop_tracebacks,
)


def mask(text: str) -> str:
    return text.replace("s3cret", "***")


def test_a_secret_is_masked_in_every_text_of_an_error() -> None:
    error = GatewayError("no s3cret", param="model")
    error.worker_text = "the s3cret is wrong"
    error.worker_body = {"error": {"code": "s3cret_unknown", "s3cret": [7, ["s3cret", None]]}}
    error.upstream_error = UpstreamErrorText(400, '{"error": "s3cret"}')

    error.mask_secrets(mask)

    assert (error.message, error.worker_text) == ("no ***", "the *** is wrong")
    assert error.worker_body == {"error": {"code": "***_unknown", "***": [7, ["***", None]]}}
    assert error.upstream_error == UpstreamErrorText(400, '{"error": "***"}')


def test_an_error_without_a_text_of_the_worker_keeps_its_own() -> None:
    error = GatewayError("too long")

    error.mask_secrets(mask)

    assert (error.message, error.worker_body, error.upstream_error) == ("too long", None, None)


def test_error_without_tracebacks_keeps_nothing_of_its_frames() -> None:
    def decode(response: set[str]) -> None:
        try:
            int(response.pop())
        except ValueError as cause:
            raise WorkerFailed("invalid") from cause

    response = {"x"}
    held = weakref.ref(response)
    with pytest.raises(WorkerFailed) as caught:
        decode(response)
    error = caught.value
    del caught, response

    drop_tracebacks(error)

    assert held() is None
    assert isinstance(error.__cause__, ValueError)
