"""What a client says of its trace, as W3C Trace Context has it."""

import pytest

from gateway.observability.tracing import ParentSpan, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", ParentSpan(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", ParentSpan(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-fe", ParentSpan(TRACE, SPAN, sampled=False)),
        (f"cc-{TRACE}-{SPAN}-03-what-follows", ParentSpan(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-01-what-follows", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f" 00-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        ("", None),
    ],
)
def test_a_traceparent_is_of_its_form_or_none(said: str, found: ParentSpan | None) -> None:
    assert parse_traceparent({"traceparent": said}) == found


@pytest.mark.parametrize(
    ("state", "kept"),
    [("a=1,b=2", "a=1,b=2"), ("a=1\r\nx: y", ""), ("a" * 513, ""), ("a=ä", "")],
)
def test_a_state_is_kept_where_a_header_can_hold_it(state: str, kept: str) -> None:
    found = parse_traceparent({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": state})
    assert found is not None
    assert found.tracestate == kept


def test_a_state_alone_says_nothing() -> None:
    assert parse_traceparent({"tracestate": "a=1"}) is None
