"""What a client says of the trace that its request is part of: W3C Trace Context. Pure."""

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_INVALID_IDS: Final = frozenset({"0" * 32, "0" * 16})
_SAMPLED_FLAG: Final = 1


class ParentSpan(Struct, frozen=True):
    """A span of the client's. ``state`` is what others have to say of its trace."""

    trace_id: str
    span_id: str
    sampled: bool
    tracestate: str = ""


def parse_traceparent(headers: Mapping[str, str]) -> ParentSpan | None:
    """The span that the request is part of; None where there is none, or it is told wrongly.

    https://www.w3.org/TR/trace-context/#traceparent-header: the version ff is none, version 00 has
    four parts, and an id of zeros only is none.
    """
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if (version == "00" and more) or trace in _INVALID_IDS or span in _INVALID_IDS:
        return None
    state = headers.get("tracestate", "")
    fit = state if _TRACESTATE.fullmatch(state) else ""
    return ParentSpan(trace, span, bool(int(flags, 16) & _SAMPLED_FLAG), fit)
