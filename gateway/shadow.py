"""Copies of requests for a version that is being tried: answered, compared, and thrown away.

A shadow is a request of its own, made from its client's by way of the one internal request, also
where that one is passed on as it is. It has none of the client's wishes to the gateway, and no name
by which the client could stop it. It runs in a task of its own, for as long as its model allows, is
not tried again, and gives way to all that clients wait for (``Context.give_way``). There are so
many at a time of one model; what comes beyond that is left out.

It ends with its client's exchange where that is cancelled: nothing is left to compare, and a client
who leaves would leave the version that is tried, too.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext
from gateway.emulation.execute import stream_emulated
from gateway.emulation.planner import EmulationPlan, plan_emulation
from gateway.fitting import apply_model_settings
from gateway.noting import (
    ReportComparison,
    ResponseSummary,
    ShadowComparison,
    ShadowOutcome,
    ShadowSide,
)
from gateway.observability.record import RequestOutcome, RequestRecord
from gateway.routing.router import Route, ShadowRule
from protocols.core.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    ErrorOrigin,
    GatewayError,
    InternalError,
    StreamBroken,
)
from protocols.core.interfaces import ClientAdapter, ClientRequest, Clock
from protocols.core.request import GenerationRequest, Request

log = logging.getLogger("interlingua")

_GATEWAY_HEADER_PREFIX: Final = "x-interlingua-"
"""What a client wishes of the gateway stands in headers that begin so."""
_OUTCOME_BY_BLAME: Final[Mapping[ErrorOrigin, RequestOutcome]] = {
    "client": "client_error",
    "worker": "worker_error",
    "gateway": "gateway_error",
}


class PrimaryRequest(Struct, frozen=True):
    """What a shadow is made from: a client's request, where it goes, and what is told of it."""

    adapter: ClientAdapter
    client_request: ClientRequest
    route: Route
    context: RequestContext
    record: RequestRecord


class ShadowPair:
    """A client's answer, and its shadow's. Whichever ends last tells of both."""

    def __init__(
        self,
        original: PrimaryRequest,
        route: Route,
        within: float,
        clock: Clock,
        tell: ReportComparison,
    ) -> None:
        """``route`` is the shadow's, which is asked at once and has ``within`` so many seconds."""
        self.primary_summary = ResponseSummary(clock)
        """To be told of the client's answer."""
        self._shadow_id = make_shadow_id(original)
        self._primary = original
        self._route = route
        self._clock = clock
        self._report = tell
        self._shadow_summary = ResponseSummary(clock)
        self._emulation_plan = EmulationPlan()
        self._is_deterministic = False
        """Both answers are to be the likeliest, and so the same."""
        self._shadow_end: tuple[ShadowOutcome, str] = ("cancelled", "")
        """The shadow's end."""
        self._sides: dict[str, ShadowSide] = {}
        """Those that have ended."""
        self.task = asyncio.get_running_loop().create_task(self._run_shadow(within))
        """The shadow."""
        self.task.add_done_callback(self._on_shadow_done)

    @contextmanager
    def observe_primary(self) -> Iterator[None]:
        """For as long as the client's exchange goes on."""
        record = self._primary.record
        how: tuple[ShadowOutcome, str] = _classify_error(InternalError(""))
        try:
            yield
            how = record.outcome, record.error
        except GatewayError as error:
            how = _classify_error(error)
            raise
        except asyncio.CancelledError:
            how = "cancelled", ""
            raise
        finally:
            self._finish_side(
                "main", self.primary_summary.build_side((record.model, record.version), how)
            )
            if "cancelled" in how or ClientDisconnected.__name__ in how:
                self.task.cancel()

    def preempt(self) -> None:
        """End the shadow: a client waits for its place."""
        self._shadow_end = "dropped", ""
        self.task.cancel()

    async def _run_shadow(self, within: float) -> None:
        try:
            async with asyncio.timeout(within):
                await self._send_shadow(within)
            self._shadow_end = "ok", ""
        except GatewayError as error:
            self._shadow_end = _classify_error(error)
        except TimeoutError:
            self._shadow_end = _classify_error(DeadlineExceeded(""))
        except Exception:
            log.exception("shadow %s failed", self._shadow_id)
            self._shadow_end = _classify_error(InternalError(""))

    async def _send_shadow(self, within: float) -> None:
        """Have the whole answer, and throw it away. Raises GatewayError."""
        original, backend = self._primary, self._route.target.backend
        request = self._build_shadow_request()
        names = original.adapter.field_names(original.client_request)
        self._emulation_plan = plan_emulation(
            request, backend.unsupported_parameters(request, names)
        )
        context = RequestContext(
            self._shadow_id,
            Deadline(self._clock, within),
            self._clock,
            original.context.timeouts,
            original.context.principal,
            started_at=self._clock(),
            preempt=self.preempt,
        )
        self._shadow_summary.start()
        async with aclosing(
            stream_emulated(backend, request, context, self._emulation_plan)
        ) as batches:
            async for _, batch in batches:
                self._shadow_summary.add_events(batch)
        if not self._shadow_summary.is_complete:
            raise StreamBroken("the answer stopped before its end")

    def _build_shadow_request(self) -> Request:
        """The client's request as the shadow's target takes it. Raises ClientError."""
        original, route = self._primary, self._route
        dialect, sent = original.adapter, original.client_request.headers
        headers = {name.lower(): text for name, text in sent.items()}
        plain = {
            name: text
            for name, text in headers.items()
            if not name.startswith(_GATEWAY_HEADER_PREFIX)
        }
        call = replace(original.client_request, headers=plain)
        names = dialect.field_names(call)
        decoded = dialect.decode_request(call, route.model.info)
        request = apply_model_settings(decoded, route, names, dialect.name)
        asked = apply_model_settings(decoded, original.route, names, dialect.name)
        self._is_deterministic = _is_deterministic(request) and _is_deterministic(asked)
        return replace(request, client_id=None, timeout=None)

    def _on_shadow_done(self, _: "asyncio.Task[None]") -> None:
        target = self._route.model.info.name, self._route.target.version
        self._finish_side("shadow", self._shadow_summary.build_side(target, self._shadow_end))

    def _finish_side(self, which: str, arm: ShadowSide) -> None:
        arms = self._sides
        arms[which] = arm
        if len(arms) > 1:
            well = all(one.outcome == "ok" for one in arms.values())
            equal = (
                self.primary_summary.has_same_content(self._shadow_summary)
                if well and self._is_deterministic
                else None
            )
            self._report(
                ShadowComparison(
                    self._primary.record.id,
                    self._shadow_id,
                    losses=self._emulation_plan.unsupported_parameters,
                    equal=equal,
                    **arms,
                )
            )


class ShadowManager:
    """Every shadow that there is now."""

    def __init__(self, clock: Clock, *tell: ReportComparison) -> None:
        self._clock = clock
        self._reporters = list(tell)
        self._running_by_model = Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    def add_reporter(self, tell: ReportComparison) -> None:
        """Tell this one of them, too."""
        self._reporters.append(tell)

    def start(
        self, original: PrimaryRequest, route: Route, shadow: ShadowRule
    ) -> ShadowPair | None:
        """Begin one, on its own ``route``; None where there are as many as there may be."""
        name = shadow.model
        if self._running_by_model[name] >= shadow.max_concurrent:
            self._report(_build_dropped_comparison(original, route))
            return None
        pair = ShadowPair(original, route, shadow.timeout, self._clock, self._report)
        self._running_by_model[name] += 1
        self._tasks.add(pair.task)

        def over(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._running_by_model[name] -= 1

        pair.task.add_done_callback(over)
        return pair

    async def wait_idle(self) -> None:
        """Wait for those that there are now."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def aclose(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for what is still to be told

    def _report(self, shadowed: ShadowComparison) -> None:
        """Tell of it, but not in the midst of an exchange, which must not fail by that."""
        loop = asyncio.get_running_loop()
        for tell in self._reporters:
            loop.call_soon(tell, shadowed)


def make_shadow_id(original: PrimaryRequest) -> str:
    """The name of its shadow."""
    return f"{original.record.id}-shadow"


def _build_dropped_comparison(original: PrimaryRequest, route: Route) -> ShadowComparison:
    record = original.record
    main = ShadowSide(record.model, record.version)
    shadow = ShadowSide(route.model.info.name, route.target.version, "dropped")
    return ShadowComparison(record.id, make_shadow_id(original), main, shadow)


def _classify_error(error: GatewayError) -> tuple[ShadowOutcome, str]:
    return _OUTCOME_BY_BLAME[error.origin], type(error).__name__


def _is_deterministic(request: Request) -> bool:
    """Whether the answer is to be the likeliest text, and nothing around it."""
    if not isinstance(request, GenerationRequest) or request.echo or request.suffix:
        return False
    return request.sampling.temperature == 0 or request.sampling.do_sample is False
