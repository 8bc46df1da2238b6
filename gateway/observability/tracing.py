"""Exchanges that are traced, as they come about. All that a request without a trace costs is here.

A client's word for its trace is linked to, and the exchange is the first span of a trace of its
own: who may not be trusted can neither fill a trace with spans nor choose what is sampled. Where it
is trusted, the exchange goes on in its trace, and is sampled as it says.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import httpx
from msgspec import Struct, field
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from gateway import __version__
from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import (
    FINISH_REASON_NAMES,
    OPERATION_NAMES,
    AttributeValue,
    SemanticConventions,
)
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Headers
from protocols.core.request import GenerationRequest, Request

# What a client says of the trace that its request is part of: W3C Trace Context. Pure.

_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_INVALID_IDS: Final = frozenset({"0" * 32, "0" * 16})
_SAMPLED_FLAG: Final = 1


class ParentSpan(Struct, frozen=True):
    """A span of the client's. ``state`` is what others have to say of its trace."""

    trace_id: str
    span_id: str
    sampled: bool
    tracestate: str = ""


def parse_traceparent(headers: Mapping[str, str]) -> ParentSpan | None:
    """The span that the request is part of; None where there is none, or it is told wrongly.

    https://www.w3.org/TR/trace-context/#traceparent-header: the version ff is none, version 00 has
    four parts, and an id of zeros only is none.
    """
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if (version == "00" and more) or trace in _INVALID_IDS or span in _INVALID_IDS:
        return None
    state = headers.get("tracestate", "")
    fit = state if _TRACESTATE.fullmatch(state) else ""
    return ParentSpan(trace, span, bool(int(flags, 16) & _SAMPLED_FLAG), fit)


_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
"""Bytes of an id."""


class AttemptSpan(Struct):
    """A worker was asked. Times are in Unix seconds."""

    span_id: str
    url: str
    backend: str
    model: str
    started_at: float
    ended_at: float = 0.0
    error: str = ""
    """The class of what it failed with."""


class RequestTrace(Struct, eq=False):
    """What is known of one exchange; a ``backends.interfaces.AttemptTrace``."""

    record: RequestRecord
    method: str
    now: Callable[[], float]
    span_id: Callable[[], str]
    linked_parent: ParentSpan | None = None
    """What the client says of a trace, where that is another."""
    parent: ParentSpan | None = None
    """What this is part of."""
    request: Request | None = None
    attempts: list[AttemptSpan] = field(default_factory=list[AttemptSpan])

    def set_request(self, request: Request) -> None:
        """See ``backends.interfaces.AttemptTrace``."""
        self.request = request

    def start_attempt(self, url: str) -> Headers:
        """See ``backends.interfaces.AttemptTrace``."""
        record = self.record
        one = AttemptSpan(self.span_id(), url, record.backend, record.model, self.now())
        self.attempts.append(one)
        told = (("traceparent", f"00-{record.trace_id}-{one.span_id}-01"),)
        state = self.parent.tracestate if self.parent is not None else ""
        return (*told, ("tracestate", state)) if state else told

    def end_attempt(self, error: GatewayError | None) -> None:
        """See ``backends.interfaces.AttemptTrace``."""
        one = self.attempts[-1]
        if not one.ended_at:
            one.ended_at = self.now()
            one.error = "" if error is None else type(error).__name__


class TracedRequest(Protocol):
    """The parts of an HTTP request that a trace reads."""

    @property
    def method(self) -> str:
        """The HTTP method."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by lower-case name."""


class TraceSampler:
    """Chooses exchanges by ``share``, and puts those that have ended where they are sent from.

    ``now`` gives Unix seconds, ``draw`` a number in [0, 1) and ``random`` so many random bytes.
    """

    def __init__(
        self,
        put: Callable[[RequestTrace], None],
        *,
        share: float,
        trust: bool,
        now: Callable[[], float],
        draw: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self._export = put
        self._sample_rate = share
        self._trust_parent = trust
        self._now = now
        self._draw = draw
        self._random = random
        self._open_traces: dict[str, RequestTrace] = {}
        """By the span's id."""

    def start_trace(self, record: RequestRecord, http: TracedRequest) -> None:
        """See ``gateway.pipeline.handler.Tracer``."""
        if not self._trust_parent:
            if self._draw() >= self._sample_rate:
                return
            said, followed = parse_traceparent(http.headers), None
        else:
            said, followed = None, parse_traceparent(http.headers)
            if not (self._draw() < self._sample_rate if followed is None else followed.sampled):
                return
        record.trace_id = (
            self._random(_TRACE_ID_BYTES).hex() if followed is None else followed.trace_id
        )
        record.span_id = self._make_span_id()
        self._open_traces[record.span_id] = RequestTrace(
            record, http.method, self._now, self._make_span_id, said, followed
        )

    def get_trace(self, record: RequestRecord) -> RequestTrace | None:
        """See ``gateway.pipeline.handler.Tracer``."""
        return self._open_traces.get(record.span_id) if record.span_id else None

    def end_trace(self, record: RequestRecord) -> None:
        """An exchange has ended."""
        if record.span_id and (trace := self._open_traces.pop(record.span_id, None)) is not None:
            self._export(trace)

    def _make_span_id(self) -> str:
        return self._random(_SPAN_ID_BYTES).hex()


# What is told of an exchange that is over: a SERVER span, and a CLIENT span for each try.
#
# The names are those of the conventions for HTTP, and of a table for generative models. Never a
# prompt, an answer, a key or what a worker said.

_NANOSECONDS_PER_SECOND: Final = 1_000_000_000
_REMOTE_PARENT_FLAGS: Final = 0x300
"""It is known whether the parent is another process's, and it is."""
_LOCAL_PARENT_FLAGS: Final = 0x100
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_FIRST_SERVER_ERROR: Final = 500
_INT64_LIMIT: Final = 2**63
"""Whole numbers are sent in 64 bits, with their sign."""


def encode_attributes(told: Mapping[str, AttributeValue | None]) -> Iterable[KeyValue]:
    """As they are sent; what is None, "" or empty says nothing."""
    return (
        KeyValue(key=name, value=_encode_value(value))
        for name, value in told.items()
        if value not in (None, "", ())
    )


def build_spans(trace: RequestTrace, names: SemanticConventions) -> Iterator[Span]:
    """Those of one exchange, its own first. What was answered is told by who answered."""
    record, tries = trace.record, trace.attempts
    local = (
        {}
        if tries
        else _build_request_attributes(trace, record.backend, record.model)
        | _build_response_attributes(record)
    )
    yield _build_server_span(trace, names.rename_attributes(local))
    for number, one in enumerate(tries, 1):
        told = _build_request_attributes(trace, one.backend, one.model)
        told |= _build_response_attributes(record) if number == len(tries) else {}
        yield _build_client_span(trace, one, names.rename_attributes(told))


def _build_server_span(trace: RequestTrace, told: Mapping[str, AttributeValue | None]) -> Span:
    record, remote = trace.record, trace.parent
    made = Span(
        trace_id=bytes.fromhex(record.trace_id),
        span_id=bytes.fromhex(record.span_id),
        trace_state="" if remote is None else remote.tracestate,
        parent_span_id=b"" if remote is None else bytes.fromhex(remote.span_id),
        flags=_SAMPLED_FLAG | (_REMOTE_PARENT_FLAGS if remote else _LOCAL_PARENT_FLAGS),
        name=_clean_text(f"{trace.method} {record.protocol}"),
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=_to_nanoseconds(record.started_at),
        end_time_unix_nano=_to_nanoseconds(record.started_at + record.duration),
        attributes=encode_attributes(
            {
                "http.request.method": trace.method,
                "url.path": record.path,
                "http.response.status_code": record.status or None,
                "error.type": record.error,
                "interlingua.request.id": record.id,
                "interlingua.protocol": record.protocol,
                "interlingua.model": record.model,
                "interlingua.version": record.version,
                "interlingua.backend": record.backend,
                "interlingua.outcome": record.outcome,
                "interlingua.fallback_from": record.fallback_from,
                **told,
            }
        ),
        links=[] if trace.linked_parent is None else [_build_link(trace.linked_parent)],
    )
    if record.status >= _FIRST_SERVER_ERROR or record.outcome in ("truncated", "worker_error"):
        made.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR))
    return made


def _build_client_span(
    trace: RequestTrace, one: AttemptSpan, told: Mapping[str, AttributeValue | None]
) -> Span:
    record, url = trace.record, urlsplit(one.url)
    operation = OPERATION_NAMES[record.operation]
    made = Span(
        trace_id=bytes.fromhex(record.trace_id),
        span_id=bytes.fromhex(one.span_id),
        parent_span_id=bytes.fromhex(record.span_id),
        flags=_SAMPLED_FLAG | _LOCAL_PARENT_FLAGS,
        name=_clean_text(f"{operation} {one.model}"),
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=_to_nanoseconds(one.started_at),
        end_time_unix_nano=_to_nanoseconds(one.ended_at),
        attributes=encode_attributes(
            {
                "server.address": url.hostname,
                "server.port": url.port or _DEFAULT_PORTS[url.scheme],
                "error.type": one.error,
                **told,
            }
        ),
    )
    if one.error:
        made.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR))
    return made


def _build_request_attributes(
    trace: RequestTrace, backend: str, model: str
) -> dict[str, AttributeValue | None]:
    """What was asked of a model; nothing where nothing was.

    Of a call that is passed on as it is, little is read.
    """
    record, request = trace.record, trace.request
    if request is None:
        return {}
    told: dict[str, AttributeValue | None] = {
        "operation": OPERATION_NAMES[record.operation],
        "backend": backend,
        "model": model,
    }
    if not isinstance(request, GenerationRequest):
        return told | {"dimensions": request.dimensions}
    sampling = request.sampling
    return told | {
        "stream": record.stream or None,
        "n": request.n if request.n != 1 else None,
        "max_tokens": request.stopping.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": _convert_seed(sampling.seed),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }


def _build_response_attributes(record: RequestRecord) -> dict[str, AttributeValue | None]:
    """What was answered."""
    usage, first = record.usage, record.first_token
    told: dict[str, AttributeValue | None] = {
        "finishes": tuple(FINISH_REASON_NAMES.get(one, one) for one in record.finish_reasons),
        "first_token": first,
    }
    if usage is None:
        return told
    return told | {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def _build_link(linked: ParentSpan) -> Span.Link:
    return Span.Link(
        trace_id=bytes.fromhex(linked.trace_id),
        span_id=bytes.fromhex(linked.span_id),
        trace_state=linked.tracestate,
        flags=_REMOTE_PARENT_FLAGS | linked.sampled,
    )


def _convert_seed(seed: int | None) -> int | None:
    """As a signed number of 64 bits, which is what there is room for."""
    return None if seed is None else (seed + _INT64_LIMIT) % (2 * _INT64_LIMIT) - _INT64_LIMIT


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS_PER_SECOND)


def _clean_text(text: str) -> str:
    """As UTF-8 can say it: a path may be any bytes."""
    return text.encode(errors="replace").decode()


def _encode_value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=max(-_INT64_LIMIT, min(value, _INT64_LIMIT - 1)))
        case float():
            return AnyValue(double_value=value)
        case tuple():
            return AnyValue(array_value=ArrayValue(values=map(_encode_value, value)))
        case _:
            return AnyValue(string_value=_clean_text(str(value)))


# What sends traces and figures to collectors, from threads of its own: OTLP over HTTP, protobuf.
#
# Whoever gives something to send never waits, and at most so many things wait to be sent. A collector
# that is busy (429, 502, 503, 504) or can't be reached is asked again, three times in all; what it
# does not take then is given up and counted.

log = logging.getLogger("interlingua")

_EXPORT_TIMEOUT: Final = 5.0
"""Seconds that a collector has for each step of an answer."""
_MAX_ATTEMPTS: Final = 3
_RETRY_DELAY: Final = 1.0
"""Seconds before another try."""
_SPAN_BATCH_DELAY: Final = 1.0
"""Seconds in which exchanges are gathered to be sent together."""
_RETRYABLE_STATUSES: Final = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
_INSTRUMENTATION_SCOPE: Final = InstrumentationScope(name="interlingua", version=__version__)


class ProtobufMessage(Protocol):
    """What protobuf makes bytes of."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's own name
        """The bytes."""


def build_resource(environment: Mapping[str, str], instance: str) -> Resource:
    """Who sends: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may say more."""
    said = environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    pairs = (one.partition("=") for one in said)
    told: dict[str, AttributeValue | None] = {
        "service.name": "interlingua",
        "service.version": __version__,
        "service.instance.id": instance,
        **{name.strip(): value.strip() for name, equals, value in pairs if equals},
    }
    if name := environment.get("OTEL_SERVICE_NAME"):
        told["service.name"] = name
    return Resource(attributes=encode_attributes(told))


class OtlpClient:
    """Sends messages to one path of a collector. It does not wait any more once ``closing`` is."""

    def __init__(self, url: str, headers: Mapping[str, str], closing: threading.Event) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/x-protobuf"}
        self._closing = closing
        self._healthy = True
        """Whether the last was taken, as the log knows."""

    def send(self, message: ProtobufMessage) -> bool:
        """Whether it was taken."""
        data = message.SerializeToString()
        why = ""
        for number in range(_MAX_ATTEMPTS):
            if number and self._closing.wait(_RETRY_DELAY):
                break
            why, again = self._post(data)
            if not again:
                break
        self._log_change(why)
        return not why

    def _post(self, data: bytes) -> tuple[str, bool]:
        """Why it was not taken, or "", and whether it may be another time."""
        try:
            answer = httpx.post(
                self._url,
                content=data,
                headers=self._headers,
                timeout=_EXPORT_TIMEOUT,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            return type(error).__name__, True
        if answer.is_success:
            return "", False
        return str(answer.status_code), answer.status_code in _RETRYABLE_STATUSES

    def _log_change(self, why: str) -> None:
        """Say it, where it has changed."""
        if why and self._healthy:
            log.warning("%s takes nothing now: %s", self._url, why)
        elif not why and not self._healthy:
            log.warning("%s takes what it is sent again", self._url)
        self._healthy = not why


class SpanExporter:
    """Sends traces that are put to it, those of a second together."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        most: int,
        sender: Resource,
        names: SemanticConventions,
    ) -> None:
        """So many exchanges may wait at ``most``."""
        self._writer = BackgroundWriter[RequestTrace](
            "traces", most, self._export_batch, _SPAN_BATCH_DELAY
        )
        self._client = OtlpClient(f"{url}/v1/traces", headers, self._writer.closing)
        self._resource = sender
        self._semconv = names
        self.enqueue: Callable[[RequestTrace], None] = self._writer.enqueue
        """Send this one; it must not change any more."""
        self.start = self._writer.start
        self.close = self._writer.close

    def count_dropped(self) -> int:
        """How many exchanges were not told."""
        return self._writer.dropped

    def _export_batch(self, batch: Sequence[RequestTrace]) -> int:
        scope = ScopeSpans(
            scope=_INSTRUMENTATION_SCOPE,
            spans=chain.from_iterable(build_spans(one, self._semconv) for one in batch),
        )
        told = ResourceSpans(resource=self._resource, scope_spans=[scope])
        taken = self._client.send(ExportTraceServiceRequest(resource_spans=[told]))
        return 0 if taken else len(batch)


class MetricExporter:
    """Sends what exchanges come to, every so many seconds and at the end."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        every: float,
        sender: Resource,
        figures: Callable[[], Iterable[Metric]],
    ) -> None:
        """``figures`` gives them, from any thread."""
        self._closing = threading.Event()
        self._client = OtlpClient(f"{url}/v1/metrics", headers, self._closing)
        self._interval = every
        self._resource = sender
        self._collect_metrics = figures
        self._thread = threading.Thread(
            target=self._export_periodically, name="figures", daemon=True
        )
        self.start = self._thread.start

    def close(self, within: float) -> bool:
        """Send them a last time, for so many seconds at most; False if it took longer."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(within)
        return not self._thread.is_alive()

    def _export_periodically(self) -> None:
        while not self._closing.wait(self._interval):
            self._export_metrics()
        self._export_metrics()

    def _export_metrics(self) -> None:
        scope = ScopeMetrics(scope=_INSTRUMENTATION_SCOPE, metrics=self._collect_metrics())
        told = ResourceMetrics(resource=self._resource, scope_metrics=[scope])
        self._client.send(ExportMetricsServiceRequest(resource_metrics=[told]))
