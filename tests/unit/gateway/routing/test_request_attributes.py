"""The attributes that rules can use are read lazily."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.routing.request_attributes import RequestAttributes

BODY = (
    b'{"user":"u","n":7,"big":123456789012345678901234567890,"part":1.5,"yes":true,"no":null,'
    b'"list":["u"],"map":{"user":"v"},"far":1e999,"empty":"","again":1,"again":2}'
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "u"),
        ("n", 7),
        ("part", 1.5),
        ("yes", True),
        ("again", 2),
        ("empty", ""),
        ("no", None),
        ("list", None),
        ("map", None),
        ("far", None),
        ("none", None),
    ],
)
def test_only_top_level_scalars_are_read_from_the_body(name: str, value: Any) -> None:
    read = RequestAttributes(body=BODY).read_field(name)

    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"user":',
        b'{"user":"\xff"}',
        b'{"user":"\\ud800"}',
        b'{"user":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "list", "cut", "encoding", "surrogate", "deep"],
)
def test_invalid_body_has_no_attributes(body: bytes) -> None:
    traits = RequestAttributes(body=body)

    assert traits.read_field("user") is None
    assert traits.find_first_source(["body:user"]) == ("", "")


def test_body_is_parsed_lazily_and_once() -> None:
    traits = RequestAttributes(headers={"x-a": "1"}, body=BODY, key="k", address="::1")

    assert [traits.read_source(one) for one in ("header:x-a", "key", "address")] == [
        "1",
        "k",
        "::1",
    ]
    assert traits.parsed_fields is None
    assert traits.read_source("body:user") == "u"

    traits.body = b"{}"
    assert traits.read_source("body:user") == "u"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["header:x-a", "body:user"], ("header:x-a", "1")),
        (["header:x-b", "body:user"], ("body:user", "u")),
        (["header:x-empty", "body:n"], ("body:n", "7")),
        (["body:yes", "body:part", "body:empty", "key"], ("key", "k")),
        (["address", "key"], ("address", "::1")),
        (["header:x-b"], ("", "")),
        ([], ("", "")),
    ],
)
def test_first_non_empty_source_identifies_the_client(
    sources: Sequence[str], expected: tuple[str, str]
) -> None:
    headers = {"x-a": "1", "x-empty": ""}
    traits = RequestAttributes(headers=headers, body=BODY, key="k", address="::1")

    assert traits.find_first_source(sources) == expected
