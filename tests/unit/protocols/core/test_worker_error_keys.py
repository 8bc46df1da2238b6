"""What is added of a worker's error to the gateway's, for clients of the worker's protocol."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import GatewayError, UnsupportedFeature, WorkerFailed
from protocols.core.response_headers import ResponseHeaders, merge_headers
from protocols.core.worker_error_keys import restore_worker_keys

OWN = {"error": {"message": "no", "type": "t", "code": None}}
TEXT = "No memory at 10.0.0.7"


def restore(
    body: dict[str, Any] | None, own: Any = OWN, error: GatewayError | None = None
) -> dict[str, Any]:
    error = error or UnsupportedFeature("no")
    error.worker_body, error.worker_protocol = body, "p"
    written: dict[str, Any] = msgspec.json.decode(
        restore_worker_keys(msgspec.json.encode(own), error, "p")
    )
    return written


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, OWN),
        ({"message": "x", "type": "y", "code": 400},
         {"error": {"message": "no", "type": "y", "code": 400}}),
        ({"error": {"message": "x", "code": "c", "n": None}, "top": [1]},
         {"error": {"message": "no", "type": "t", "code": "c", "n": None}, "top": [1]}),
        ({"error": "x", "top": 1}, {**OWN, "top": 1}),
    ],
)  # fmt: skip
def test_keys_of_the_worker_are_added(body: Any, expected: Any) -> None:
    assert restore(body) == expected


def test_object_of_the_worker_in_place_of_a_text_has_the_text() -> None:
    assert restore({"error": {"message": "x", "n": 1}}, {"error": "no"}) == {
        "error": {"message": "no", "n": 1}
    }


def test_gateway_s_own_param_stays() -> None:
    own = {"error": {"message": "no", "param": "messages"}}

    assert restore({"error": {"param": "input"}}, own) == own


def test_last_event_of_items_has_the_error_in_its_response() -> None:
    own = {"type": "response.failed", "response": OWN}

    assert restore({"error": {"n": 1}}, own)["response"]["error"]["n"] == 1


@pytest.mark.parametrize(("status", "is_kept"), [(500, True), (401, False)])
def test_only_words_of_a_failure_are_added(status: int, *, is_kept: bool) -> None:
    body = {"n": 7, "host": TEXT, "list": [TEXT, "word"], "code": 500}

    written = restore(body, error=WorkerFailed("no", status=status))

    assert TEXT not in str(written)
    assert ("n" in written["error"]) is is_kept


def test_text_that_is_no_json_stays_as_it_is() -> None:
    error = UnsupportedFeature("no")
    error.worker_body, error.worker_protocol = {"n": 1}, "p"

    assert restore_worker_keys(b"Failed to get engine response", error, "p") == (
        b"Failed to get engine response"
    )


def test_headers_are_selected_and_lost_by_the_protocol_s_table() -> None:
    table = ResponseHeaders(("own-",), ("id",), ("own-state",))
    head = {"own-state": "1", "own-new": "2", "id": "3", "x-a": "é", "x-hop": "1", "via": "4",
            "connection": "x-hop"}  # fmt: skip

    selected = table.select(head)

    assert selected == (("own-state", "1"), ("own-new", "2"), ("id", "3"))
    assert [one.field for one in table.find_lost(selected)] == ["response.header.own-new"]
    assert table.select({"via": "1"}) == ()


def test_headers_are_bounded_in_number_and_size() -> None:
    head = {"x-large": "1" * 100_000, **{f"x-{number}": "1" for number in range(100)}}

    assert ResponseHeaders().select(head) == tuple((f"x-{number}", "1") for number in range(64))


def test_gateway_s_own_time_to_wait_wins() -> None:
    passed = (("retry-after", "9"), ("retry-after-ms", "9000"), ("id", "3"))

    assert merge_headers((("Retry-After", "2"), ("ID", "1")), passed) == (
        ("Retry-After", "2"),
        ("id", "3"),
    )
    assert merge_headers((), passed) == passed
