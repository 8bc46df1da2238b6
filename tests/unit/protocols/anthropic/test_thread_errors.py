"""A worker's error about a thread keeps its code, which tells clients what to send next."""

import json

import pytest

from protocols.anthropic.errors import build_error_response, read_worker_error
from protocols.core.errors import ClientError
from protocols.core.worker_error_keys import restore_worker_keys


def make_body(code: str) -> bytes:
    error = {"type": "x", "message": "no thread", "details": {"error_code": code}}
    return json.dumps({"type": "error", "error": error}).encode()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (404, "thread_not_found"),
        (400, "thread_already_continued"),
        (400, "thread_continue_in_flight"),
        (400, "thread_unsupported_request"),
        (400, "thread_of_a_later_release"),
    ],
)
def test_error_about_a_thread_keeps_its_status_and_code(status: int, code: str) -> None:
    error = read_worker_error(status, {}, make_body(code))
    error.worker_protocol = "anthropic"
    shown = build_error_response(error, None)
    body = json.loads(restore_worker_keys(shown.body, error, "anthropic"))

    assert isinstance(error, ClientError)
    assert shown.status == status
    assert body["error"]["details"] == {"error_code": code}


@pytest.mark.parametrize("body", [make_body("file_expired"), b'{"error": {}}', b"<html>"])
def test_other_errors_have_no_code(body: bytes) -> None:
    shown = build_error_response(read_worker_error(400, {}, body), None)

    assert "details" not in json.loads(shown.body)["error"]
