"""Captures a request and its response for a recording, while it is handled.

The response is captured where it is written to the client, so that every path of it is: passed
through, translated, streamed, forwarded, and errors. Everything else happens later, in the
recorder's thread.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.memory import MemoryBudget
from gateway.observability.recording_writer import (
    MAX_BODY,
    CapturedRequest,
    RecordingPolicy,
    RequestRecorder,
)
from gateway.pipeline.state import RequestState, RouteStage, Stage
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import Model
from protocols.core.events import Event

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


class RecordingStage(RouteStage):
    """Records the requests of models and routes with a recording policy, as far as drawn."""

    def __init__(
        self, recorder: RequestRecorder, draw: Callable[[], float], memory: MemoryBudget
    ) -> None:
        self._memory = memory
        self._recorder = recorder
        self._draw = draw

    def observes_model(self, model: Model) -> bool:
        """See ``gateway.pipeline.state.RouteStage``."""
        policies = (model.recording, *(rule.recording for rule in model.rules))
        return any(policy is not None for policy in policies)

    def on_routed(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        policy = request.route.model.recording
        if policy is None or request.is_dry_run or self._draw() >= policy.config.share:
            return
        has_bodies = request.is_inference and policy.config.bodies != "none"
        stage = RequestCapture(
            policy, self._recorder.record_request, self._memory, has_bodies=has_bodies
        )
        request.add_stage(stage)


class RequestCapture(Stage):
    """Captures one request and its response: at most ``MAX_BODY`` bytes of a stream."""

    observes_response = True
    observes_events = True

    def __init__(
        self,
        policy: RecordingPolicy,
        record_captured: Callable[[CapturedRequest], None],
        memory: MemoryBudget,
        *,
        has_bodies: bool,
    ) -> None:
        """``has_bodies``: whether bodies may be captured: not those of forwarded requests."""
        self._policy = policy
        self._memory = memory
        self._held_bytes = 0
        """Taken of the memory budget; what does not fit is not recorded."""
        self._record_captured = record_captured
        self._has_bodies = has_bodies
        self._response: bytes | None = None
        self._size = 0
        self._chunks: list[tuple[float, bytes]] = []
        self._events: list[Event] = []
        self._is_truncated = False

    def on_attempt(self, _: RequestState, __: TargetAttempt) -> None:
        """See ``gateway.pipeline.state.Stage``. The events of a failed target are forgotten."""
        self._events = []

    def on_events(self, _: RequestState, events: Sequence[Event]) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if self._has_bodies and len(self._events) < _MAX_EVENTS and self._take(300 * len(events)):
            self._events += events

    def on_data(self, request: RequestState, data: bytes, *, is_whole: bool) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        self._size += len(data)
        if not self._has_bodies:
            return
        if is_whole:
            self._response = data
        elif self._size <= MAX_BODY and self._take(len(data) + 300):
            context = request.context
            self._chunks.append((context.clock() - context.received_at, data))
        else:
            self._is_truncated = True

    def on_end(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``. Hands the request to the recorder."""
        self._memory.record_held("recordings", -self._held_bytes)
        self._held_bytes = 0
        client_request = request.client_request
        body = client_request.body
        self._record_captured(
            CapturedRequest(
                policy=self._policy,
                record=request.record,
                method=client_request.endpoint.method,
                path=client_request.path,
                query=_select_query(client_request.query),
                headers=select_recorded_headers(client_request.headers),
                body=body if self._has_bodies else None,
                body_size=len(body),
                response=self._response,
                response_size=self._size,
                chunks=self._chunks,
                is_truncated=self._is_truncated,
                events=self._events,
            )
        )

    def _take(self, size: int) -> bool:
        """Take so many bytes of the memory budget; returns whether there is room, as ever before.

        No connection is closed for a recording.
        """
        if self._is_truncated or not self._memory.has_room(size):
            self._is_truncated = True
            return False
        self._memory.record_held("recordings", size)
        self._held_bytes += size
        return True


def _select_query(query: str) -> str:
    """The version of the API, for protocols that have it in the query."""
    found = _API_VERSION.search(query)
    return found[0] if found else ""


def select_recorded_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers that are recorded, and sent again by a replay."""
    return {
        name: value[:_MAX_HEADER]
        for name, value in headers.items()
        if name in _RECORDED_HEADERS or name.endswith(_RECORDED_ENDINGS)
    }
