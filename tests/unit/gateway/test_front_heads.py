"""The head of an answer: its own headers, and those that the front says itself."""

import pytest

from gateway.front.heads import filled, head, named

NAMES = ("X-Id", "Cache-Control", "100%", "DATE", "Connection", "transfer-encoding")
VALUES = ("a", "no-store", "ü", "now", "close", "chunked")


def test_what_the_front_says_itself_is_left_out() -> None:
    told = named(NAMES)

    assert filled(told.whole, VALUES) == "X-Id: a\r\nCache-Control: no-store\r\n100%: ü\r\n"
    assert filled(told.stream, VALUES) == "X-Id: a\r\n100%: ü\r\n"
    assert (told.closes, told.chunked) == (True, True)
    plain = named(NAMES[:3])
    assert (plain.closes, plain.chunked) == (False, False)


def test_there_may_be_none() -> None:
    assert filled(named(()).whole, ()) == ""
    lines = head(299, "", "A: b\r\n").split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 299 "
    assert lines[2] == b"A: b"
    assert lines[-2:] == [b"", b""]


@pytest.mark.parametrize("end", ["\r", "\n", "\0", "\r\n"])
def test_no_header_is_two(end: str) -> None:
    with pytest.raises(ValueError, match="line's end"):
        filled(named(("a", "b")).whole, ("x", f"y{end}c: d"))
    with pytest.raises(ValueError, match="name"):
        named(("a", f"b{end}c"))
