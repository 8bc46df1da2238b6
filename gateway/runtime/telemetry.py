"""What counts exchanges, keeps their usage and tells of them, where that is configured."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from backends.interfaces import Backend
from gateway.config import listeners as config_listeners
from gateway.config import schema
from gateway.http_server.listener import Listener
from gateway.observability.record import RecordObserver, RequestRecord
from gateway.pipeline.handler import GatewayServices
from gateway.runtime.reload import ReloadResult
from gateway.runtime.snapshot import ConfigSnapshot

if TYPE_CHECKING:
    from gateway.observability.metrics.requests import MetricsCollector
    from gateway.observability.metrics.system import ProcessCollector
    from gateway.observability.usage import UsageRecorder


def set_up_metrics(
    outside: GatewayServices, backends: Callable[[], Mapping[str, Backend]], digest: str
) -> tuple[GatewayServices, "MetricsCollector", Callable[[ReloadResult], None]]:
    """The surroundings in which exchanges are counted, the counts, and what counts reloads.

    ``digest`` is the configuration's.
    """
    from gateway.observability.metrics.requests import MetricsCollector  # noqa: PLC0415 - as above
    from gateway.observability.metrics.system import (
        DroppedRecordCollector,
        EngineCollector,
        ReloadCollector,
        ShadowCollector,
        SupportsEngineStats,
    )
    from gateway.observability.metrics.upstream import PoolStats

    def crews() -> Mapping[str, PoolStats]:
        return {name: one for name, one in backends().items() if isinstance(one, PoolStats)}

    def engines() -> Mapping[str, SupportsEngineStats]:
        return {
            name: one for name, one in backends().items() if isinstance(one, SupportsEngineStats)
        }

    metrics = MetricsCollector(outside.observe_request, crews)
    reloads = ReloadCollector(digest, outside.wall_clock)
    shadows = ShadowCollector()
    outside.shadow_manager.add_reporter(shadows.record_shadow)
    metrics.register(reloads)
    metrics.register(shadows)
    metrics.register(EngineCollector(engines))
    metrics.register(DroppedRecordCollector(outside.dropped_counts))
    return replace(outside, observe_request=metrics.record_request), metrics, reloads.record_reload


def set_up_usage(
    told: schema.UsageConfig | None, outside: GatewayServices
) -> tuple[GatewayServices, "UsageRecorder | None"]:
    """The surroundings in which usage is written down, and what writes it, if it is to be."""
    if told is None:
        return outside, None
    ledger = _create_usage_recorder(told, outside)
    lost = {**outside.dropped_counts, "usage_rows": ledger.count_dropped}
    return replace(
        outside,
        observe_request=_chain_observers(outside.observe_request, ledger.record_usage),
        dropped_counts=lost,
    ), ledger


def _create_usage_recorder(told: schema.UsageConfig, outside: GatewayServices) -> "UsageRecorder":
    """What writes the rows, to where they are to be."""
    if told.postgres is not None:
        from gateway.observability.usage_postgres import create_postgres_recorder  # noqa: PLC0415 - it need not be installed

        return create_postgres_recorder(told.postgres.reveal(), told.retention, outside.wall_clock)
    from gateway.observability.usage import SqliteUsageRecorder  # noqa: PLC0415 - nobody else needs its library

    assert told.sqlite is not None  # noqa: S101 - the loader refuses rows without a place
    return SqliteUsageRecorder(told.sqlite, told.retention, outside.wall_clock)


class TelemetrySender(Protocol):
    """What sends something, from a thread of its own."""

    def start(self) -> None:
        """Begin."""

    def close(self, within: float) -> bool:
        """Send what waits, for so many seconds at most, and end; False if it was not all."""


def set_up_exporters(
    told: schema.ObservabilityConfig, outside: GatewayServices, environment: Mapping[str, str]
) -> tuple[GatewayServices, Sequence[TelemetrySender]]:
    """The surroundings in which exchanges are told to collectors, and what sends it."""
    if told.traces is None and told.metrics.push is None:
        return outside, ()
    from gateway.observability.otel_metrics import OtelMetrics  # noqa: PLC0415 - the extra may not be installed
    from gateway.observability.semconv import select_conventions  # noqa: PLC0415 - as above
    from gateway.observability.tracing import (
        MetricExporter,
        SpanExporter,
        TraceSampler,
        build_resource,
    )

    sender, sending = build_resource(environment, os.urandom(8).hex()), list[TelemetrySender]()
    if (traces := told.traces) is not None:
        spans = SpanExporter(
            traces.otlp,
            _build_collector_headers(traces),
            traces.buffer,
            sender,
            select_conventions(environment),
        )
        follower = TraceSampler(
            spans.enqueue,
            share=traces.sample,
            trust=traces.trust,
            now=outside.wall_clock,
            draw=outside.draw,
            random=os.urandom,
        )
        sending.append(spans)
        lost = {**outside.dropped_counts, "traces": spans.count_dropped}
        observe = _chain_observers(outside.observe_request, follower.end_trace)
        outside = replace(outside, observe_request=observe, tracer=follower, dropped_counts=lost)
    if (push := told.metrics.push) is not None:
        figures, now = (
            OtelMetrics(select_conventions(environment), outside.wall_clock()),
            outside.wall_clock,
        )
        sending.append(
            MetricExporter(
                push.otlp,
                _build_collector_headers(push),
                push.interval,
                sender,
                lambda: figures.build_metrics(now()),
            )
        )
        outside = replace(
            outside,
            observe_request=_chain_observers(outside.observe_request, figures.record_request),
        )
    return outside, sending


def _chain_observers(first: RecordObserver, then: RecordObserver) -> RecordObserver:
    def both(record: RequestRecord) -> None:
        first(record)
        then(record)

    return both


def _build_collector_headers(
    told: schema.TracingConfig | schema.OtlpMetricsConfig,
) -> Mapping[str, str]:
    """Of a request to a collector."""
    key = {} if told.auth is None else {"authorization": f"Bearer {told.auth.bearer.reveal()}"}
    return key | {name: value.reveal() for name, value in told.headers.items()}


class ServingState(Protocol):
    """What serves."""

    @property
    def active_snapshots(self) -> Sequence[ConfigSnapshot]:
        """Those that have exchanges, or may have."""

    @property
    def backends(self) -> Mapping[str, Backend]:
        """Those that are asked now, by their names."""

    @property
    def listeners(self) -> Mapping[config_listeners.ListenerId, Listener]:
        """Those that listen now."""


def set_up_process_metrics(
    metrics: "MetricsCollector", served: ServingState, *, vllm: bool
) -> "ProcessCollector":
    """What looks after the process, once it is started; with ``vllm``, figures have its names, too.

    ``metrics`` tells what runs from now on.
    """
    from gateway.observability.metrics.requests import RunningRequestCollector  # noqa: PLC0415 - as above
    from gateway.observability.metrics.system import ProcessCollector, RateLimitCollector
    from gateway.observability.metrics.upstream import PoolStats  # noqa: PLC0415 - as above
    from gateway.observability.metrics.vllm_compat import VllmCollector  # noqa: PLC0415 - as above

    def queued() -> set[str]:
        crews = (one for one in served.backends.values() if isinstance(one, PoolStats))
        return {name for crew in crews for name in crew.queued_request_ids}

    def live() -> Iterator[RequestRecord]:
        for now in served.active_snapshots:
            for server in now.handlers.values():
                yield from (exchange.record for exchange in server.dispatcher.running_requests)

    def fronts() -> Mapping[str, Listener]:
        return {
            config_listeners.listener_name(listener_id): front
            for listener_id, front in served.listeners.items()
        }

    running = RunningRequestCollector(live, queued)
    process = ProcessCollector(fronts)
    metrics.register(RateLimitCollector(lambda: served.active_snapshots[-1].rate_limiter))
    metrics.register(running)
    metrics.register(process)
    if vllm:
        metrics.register(VllmCollector(metrics.collect_stats, running.count_by_phase))
    return process
