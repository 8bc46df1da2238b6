"""Whatever can be wrong with a JSON body is one error, which says what and where."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import ClientRequest, Endpoint
from protocols.json_body import (
    JSON_ERRORS,
    check_unicode,
    decode_value,
    pop_fields,
    read_fields,
    read_object,
    read_unchecked_fields,
)

DEEP = b"[" * 100_000

OBJECTS: list[tuple[bytes, str, int | None, str]] = [
    (b"", "json", None, "the body is empty"),
    (b" \n", "json", None, "the body is empty"),
    (b"{", "json", None, "truncated"),
    (b'{"a":1,}', "json", 7, "malformed"),
    (b'{"a":NaN}', "json", 5, "malformed"),
    (b"{} {}", "json", 4, "trailing"),
    (b"[]", "object", None, "object"),
    (b"null", "object", None, "object"),
    (b"5", "object", None, "object"),
    (b'{"a":"\xff"}', "encoding", 6, "UTF-8"),
    (b'{"a":"\\ud800 and so on"}', "json", None, "surrogate"),
    (b'{"a":' + DEEP, "depth", None, "deep"),
]


@pytest.mark.parametrize(("body", "problem", "at", "said"), OBJECTS)
def test_a_body_that_can_not_be_read(body: bytes, problem: str, at: int | None, said: str) -> None:
    with pytest.raises(MalformedRequest, match=said) as caught:
        read_object(body)

    assert caught.value.problem == problem
    assert at is None or caught.value.offset == at


def called(body: bytes) -> ClientRequest:
    return ClientRequest(Endpoint("POST", "/"), {}, {}, "", body, "/")


@pytest.mark.parametrize("peeked", [True, False])
@pytest.mark.parametrize("body", [body for body, *_ in OBJECTS])
def test_a_calls_fields_are_refused_alike(body: bytes, *, peeked: bool) -> None:
    call = called(body)
    if peeked:
        read_unchecked_fields(call)

    with pytest.raises(MalformedRequest) as caught:
        read_fields(call)
    with pytest.raises(MalformedRequest) as other:
        read_object(body)

    assert str(caught.value) == str(other.value)
    assert (caught.value.problem, caught.value.offset) == (other.value.problem, other.value.offset)


@pytest.mark.parametrize(
    "body", [b"{}", b'{"a": 1.50,"a":[2]}', '{"é":"é"}'.encode(), b'{"a":"\\n","b":"\\u00e9"}']
)
def test_a_calls_fields_are_those_of_its_body_and_are_read_once(body: bytes) -> None:
    call = called(body)
    assert read_fields(call) == read_object(body)

    kept = read_unchecked_fields(call)

    assert kept == read_object(body)
    assert read_fields(call) is kept


@pytest.mark.parametrize("peeked", [True, False])
@pytest.mark.parametrize("body", [body for body, *_ in OBJECTS])
def test_fields_that_are_taken_are_refused_once_their_texts_are_looked_at(
    body: bytes, *, peeked: bool
) -> None:
    call = called(body)
    if peeked:
        read_unchecked_fields(call)

    def taken() -> Mapping[str, Any]:
        fields = pop_fields(call)
        check_unicode(call.body)
        return fields

    with pytest.raises(JSON_ERRORS):
        taken()


def test_fields_are_taken_once() -> None:
    call = called(b'{"a":1}')
    kept = read_unchecked_fields(call)

    assert pop_fields(call) is kept
    assert pop_fields(call) == kept
    assert pop_fields(call) is not kept


def test_unchecked_fields_may_hold_any_text() -> None:
    assert list(read_unchecked_fields(called(b'{"a":"\xff"}')) or ()) == ["a"]
    assert read_unchecked_fields(called(b'{"\xff":1}')) is None


VALUES: list[tuple[bytes, str]] = [(b'"\xff"', "encoding"), (DEEP, "depth"), (b"[1,]", "json")]


@pytest.mark.parametrize(("raw", "problem"), VALUES)
def test_a_value_that_can_not_be_read(raw: bytes, problem: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        decode_value(Raw(raw))

    assert caught.value.problem == problem


def test_values_are_left_as_they_were_sent() -> None:
    fields = read_object(' {"a": {"b":1.50}, "é":"é", "a":[1 ,2], "c":"\\u00e9"}'.encode())

    assert {name: bytes(raw) for name, raw in fields.items()} == {
        "a": b"[1 ,2]",
        "é": '"é"'.encode(),
        "c": b'"\\u00e9"',
    }
    assert [decode_value(raw) for raw in fields.values()] == [[1, 2], "é", "é"]
