"""W3C Trace Context headers of clients are parsed and, if trusted, continued."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, format_span_id, format_trace_id

from gateway.observability.record import RequestRecord
from gateway.observability.semconv import STABLE_CONVENTIONS
from gateway.observability.tracing import RequestTracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class UnlimitedQueue:
    def reserve(self) -> bool:
        return True


class FakeHttpRequest:
    method = "POST"

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers


def get_link(headers: dict[str, str]) -> Link | None:
    """Return the span link of a request with these headers to a gateway without trust."""
    provider = TracerProvider(ALWAYS_ON, shutdown_on_exit=False)
    tracer = RequestTracer(
        provider, UnlimitedQueue(), STABLE_CONVENTIONS, trust_parent=False, now=lambda: 1.0
    )
    record = RequestRecord("r")
    tracer.start_trace(record, FakeHttpRequest(headers))
    trace = tracer.get_trace(record)
    assert trace is not None
    links = getattr(trace.span, "links")  # noqa: B009 - the SDK's span has it, the API's has not
    assert len(links) <= 1
    return links[0] if links else None


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-03-what-follows", True),
        (f"00-{TRACE}-{SPAN}-01-what-follows", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_only_a_valid_traceparent_creates_a_link(traceparent: str, sampled: bool | None) -> None:
    link = get_link({"traceparent": traceparent})
    if sampled is None:
        assert link is None
        return

    assert link is not None
    assert format_trace_id(link.context.trace_id) == TRACE
    assert format_span_id(link.context.span_id) == SPAN
    assert link.context.trace_flags.sampled == sampled


@pytest.mark.parametrize(
    ("state", "forwarded"),
    [
        ("a=1,b=2", "a=1,b=2"),
        ("a=1\r\nx: y", ""),
        ("a" * 513, ""),
        (",".join(f"a{n}={'x' * 250}" for n in range(33)), ""),
        ("a=ä", ""),
    ],
)
def test_only_a_valid_tracestate_is_kept(state: str, forwarded: str) -> None:
    link = get_link({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": state})
    assert link is not None
    assert link.context.trace_state.to_header() == forwarded


def test_tracestate_without_traceparent_is_ignored() -> None:
    assert get_link({"tracestate": "a=1"}) is None
