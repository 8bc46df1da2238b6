"""A request as it is sent to workers, built once for all of its attempts.

Its headers stand in two places: those that many requests have in common, whose text the HTTP client
caches, and those of this request alone.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import AttemptTrace, Deadline, ModelTimeouts, RequestContext
from backends.pool.worker_state import WorkerState
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Headers, PassthroughReader, UpstreamRequest
from protocols.core.request import AnyRequest

ErrorReader = Callable[[int, Mapping[str, str], bytes], GatewayError]
"""See ``protocols.core.interfaces.UpstreamAdapter.read_error``."""

_COMMON_HEADERS: Final = ("content-type", "accept")
"""Headers of a protocol that are sent to workers and are the same for many requests."""
_PER_REQUEST_HEADERS: Final = ("req-id",)
"""Headers of a protocol that differ for each request."""
_HEADER_WORD: Final = re.compile(r"[!-~]{1,256}")
"""Printable ASCII without spaces, and not too long for a header."""
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


class AttemptRequest(Struct, frozen=True):
    """A request as sent to workers. ``upstream_request`` has the headers common to requests."""

    request: AnyRequest
    upstream_request: UpstreamRequest
    request_headers: Headers
    """The headers of this request alone, without the worker's key."""
    make_response_reader: Callable[[], PassthroughReader]
    """Creates the reader of the response, a new one for each attempt."""
    read_error: ErrorReader
    deadline: Deadline
    reserve_memory: Callable[[int], None]
    """See ``backends.interfaces.RequestContext``."""
    background: bool = False
    """Shadow traffic: no client waits for it, and it does not affect the worker's health."""
    model_timeouts: ModelTimeouts | None = None
    """Those of the model, which replace the pool's."""


def filter_headers(
    wire: UpstreamRequest, context: RequestContext, own: frozenset[str] = frozenset()
) -> tuple[UpstreamRequest, Headers]:
    """``wire`` with the common headers only, and the headers of this request alone.

    ``own`` are names of further headers of the protocol.
    """
    common, headers = _split_headers(wire.headers, own)
    if common is not wire.headers:
        wire = UpstreamRequest(wire.path, wire.body, common, wire.method)
    if _HEADER_WORD.fullmatch(context.id):
        headers += (("x-request-id", context.id),)
    if context.traceparent and _HEADER_WORD.fullmatch(context.traceparent):
        headers += (("traceparent", context.traceparent),)
    if context.tracestate and _TRACESTATE.fullmatch(context.tracestate):
        headers += (("tracestate", context.tracestate),)
    return wire, headers


@functools.lru_cache(256)
def _split_headers(headers: Headers, own: frozenset[str]) -> tuple[Headers, Headers]:
    """The headers that are sent: those common to requests, and those of one request."""
    common = tuple(header for header in headers if header[0].lower() in _COMMON_HEADERS)
    if common == headers:
        return headers, ()
    single = own.union(_PER_REQUEST_HEADERS)
    return common, tuple(header for header in headers if header[0].lower() in single)


def add_trace_headers(
    request: AttemptRequest, trace: AttemptTrace, worker: WorkerState
) -> AttemptRequest:
    """``request`` with the trace headers of an attempt at this worker."""
    headers = [header for header in request.request_headers if header[0] not in _TRACE_HEADERS]
    return replace(request, request_headers=(*headers, *trace.start_attempt(worker.name)))
