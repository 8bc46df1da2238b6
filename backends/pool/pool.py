"""The pool backend: choose a worker, run the attempts of a request, retry on another worker."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import asdict, replace

from backends.aio import DeadlineTimer
from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import (
    ConnectionCounts,
    HttpClient,
    SupportsConnectionCounts,
    WorkerConfig,
)
from backends.interfaces import (
    Deadline,
    EventSink,
    RequestContext,
    RequestObserver,
    StreamItem,
    StreamItems,
    Timeouts,
    WorkerCandidate,
    WorkerSelection,
)
from backends.pool.attempt import (
    Attempt,
    AttemptRequest,
    AttemptServices,
    TranslatedResponse,
    add_trace_headers,
    filter_headers,
)
from backends.pool.discovery import FileSource, WorkerDiscovery, WorkerFileReader, WorkerSource
from backends.pool.dns_discovery import DnsSource
from backends.pool.health_check import HealthChecker
from backends.pool.load_balancing import (
    NO_ROUTING_KEY,
    ROUTING_KEY_FACTORIES,
    PolicyScores,
    make_policy,
)
from backends.pool.metrics import PoolMetrics
from backends.pool.retry import RetryBudget, RetryState
from backends.pool.settings import (
    DnsSettings,
    PoolContext,
    PoolSettings,
    RetrySettings,
    WorkerListParser,
    WorkerSourceSettings,
)
from backends.pool.side_requests import CancelSender, add_bearer
from backends.pool.worker_metadata import ModelMetadataCache
from backends.pool.workers import (
    ANY_WORKER,
    BACKGROUND_PRIORITY,
    DEFAULT_PRIORITY,
    PoolLimits,
    SelectionCriteria,
    WorkerPool,
    WorkerReport,
    WorkerState,
)
from protocols.core.errors import GatewayError
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    ModelMetadataReader,
    PassthroughRequest,
    ResponseContext,
    SupportsCancel,
    SupportsPassthrough,
    UpstreamAdapter,
    UpstreamRequest,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import Request

# Reports the selection of a worker to an observer (explain, dry run).

Availability = Literal["yes", "no", "full", "tried"]


class SelectionReporter:
    """Reports selections and attempts of one request to its observer."""

    def __init__(
        self,
        watch: RequestObserver,
        settings: PoolSettings,
        roster: WorkerPool,
        work: AttemptRequest,
    ) -> None:
        self._observer = watch
        self._settings = settings
        self._workers = roster
        self._request = work

    def observe_choice(self, wish: SelectionCriteria) -> None:
        """Report the selection that is about to be made, without making it.

        Raises what the observer raises.
        """
        free, scores, likely = self._workers.preview_pick(wish)
        can: dict[int, Availability] = dict.fromkeys(wish.tried_keys, "tried")
        can |= {one.key: "full" for one in self._workers.select_available(wish)}
        can |= {one.key: "yes" for one in free}
        candidates = [
            _build_candidate(one, can.get(one.key, "no"), scores) for one in self._workers.workers
        ]
        self._observer.on_selection(
            self._build_choice(candidates, scores, likely), self._build_upstream_request(likely)
        )

    def observe_attempt(self, member: WorkerState) -> None:
        """Report that the request is sent to this worker."""
        self._observer.on_send(member.name, self._build_upstream_request(member))

    def observe_failure(self, member: WorkerState, error: GatewayError) -> None:
        """Report that the attempt failed before its response began."""
        self._observer.on_failure(member.name, error)

    def _build_upstream_request(self, member: WorkerState | None) -> UpstreamRequest:
        """The request as sent to this worker; None: without a key."""
        wire, own = self._request.upstream_request, self._request.request_headers
        told = own if member is None else add_bearer(own, member.config)
        return UpstreamRequest(wire.path, wire.body, (*wire.headers, *told), wire.method)

    def _build_choice(
        self, candidates: list[WorkerCandidate], scores: PolicyScores, likely: WorkerState | None
    ) -> WorkerSelection:
        told = self._settings
        timeouts, retries = told.timeouts or Timeouts(), told.retries or RetrySettings()
        return WorkerSelection(
            policy=told.policy,
            score_rule=scores.winner,
            candidates=candidates,
            expected_url="" if likely is None else likely.name,
            queue_length=self._workers.queue_length,
            queue_limit=told.queue.max,
            queue_timeout=told.queue.wait,
            timeouts=asdict(timeouts) | {"total": self._request.deadline.remaining()},
            max_retries=retries.max,
            retry_budget=retries.budget,
            retryable_failures=sorted(retries.on),
        )


def _build_candidate(
    member: WorkerState, can: Availability, scores: PolicyScores
) -> WorkerCandidate:
    report = member.report()
    return WorkerCandidate(
        url=report.url,
        state=report.state,
        weight=report.weight,
        in_flight=report.in_flight,
        limit=report.limit,
        latency=report.latency,
        availability=can,
        score=scores.by_worker.get(member.key),
    )


class PoolBackend:
    """A backend that sends each request to one of several workers of one protocol.

    ``draw`` returns a random number in [0, 1). ``upstream`` is the HTTP client; the pool starts and
    closes it.
    """

    explains_selection = True
    """See ``backends.interfaces.ExplainsSelection``."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        dialect: UpstreamAdapter,
        clock: Clock,
        draw: Callable[[], float],
        context: PoolContext = PoolContext(),  # noqa: B008 - frozen
        upstream: HttpClient | None = None,
        has_health_checks: bool = True,
    ) -> None:
        workers = settings.make_workers(settings.workers)
        timeouts = settings.timeouts or Timeouts()
        self._adapter = dialect
        self._settings = settings
        self._retry_settings = settings.retries or RetrySettings()
        self._total_timeout = timeouts.total
        self._clock = clock
        self._http_client = upstream or AsyncioHttpClient(
            ca=settings.tls.ca if settings.tls else None
        )
        self._metrics = PoolMetrics()
        self._deadline_timer = DeadlineTimer(clock, asyncio.get_running_loop)
        self._services = AttemptServices(
            self._http_client, timeouts, clock, self._deadline_timer, self._metrics
        )
        limits = PoolLimits(
            settings.total_concurrency, settings.queue, settings.health, settings.breaker
        )
        self._make_routing_key = ROUTING_KEY_FACTORIES.get(settings.policy)
        """Builds the routing key of a request; None if the policy uses none."""
        self._workers = WorkerPool(
            workers, make_policy(settings.policy, draw), limits, clock, self._metrics
        )
        self._retry_budget = RetryBudget(self._retry_settings.budget)
        self._metadata_cache: ModelMetadataCache | None = None
        if isinstance(dialect, ModelMetadataReader):
            self._metadata_cache = ModelMetadataCache(
                dialect, context.models, self._http_client, clock
            )
        self._health_checker: HealthChecker | None = None
        if has_health_checks:
            self._health_checker = HealthChecker(
                settings.health,
                dialect.health_request,
                self._http_client,
                self._metadata_cache,
                draw=draw,
                on_unresponsive=self._cancel_waiting,
            )
        self._cancel_adapter = dialect if isinstance(dialect, SupportsCancel) else None
        self._passthrough_adapter = dialect if isinstance(dialect, SupportsPassthrough) else None
        self._cancel_sender = CancelSender(self._http_client)
        self._request_id_prefix = f"{int(draw() * 2**32):08x}"
        self._request_numbers = itertools.count()
        self._started = False
        sources = list(_make_sources(settings, context.parse_workers))
        self._discovery = WorkerDiscovery(context.name, workers, sources, self.replace_workers)

    @property
    def ready(self) -> bool:
        """Whether any worker is available."""
        return self._workers.ready

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """The parameters that the workers' protocol can't carry."""
        return self._adapter.unsupported_parameters(request, names)

    def replace_workers(self, workers: Sequence[WorkerConfig]) -> None:
        """Replace the workers; see ``WorkerPool.replace_workers``."""
        self._workers.replace_workers(workers)
        if self._health_checker is not None and self._started:
            self._health_checker.set_workers(self._workers.workers)

    @property
    def discovery_failures(self) -> int:
        """How many discovery lookups failed or found no worker."""
        return self._discovery.failures

    def report_workers(self) -> Sequence[WorkerReport]:
        """The state of each worker."""
        return self._workers.report_workers()

    @property
    def metrics(self) -> PoolMetrics:
        """The pool's counters, up to date."""
        self._workers.count_slot_times()
        return self._metrics

    @property
    def queued_request_ids(self) -> Sequence[str]:
        """See ``WorkerPool.queued_request_ids``."""
        return self._workers.queued_request_ids

    @property
    def in_panic(self) -> bool:
        """See ``WorkerPool.in_panic``."""
        return self._workers.in_panic

    @property
    def connections(self) -> ConnectionCounts:
        """The connections to the workers."""
        upstream = self._http_client
        return (
            upstream.connections
            if isinstance(upstream, SupportsConnectionCounts)
            else ConnectionCounts()
        )

    def add_worker(self, worker: WorkerConfig) -> bool:
        """See ``WorkerDiscovery.add``."""
        return self._discovery.add(worker)

    def remove_worker(self, url: str) -> bool:
        """See ``WorkerDiscovery.remove``."""
        return self._discovery.remove(url)

    @property
    def manual_workers(self) -> Sequence[str]:
        """See ``WorkerDiscovery.manual_workers``."""
        return self._discovery.manual_workers

    async def warm_up(self) -> None:
        """Wait for the first health check of each worker, if health checks are on."""
        if self._health_checker is not None:
            await self._health_checker.wait_first_checks()

    async def start(self) -> None:
        """Start the HTTP client, the health checks and the discovery of workers."""
        await self._http_client.start()
        self._started = True
        if self._health_checker is not None:
            self._health_checker.set_workers(self._workers.workers)
        await self._discovery.start()

    async def aclose(self) -> None:
        """Stop the background tasks and close all connections."""
        self._started = False
        await self._discovery.aclose()
        self._workers.close_queue()
        if self._health_checker is not None:
            await self._health_checker.aclose()
        if self._metadata_cache is not None:
            await self._metadata_cache.aclose()
        await self._cancel_sender.aclose()
        await self._http_client.aclose()
        self._deadline_timer.close()

    def stream(
        self, request: Request, context: RequestContext
    ) -> AsyncGenerator[Sequence[Event], None]:
        """See ``stream_to``."""
        return self.stream_to(request, context, None)

    async def stream_to(
        self, request: Request, context: RequestContext, take: EventSink | None
    ) -> AsyncGenerator[Sequence[Event], None]:
        """The events of a worker's response, one batch for each read that held any.

        Events before the first content are buffered until it arrives: until then the request may
        be retried on another worker. Raises Overloaded, DeadlineExceeded, WorkerError, and the
        errors that the protocol's adapter reads from the worker.
        """
        work = await self._translate_request(request, context)
        attempt, pieces = await self._begin_response(work, context)
        try:
            for _, events in pieces:
                yield events
            while not attempt.finished:
                _, events = await attempt.read_next(take)
                yield events
            if not attempt.complete:
                await attempt.drain()
        finally:
            self._abandon_attempt(attempt, work, context)

    async def collect(self, request: Request, context: RequestContext) -> Sequence[StreamItem]:
        """All items of the response; raises as ``stream_to`` does."""
        return await self._collect_attempts(
            await self._translate_request(request, context), context
        )

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``backends.interfaces.PassthroughBackend``."""
        return (
            None
            if self._passthrough_adapter is None
            else self._passthrough_adapter.prepare_passthrough(client, call, about)
        )

    def stream_passthrough(
        self, relay: PassthroughRequest, context: RequestContext, take: EventSink | None = None
    ) -> StreamItems:
        """See ``backends.interfaces.PassthroughBackend``."""
        return self._stream_attempts(self._build_passthrough_request(relay, context), context, take)

    def collect_passthrough(
        self, relay: PassthroughRequest, context: RequestContext
    ) -> Coroutine[Any, Any, Sequence[StreamItem]]:
        """See ``backends.interfaces.PassthroughBackend``."""
        return self._collect_attempts(self._build_passthrough_request(relay, context), context)

    async def _translate_request(self, request: Request, context: RequestContext) -> AttemptRequest:
        """Translate the request into the workers' protocol."""
        dialect = self._adapter
        deadline = self._compute_deadline(context)
        learner = self._metadata_cache
        if (
            learner is not None
            and not learner.has_metadata(request.model)
            and not _is_dry_run(context)
        ):
            members = self._workers.select_available(ANY_WORKER)
            await learner.load_metadata(request.model, members, deadline)
        if self._cancel_adapter is not None:
            name = f"{context.id}-{self._request_id_prefix}{next(self._request_numbers):x}"
            request = replace(request, client_id=name)
        if context.offload_to_thread:
            wire = await asyncio.to_thread(dialect.encode_request, request)
        else:
            wire = dialect.encode_request(request)
        wire, own = filter_headers(wire, context)
        return AttemptRequest(
            request,
            wire,
            own,
            lambda: TranslatedResponse(dialect.create_decoder(request)),
            dialect.read_error,
            deadline,
            context.preempt is not None,
        )

    def _build_passthrough_request(
        self, relay: PassthroughRequest, context: RequestContext
    ) -> AttemptRequest:
        wire, own = filter_headers(relay.upstream_request, context)
        read_error = relay.read_error or self._adapter.read_error
        return AttemptRequest(
            relay.request,
            wire,
            own,
            relay.create_reader,
            read_error,
            self._compute_deadline(context),
        )

    def _compute_deadline(self, context: RequestContext) -> Deadline:
        """The request's deadline, or the pool's if that is sooner. Raises DeadlineExceeded."""
        now, most = context.clock(), self._total_timeout
        if now < context.deadline.expires_at <= now + most:
            return context.deadline
        context.deadline.remaining()  # raises if the deadline has passed
        return Deadline(context.clock, most, now)

    async def _stream_attempts(
        self, work: AttemptRequest, context: RequestContext, take: EventSink | None
    ) -> StreamItems:
        """The response of the first worker whose response begins."""
        attempt, pieces = await self._begin_response(work, context)
        try:
            for piece in pieces:
                yield piece
            while not attempt.finished:
                yield await attempt.read_next(take)
            if not attempt.complete:
                await attempt.drain()
        finally:
            self._abandon_attempt(attempt, work, context)

    async def _collect_attempts(
        self, work: AttemptRequest, context: RequestContext
    ) -> Sequence[StreamItem]:
        """All items of that response."""
        attempt, pieces = await self._begin_response(work, context)
        try:
            while not attempt.finished:
                pieces.append(await attempt.read_next())
            if not attempt.complete:
                await attempt.drain()
        finally:
            self._abandon_attempt(attempt, work, context)
        return pieces

    async def _begin_response(
        self, work: AttemptRequest, context: RequestContext
    ) -> tuple[Attempt, list[StreamItem]]:
        """The first attempt whose response begins, and its first items (see ``Attempt.begin``)."""
        wish = self._build_criteria(work.request, context)
        watch = context.observer
        show = (
            None if watch is None else SelectionReporter(watch, self._settings, self._workers, work)
        )
        retry: RetryState | None = None
        now = self._clock()
        self._retry_budget.record_request(now)
        if context.first_attempt_at is None:
            context.first_attempt_at = now
        while True:
            if show is not None:
                show.observe_choice(wish)
            place = self._workers.try_acquire(wish, now)
            if place is None:
                place = await self._workers.acquire(wish, work.deadline, context.id)
            if show is not None:
                show.observe_attempt(place.worker)
            asks = (
                work
                if context.attempt_trace is None
                else add_trace_headers(work, context.attempt_trace, place.worker)
            )
            attempt, pieces = Attempt(place, asks, self._services), None
            try:
                pieces = await attempt.begin()
            except GatewayError as error:
                if show is not None:
                    show.observe_failure(place.worker, error)
                if retry is None:
                    retry = RetryState(
                        self._retry_settings, self._retry_budget, metrics=self._metrics
                    )
                    wish = replace(wish, tried_keys=retry.tried)
                now = self._clock()
                self._check_retry(error, attempt, retry, wish, now)
            else:
                return attempt, pieces
            finally:
                if pieces is None:
                    self._abandon_attempt(attempt, work, context)

    def _check_retry(
        self,
        error: GatewayError,
        attempt: Attempt,
        retry: RetryState,
        wish: SelectionCriteria,
        now: float,
    ) -> None:
        """Raise the error for the client, unless the request may be retried."""
        retry.record_failure(attempt.worker.key, error)
        left = bool(self._workers.select_available(wish))
        again = left and wish.preempt is None
        if again and retry.allows_retry(error, now, accepted=attempt.accepted):
            return
        last = retry.get_final_error(error, has_untried=left)
        if last is error:
            raise error
        raise last from error

    def _abandon_attempt(
        self, attempt: Attempt, work: AttemptRequest, context: RequestContext
    ) -> None:
        """End the attempt: free its slot, and cancel the work at the worker if it is unfinished."""
        attempt.close()
        self._workers.release(attempt.slot)
        if context.attempt_trace is not None:
            context.attempt_trace.end_attempt(attempt.failure)
        if not attempt.finished:  # the worker may still be generating
            self._metrics.abandoned += 1
            self._send_cancel(attempt.worker, work.request)

    def _build_criteria(self, request: Request, context: RequestContext) -> SelectionCriteria:
        """The criteria for choosing a worker."""
        if self._make_routing_key is None and request.priority is None and context.preempt is None:
            return ANY_WORKER
        ask = (
            NO_ROUTING_KEY
            if self._make_routing_key is None
            else self._make_routing_key(request, context)
        )
        priority = DEFAULT_PRIORITY if request.priority is None else request.priority
        if context.preempt is not None:
            priority = BACKGROUND_PRIORITY
        return SelectionCriteria(frozenset(), ask, priority, context.preempt)

    def _cancel_waiting(self, member: WorkerState) -> None:
        """Cancel the attempts that wait for a worker that went down, if another worker is up."""
        if any(
            other.logged_state == "up" for other in self._workers.workers if other is not member
        ):
            member.cancel_waiting()

    def _send_cancel(self, member: WorkerState, request: Request) -> None:
        if self._cancel_adapter is not None and self._started:
            self._cancel_sender.send(member.config, self._cancel_adapter.encode_cancel(request))


def _is_dry_run(context: RequestContext) -> bool:
    return context.observer is not None and context.observer.dry_run


def _make_sources(
    settings: PoolSettings, parse_workers: WorkerListParser | None
) -> Iterator[WorkerSource]:
    for source in settings.workers:
        if source.file is not None:
            if parse_workers is None:
                raise ValueError("a file of workers needs a parser")
            yield FileSource(source.file, _make_file_reader(settings, source, parse_workers))
        elif source.url is None:
            query = DnsSettings(
                source.dns or source.srv or "",
                "srv" if source.dns is None else "a",
                source.refresh_interval,
                nameserver=source.nameserver,
            )
            yield DnsSource(query, settings.make_template(source))


def _make_file_reader(
    settings: PoolSettings, source: WorkerSourceSettings, parse_workers: WorkerListParser
) -> WorkerFileReader:
    return lambda data: settings.make_listed_workers(source, parse_workers(data))
