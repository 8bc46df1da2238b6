"""What a worker sees in the headers of a request: the dialect's, the exchange's id, its trace."""

import functools
import re
from typing import Final

from msgspec.structs import replace

from backends.interfaces import AttemptTrace, RequestContext
from backends.pool.attempt import AttemptRequest
from backends.pool.member import WorkerState
from protocols.core.interfaces import Headers, UpstreamRequest

_COMMON_HEADERS: Final = ("content-type", "accept")
"""The headers of a dialect that a worker sees, and that many requests have in common."""
_PER_REQUEST_HEADERS: Final = ("req-id",)
"""The same, but each of one request."""
_HEADER_WORD: Final = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces, and not too long for a header."""
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


def filter_headers(
    wire: UpstreamRequest, context: RequestContext
) -> tuple[UpstreamRequest, Headers]:
    """``wire`` with no header that a worker need not see, and the headers of this request alone."""
    shared, own = _split_headers(wire.headers)
    if shared is not wire.headers:
        wire = UpstreamRequest(wire.path, wire.body, shared, wire.method)
    if _HEADER_WORD.fullmatch(context.id):
        own += (("x-request-id", context.id),)
    if context.traceparent and _HEADER_WORD.fullmatch(context.traceparent):
        own += (("traceparent", context.traceparent),)
    if context.tracestate and _TRACESTATE.fullmatch(context.tracestate):
        own += (("tracestate", context.tracestate),)
    return wire, own


@functools.lru_cache(256)
def _split_headers(headers: Headers) -> tuple[Headers, Headers]:
    """Those that a worker sees: what requests have in common, and what is each one's own."""
    shared = tuple(one for one in headers if one[0].lower() in _COMMON_HEADERS)
    if shared == headers:
        return headers, ()
    return shared, tuple(one for one in headers if one[0].lower() in _PER_REQUEST_HEADERS)


def add_trace_headers(
    work: AttemptRequest, trace: AttemptTrace, member: WorkerState
) -> AttemptRequest:
    """``work`` for one worker, which is told of the trace."""
    own = [one for one in work.request_headers if one[0] not in _TRACE_HEADERS]
    return replace(work, request_headers=(*own, *trace.start_attempt(member.name)))
