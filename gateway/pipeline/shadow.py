"""Shadow traffic: copies of requests for another target, whose responses are only compared.

A shadow is a request of its own. It is translated through the internal request even where the
client's request is passed through. It has none of the client's ``x-interlingua-`` headers and no
id by which the client could cancel it. It runs in its own task within the model's shadow timeout,
is never retried, and is preempted by requests of clients (``RequestContext.preempt``). At most
``max_concurrency`` run per model, and a fixed number of all models. The body of a shadow, and what
is held to measure its response, count in the memory budget. A request gets no shadow that would be
one too many, or for which there is no room.

If the client's request is cancelled, so is its shadow: there is nothing left to compare.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from msgspec.structs import replace

from backends.interfaces import BackendRequest, Deadline, RequestContext
from gateway.emulation.execute import send_emulated
from gateway.emulation.planner import EmulationPlan, plan_emulation
from gateway.memory import MemoryBudget, ResponseAccount
from gateway.pipeline.measures import BudgetedMeasure
from gateway.pipeline.model_settings import apply_model_settings
from gateway.pipeline.shadow_comparison import (
    ResponseSummary,
    ShadowComparison,
    ShadowOutcome,
    ShadowSide,
    classify_error,
)
from gateway.pipeline.state import RequestState, RouteStage, Stage
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import Model, Route, Router, ShadowRule
from protocols.core.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    StreamBroken,
)
from protocols.core.events import Event
from protocols.core.interfaces import Clock, StoresResponses
from protocols.core.request import AnyRequest, GenerationRequest

ReportComparison = Callable[[ShadowComparison], None]


log = logging.getLogger("interlingua")

_MAX_RUNNING: Final = 512
"""Shadows of all models of a process."""
_GATEWAY_HEADER_PREFIX: Final = "x-interlingua-"
"""The request headers for the gateway itself begin with this."""


class CopyReader(Protocol):
    """Reads the response to a copy that a rollout takes as evidence."""

    def add_events(self, events: Sequence[Event]) -> None:
        """Some events of the response."""

    def finish(self, copy: ShadowSide, request_id: str, body: bytes) -> None:
        """Both responses have ended; with the id of the copy, and the body of the request."""


ReadCopy = Callable[[Route], CopyReader | None]
"""Reads the response to a copy on this route; None if it is not read."""


class ShadowPair(Stage):
    """A client's response and its shadow's. Whichever ends last reports the comparison."""

    observes_events = True

    def __init__(
        self,
        primary: RequestState,
        route: Route,
        rule: ShadowRule,
        clock: Clock,
        report: ReportComparison,
        *,
        memory: MemoryBudget,
        reader: CopyReader | None,
    ) -> None:
        """``route`` is the shadow's, which starts at once with the timeout of its ``rule``."""
        self.primary_summary = ResponseSummary(clock)
        """Summarizes the client's response."""
        self._shadow_id = make_shadow_id(primary)
        self._primary = primary
        self._route = route
        self._split = rule.split
        self._response_measure = (
            BudgetedMeasure(memory, primary.client_request.body) if rule.split else None
        )
        self._reader = reader
        self._account = ResponseAccount(memory)
        self._clock = clock
        self._report = report
        self._shadow_summary = ResponseSummary(clock)
        self._emulation_plan = EmulationPlan()
        self._is_deterministic = False
        """Both requests are greedy, so that the responses should be equal."""
        self._shadow_end: tuple[ShadowOutcome, str] = ("cancelled", "")
        """The shadow's outcome and error."""
        self._sides: dict[str, ShadowSide] = {}
        """The sides that have ended."""
        self.task = asyncio.get_running_loop().create_task(self._run_shadow(rule.config.timeout))
        """Runs the shadow."""
        self.task.add_done_callback(self._on_shadow_done)

    def on_attempt(self, _: RequestState, __: TargetAttempt) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        self.primary_summary.start()

    def on_events(self, _: RequestState, events: Sequence[Event]) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        self.primary_summary.add_events(events)

    def on_end(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        record = request.record
        outcome = record.outcome, record.error
        side = self.primary_summary.build_side((record.model, record.version), outcome)
        self._finish_side("primary", side)
        if "cancelled" in outcome or ClientDisconnected.__name__ in outcome:
            self.task.cancel()

    def preempt(self) -> None:
        """Cancel the shadow, since a client's request waits for its slot."""
        self._shadow_end = "dropped", ""
        self.task.cancel()

    async def _run_shadow(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._send_shadow(seconds)
            self._shadow_end = "ok", ""
        except GatewayError as error:
            self._shadow_end = classify_error(error)
        except TimeoutError:
            self._shadow_end = classify_error(DeadlineExceeded(""))
        except Exception:
            log.exception("shadow %s failed", self._shadow_id)
            self._shadow_end = classify_error(InternalError(""))
        finally:
            self._account.release()

    async def _send_shadow(self, seconds: float) -> None:
        """Read the response and discard it. Raises GatewayError."""
        primary, backend, summary = self._primary, self._route.target.backend, self._shadow_summary
        prepared = backend.prepare(BackendRequest(self._build_shadow_request))
        plan = plan_emulation(prepared.request, prepared.unsupported_parameters)
        self._emulation_plan = plan
        context = RequestContext(
            id=self._shadow_id,
            deadline=Deadline(self._clock, seconds),
            clock=self._clock,
            timeouts=primary.context.timeouts,
            principal=primary.context.principal,
            received_at=self._clock(),
            reserve_memory=self._account.reserve,
            preempt=self.preempt,
        )
        summary.start()
        items, process_events = send_emulated(backend, prepared, context, plan)
        async with aclosing(items):
            async for _, batch in items:
                events = process_events(batch)
                summary.add_events(events)
                if self._response_measure is not None:
                    self._response_measure.add_events(events)
                if self._reader is not None:
                    self._reader.add_events(events)
        if not summary.is_complete:
            raise StreamBroken("the response ended early")

    def _build_shadow_request(self) -> tuple[AnyRequest, Mapping[str, str]]:
        """See ``backends.interfaces.BackendRequest.decode``."""
        primary, route, adapter = self._primary, self._route, self._primary.adapter
        headers = {
            name.lower(): value
            for name, value in primary.client_request.headers.items()
            if not name.lower().startswith(_GATEWAY_HEADER_PREFIX)
        }
        client_request = replace(primary.client_request, headers=headers)
        if isinstance(adapter, StoresResponses) and client_request.endpoint.is_stateful:
            adapter.copy_references(primary.client_request, client_request)
        names = adapter.field_names(client_request)
        decoded = adapter.decode_request(client_request, route.model.info)
        request = apply_model_settings(decoded, route, names, adapter.name)
        primary_request = apply_model_settings(decoded, primary.route, names, adapter.name)
        self._is_deterministic = _is_deterministic(request) and _is_deterministic(primary_request)
        return replace(request, client_id=None, timeout=None), names

    def _on_shadow_done(self, _: "asyncio.Task[None]") -> None:
        target = self._route.model.info.name, self._route.target.version
        side = self._shadow_summary.build_side(target, self._shadow_end)
        if self._response_measure is not None:
            side.measures = self._response_measure.measures
            self._response_measure.release()
        self._finish_side("shadow", side)

    def _finish_side(self, name: str, side: ShadowSide) -> None:
        sides = self._sides
        sides[name] = side
        if len(sides) > 1:
            are_complete = all(each.outcome == "ok" for each in sides.values())
            equal = (
                self.primary_summary.has_same_content(self._shadow_summary)
                if are_complete and self._is_deterministic
                else None
            )
            self._report(
                ShadowComparison(
                    self._primary.record.id,
                    self._shadow_id,
                    unsupported_parameters=self._emulation_plan.unsupported_parameters,
                    split=self._split,
                    equal=equal,
                    **sides,
                )
            )
            if self._reader is not None:
                body = self._primary.client_request.body
                self._reader.finish(sides["shadow"], self._shadow_id, body)


class ShadowManager:
    """Starts shadows and keeps track of the running ones."""

    def __init__(self, clock: Clock, *reporters: ReportComparison) -> None:
        self._clock = clock
        self._reporters = list(reporters)
        self.memory = MemoryBudget()
        """That of the process, once the gateway has set it."""
        self._running_by_model = Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    def add_reporter(self, reporter: ReportComparison) -> None:
        """Report comparisons to this function, too."""
        self._reporters.append(reporter)

    def start(
        self, primary: RequestState, route: Route, rule: ShadowRule, read_copy: ReadCopy
    ) -> ShadowPair | None:
        """Start a shadow on its ``route``; None if there is no room for another one."""
        name, memory, size = rule.model, self.memory, len(primary.client_request.body)
        if (
            self._running_by_model[name] >= rule.config.max_concurrency
            or len(self._tasks) >= _MAX_RUNNING
            or not memory.has_room(size)
        ):
            self._report(_build_dropped_comparison(primary, route))
            return None
        memory.record_held("bodies", size)
        reader = read_copy(route) if rule.split else None
        pair = ShadowPair(
            primary, route, rule, self._clock, self._report, memory=memory, reader=reader
        )
        self._running_by_model[name] += 1
        self._tasks.add(pair.task)

        def on_done(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._running_by_model[name] -= 1
            memory.record_held("bodies", -size)

        pair.task.add_done_callback(on_done)
        return pair

    async def wait_idle(self) -> None:
        """Wait for the shadows that are running now."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def aclose(self) -> None:
        """Cancel all shadows."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets the pending reports run

    def _report(self, comparison: ShadowComparison) -> None:
        """Report a comparison later, so that an error in a reporter fails no request."""
        loop = asyncio.get_running_loop()
        for reporter in self._reporters:
            loop.call_soon(reporter, comparison)


class ShadowStage(RouteStage):
    """Starts the shadows of a listener's requests.

    A shadow holds the request until it ends, for at most the model's shadow timeout; at most
    ``max_concurrency`` of a model do.
    """

    def __init__(
        self, router: Router, manager: ShadowManager, read_copy: ReadCopy = lambda _: None
    ) -> None:
        self._router = router
        self._manager = manager
        self._read_copy = read_copy

    def observes_model(self, model: Model) -> bool:
        """See ``gateway.pipeline.state.RouteStage``."""
        return model.shadow is not None

    def on_admitted(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        rule = request.route.model.shadow
        if rule is None or request.is_dry_run or not request.is_inference:
            return
        route = self._router.route_shadow(request.route, rule, request.get_attributes)
        if route is None:
            return
        pair = self._manager.start(request, route, rule, self._read_copy)
        if pair is not None:
            request.add_stage(pair)


def make_shadow_id(primary: RequestState) -> str:
    """The id of a request's shadow."""
    return f"{primary.record.id}-shadow"


def _build_dropped_comparison(primary: RequestState, route: Route) -> ShadowComparison:
    record = primary.record
    primary_side = ShadowSide(record.model, record.version)
    shadow = ShadowSide(route.model.info.name, route.target.version, "dropped")
    return ShadowComparison(record.id, make_shadow_id(primary), primary_side, shadow)


def _is_deterministic(request: AnyRequest) -> bool:
    """Whether the request is greedy and its response is only the generated text."""
    if not isinstance(request, GenerationRequest) or request.echo or request.suffix:
        return False
    return request.sampling.temperature == 0 or request.sampling.do_sample is False
