"""The log of a failed attempt has the worker's status and text, without keys."""

import msgspec
import pytest

from backends.http.interfaces import make_bearer_credentials, make_query_credentials
from backends.interfaces import (
    MAX_WORKER_FAILURES,
    AttemptHistory,
    WorkerFailure,
    describe_failure,
)
from protocols.core.errors import GatewayError, WorkerFailed, WorkerUnreachable

URL = "http://w:1"


def make_error(text: str, status: int | None = 500) -> GatewayError:
    error = WorkerFailed("The worker answered with an error (500).", status=status)
    error.worker_status, error.worker_text = status, text
    return error


def test_failure_has_worker_error_class_status_and_text() -> None:
    assert describe_failure(URL, make_error("CUDA out of memory")) == WorkerFailure(
        URL, "WorkerFailed", 500, "CUDA out of memory"
    )


def test_failure_without_a_response_has_the_reason_of_the_system() -> None:
    error = WorkerUnreachable("the worker is unreachable")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert describe_failure(URL, error) == WorkerFailure(
        URL, "WorkerUnreachable", None, "Connection refused"
    )

    error.__cause__ = OSError("the host resolves to a forbidden address")
    assert describe_failure(URL, error).text == "the host resolves to a forbidden address"


def test_text_is_one_line_of_at_most_300_characters_without_markup() -> None:
    page = "<html>\r\n<head><title>502 Bad Gateway</title></head>\x00\u2028 nginx" + "x" * 9999
    text = describe_failure(URL, make_error(page)).text

    assert text.startswith("502 Bad Gateway nginxxx")
    assert len(text) == 300


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Wrong API key provided: sk-ab12-cd34ef. Get one", "Wrong API key provided: *** Get one"),
        ("no such key sk-proj-abcdef123456, sorry", "no such key ***, sorry"),
        ("Authorization: Bearer abc.def is expired", "Authorization: Bearer *** is expired"),
        ("bad header 'bearer abc.def'", "bad header 'bearer ***'"),
        ('{"api_key":"abcdef","model":"m"}', '{"api_key":"***","model":"m"}'),
        ("connect to redis://me:pass@host:1/0 failed", "connect to redis://***@host:1/0 failed"),
        ("token eyJhbGciOiJIUzI1.eyJzdWIi.sig", "token ***"),
        ("password = hunter2!", "password = ***"),
        ("max_tokens: 5 is too many tokens", "max_tokens: 5 is too many tokens"),
        ("key_value_heads and hf_overrides differ", "key_value_heads and hf_overrides differ"),
        ("hf_Abcdefgh12345 is expired", "*** is expired"),
        ("keyword 'x' of http://host/v1", "keyword 'x' of http://host/v1"),
    ],
)  # fmt: skip
def test_keys_in_the_text_are_masked(text: str, shown: str) -> None:
    assert describe_failure(URL, make_error(text)).text == shown


@pytest.mark.parametrize(
    "make", [make_bearer_credentials, lambda key: make_query_credentials("k", key)]
)
def test_key_that_the_gateway_sent_is_masked_whatever_its_form(make: object) -> None:
    assert callable(make)

    credentials = make("odd/one")
    text = "you sent odd/one or odd%2Fone"
    shown = describe_failure(URL, make_error(text), credentials.mask_text).text

    assert "odd/one" not in shown
    assert shown.startswith("you sent *** or ")


def test_failures_of_a_request_are_bounded_and_short_in_json() -> None:
    history = AttemptHistory()
    for number in range(MAX_WORKER_FAILURES + 5):
        history.add_failure(WorkerFailure(f"http://w:{number}", "StreamBroken"))

    assert [one.worker for one in history.failures] == [
        f"http://w:{number}" for number in range(MAX_WORKER_FAILURES)
    ]
    assert msgspec.json.encode(history.failures[0]) == (
        b'{"worker":"http://w:0","error":"StreamBroken"}'
    )
