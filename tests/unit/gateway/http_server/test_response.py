"""The head of a response has the handler's headers and those of the server."""

import pytest

from gateway.http_server.response import (
    STREAM_PREFIXES,
    UNARY_PREFIXES,
    HeaderPrefixCache,
    render_head,
    render_headers,
)

HEADERS = (
    ("X-Id", "a"),
    ("Cache-Control", "no-store"),
    ("100%", "ü"),
    ("DATE", "now"),
    ("Connection", "close"),
    ("transfer-encoding", "chunked"),
)


def test_headers_set_by_the_server_are_not_duplicated() -> None:
    lines, silent = render_headers(HEADERS, UNARY_PREFIXES)
    assert lines == ["X-Id: a", "Cache-Control: no-store", "100%: ü"]
    assert silent == ("date", "connection", "transfer-encoding")

    lines, silent = render_headers(HEADERS, STREAM_PREFIXES)
    assert lines == ["X-Id: a", "100%: ü"]
    assert silent == ("cache-control", "date", "connection", "transfer-encoding")


def test_response_head_is_rendered_without_own_headers() -> None:
    assert render_headers((), UNARY_PREFIXES) == ([], ())

    lines = render_head(299, ["A: b"]).split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 299 "
    assert lines[2] == b"A: b"
    assert lines[3].startswith(b"Date: ")
    assert lines[4:] == [b"", b""]


@pytest.mark.parametrize("end", ["\r", "\n", "\0", "\r\n"])
def test_line_break_in_a_header_is_rejected(end: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        render_headers((("a", "x"), ("b", f"y{end}c: d")), UNARY_PREFIXES)
    with pytest.raises(ValueError, match="name"):
        render_headers((("a", "x"), (f"b{end}c", "y")), UNARY_PREFIXES)


def test_header_prefix_cache_is_bounded() -> None:
    starts = HeaderPrefixCache(frozenset({"date"}))
    for number in range(5000):
        assert starts[f"x-{number}"] == f"x-{number}: "
        assert len(starts) <= 1024
    assert starts["Date"] == ""
