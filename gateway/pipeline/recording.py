"""Captures a request and its response for a recording, while it is handled.

The response is captured where it is written to the client, so that every path of it is: passed
through, translated, streamed, forwarded, and errors. The events of the answer are observed as
those of a request with a shadow are. Everything else happens later, in the recorder's thread.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from backends.interfaces import RequestContext
from gateway.observability.record import RequestRecord
from gateway.observability.recording_writer import MAX_BODY, CapturedRequest, RecordingPolicy
from gateway.pipeline.http import ResponseWriter, ResponseWriterWrapper
from gateway.pipeline.strategies import EventObserver
from protocols.core.events import Event
from protocols.core.interfaces import ClientRequest, Headers

_RECORDED_HEADERS: Final = frozenset(
    {
        "content-type",
        "accept",
        "accept-language",
        "user-agent",
        "x-interlingua-strict",
        "x-interlingua-timeout",
        "x-interlingua-protocol",
    }
)
"""The headers of requests that are recorded. None holds credentials."""
_RECORDED_ENDINGS: Final = ("-version", "-beta")
"""So end the names of headers by which clients choose a version of their protocol."""
_MAX_EVENTS: Final = 200_000
_API_VERSION: Final = re.compile(r"(?<![^&])api-version=[\w.-]{1,40}(?![^&])")
_MAX_HEADER: Final = 500

RecordCaptured = Callable[[CapturedRequest], None]


class RequestCapture(ResponseWriterWrapper):
    """The writer of a request's response, which captures what it writes."""

    def __init__(
        self,
        policy: RecordingPolicy,
        record_captured: RecordCaptured,
        client_request: ClientRequest,
        context: RequestContext,
        writer: ResponseWriter,
        *,
        has_bodies: bool,
    ) -> None:
        """``has_bodies``: whether bodies may be captured: not those of forwarded requests."""
        super().__init__(writer)
        self._policy = policy
        self._record_captured = record_captured
        self._client_request = client_request
        self._context = context
        self._has_bodies = has_bodies and policy.config.bodies != "none"
        self._response: bytes | None = None
        self._size = 0
        self._chunks: list[tuple[float, bytes]] = []
        self._events: list[Event] = []
        self._is_truncated = False

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``ResponseWriter``."""
        self._size = len(body)
        if self._has_bodies:
            self._response = body
        self._writer.send_response(status, headers, body)

    def write(self, data: bytes) -> None:
        """See ``ResponseWriter``."""
        self._size += len(data)
        if self._has_bodies:
            if self._size <= MAX_BODY:
                self._chunks.append((self._context.clock() - self._context.started_at, data))
            else:
                self._is_truncated = True
        self._writer.write(data)

    def start_attempt(self, other: EventObserver | None) -> EventObserver | None:
        """The request is sent to a target: observe its events, for the ``other`` observer, too.

        Those of a target that failed before are forgotten.
        """
        self._events = []
        if not self._has_bodies:
            return other
        if other is None:
            return self._add_events

        def observe_both(events: Sequence[Event]) -> None:
            other(events)
            self._add_events(events)

        return observe_both

    def _add_events(self, events: Sequence[Event]) -> None:
        if not self._is_truncated and len(self._events) < _MAX_EVENTS:
            self._events += events

    def end(self, record: RequestRecord) -> None:
        """The request has ended: hand it to the recorder."""
        client_request = self._client_request
        body = client_request.body
        self._record_captured(
            CapturedRequest(
                policy=self._policy,
                record=record,
                method=client_request.endpoint.method,
                path=client_request.path,
                query=_select_query(client_request.query),
                headers=_select_headers(client_request.headers),
                body=body if self._has_bodies else None,
                body_size=len(body),
                response=self._response,
                response_size=self._size,
                chunks=self._chunks,
                is_truncated=self._is_truncated,
                events=self._events,
            )
        )


def _select_query(query: str) -> str:
    """The version of the API, for protocols that have it in the query."""
    found = _API_VERSION.search(query)
    return found[0] if found else ""


def _select_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers that are recorded."""
    return {
        name: value[:_MAX_HEADER]
        for name, value in headers.items()
        if name in _RECORDED_HEADERS or name.endswith(_RECORDED_ENDINGS)
    }
