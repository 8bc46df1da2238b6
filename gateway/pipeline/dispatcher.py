"""Sends a routed request to its target, or to a fallback if the target fails.

One target is tried after the other, each with its own attempt: what a fallback reuses is the parsed
body and the history of failed workers. The first target that begins a response is the last one.

strategy  pass-through or translation, as the target's backend can (``pipeline.strategies``)
response  the events, written to the client (``pipeline.responder``)
fallback  the next target that meets the request's requirements (``routing.fallback``)

What must never happen: a fallback after the client has received something, or to a model that the
caller's key may not use.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final

from backends.deadline_timer import DeadlineTimer
from gateway.observability.record import RequestRecord
from gateway.pipeline.admission import set_target_labels
from gateway.pipeline.http import CancellableRequest
from gateway.pipeline.responder import Responder
from gateway.pipeline.state import RequestState
from gateway.pipeline.strategies import TargetAttempt
from gateway.ratelimit.reservation import Reservation
from gateway.routing.fallback import (
    CONTEXT_TOO_SHORT,
    NO_ACCESS,
    FallbackHistory,
    describe_missing,
    is_fallback_error,
)
from gateway.routing.requirements import find_missing_requirements
from gateway.routing.router import Model, Route, Router
from protocols.core.errors import ClientError, GatewayError
from protocols.core.events import Event
from protocols.core.interfaces import ResponseContext
from protocols.core.request import AnyRequest, GenerationRequest

_MAX_ENCODING: Final = 2
"""Large responses of a listener that are written at the same time."""


class Dispatcher:
    """Sends each request to one target after the other until one succeeds."""

    running_requests: set[CancellableRequest]
    """All running requests, with or without an id of their client's."""

    def __init__(
        self,
        router: Router,
        deadline_timer: DeadlineTimer,
    ) -> None:
        self.named_requests: dict[tuple[str, str, str], Responder] = {}
        """By protocol, API key and the client's own id for the request."""
        self.running_requests = set()
        self._router = router
        self._deadline_timer = deadline_timer
        self._encoding_slots = asyncio.Semaphore(_MAX_ENCODING)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, since the first request."""

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self.running_requests)} requests running>"

    async def dispatch(self, request: RequestState) -> None:
        """Send the request to its target, or to its fallbacks. Raises GatewayError."""
        route = request.route
        if request.is_dry_run:
            self._report_fallbacks(request)
        try:
            if request.context.offload_to_thread:  # it would block the event loop
                strategy = await asyncio.to_thread(_make_strategy, request, route)
            else:
                strategy = _make_strategy(request, route)
            if strategy.plan.unsupported_parameters:
                strategy.check_content()
            await self._run_attempt(request, strategy)
        except GatewayError as error:
            if request.writer.started or request.is_rejected or not is_fallback_error(error):
                raise
            fallbacks = self._router.list_fallbacks(route, request.get_attributes)

            async def prepare(fallback: Route) -> FallbackAttempt | str:
                if request.context.offload_to_thread:  # as above
                    strategy = await asyncio.to_thread(
                        self._prepare_fallback, request, fallback, route.model
                    )
                else:
                    strategy = self._prepare_fallback(request, fallback, route.model)
                if isinstance(strategy, str):
                    return strategy
                return partial(self._run_attempt, request, strategy)

            await try_fallbacks(request, FallbackHistory(route, error), fallbacks, prepare)

    def _report_fallbacks(self, request: RequestState) -> None:
        """Tell the stages of a dry run about all fallbacks."""
        for fallback in self._router.list_fallbacks(request.route, request.get_attributes):
            found = self._prepare_fallback(request, fallback, request.route.model)
            skipped = found if isinstance(found, str) else ""
            request.notify(
                lambda stage, route=fallback, why=skipped: stage.on_fallback(request, route, why)  # type: ignore[misc]
            )

    @staticmethod
    def _prepare_fallback(request: RequestState, route: Route, model: Model) -> TargetAttempt | str:
        """The strategy for a fallback of ``model``; or why it is skipped."""
        if not has_fallback_access(request, route, model):
            return NO_ACCESS
        try:
            strategy = _make_strategy(request, route)
            translated, losses = strategy.translate()
        except ClientError as error:
            return type(error).__name__
        context_length = route.model.info.context_length
        if missing := find_missing_requirements(translated, losses, context_length):
            return describe_missing(*missing)
        return strategy

    def _run_attempt(
        self, request: RequestState, strategy: TargetAttempt
    ) -> Coroutine[Any, Any, None]:
        """Make one attempt at a target with this strategy."""
        record, prepared = request.record, strategy.prepared
        request.context.worker_headers = ()  # of a former target
        wanted = prepared.request
        if request.reservation is not None and strategy.route.target.computes_choices:
            _reserve_choices(request.reservation, wanted)
        if prepared.passthrough is not None or not isinstance(wanted, GenerationRequest):
            record.stream = wanted.stream  # only text is streamed, whatever a body says
        record.unsupported_parameters = strategy.unsupported_parameters
        record.operation = wanted.kind
        if wanted.timeout is not None:
            request.context.deadline.shorten(wanted.timeout)
        if request.stages:
            request.notify(lambda stage: stage.on_attempt(request, strategy))
            if any(stage.observes_events for stage in request.stages):
                strategy.observe_events = partial(_report_events, request)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        responder = Responder(
            request, strategy, self._deadline_timer, self._encoding_slots, self._loop
        )
        if client_id := request.routing_info.client_id or wanted.client_id:
            return self._run_named((request.adapter.name, record.key, client_id), responder)
        return responder.run(self.running_requests, stream=record.stream)

    async def _run_named(self, name: tuple[str, str, str], responder: Responder) -> None:
        """Run a request that its client may cancel by its id."""
        self.named_requests[name] = responder
        try:
            await responder.run(self.running_requests, stream=responder.record.stream)
        finally:
            if self.named_requests.get(name) is responder:
                del self.named_requests[name]


FallbackAttempt = Callable[[], Awaitable[None]]
"""Sends a request to a fallback. Raises GatewayError."""


async def try_fallbacks(
    request: RequestState,
    history: FallbackHistory,
    fallbacks: Iterator[Route],
    prepare: Callable[[Route], Awaitable[FallbackAttempt | str]],
) -> None:
    """Send the request to the fallbacks in order, except those to skip.

    ``prepare`` returns how a fallback gets it, or why it is skipped. Raises the error of the last
    target that failed.
    """
    record, stream = request.record, request.routing_info.stream
    attempts = request.context.attempt_history
    first_worker = attempts.worker
    for route in fallbacks:
        attempt = await prepare(route) if history.fits_context(route) else CONTEXT_TOO_SHORT
        if isinstance(attempt, str):
            history.record_skipped(route, attempt)
            continue
        _record_fallback(record, history, route)
        set_target_labels(record, route, stream)
        attempts.worker = ""  # of the former target
        try:
            await attempt()
        except GatewayError as error:
            if (
                request.writer.started
                or request.is_rejected
                or not history.record_failure(route, error)
            ):
                raise
        else:
            return
    _record_fallback(record, history, history.route)
    set_target_labels(record, history.route, stream)
    attempts.worker = first_worker
    raise history.error


def has_fallback_access(request: RequestState, route: Route, model: Model) -> bool:
    """Whether the request's principal may use a fallback of ``model``."""
    principal = request.principal
    if principal is None or route.model.info.name == model.info.name:
        return True
    return not model.fallback_requires_access or principal.may_use(route.model.info.name)


def _make_strategy(request: RequestState, route: Route) -> TargetAttempt:
    """The strategy for this target. Raises ClientError."""
    record, target, model = request.record, route.target, route.model
    response_context = ResponseContext(
        id=record.id,
        created=int(record.started_at),
        model=request.routing_info.model,
        version=target.version,
        backend_model=target.backend_model,
        clock=request.context.clock,
        context_length=model.info.context_length,
        settings=model.settings,
    )
    return TargetAttempt.prepare(
        request.adapter,
        request.client_request,
        route,
        response_context=response_context,
        context=request.context,
    )


def _reserve_choices(reservation: Reservation, request: AnyRequest) -> None:
    """Take the slots of further choices, each of which a local model computes."""
    if isinstance(request, GenerationRequest) and request.sample_count > 1:
        reservation.reserve_choices(request.sample_count)


def _report_events(request: RequestState, events: Sequence[Event]) -> None:
    request.notify(lambda stage: stage.on_events(request, events), may_refuse=False)


def _record_fallback(record: RequestRecord, history: FallbackHistory, route: Route) -> None:
    """Note that ``route`` serves the request, or is the last that fails, after the others."""
    record.fallback_from = history.get_first_target(route)
    record.failed_attempts = history.list_failures(route)
