"""An invalid JSON body gives one error with the reason and the place."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import ClientRequest, Endpoint
from protocols.core.json_text import encode_ascii
from protocols.json_body import (
    JSON_ERRORS,
    check_unicode,
    decode_value,
    get_decoded_fields,
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


@pytest.mark.parametrize(("body", "problem", "at", "message"), OBJECTS)
def test_malformed_body_reports_problem_and_offset(
    body: bytes, problem: str, at: int | None, message: str
) -> None:
    with pytest.raises(MalformedRequest, match=message) as excinfo:
        read_object(body)

    assert excinfo.value.problem == problem
    assert at is None or excinfo.value.offset == at


def create_client_request(body: bytes) -> ClientRequest:
    return ClientRequest(Endpoint("POST", "/"), {}, {}, "", body, "/")


@pytest.mark.parametrize("peeked", [True, False])
@pytest.mark.parametrize("body", [body for body, *_ in OBJECTS])
def test_read_fields_raises_the_same_error_as_read_object(body: bytes, *, peeked: bool) -> None:
    call = create_client_request(body)
    if peeked:
        read_unchecked_fields(call)

    with pytest.raises(MalformedRequest) as excinfo:
        read_fields(call)
    with pytest.raises(MalformedRequest) as other:
        read_object(body)

    assert str(excinfo.value) == str(other.value)
    assert (excinfo.value.problem, excinfo.value.offset) == (
        other.value.problem,
        other.value.offset,
    )


@pytest.mark.parametrize(
    "body", [b"{}", b'{"a": 1.50,"a":[2]}', '{"é":"é"}'.encode(), b'{"a":"\\n","b":"\\u00e9"}']
)
def test_read_fields_parses_the_body_once(body: bytes) -> None:
    call = create_client_request(body)
    assert read_fields(call) == read_object(body)

    fields = read_unchecked_fields(call)

    assert fields == read_object(body)
    assert read_fields(call) is fields


@pytest.mark.parametrize("peeked", [True, False])
@pytest.mark.parametrize("body", [body for body, *_ in OBJECTS])
def test_pop_fields_and_check_unicode_reject_malformed_bodies(body: bytes, *, peeked: bool) -> None:
    call = create_client_request(body)
    if peeked:
        read_unchecked_fields(call)

    def taken() -> Mapping[str, Any]:
        fields = pop_fields(call)
        check_unicode(call.body)
        return fields

    with pytest.raises(JSON_ERRORS):
        taken()


def test_pop_fields_removes_the_parsed_fields() -> None:
    call = create_client_request(b'{"a":1}')
    fields = read_unchecked_fields(call)

    assert pop_fields(call) is fields
    assert pop_fields(call) == fields
    assert pop_fields(call) is not fields


def test_decoded_fields_are_those_that_were_cached_until_they_are_taken() -> None:
    call = create_client_request(b'{"a": 1}')
    assert get_decoded_fields(call) is None
    fields = read_unchecked_fields(call)
    assert get_decoded_fields(call) is fields
    pop_fields(call)
    assert get_decoded_fields(call) is None


def test_unchecked_fields_may_contain_invalid_utf8_values() -> None:
    assert list(read_unchecked_fields(create_client_request(b'{"a":"\xff"}')) or ()) == ["a"]
    assert read_unchecked_fields(create_client_request(b'{"\xff":1}')) is None


VALUES: list[tuple[bytes, str]] = [(b'"\xff"', "encoding"), (DEEP, "depth"), (b"[1,]", "json")]


@pytest.mark.parametrize(("raw", "problem"), VALUES)
def test_malformed_value_reports_its_problem(raw: bytes, problem: str) -> None:
    with pytest.raises(MalformedRequest) as excinfo:
        decode_value(Raw(raw))

    assert excinfo.value.problem == problem


def test_values_keep_their_raw_json() -> None:
    fields = read_object(' {"a": {"b":1.50}, "é":"é", "a":[1 ,2], "c":"\\u00e9"}'.encode())

    assert {name: bytes(raw) for name, raw in fields.items()} == {
        "a": b"[1 ,2]",
        "é": '"é"'.encode(),
        "c": b'"\\u00e9"',
    }
    assert [decode_value(raw) for raw in fields.values()] == [[1, 2], "é", "é"]


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        ({"a": 1}, b'{"a":1}'),
        ("a\u2028\u0085\xe9", b'"a\\u2028\\u0085\\u00e9"'),
        ({"\U0001f5fc": ["\U0001f5fc", '"']}, b'{"\\ud83d\\uddfc":["\\ud83d\\uddfc","\\""]}'),
    ],
)
def test_ascii_json_has_escapes_for_all_other_characters(value: Any, wire: bytes) -> None:
    assert encode_ascii(value) == wire
    assert msgspec.json.decode(wire) == value


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model":"a","Model":"b"}', "Model"),
        (b'{"MODEL":"b"}', "MODEL"),
        (b'{"stream":true,"\xc5\xbftream":false}', "\u017ftream"),
        (b'{"A":1,"a":2}', "a"),
    ],
)
def test_name_that_differs_from_another_in_case_only_is_refused(body: bytes, name: str) -> None:
    """A worker that ignores case could read another value than the gateway."""
    call = create_client_request(body)

    assert read_unchecked_fields(call) is None
    for read in (read_fields, lambda call: read_object(call.body)):
        with pytest.raises(
            MalformedRequest, match="differs from another one in case only"
        ) as excinfo:
            read(call)
        assert name in excinfo.value.message
    with pytest.raises(JSON_ERRORS):
        pop_fields(call)


@pytest.mark.parametrize("body", [rb'{"model":"a","model\u0000":"b"}', rb'{"n":1,"n\u0000x":2}'])
def test_name_with_nul_is_refused(body: bytes) -> None:
    """A worker whose strings end at NUL would read it as the other one."""
    call = create_client_request(body)

    assert read_unchecked_fields(call) is None
    with pytest.raises(MalformedRequest, match="has a NUL in its name"):
        read_fields(call)
    with pytest.raises(JSON_ERRORS):
        pop_fields(call)


def test_names_in_upper_case_are_read() -> None:
    assert read_object(b'{"topK":1,"X":2,"topP":3}').keys() == {"topK", "X", "topP"}
    assert read_object(b"{}") == {}
