"""JSON is parsed like the original's; errors and offsets are recorded from a running server."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.errors import MalformedRequest
from protocols.triton import rapidjson

REFUSED = [
    (b"{", "Missing a name for object member. at 1"),
    (b"{,}", "Missing a name for object member. at 1"),
    (b"{'a':1}", "Missing a name for object member. at 1"),
    (b'{"a":1,}', "Missing a name for object member. at 7"),
    (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
    (b'{"a"\0', "Missing a colon after a name of object member. at 4"),
    (b'{"a":1', "Missing a comma or '}' after an object member. at 6"),
    (b'{"a":1 2}', "Missing a comma or '}' after an object member. at 7"),
    (b'{"a":01}', "Missing a comma or '}' after an object member. at 6"),
    (b'{"a":NaNN}', "Missing a comma or '}' after an object member. at 8"),
    (b"[1", "Missing a comma or ']' after an array element. at 2"),
    (b"[1}", "Missing a comma or ']' after an array element. at 2"),
    (b"hello", "Invalid value. at 0"),
    (b"[1,]", "Invalid value. at 3"),
    (b'{"a":tru}', "Invalid value. at 8"),
    (b'{"a":+1}', "Invalid value. at 5"),
    (b'{"a":-}', "Invalid value. at 6"),
    (b'{"a":\0}', "Invalid value. at 5"),
    (b'{"x":-Infinit}', "Invalid value. at 13"),
    (b'{"x":NIaN}', "Invalid value. at 7"),
    (b'{"x":NaX}', "Invalid value. at 7"),
    (b"//c\n{}", "Invalid value. at 0"),
    (b"", "The document is empty. at 0"),
    (b"  ", "The document is empty. at 2"),
    (b"\0", "The document is empty. at 0"),
    (b"\xef\xbb\xbf", "The document is empty. at 3"),
    (b"\xef\xbb\xbf{", "Missing a name for object member. at 4"),
    (b'{"text_input":"a"}{', "The document root must not be followed by other values. at 18"),
    (b'{"a":"x', "Missing a closing quotation mark in string. at 7"),
    (b'{"text_input":"a\0b"}', "Missing a closing quotation mark in string. at 16"),
    (rb'{"a":"\x"}', "Invalid escape character in string. at 6"),
    (b'{"text_input":"a","x":"\x1f"}', "Invalid escape character in string. at 23"),
    (rb'{"a":"\u12g"}', "Incorrect hex digit after \\u escape in string. at 6"),
    (rb'{"a":"\ud800\ux"}', "Incorrect hex digit after \\u escape in string. at 6"),
    (rb'{"a":"\ud800"}', "The surrogate pair in string is invalid. at 6"),
    (rb'{"a":"\ud800\u0041"}', "The surrogate pair in string is invalid. at 6"),
    (b'{"x":1e309}', "Number too big to be stored in double. at 5"),
    (b'{"x":-1e999}', "Number too big to be stored in double. at 5"),
    (b'{"x":1.}', "Miss fraction part in number. at 7"),
    (b'{"x":1.e5}', "Miss fraction part in number. at 7"),
    (b'{"x":1e}', "Miss exponent in number. at 7"),
    (b'{"x":1e+}', "Miss exponent in number. at 8"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_invalid_json_error_text_and_offset(text: bytes, reason: str) -> None:
    with pytest.raises(MalformedRequest) as excinfo:
        rapidjson.parse_fields(text)
    assert excinfo.value.message == f"failed to parse the request JSON buffer: {reason}"
    assert excinfo.value.offset == int(reason.rpartition(" ")[2])


def test_integer_too_large_for_a_double_is_rejected() -> None:
    with pytest.raises(MalformedRequest, match=r"Number too big to be stored in double\. at 0"):
        rapidjson.parse_rapidjson_value(b"9" * 309)
    assert rapidjson.parse_rapidjson_value(b"1" * 309) == int("1" * 309)


TAKEN = [
    (b'\xef\xbb\xbf{"a":1}', [("a", 1)]),
    (b'{"a":1}\0 and more', [("a", 1)]),
    (b' {"a" : "x" } \n', [("a", "x")]),
    (b'{"a":1,"b":2,"a":3}', [("a", 1), ("b", 2), ("a", 1)]),
    (b'{"a":Infinity,"b":-Inf,"c":[null,true,{}]}',
     [("a", float("inf")), ("b", float("-inf")), ("c", [None, True, {}])]),
    (rb'{"\u00e9":"\ud83d\ude00\/\b"}', [("é", "😀/\b")]),
    (rb'{"a":Inf,"b":"\ud83d\ude00\n\u00e9"}', [("a", float("inf")), ("b", "😀\né")]),
    (b'{"a":Inf,"b":0.5e-3,"c":-12,"d":false,"e":[],"f":{"x":1,"x":2}}',
     [("a", float("inf")), ("b", 0.0005), ("c", -12), ("d", False), ("e", []), ("f", {"x": 2})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "members"), TAKEN)
def test_valid_json_members_are_parsed(text: bytes, members: list[tuple[str, Any]]) -> None:
    fields = rapidjson.parse_fields(text)
    assert [(name, rapidjson.parse_value(fields[name])) for name in fields.names] == members


@pytest.mark.parametrize("text", [b"NInf", b"NaInf", b"NaInfinity"])
def test_partial_nan_before_inf_is_parsed_as_infinity(text: bytes) -> None:
    assert rapidjson.parse_value(text) == float("inf")
    assert rapidjson.parse_value(b"-" + text) == float("-inf")


def test_nan_is_parsed_as_a_number() -> None:
    value = rapidjson.parse_value(rapidjson.parse_fields(b'{"a":NaN}')["a"])
    assert value != value  # noqa: PLR0124 - which is what NaN is


def test_invalid_utf8_is_rejected() -> None:
    with pytest.raises(MalformedRequest, match=r"Invalid encoding in string\. at 7"):
        rapidjson.parse_fields(b'{"a":"b\xff"}')


@pytest.mark.parametrize("depth", [200, 5000])
def test_deeply_nested_body_is_rejected(depth: int) -> None:
    for text in (b'{"a":' + b"[" * depth, b'{"a":NaN,"b":' + b"[" * depth + b"]" * depth + b"}"):
        with pytest.raises(MalformedRequest) as excinfo:
            rapidjson.parse_fields(text)
        assert excinfo.value.problem == "depth"


def test_deeply_nested_value_is_rejected() -> None:
    with pytest.raises(MalformedRequest, match="nested too deep"):
        rapidjson.parse_value(b"[" * 5000)


@pytest.mark.parametrize("text", [b"[]", b"NaN", b'"x"', b"null", b"\xef\xbb\xbf5"])
def test_body_that_is_no_object_is_rejected(text: bytes) -> None:
    with pytest.raises(MalformedRequest, match="attempt to get members for non-object") as excinfo:
        rapidjson.parse_fields(text)
    assert excinfo.value.problem == "object"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)


@given(OBJECTS)
def test_both_parsers_return_the_same_values(what: dict[str, Any]) -> None:
    text = msgspec.json.encode(what)
    assert rapidjson.parse_rapidjson_value(text) == what
    assert rapidjson.parse_rapidjson_members(text) == [
        (n, msgspec.Raw(msgspec.json.encode(v))) for n, v in what.items()
    ]


@given(OBJECTS, st.data())
def test_both_parsers_report_the_same_error_for_damaged_json(
    what: dict[str, Any], data: st.DataObject
) -> None:
    text = bytearray(msgspec.json.encode(what))
    at = data.draw(st.integers(0, len(text) - 1))

    text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))

    assert parse_or_return_error(rapidjson.parse_fields, bytes(text)) == parse_or_return_error(
        rapidjson.parse_rapidjson_members, bytes(text)
    )


def parse_or_return_error(read: Any, text: bytes) -> Any:
    try:
        fields = read(text)
    except MalformedRequest as e:
        return e.message
    return (
        fields.names
        if isinstance(fields, rapidjson.OrderedFields)
        else [name for name, _ in fields]
    )
