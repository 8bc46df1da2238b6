"""Measures the responses of models whose rollout has guardrails on them.

A response is measured when its last event comes, so that the measures are in the request's record
before it ends. What is held until then counts in the memory budget; a response that does not fit,
or is too large (``gateway.evidence.live_measures``), is not measured.
"""

from collections.abc import Sequence

from gateway.evidence.live_measures import MeasuredResponse, count_event_bytes
from gateway.memory import MemoryBudget
from gateway.pipeline.state import RequestState, RouteStage, Stage
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import Model
from protocols.core.events import Event


class BudgetedMeasure:
    """Measures one response; what is held of it until then counts in the memory budget."""

    def __init__(self, memory: MemoryBudget, body: bytes) -> None:
        """``body`` is that of the request."""
        self._memory = memory
        self._response: MeasuredResponse | None = MeasuredResponse(body)
        self._held_bytes = 0

    def add_events(self, events: Sequence[Event]) -> None:
        """Add events in their order, unless there is no room for them."""
        size = count_event_bytes(events)
        if self._response is None or not self._memory.has_room(size):
            self._response = None
            return
        self._memory.record_held("recordings", size)
        self._held_bytes += size
        self._response.add_events(events)

    @property
    def measures(self) -> dict[str, bool]:
        """What is measured of a complete response."""
        return {} if self._response is None else self._response.measures

    def release(self) -> None:
        """Give back what is held."""
        self._memory.record_held("recordings", -self._held_bytes)
        self._held_bytes = 0


class MeasureStage(RouteStage):
    """Adds a stage to the requests of models whose responses are measured."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory

    def observes_model(self, model: Model) -> bool:
        """See ``gateway.pipeline.state.RouteStage``."""
        return model.is_measured

    def on_routed(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if request.route.model.is_measured and request.is_inference and not request.is_dry_run:
            request.add_stage(ResponseMeasure(self._memory))


class ResponseMeasure(Stage):
    """Measures the response to a client."""

    needs_body = False
    observes_events = True

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._response: BudgetedMeasure | None = None

    def on_attempt(self, request: RequestState, _: TargetAttempt) -> None:
        """See ``gateway.pipeline.state.Stage``. The events of a failed target are forgotten."""
        self.on_end(request)
        self._response = BudgetedMeasure(self._memory, request.client_request.body)
        request.record.measures = {}

    def on_events(self, request: RequestState, events: Sequence[Event]) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if self._response is not None:
            self._response.add_events(events)
            request.record.measures = self._response.measures

    def on_end(self, _: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if self._response is not None:
            self._response.release()
