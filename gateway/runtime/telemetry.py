"""Sets up metrics, usage rows, traces and OTLP metrics as configured."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from backends.interfaces import Backend
from gateway.config import listeners as config_listeners
from gateway.config import schema
from gateway.http_server.listener import Listener
from gateway.memory import MemoryBudget
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.observability.recording_writer import RequestRecorder
from gateway.pipeline.answer_judge import AnswerJudge, JudgeStage
from gateway.pipeline.feedback import FEEDBACK_PATH, FeedbackEndpoint, FeedbackStage
from gateway.pipeline.measures import MeasureStage
from gateway.pipeline.recording import RecordingStage
from gateway.pipeline.services import GatewayServices, StageFactory
from gateway.pipeline.shadow_comparison import ShadowComparison
from gateway.pipeline.state import RequestState, Stage
from gateway.pipeline.strategies import TargetAttempt
from gateway.runtime.reload import ReloadResult
from gateway.runtime.snapshot import ConfigSnapshot

if TYPE_CHECKING:
    from gateway.admin.api import AdminServer
    from gateway.observability.metrics.requests import MetricsCollector
    from gateway.observability.metrics.system import ProcessCollector
    from gateway.observability.tracing import RequestTracer
    from gateway.observability.usage import UsageRecorder


def set_up_metrics(
    services: GatewayServices,
    get_backends: Callable[[], Mapping[str, Backend]],
    config_hash: str,
) -> tuple[GatewayServices, "MetricsCollector", Callable[[ReloadResult], None]]:
    """Set up metrics. Returns services that count requests, the collector, and a reload observer.

    ``config_hash`` is that of the first configuration.
    """
    from gateway.observability.metrics.dropped import (  # noqa: PLC0415 - only with an admin listener
        DroppedRecordCollector,
        FeedbackCollector,
        RecordingCollector,
    )
    from gateway.observability.metrics.engines import EngineCollector, SupportsEngineStats  # noqa: PLC0415 - only with an admin listener
    from gateway.observability.metrics.reloads import ReloadCollector  # noqa: PLC0415 - only with an admin listener
    from gateway.observability.metrics.requests import MetricsCollector  # noqa: PLC0415 - as above
    from gateway.observability.metrics.shadows import ShadowCollector  # noqa: PLC0415 - only with an admin listener
    from gateway.observability.metrics.upstream import PoolStats  # noqa: PLC0415 - as above

    def get_pools() -> Mapping[str, PoolStats]:
        return {name: one for name, one in get_backends().items() if isinstance(one, PoolStats)}

    def get_engines() -> Mapping[str, SupportsEngineStats]:
        return {
            name: one
            for name, one in get_backends().items()
            if isinstance(one, SupportsEngineStats)
        }

    metrics = MetricsCollector(services.observe_request, get_pools)
    reloads = ReloadCollector(config_hash, services.wall_clock)
    shadows = ShadowCollector()
    services.shadow_manager.add_reporter(shadows.record_shadow)
    services.shadow_manager.add_reporter(metrics.record_shadow)
    metrics.register(reloads)
    metrics.register(shadows)
    metrics.register(EngineCollector(get_engines))
    if services.request_recorder is not None:
        metrics.register(RecordingCollector(services.request_recorder.count_written))
    metrics.register(DroppedRecordCollector(services.dropped_counts))
    feedback = services.own_endpoints.get(FEEDBACK_PATH)
    if isinstance(feedback, FeedbackEndpoint):
        metrics.register(FeedbackCollector(feedback.results))
    return replace(services, observe_request=metrics.record_request), metrics, reloads.record_reload


def set_up_usage(
    config: schema.ObservabilityConfig, services: GatewayServices
) -> tuple[GatewayServices, "UsageRecorder | None"]:
    """Set up usage rows and feedback, if configured. Returns the services and the recorder."""
    if config.usage is None:
        return services, None
    recorder = _create_usage_recorder(config.usage, services, feedback=config.feedback is not None)
    if config.feedback is not None:
        endpoint = FeedbackEndpoint(config.feedback, recorder, services.clock, services.wall_clock)
        judge = AnswerJudge(
            recorder, recorder.record_usage, endpoint.results, services.clock, services.wall_clock
        )
        services = replace(
            services,
            answer_judge=judge,
            own_endpoints={**services.own_endpoints, FEEDBACK_PATH: endpoint},
            stage_factories=(*services.stage_factories, lambda _, __: FeedbackStage()),
        )

    def record_shadow(pair: ShadowComparison) -> None:
        if (record := build_shadow_record(pair, services.wall_clock())) is not None:
            recorder.record_usage(record)

    services.shadow_manager.add_reporter(record_shadow)
    dropped = {**services.dropped_counts, "usage_rows": recorder.count_dropped}
    return replace(
        services,
        observe_request=_chain_observers(services.observe_request, recorder.record_usage),
        dropped_counts=dropped,
    ), recorder


def build_shadow_record(pair: ShadowComparison, now: float) -> RequestRecord | None:
    """The usage row of a copy that a rollout takes as evidence, which ended ``now``."""
    side = pair.shadow
    if not pair.split or side.outcome == "dropped":
        return None
    return RequestRecord(
        pair.shadow_id,
        now - side.duration,
        model=side.model,
        version=side.version,
        split=pair.split,
        outcome=side.outcome,
        error=side.error,
        first_token=side.first_token,
        duration=side.duration,
        tokens=side.tokens,
        measures=side.measures,
        shadow_of=pair.id,
    )


def _create_usage_recorder(
    config: schema.UsageConfig, services: GatewayServices, *, feedback: bool
) -> "UsageRecorder":
    """Create the recorder for the configured database."""
    if config.postgres is not None:
        from gateway.observability.usage_postgres import create_postgres_recorder  # noqa: PLC0415 - it need not be installed

        return create_postgres_recorder(
            config.postgres.reveal(), config.retention, services.wall_clock, feedback=feedback
        )
    from gateway.observability.usage import SqliteUsageRecorder  # noqa: PLC0415 - nobody else needs its library

    assert config.sqlite is not None  # noqa: S101 - the loader refuses rows without a place
    return SqliteUsageRecorder(
        config.sqlite, config.retention, services.wall_clock, feedback=feedback
    )


def set_up_recording(
    services: GatewayServices, memory: MemoryBudget
) -> tuple[GatewayServices, RequestRecorder]:
    """Set up what holds responses: the recorder, the measures of rollouts, and shadows.

    They do nothing before the configuration names them. So do judges of answers, which need the
    feedback that ``set_up_usage`` sets up.
    """
    recorder = RequestRecorder(services.wall_clock)
    memory.measure_waiting = recorder.measure_waiting
    services.shadow_manager.memory = memory
    factories: tuple[StageFactory, ...] = (
        lambda _, __: RecordingStage(recorder, services.draw, memory),
        lambda _, __: MeasureStage(memory),
    )
    if (judge := services.answer_judge) is not None:
        factories += (lambda router, _: JudgeStage(router, judge, services.draw, memory),)
    return replace(
        services,
        request_recorder=recorder,
        stage_factories=(*services.stage_factories, *factories),
        dropped_counts={**services.dropped_counts, "recorded_requests": recorder.count_dropped},
    ), recorder


class TracingStage(Stage):
    """Traces sampled requests from their start; the tracer observes their records at the end."""

    needs_body = False

    def __init__(self, tracer: "RequestTracer") -> None:
        self._tracer = tracer

    def on_found(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        self._tracer.start_trace(request.record, request.http)
        request.attempt_trace = self._tracer.get_trace(request.record)

    def on_attempt(self, request: RequestState, attempt: TargetAttempt) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if request.attempt_trace is not None:
            request.attempt_trace.set_request(attempt.prepared.request)


class TelemetrySender(Protocol):
    """An exporter with a background thread."""

    def close(self, within: float) -> bool:
        """Export what is queued within ``within`` seconds and stop; False if some is left."""


def set_up_exporters(
    config: schema.ObservabilityConfig, services: GatewayServices, environment: Mapping[str, str]
) -> tuple[GatewayServices, Sequence[TelemetrySender]]:
    """Set up traces and OTLP metrics, if configured. Returns the services and the exporters."""
    if config.traces is None and config.metrics.push is None:
        return services, ()
    from gateway.observability.otel_metrics import OtelMetrics  # noqa: PLC0415 - the extra may not be installed
    from gateway.observability.otlp import (  # noqa: PLC0415 - as above
        MetricExporter,
        TraceExporter,
        build_resource,
    )
    from gateway.observability.semconv import select_conventions  # noqa: PLC0415 - as above
    from gateway.observability.tracing import RequestTracer  # noqa: PLC0415 - as above

    resource, names = build_resource(os.urandom(8).hex()), select_conventions(environment)
    exporters = list[TelemetrySender]()
    if (traces := config.traces) is not None:
        spans = TraceExporter(
            traces.otlp, _build_collector_headers(traces), traces.buffer, resource, traces.sample
        )
        tracer = RequestTracer(
            spans.provider, spans, names, trust_parent=traces.trust, now=services.wall_clock
        )
        exporters.append(spans)
        services = replace(
            services,
            observe_request=_chain_observers(services.observe_request, tracer.end_trace),
            stage_factories=(*services.stage_factories, lambda _, __: TracingStage(tracer)),
            dropped_counts={**services.dropped_counts, "traces": spans.count_dropped},
        )
    if (push := config.metrics.push) is not None:
        exporter = MetricExporter(
            push.otlp, _build_collector_headers(push), push.interval, resource
        )
        exporters.append(exporter)
        record_request = OtelMetrics(names, exporter.provider).record_request
        services = replace(
            services, observe_request=_chain_observers(services.observe_request, record_request)
        )
    return services, exporters


def _chain_observers(
    first_observer: RecordObserver, second_observer: RecordObserver
) -> RecordObserver:
    def observe_both(record: RequestRecord) -> None:
        first_observer(record)
        second_observer(record)

    return observe_both


def _build_collector_headers(
    config: schema.TracingConfig | schema.OtlpMetricsConfig,
) -> Mapping[str, str]:
    """Headers of requests to a collector."""
    key = {} if config.auth is None else {"authorization": f"Bearer {config.auth.bearer.reveal()}"}
    return key | {name: value.reveal() for name, value in config.headers.items()}


class ServingState(Protocol):
    """The running gateway."""

    @property
    def active_snapshots(self) -> Sequence[ConfigSnapshot]:
        """The snapshots that may have running requests."""

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The current backends by name."""

    @property
    def listeners(self) -> Mapping[config_listeners.ListenerId, Listener]:
        """The current listeners."""

    @property
    def admin_server(self) -> "AdminServer | None":
        """The admin listener, if there is one."""


def set_up_process_metrics(
    metrics: "MetricsCollector", state: ServingState, *, vllm: bool
) -> "ProcessCollector":
    """Add process, rate limit and running request metrics; with ``vllm`` also vLLM's names.

    The caller starts and stops the returned collector.
    """
    from gateway.observability.metrics.rate_limits import RateLimitCollector  # noqa: PLC0415 - as above
    from gateway.observability.metrics.requests import RunningRequestCollector  # noqa: PLC0415 - as above
    from gateway.observability.metrics.system import ListenerStats, ProcessCollector  # noqa: PLC0415 - as above
    from gateway.observability.metrics.upstream import PoolStats  # noqa: PLC0415 - as above
    from gateway.observability.metrics.vllm_compat import VllmCollector  # noqa: PLC0415 - as above

    def get_queued_ids() -> set[str]:
        pools = (one for one in state.backends.values() if isinstance(one, PoolStats))
        return {name for pool in pools for name in pool.queued_request_ids}

    def get_records() -> Iterator[RequestRecord]:
        for snapshot in state.active_snapshots:
            for handler in snapshot.handlers.values():
                yield from (request.record for request in handler.dispatcher.running_requests)

    def get_listeners() -> Mapping[str, ListenerStats]:
        stats: dict[str, ListenerStats] = {
            config_listeners.listener_name(listener_id): listener
            for listener_id, listener in state.listeners.items()
        }
        return (
            stats if state.admin_server is None else stats | {"admin": state.admin_server.listener}
        )

    running = RunningRequestCollector(get_records, get_queued_ids)
    process = ProcessCollector(get_listeners)
    metrics.register(RateLimitCollector(lambda: state.active_snapshots[-1].rate_limiter))
    metrics.register(running)
    metrics.register(process)
    if vllm:
        metrics.register(VllmCollector(metrics.collect_stats, running.count_by_phase))
    return process
