"""What counts exchanges, keeps their usage and tells of them, where that is configured."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from gateway import config as c
from gateway.core.ports import Backend
from gateway.front import Front
from gateway.reload import Told
from gateway.server import Surroundings
from gateway.snapshot import Snapshot
from gateway.telemetry import Observer, Record

if TYPE_CHECKING:
    from gateway.metrics import Metrics
    from gateway.metrics.process import Process
    from gateway.recording.ledger import Book


def counted(
    outside: Surroundings, backends: Callable[[], Mapping[str, Backend]], digest: str
) -> tuple[Surroundings, "Metrics", Callable[[Told], None]]:
    """The surroundings in which exchanges are counted, the counts, and what counts reloads.

    ``digest`` is the configuration's.
    """
    from gateway.engines import Engine, Engines  # noqa: PLC0415 - nobody else needs its library
    from gateway.metrics import Crew, Metrics  # noqa: PLC0415 - as above
    from gateway.recording.lost import Lost  # noqa: PLC0415 - as above
    from gateway.reloads import Reloads  # noqa: PLC0415 - as above
    from gateway.shadow_counts import ShadowCounts  # noqa: PLC0415 - as above

    def crews() -> Mapping[str, Crew]:
        return {name: one for name, one in backends().items() if isinstance(one, Crew)}

    def engines() -> Mapping[str, Engine]:
        return {name: one for name, one in backends().items() if isinstance(one, Engine)}

    metrics = Metrics(outside.observe_request, crews)
    reloads = Reloads(digest, outside.wall_clock)
    shadows = ShadowCounts()
    outside.shadow_manager.add_reporter(shadows.record_shadow)
    metrics.register(reloads)
    metrics.register(shadows)
    metrics.register(Engines(engines))
    metrics.register(Lost(outside.dropped_counts))
    return replace(outside, observe_request=metrics.record_request), metrics, reloads.record_reload


def kept(told: c.UsageRows | None, outside: Surroundings) -> tuple[Surroundings, "Book | None"]:
    """The surroundings in which usage is written down, and what writes it, if it is to be."""
    if told is None:
        return outside, None
    ledger = _book(told, outside)
    lost = {**outside.dropped_counts, "usage_rows": ledger.count_dropped}
    return replace(
        outside,
        observe_request=_both(outside.observe_request, ledger.record_usage),
        dropped_counts=lost,
    ), ledger


def _book(told: c.UsageRows, outside: Surroundings) -> "Book":
    """What writes the rows, to where they are to be."""
    if told.postgres is not None:
        from gateway.recording.postgres import book  # noqa: PLC0415 - it need not be installed

        return book(told.postgres.reveal(), told.keep, outside.wall_clock)
    from gateway.recording.ledger import Ledger  # noqa: PLC0415 - nobody else needs its library

    assert told.sqlite is not None  # noqa: S101 - the loader refuses rows without a place
    return Ledger(told.sqlite, told.keep, outside.wall_clock)


class Sending(Protocol):
    """What sends something, from a thread of its own."""

    def start(self) -> None:
        """Begin."""

    def close(self, within: float) -> bool:
        """Send what waits, for so many seconds at most, and end; False if it was not all."""


def exported(
    told: c.Observe, outside: Surroundings, environment: Mapping[str, str]
) -> tuple[Surroundings, Sequence[Sending]]:
    """The surroundings in which exchanges are told to collectors, and what sends it."""
    if told.traces is None and told.metrics.push is None:
        return outside, ()
    from gateway.tracing.figures import Figures  # noqa: PLC0415 - the extra may not be installed
    from gateway.tracing.follow import Follower  # noqa: PLC0415 - as above
    from gateway.tracing.names import names  # noqa: PLC0415 - as above
    from gateway.tracing.sending import Push, Spans, resource  # noqa: PLC0415 - as above

    sender, sending = resource(environment, os.urandom(8).hex()), list[Sending]()
    if (traces := told.traces) is not None:
        spans = Spans(traces.otlp, _headers(traces), traces.buffer, sender, names(environment))
        follower = Follower(
            spans.enqueue,
            share=traces.sample,
            trust=traces.trust,
            now=outside.wall_clock,
            draw=outside.draw,
            random=os.urandom,
        )
        sending.append(spans)
        lost = {**outside.dropped_counts, "traces": spans.count_dropped}
        observe = _both(outside.observe_request, follower.end_trace)
        outside = replace(outside, observe_request=observe, tracer=follower, dropped_counts=lost)
    if (push := told.metrics.push) is not None:
        figures, now = Figures(names(environment), outside.wall_clock()), outside.wall_clock
        sending.append(
            Push(
                push.otlp,
                _headers(push),
                push.every,
                sender,
                lambda: figures.build_metrics(now()),
            )
        )
        outside = replace(
            outside, observe_request=_both(outside.observe_request, figures.record_request)
        )
    return outside, sending


def _both(first: Observer, then: Observer) -> Observer:
    def both(record: Record) -> None:
        first(record)
        then(record)

    return both


def _headers(told: c.Traces | c.Push) -> Mapping[str, str]:
    """Of a request to a collector."""
    key = {} if told.auth is None else {"authorization": f"Bearer {told.auth.bearer.reveal()}"}
    return key | {name: value.reveal() for name, value in told.headers.items()}


class Served(Protocol):
    """What serves."""

    @property
    def active_snapshots(self) -> Sequence[Snapshot]:
        """Those that have exchanges, or may have."""

    @property
    def backends(self) -> Mapping[str, Backend]:
        """Those that are asked now, by their names."""

    @property
    def listeners(self) -> Mapping[c.ListenerId, Front]:
        """Those that listen now."""


def overseen(metrics: "Metrics", served: Served, *, vllm: bool) -> "Process":
    """What looks after the process, once it is started; with ``vllm``, figures have its names, too.

    ``metrics`` tells what runs from now on.
    """
    from gateway.limits.counts import LimitCounts  # noqa: PLC0415 - nobody else needs its library
    from gateway.metrics import Crew  # noqa: PLC0415 - as above
    from gateway.metrics.process import Process  # noqa: PLC0415 - as above
    from gateway.metrics.running import Running  # noqa: PLC0415 - as above
    from gateway.metrics.vllm import Vllm  # noqa: PLC0415 - as above

    def queued() -> set[str]:
        crews = (one for one in served.backends.values() if isinstance(one, Crew))
        return {name for crew in crews for name in crew.queued_request_ids}

    def live() -> Iterator[Record]:
        for now in served.active_snapshots:
            for server in now.handlers.values():
                yield from (exchange.record for exchange in server.dispatcher.running_requests)

    def fronts() -> Mapping[str, Front]:
        return {
            c.listener_name(listener_id): front for listener_id, front in served.listeners.items()
        }

    running = Running(live, queued)
    process = Process(fronts)
    metrics.register(LimitCounts(lambda: served.active_snapshots[-1].rate_limiter))
    metrics.register(running)
    metrics.register(process)
    if vllm:
        metrics.register(Vllm(metrics.collect_stats, running.count_by_phase))
    return process
