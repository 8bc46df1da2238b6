"""The pool backend: choose a worker, run the attempts of a request, retry on another worker.

``prepare`` decides on pass-through or translation, without I/O. ``send`` and ``send_unary`` encode
the request once and then loop: take a slot at a worker (``workers``), make an attempt
(``attempt``), and on a failure ask whether it may be repeated (``retry``). The history of attempts
belongs to the request: a fallback to another pool goes on with it, so that no worker gets the same
request twice, and no request kills one worker after the other.

What must never happen:

- A retry after the client has received something, or of what the worker may have done and must not
  do twice.
- A slot that is not given back: whatever ends an attempt goes through ``_abandon_attempt``.
- A worker that goes on generating for nobody: an unfinished attempt closes its connection, and is
  cancelled by a request where the worker's protocol has one.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from backends.deadline_timer import DeadlineTimer
from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import (
    ConnectionCounts,
    HttpClient,
    SupportsConnectionCounts,
    WorkerConfig,
)
from backends.interfaces import (
    AttemptHistory,
    BackendRequest,
    Deadline,
    EventSink,
    ForwardedRequest,
    PassthroughSource,
    PreparedRequest,
    RequestContext,
    StreamItem,
    StreamItems,
    Timeouts,
    WorkerModel,
    describe_failure,
)
from backends.pool.attempt import Attempt, AttemptServices
from backends.pool.attempt_request import AttemptRequest, add_trace_headers, filter_headers
from backends.pool.discovery import WorkerDiscovery, WorkerSource
from backends.pool.dns_discovery import DnsSource
from backends.pool.file_discovery import FileSource, WorkerFileReader
from backends.pool.forwarding import ForwardedAttempt
from backends.pool.health_check import HealthChecker
from backends.pool.load_balancing import NO_ROUTING_KEY, ROUTING_KEY_FACTORIES, make_policy
from backends.pool.metrics import PoolMetrics
from backends.pool.retry import RetryBudget, RetryCounters, RetryState, is_model_refusal
from backends.pool.selection_report import SelectionReporter
from backends.pool.settings import (
    DnsSettings,
    PoolContext,
    PoolSettings,
    RetrySettings,
    WorkerListParser,
    WorkerSourceSettings,
)
from backends.pool.side_requests import CancelSender
from backends.pool.worker_metadata import ModelMetadataCache
from backends.pool.worker_response import TranslatedResponse
from backends.pool.worker_state import WorkerReport, WorkerState
from backends.pool.workers import (
    ANY_WORKER,
    BACKGROUND_PRIORITY,
    DEFAULT_PRIORITY,
    PoolLimits,
    SelectionCriteria,
    WorkerPool,
)
from protocols.core.custom_tools import has_custom_tools, replace_custom_tools
from protocols.core.errors import (
    ClientError,
    GatewayError,
    MemoryExhausted,
    RateLimitExceeded,
    RetriesExhausted,
    UnsupportedEndpoint,
    WorkerUnreachable,
)
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import (
    NO_SETTINGS,
    AppliesModelSettings,
    ClientAdapter,
    Clock,
    LearnsFromErrors,
    ModelMetadataReader,
    PassthroughRequest,
    SupportsCancel,
    SupportsPassthrough,
    SupportsProxy,
    UpstreamAdapter,
    build_custom_tools_check,
    build_kept_keys_reader,
    build_unsupported_kind_error,
    get_own_headers,
    get_request_kinds,
    get_response_headers,
)
from protocols.core.request import AnyRequest


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
        adapter: UpstreamAdapter,
        clock: Clock,
        draw: Callable[[], float],
        context: PoolContext = PoolContext(),  # noqa: B008 - frozen
        http_client: HttpClient | None = None,
        has_health_checks: bool = True,
    ) -> None:
        workers = settings.make_workers(settings.workers)
        timeouts = settings.timeouts or Timeouts()
        self._adapter, self._request_kinds = adapter, get_request_kinds(adapter)
        self._own_headers, rules = get_own_headers(adapter), get_response_headers(adapter)
        self._settings, self._clock = settings, clock
        self._retry_settings = settings.retries or RetrySettings()
        self._total_timeout = timeouts.total
        self._http_client = http_client or _make_http_client(settings)
        self._metrics = PoolMetrics()
        self._deadline_timer = DeadlineTimer(clock, asyncio.get_running_loop)
        services = (self._http_client, timeouts, clock, self._deadline_timer, self._metrics, rules)
        self._services = AttemptServices(*services, *settings.list_response_limits())
        limits = PoolLimits(
            settings.total_concurrency, settings.queue, settings.health, settings.breaker
        )
        self._make_routing_key = ROUTING_KEY_FACTORIES.get(settings.policy)
        """Builds the routing key of a request; None if the policy uses none."""
        policy = make_policy(settings.policy, draw)
        self._workers = WorkerPool(workers, policy, limits, clock, self._metrics)
        self._retry_counters = {} if context.retry_counters is None else context.retry_counters
        self._retry_budget = self._create_retry_budget()
        self._metadata_cache = (
            ModelMetadataCache(adapter, context.models, self._http_client, clock)
            if isinstance(adapter, ModelMetadataReader)
            else None
        )
        self._health_checker: HealthChecker | None = None
        if has_health_checks:
            self._health_checker = HealthChecker(
                settings.health,
                adapter.health_request,
                self._http_client,
                self._metadata_cache,
                draw=draw,
                on_unresponsive=self._cancel_waiting,
                build_health_requests=context.build_health_requests,
            )
        self._cancel_adapter = adapter if isinstance(adapter, SupportsCancel) else None
        self._learning_adapter = adapter if isinstance(adapter, LearnsFromErrors) else None
        self._get_kept_keys = build_kept_keys_reader(adapter)
        self._keeps_custom_tools = build_custom_tools_check(adapter)
        self._applies_settings = isinstance(adapter, AppliesModelSettings)
        self._passthrough_adapter = adapter if isinstance(adapter, SupportsPassthrough) else None
        self._cancel_sender = CancelSender(self._http_client)
        self._request_id_prefix = f"{int(draw() * 2**32):08x}"
        self._request_numbers = itertools.count()
        self._started = False
        sources = list(_make_sources(settings, context.parse_workers))
        self._discovery = WorkerDiscovery(context.name, workers, sources, self.replace_workers)

    def __repr__(self) -> str:
        return f"<PoolBackend {self._adapter.name}, {self._workers!r}>"

    @property
    def ready(self) -> bool:
        """Whether any worker is available."""
        return self._workers.ready

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        """See ``backends.interfaces.Backend``."""
        adapter, source = self._passthrough_adapter, request.passthrough
        if (
            adapter is not None
            and source is not None
            and (self._applies_settings or source.response_context.settings is NO_SETTINGS)
        ):
            passthrough = adapter.prepare_passthrough(
                source.adapter, source.client_request, source.response_context
            )
            if passthrough is not None:
                headers = source.client_request.headers
                if not source.adapter.request_headers.forwarded.isdisjoint(headers):
                    passthrough = self._forward_headers(passthrough, source)
                return PreparedRequest(
                    passthrough.request,
                    passthrough.unsupported_parameters,
                    passthrough,
                    None if self._learning_adapter is None else partial(self.prepare, request),
                )
        decoded, names = request.decode()
        if decoded.kind not in self._request_kinds:
            raise build_unsupported_kind_error(decoded.kind, UnsupportedEndpoint)
        if has_custom_tools(decoded) and not self._keeps_custom_tools(decoded):
            decoded, replaced = replace_custom_tools(decoded)
        else:
            replaced = ()
        decoded, foreign = remove_extra_fields(decoded, self._get_kept_keys(decoded))
        # The adapter takes this kind, whatever the type of its parameter says: see request_kinds.
        unsupported = self._adapter.unsupported_parameters(decoded, names)  # type: ignore[arg-type]
        return PreparedRequest(decoded, unsupported + foreign + replaced)

    def _forward_headers(
        self, passthrough: PassthroughRequest, source: PassthroughSource
    ) -> PassthroughRequest:
        """The request with those of the client's headers that the workers' protocol has, too."""
        known = source.adapter.request_headers.select_forwarded(source.client_request.headers)
        headers = tuple(one for one in known if one[0] in self._own_headers)
        wire = passthrough.upstream_request
        return replace(passthrough, upstream_request=replace(wire, headers=wire.headers + headers))

    def replace_workers(self, workers: Sequence[WorkerConfig]) -> None:
        """Replace the workers; see ``WorkerPool.replace_workers``."""
        self._workers.replace_workers(workers)
        self._retry_budget = self._create_retry_budget()
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
        client = self._http_client
        return (
            client.connections
            if isinstance(client, SupportsConnectionCounts)
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

    async def send(
        self, prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
    ) -> StreamItems:
        """The events of a worker's response, one batch for each read that held any.

        Events before the first content are buffered until it arrives: until then the request may
        be retried on another worker. Raises Overloaded, DeadlineExceeded, WorkerError, and the
        errors that the protocol's adapter reads from the worker.
        """
        attempt, items = await self._begin_response(prepared, context)
        del prepared  # a stream may take long, and its request be large
        try:
            while items:
                yield items.pop(0)  # what is written is kept no longer
            while not attempt.finished:
                yield await attempt.read_next(sink)
            if not attempt.complete:
                await attempt.drain()
        except GatewayError as error:
            self._end_failed_response(attempt, context, error)
            raise
        finally:
            self._abandon_attempt(attempt, context)

    async def send_unary(
        self, prepared: PreparedRequest, context: RequestContext
    ) -> Sequence[StreamItem]:
        """See ``backends.interfaces.Backend``: the response begins when all of it is there."""
        attempt, items = await self._begin_response(prepared, context)
        if attempt.is_large:
            context.offload_to_thread = True
        try:
            if not attempt.complete:
                await attempt.drain()
        except GatewayError as error:
            self._end_failed_response(attempt, context, error)
            raise
        finally:
            self._abandon_attempt(attempt, context)
        return items

    def find_forwarded_path(self, client: ClientAdapter, operation: str, model: str) -> str | None:
        """See ``backends.interfaces.ForwardsRequests``."""
        adapter = self._adapter
        if not isinstance(adapter, SupportsProxy) or adapter.name != client.name:
            return None
        return adapter.get_proxied_path(operation, model)

    async def forward(self, request: ForwardedRequest, context: RequestContext) -> ForwardedAttempt:
        """See ``backends.interfaces.ForwardsRequests``."""
        deadline = self._compute_deadline(context)
        wire, headers = filter_headers(request.upstream_request, context)
        request = replace(request, upstream_request=wire, headers=(*request.headers, *headers))
        tried_keys: set[int] = set()
        self._retry_budget.record_request(self._clock())
        while True:
            criteria = SelectionCriteria(frozenset(tried_keys), model=request.model)
            slot = await self._workers.acquire(criteria, deadline, context.id)
            if context.first_attempt_at is None:
                context.first_attempt_at = slot.acquired_at
            context.attempt_history.worker = slot.worker.config.url
            attempt = ForwardedAttempt(slot, self._workers, self._services, deadline)
            has_begun = False
            try:
                await attempt.begin(request, self._adapter.read_error)
                has_begun = True
            except GatewayError as error:
                _record_failure(slot.worker, error, context, self._adapter.name)
                tried_keys.add(slot.worker.key)
                criteria = SelectionCriteria(frozenset(tried_keys), model=request.model)
                if not isinstance(error, WorkerUnreachable) or not (
                    self._workers.select_available(criteria)
                ):
                    raise
            finally:
                if not has_begun:
                    attempt.close()
            if has_begun:
                return attempt

    def _end_failed_response(
        self, attempt: Attempt, context: RequestContext, error: GatewayError
    ) -> None:
        """Note, also for fallbacks, that a response that had begun failed at this worker."""
        history = context.attempt_history
        _record_failure(attempt.worker, error, context, self._adapter.name)
        model = attempt.slot.model if is_model_refusal(error) else ""
        history.failed |= {(attempt.worker.config.url, model)}
        history.failed_pools |= self._list_targets(model)

    async def _encode_request(self, request: Any, context: RequestContext) -> AttemptRequest:
        """Encode the request in the workers' protocol."""
        adapter = self._adapter
        deadline = self._compute_deadline(context)
        cache = self._metadata_cache
        if cache is not None and not cache.has_metadata(request.model) and not _is_dry_run(context):
            workers = self._workers.select_available(ANY_WORKER)
            await cache.load_metadata(request.model, workers, deadline)
        if self._cancel_adapter is not None:
            name = f"{context.id}-{self._request_id_prefix}{next(self._request_numbers):x}"
            request = replace(request, client_id=name)
        if context.offload_to_thread:
            wire = await asyncio.to_thread(adapter.encode_request, request)
        else:
            wire = adapter.encode_request(request)
        wire, headers = filter_headers(wire, context, self._own_headers)
        return AttemptRequest(
            request=request,
            upstream_request=wire,
            request_headers=headers,
            make_response_reader=lambda: TranslatedResponse(adapter.create_decoder(request)),
            read_error=adapter.read_error,
            deadline=deadline,
            reserve_memory=context.reserve_memory,
            background=context.preempt is not None,
            model_timeouts=context.model_timeouts,
        )

    async def _encode_prepared(
        self, prepared: PreparedRequest, context: RequestContext
    ) -> AttemptRequest:
        passthrough = prepared.passthrough
        if passthrough is None:
            return await self._encode_request(prepared.request, context)
        wire, headers = filter_headers(passthrough.upstream_request, context, self._own_headers)
        read_error = passthrough.read_error or self._adapter.read_error
        return AttemptRequest(
            passthrough.request,
            wire,
            headers,
            make_response_reader=passthrough.create_reader,
            read_error=read_error,
            deadline=self._compute_deadline(context),
            reserve_memory=context.reserve_memory,
            model_timeouts=context.model_timeouts,
        )

    def _compute_deadline(self, context: RequestContext) -> Deadline:
        """The request's deadline, or the pool's if that is sooner. Raises DeadlineExceeded."""
        now, most = context.clock(), self._total_timeout
        if now < context.deadline.expires_at <= now + most:
            return context.deadline
        context.deadline.remaining()  # raises if the deadline has passed
        return Deadline(context.clock, most, now)

    async def _begin_response(
        self, prepared: PreparedRequest, context: RequestContext
    ) -> tuple[Attempt, list[StreamItem]]:
        """The first attempt whose response begins, and its first items (see ``Attempt.begin``).

        Raises RetriesExhausted if the request failed in other pools and may not be sent again.
        """
        request = await self._encode_prepared(prepared, context)
        observer = context.observer
        reporter = (
            None
            if observer is None
            else SelectionReporter(observer, self._settings, self._workers, request)
        )
        now = self._clock()
        criteria, retry = self._start_request(request.request, context, now)
        if context.first_attempt_at is None:
            context.first_attempt_at = now
        while True:
            if reporter is not None:
                reporter.observe_selection(criteria)
            slot = self._workers.try_acquire(criteria, now)
            if slot is None:
                slot = await self._workers.acquire(criteria, request.deadline, context.id)
            context.attempt_history.worker = slot.worker.config.url
            if reporter is not None:
                reporter.observe_attempt(slot.worker)
            attempt_request = (
                request
                if context.attempt_trace is None
                else add_trace_headers(request, context.attempt_trace, slot.worker)
            )
            attempt, items = Attempt.create(slot, attempt_request, self._services), None
            try:
                items = await attempt.begin()
            except GatewayError as error:
                if self._learns_from(error, prepared):
                    if prepared.prepare_again is not None:
                        prepared = prepared.prepare_again()
                    request = await self._encode_prepared(prepared, context)
                    continue
                _record_failure(slot.worker, error, context, self._adapter.name)
                if retry is None:
                    retry = self._create_retry_state(context.attempt_history)
                    criteria = replace(criteria, tried_keys=retry.tried)
                now = self._clock()
                self._check_retry(error, attempt, retry, criteria, now)
            else:
                context.worker_protocol = self._adapter.name
                context.worker_header_rules = self._services.response_headers
                context.worker_headers = attempt.select_headers()
                return attempt, items
            finally:
                if items is None:
                    self._abandon_attempt(attempt, context)

    def _learns_from(self, error: GatewayError, prepared: PreparedRequest) -> bool:
        """Whether the adapter learned from its worker's error to encode the request otherwise."""
        adapter = self._learning_adapter
        return adapter is not None and adapter.learn_from_error(prepared.request.model, error)

    def _create_retry_budget(self) -> RetryBudget:
        """The retry budget of the current workers."""
        counters = self._retry_counters.setdefault(frozenset(self._list_urls()), RetryCounters())
        return RetryBudget(self._retry_settings.budget, counters=counters)

    def _list_urls(self) -> Iterator[str]:
        return (worker.config.url for worker in self._workers.workers)

    def _list_targets(self, model: str) -> frozenset[WorkerModel]:
        """All workers, with one of their models; "" for all of them."""
        return frozenset((url, model) for url in self._list_urls())

    def _create_retry_state(self, history: AttemptHistory) -> RetryState:
        return RetryState(
            self._retry_settings, self._retry_budget, metrics=self._metrics, history=history
        )

    def _start_request(
        self, request: AnyRequest, context: RequestContext, now: float
    ) -> tuple[SelectionCriteria, RetryState | None]:
        """The criteria for choosing a worker; the state of a request that failed in other pools.

        Raises RetriesExhausted.
        """
        criteria, history = _build_criteria(request.model), context.attempt_history
        if (
            self._make_routing_key is not None
            or request.priority is not None
            or context.preempt is not None
        ):
            criteria = self._build_criteria(request, context)
        if not history.failed_pools:
            self._retry_budget.record_request(now)
            return criteria, None
        retry = self._start_fallback(request.model, history, now)
        return replace(criteria, tried_keys=retry.tried), retry

    def _start_fallback(self, model: str, history: AttemptHistory, now: float) -> RetryState:
        """The state of a request that failed in other pools. Raises RetriesExhausted.

        It is sent to a worker that those pools do not have. If there is none, that is a retry, at a
        worker that was not tried.
        """
        workers = self._workers.workers
        has_new_workers = not all(
            _includes_worker(history.failed_pools, url, model) for url in self._list_urls()
        )
        excluded = history.failed_pools if has_new_workers else history.failed
        retry = self._create_retry_state(history)
        retry.tried.update(
            one.key for one in workers if _includes_worker(excluded, one.config.url, model)
        )
        if has_new_workers or not workers:
            self._retry_budget.record_request(now)
            return retry
        retry.workers_killed = history.workers_killed
        if not self._workers.select_available(SelectionCriteria(retry.tried, model=model)):
            raise RetriesExhausted("all workers tried")
        if not retry.allows_fallback(now):
            raise RetriesExhausted("no retry left")
        return retry

    def _check_retry(
        self,
        error: GatewayError,
        attempt: Attempt,
        retry: RetryState,
        criteria: SelectionCriteria,
        now: float,
    ) -> None:
        """Raise the error for the client, or for the next fallback, unless a retry is allowed."""
        if isinstance(error, MemoryExhausted):
            raise error
        history = retry.history
        retry.record_failure(attempt.worker.key, error)
        if not isinstance(error, ClientError) or isinstance(error, RateLimitExceeded):
            refused = attempt.slot.model if is_model_refusal(error) else ""
            history.failed |= {(attempt.worker.config.url, refused)}
        has_candidates = bool(self._workers.select_available(criteria))
        may_retry = has_candidates and criteria.preempt is None
        if may_retry and retry.allows_retry(error, now, accepted=attempt.accepted):
            return
        if history.failed:
            model = "" if retry.has_failed_worker else attempt.slot.model
            history.failed_pools |= self._list_targets(model)
            history.workers_killed = retry.workers_killed
        final_error = retry.get_final_error(error, has_untried=has_candidates)
        if final_error is error:
            raise error
        raise final_error from error

    def _abandon_attempt(self, attempt: Attempt, context: RequestContext) -> None:
        """End the attempt: free its slot, and cancel the work at the worker if it is unfinished."""
        attempt.close()
        self._workers.release(attempt.slot)
        if context.attempt_trace is not None:
            context.attempt_trace.end_attempt(attempt.failure)
        if not attempt.finished:  # the worker may still be generating
            self._metrics.abandoned += 1
            self._send_cancel(attempt.worker, attempt.request.request)

    def _build_criteria(self, request: AnyRequest, context: RequestContext) -> SelectionCriteria:
        """The criteria for choosing a worker."""
        routing_key = (
            NO_ROUTING_KEY
            if self._make_routing_key is None
            else self._make_routing_key(request, context)
        )
        priority = DEFAULT_PRIORITY if request.priority is None else request.priority
        if context.preempt is not None:
            priority = BACKGROUND_PRIORITY
        return SelectionCriteria(frozenset(), routing_key, priority, context.preempt, request.model)

    def _cancel_waiting(self, worker: WorkerState) -> None:
        """Cancel the attempts that wait for a worker that went down, if another worker is up."""
        if any(
            other.logged_state == "up" for other in self._workers.workers if other is not worker
        ):
            worker.cancel_waiting()

    def _send_cancel(self, worker: WorkerState, request: Any) -> None:
        if self._cancel_adapter is not None and self._started:
            self._cancel_sender.send(worker.config, self._cancel_adapter.encode_cancel(request))


@functools.lru_cache(256)
def _build_criteria(model: str) -> SelectionCriteria:
    """Any worker, default priority."""
    return SelectionCriteria(model=model)


def _includes_worker(failed: frozenset[WorkerModel], url: str, model: str) -> bool:
    """Whether ``failed`` has this worker, or this model of it."""
    return (url, "") in failed or (url, model) in failed


def _record_failure(
    worker: WorkerState, error: GatewayError, context: RequestContext, protocol: str
) -> None:
    """Keep a failed attempt for the operator, and mask the worker's key in the error.

    ``protocol`` is the worker's.
    """
    if isinstance(error, MemoryExhausted):
        return  # not the worker's fault
    error.worker_protocol = protocol
    credentials = worker.config.credentials
    mask = None if credentials is None else credentials.mask_text
    if mask is not None:
        error.mask_secrets(mask)
    failure = describe_failure(worker.name, error, mask)
    context.attempt_history.add_failure(failure)
    if context.observer is not None:
        context.observer.on_failure(failure)


def _make_http_client(settings: PoolSettings) -> HttpClient:
    ca_file = settings.tls.ca if settings.tls else None
    return AsyncioHttpClient(ca=ca_file, max_response_head=settings.max_response_head)


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
