"""What a worker sees in the headers of a request: the dialect's, the exchange's id, its trace."""

import functools
import re
from typing import Final

from msgspec.structs import replace

from backends.pool.attempt import Work
from backends.pool.member import Member
from gateway.core.context import Context
from gateway.core.ports import Headers, WireRequest
from gateway.core.watching import Trace

_SHARED: Final = ("content-type", "accept")
"""The headers of a dialect that a worker sees, and that many requests have in common."""
_OWN: Final = ("req-id",)
"""The same, but each of one request."""
_WORD: Final = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces, and not too long for a header."""
_STATE: Final = re.compile(r"[ -~]{1,512}")
_OF_A_TRACE: Final = ("traceparent", "tracestate")


def allowed(wire: WireRequest, context: Context) -> tuple[WireRequest, Headers]:
    """``wire`` with no header that a worker need not see, and the headers of this request alone."""
    shared, own = _passed_on(wire.headers)
    if shared is not wire.headers:
        wire = WireRequest(wire.path, wire.body, shared, wire.method)
    if _WORD.fullmatch(context.id):
        own += (("x-request-id", context.id),)
    if context.traceparent and _WORD.fullmatch(context.traceparent):
        own += (("traceparent", context.traceparent),)
    if context.tracestate and _STATE.fullmatch(context.tracestate):
        own += (("tracestate", context.tracestate),)
    return wire, own


@functools.lru_cache(256)
def _passed_on(headers: Headers) -> tuple[Headers, Headers]:
    """Those that a worker sees: what requests have in common, and what is each one's own."""
    shared = tuple(one for one in headers if one[0].lower() in _SHARED)
    if shared == headers:
        return headers, ()
    return shared, tuple(one for one in headers if one[0].lower() in _OWN)


def traced(work: Work, trace: Trace, member: Member) -> Work:
    """``work`` for one worker, which is told of the trace."""
    own = [one for one in work.request_headers if one[0] not in _OF_A_TRACE]
    return replace(work, request_headers=(*own, *trace.start_attempt(member.name)))
