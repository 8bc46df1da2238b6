"""What is measured of the responses of a running gateway, for the guardrails of rollouts.

Each measure says of a response whether it is good; the ones of ``interlingua compare`` that need no
second response. A response to which a measure does not apply has none: without tools in the request
there is nothing to call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.evidence.observation import Observation, observe
from gateway.observability.recording import RecordedRequest
from gateway.observability.recording_writer import fold_answer
from protocols.core.events import Event, StreamEnd
from protocols.core.json_text import decode_json

_EVENT_SIZE: Final = 300
_MAX_SIZE: Final = 8 << 20
"""Bytes of a request and the events of its response."""


def _invert(value: bool | None) -> bool | None:  # noqa: FBT001 - a measured value
    return None if value is None else not value


def _is_whole(observation: Observation) -> bool | None:
    reasons = observation.finish_reasons
    return "length" not in reasons if reasons else None


LIVE_MEASURES: Final[Mapping[str, Callable[[Observation], bool | None]]] = {
    "json_valid": lambda one: one.is_json,
    "tool_calls": lambda one: one.calls_tools,
    "tool_arguments": lambda one: one.has_valid_arguments,
    "stop_strings": lambda one: _invert(one.ignores_stop),
    "not_truncated": _is_whole,
    "not_refused": lambda one: _invert(one.declines),
    "not_empty": lambda one: _invert(one.is_empty),
}
"""By their names in the configuration: see ``CompareGuardrailsConfig``."""


class MeasuredResponse:
    """Measures a response when its last event comes, unless it is too large."""

    def __init__(self, body: bytes) -> None:
        """``body`` is that of the request."""
        self._body = body
        self._events: list[Event] = []
        self.size = len(body)
        """About the bytes of all that is held."""
        self.measures: dict[str, bool] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Add events in their order."""
        self.size += count_event_bytes(events)
        if self.size > _MAX_SIZE:
            self._events = []
            return
        self._events += events
        if any(isinstance(event, StreamEnd) for event in events):
            self.measures = measure_response(self._body, self._events)


def count_event_bytes(events: Sequence[Event]) -> int:
    """About the bytes of events: their objects and their texts."""
    return sum([_EVENT_SIZE + len(getattr(event, "text", "")) for event in events])


def measure_response(body: bytes, events: Sequence[Event]) -> dict[str, bool]:
    """The measures that apply to a complete response, given the body of its request."""
    try:
        request = decode_json(body)
    except ValueError:  # no JSON: the request of another protocol
        request = None
    recorded = RecordedRequest(id="", at=0.0, status=200, request=request)
    recorded.answer = fold_answer(events)
    observation = observe(recorded)
    found = {name: measure(observation) for name, measure in LIVE_MEASURES.items()}
    return {name: value for name, value in found.items() if value is not None}
