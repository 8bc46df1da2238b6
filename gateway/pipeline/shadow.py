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
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import Deadline, EventSink, RequestContext, StreamItem, StreamItems
from gateway.emulation.execute import stream_emulated
from gateway.emulation.planner import EmulationPlan, plan_emulation
from gateway.observability.record import RequestOutcome, RequestRecord
from gateway.pipeline.responder import ResponseStrategy
from gateway.pipeline.strategies import apply_model_settings
from gateway.routing.router import Route, ShadowRule
from protocols.core.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    ErrorOrigin,
    GatewayError,
    InternalError,
    StreamBroken,
)
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import ClientAdapter, ClientRequest, Clock
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import GenerationRequest, Request

# What an answer comes to, noted as it passes; and two of them side by side.

ShadowOutcome = RequestOutcome | Literal["dropped"]


class ShadowSide(Struct, omit_defaults=True):
    """One of two answers to a request. Times are in seconds, from when its target was asked.

    ``dropped``: there was no room for it. ``length`` is in characters, as far as it came.
    """

    model: str
    version: str
    outcome: ShadowOutcome = "ok"
    error: str = ""
    """The class of the error."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """Why each choice ended."""
    tokens: int = 0
    length: int = 0
    first_token: float | None = None
    duration: float = 0.0


class ShadowComparison(Struct, omit_defaults=True, tag_field="kind", tag="shadow"):
    """A client's answer, and its shadow's. ``id`` is the client's exchange."""

    id: str
    shadow_id: str
    primary: ShadowSide
    shadow: ShadowSide
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    """The shadow's."""
    equal: bool | None = None
    """Whether both say the same; None where they need not, or did not come to their end."""


ReportComparison = Callable[[ShadowComparison], None]


class ResponseSummary:
    """What one answer comes to. Of what it says only digests are kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """A target is asked. What another said before it was heard by nobody."""
        self._started_at = self._clock()
        self._first_token_time: float | None = None
        self._started_choices: set[int] = set()
        self._finish_reasons: dict[int, FinishReason] = {}
        self._is_done = False
        self._tokens = self._length = 0
        self._usage: Usage | None = None
        self._digests: dict[tuple[int, int], hashlib.blake2b] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Note these events."""
        for event in events:
            match event:
                case TextDelta(text, index, tokens):
                    self._tokens += tokens
                    self._add_content(text, index)
                case RefusalDelta(text, index):
                    self._add_content(text, index)
                case ToolCallStart(index, call, _, text) | ToolCallDelta(index, call, text):
                    self._add_content(text, index, call)
                case ReasoningDelta(index=index):
                    self._mark_first_token()
                    self._started_choices.add(index)
                case Embedding():
                    self._mark_first_token()
                case ChoiceEnd(reason, index):
                    self._finish_reasons[index] = reason
                case Usage():
                    self._usage = event
                case StreamEnd():
                    self._is_done = True
                case _:
                    pass

    @property
    def is_complete(self) -> bool:
        """Whether it came to its end, and each choice to its own."""
        return self._is_done and self._started_choices <= self._finish_reasons.keys()

    def build_side(self, target: tuple[str, str], how: tuple[ShadowOutcome, str]) -> ShadowSide:
        """What it comes to by now.

        ``target`` is a model and its version, ``how`` the outcome and the error's class.
        """
        return ShadowSide(
            *target,
            *how,
            tuple(self._finish_reasons[index] for index in sorted(self._finish_reasons)),
            self._tokens if self._usage is None else self._usage.completion_tokens,
            self._length,
            self._first_token_time,
            self._clock() - self._started_at,
        )

    def has_same_content(self, other: "ResponseSummary") -> bool:
        """Whether both say the same words, and call the same tools with them."""
        return self.get_digests() == other.get_digests()

    def get_digests(self) -> dict[tuple[int, int], bytes]:
        """The digest of each choice's words, and of those of each call in it."""
        return {place: digest.digest() for place, digest in self._digests.items()}

    def _add_content(self, text: str, index: int, call: int = -1) -> None:
        """Note words of a choice, or of a call in it."""
        self._mark_first_token()
        self._started_choices.add(index)
        self._length += len(text)
        digest = self._digests.get((index, call))
        if digest is None:
            digest = self._digests[index, call] = hashlib.blake2b()
        digest.update(text.encode("utf-8", "surrogatepass"))

    def _mark_first_token(self) -> None:
        if self._first_token_time is None:
            self._first_token_time = self._clock() - self._started_at


class ObservedStrategy:
    """An answer that is noted as it passes."""

    def __init__(self, answering: ResponseStrategy, noted: ResponseSummary) -> None:
        self.unsupported_parameters = answering.unsupported_parameters
        self.get_encoder = answering.get_encoder
        self.get_stream_headers = answering.get_stream_headers
        self.build_response = answering.build_response
        self._strategy = answering
        self._summary = noted

    @property
    def request(self) -> Request:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        return self._strategy.request

    def process_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        events = self._strategy.process_events(events)
        self._summary.add_events(events)
        return events

    async def collect(self) -> StreamItem:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        self._summary.start()
        body, said = await self._strategy.collect()
        self._summary.add_events(said)
        return body, said

    def stream(self, take: EventSink | None = None) -> StreamItems:
        """See ``gateway.pipeline.responder.ResponseStrategy``."""
        self._summary.start()
        return self._strategy.stream(take)


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
                "primary", self.primary_summary.build_side((record.model, record.version), how)
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
                    unsupported_parameters=self._emulation_plan.unsupported_parameters,
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
