"""OpenTelemetry traces: W3C Trace Context, sampling, spans and OTLP export.

By default a client's ``traceparent`` becomes a link, and the request starts a trace of its own:
untrusted clients can neither add spans to a trace nor choose what is sampled. With
``trust_parent``, the request continues the client's trace and follows its sampling flag.
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

# W3C Trace Context of a request. Pure.

_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")
_INVALID_IDS: Final = frozenset({"0" * 32, "0" * 16})
_SAMPLED_FLAG: Final = 1


class ParentSpan(Struct, frozen=True):
    """The client's span. ``tracestate`` is vendor data, passed on unchanged."""

    trace_id: str
    span_id: str
    sampled: bool
    tracestate: str = ""


def parse_traceparent(headers: Mapping[str, str]) -> ParentSpan | None:
    """Parse the parent span of a request; None if the header is absent or invalid.

    https://www.w3.org/TR/trace-context/#traceparent-header: the version ff is none, version 00 has
    four parts, and an id of zeros only is none.
    """
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if (version == "00" and more) or trace in _INVALID_IDS or span in _INVALID_IDS:
        return None
    state = headers.get("tracestate", "")
    tracestate = state if _TRACESTATE.fullmatch(state) else ""
    return ParentSpan(trace, span, bool(int(flags, 16) & _SAMPLED_FLAG), tracestate)


_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
"""Bytes of an id, as is ``_TRACE_ID_BYTES``."""


class AttemptSpan(Struct):
    """An attempt at a worker. Times are in Unix seconds."""

    span_id: str
    url: str
    backend: str
    model: str
    started_at: float
    ended_at: float = 0.0
    error: str = ""
    """The class of the error, or ""."""


class RequestTrace(Struct, eq=False):
    """The trace of one request; a ``backends.interfaces.AttemptTrace``."""

    record: RequestRecord
    method: str
    now: Callable[[], float]
    span_id: Callable[[], str]
    linked_parent: ParentSpan | None = None
    """The client's span, if this trace is not a part of it."""
    parent: ParentSpan | None = None
    """The client's span that this trace continues."""
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
        headers: Headers = (("traceparent", f"00-{record.trace_id}-{one.span_id}-01"),)
        state = self.parent.tracestate if self.parent is not None else ""
        return (*headers, ("tracestate", state)) if state else headers

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
    """Samples requests and exports their traces when they end.

    ``now`` gives Unix seconds, ``draw`` a number in [0, 1), ``random`` a number of random bytes.
    """

    def __init__(
        self,
        export: Callable[[RequestTrace], None],
        *,
        sample_rate: float,
        trust_parent: bool,
        now: Callable[[], float],
        draw: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self._export = export
        self._sample_rate = sample_rate
        self._trust_parent = trust_parent
        self._now = now
        self._draw = draw
        self._random = random
        self._open_traces: dict[str, RequestTrace] = {}
        """By span id."""

    def start_trace(self, record: RequestRecord, http: TracedRequest) -> None:
        """See ``gateway.pipeline.handler.Tracer``."""
        if not self._trust_parent:
            if self._draw() >= self._sample_rate:
                return
            linked, parent = parse_traceparent(http.headers), None
        else:
            linked, parent = None, parse_traceparent(http.headers)
            if not (self._draw() < self._sample_rate if parent is None else parent.sampled):
                return
        record.trace_id = self._random(_TRACE_ID_BYTES).hex() if parent is None else parent.trace_id
        record.span_id = self._make_span_id()
        self._open_traces[record.span_id] = RequestTrace(
            record, http.method, self._now, self._make_span_id, linked, parent
        )

    def get_trace(self, record: RequestRecord) -> RequestTrace | None:
        """See ``gateway.pipeline.handler.Tracer``."""
        return self._open_traces.get(record.span_id) if record.span_id else None

    def end_trace(self, record: RequestRecord) -> None:
        """Export the trace of a request that has ended, if it is sampled."""
        if record.span_id and (trace := self._open_traces.pop(record.span_id, None)) is not None:
            self._export(trace)

    def _make_span_id(self) -> str:
        return self._random(_SPAN_ID_BYTES).hex()


# Spans of a finished request: a SERVER span, and a CLIENT span per attempt. Attribute names are
# those of the conventions for HTTP and for generative AI. Spans never contain prompts, responses,
# keys or error messages of workers.

_NANOSECONDS_PER_SECOND: Final = 1_000_000_000
_REMOTE_PARENT_FLAGS: Final = 0x300
"""The parent span belongs to another process."""
_LOCAL_PARENT_FLAGS: Final = 0x100
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_FIRST_SERVER_ERROR: Final = 500
_INT64_LIMIT: Final = 2**63
"""Integers are sent as signed 64-bit numbers."""


def encode_attributes(attributes: Mapping[str, AttributeValue | None]) -> Iterable[KeyValue]:
    """Encode attributes; None, "" and empty values are omitted."""
    return (
        KeyValue(key=name, value=_encode_value(value))
        for name, value in attributes.items()
        if value not in (None, "", ())
    )


def build_spans(trace: RequestTrace, names: SemanticConventions) -> Iterator[Span]:
    """Build the spans of a request, the SERVER span first.

    The last attempt has the response's attributes; without attempts, the SERVER span has them.
    """
    record, attempts = trace.record, trace.attempts
    local = (
        {}
        if attempts
        else _build_request_attributes(trace, record.backend, record.model)
        | _build_response_attributes(record)
    )
    yield _build_server_span(trace, names.rename_attributes(local))
    for number, one in enumerate(attempts, 1):
        attributes = _build_request_attributes(trace, one.backend, one.model)
        attributes |= _build_response_attributes(record) if number == len(attempts) else {}
        yield _build_client_span(trace, one, names.rename_attributes(attributes))


def _build_server_span(
    trace: RequestTrace, attributes: Mapping[str, AttributeValue | None]
) -> Span:
    record, remote = trace.record, trace.parent
    span = Span(
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
                **attributes,
            }
        ),
        links=[] if trace.linked_parent is None else [_build_link(trace.linked_parent)],
    )
    if record.status >= _FIRST_SERVER_ERROR or record.outcome in ("truncated", "worker_error"):
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR))
    return span


def _build_client_span(
    trace: RequestTrace, one: AttemptSpan, attributes: Mapping[str, AttributeValue | None]
) -> Span:
    record, url = trace.record, urlsplit(one.url)
    operation = OPERATION_NAMES[record.operation]
    span = Span(
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
                **attributes,
            }
        ),
    )
    if one.error:
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR))
    return span


def _build_request_attributes(
    trace: RequestTrace, backend: str, model: str
) -> dict[str, AttributeValue | None]:
    """Attributes of the inference request; empty if no model was called.

    Passed-through requests are decoded only in part.
    """
    record, request = trace.record, trace.request
    if request is None:
        return {}
    attributes: dict[str, AttributeValue | None] = {
        "operation": OPERATION_NAMES[record.operation],
        "backend": backend,
        "model": model,
    }
    if not isinstance(request, GenerationRequest):
        return attributes | {"dimensions": request.dimensions}
    sampling = request.sampling
    return attributes | {
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
    """Attributes of the response."""
    usage, first = record.usage, record.first_token
    attributes: dict[str, AttributeValue | None] = {
        "finish_reasons": tuple(FINISH_REASON_NAMES.get(one, one) for one in record.finish_reasons),
        "first_token": first,
    }
    if usage is None:
        return attributes
    return attributes | {
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
    """Wrap a seed to a signed 64-bit number."""
    return None if seed is None else (seed + _INT64_LIMIT) % (2 * _INT64_LIMIT) - _INT64_LIMIT


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS_PER_SECOND)


def _clean_text(text: str) -> str:
    """Replace what UTF-8 cannot encode: a path may be any bytes."""
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


# Export of traces and metrics from background threads: OTLP over HTTP with protobuf. Queues are
# bounded and adding never blocks. A collector that is busy (429, 502, 503, 504) or unreachable gets
# three attempts in all; then the data is dropped and counted.

log = logging.getLogger("interlingua")

_EXPORT_TIMEOUT: Final = 5.0
"""Seconds for each step of a collector's response."""
_MAX_ATTEMPTS: Final = 3
_RETRY_DELAY: Final = 1.0
"""Seconds between attempts."""
_SPAN_BATCH_DELAY: Final = 1.0
"""Seconds in which traces are collected into a batch."""
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
    """A protobuf message."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's own name
        """Serialize the message."""


def build_resource(environment: Mapping[str, str], instance: str) -> Resource:
    """The OpenTelemetry resource; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES extend it."""
    entries = environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    pairs = (entry.partition("=") for entry in entries)
    attributes: dict[str, AttributeValue | None] = {
        "service.name": "interlingua",
        "service.version": __version__,
        "service.instance.id": instance,
        **{name.strip(): value.strip() for name, equals, value in pairs if equals},
    }
    if name := environment.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = name
    return Resource(attributes=encode_attributes(attributes))


class OtlpClient:
    """Sends messages to one path of a collector; no more retries once ``closing`` is set."""

    def __init__(self, url: str, headers: Mapping[str, str], closing: threading.Event) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/x-protobuf"}
        self._closing = closing
        self._healthy = True
        """Whether the last message was accepted, as logged."""

    def send(self, message: ProtobufMessage) -> bool:
        """Send a message; returns whether the collector accepted it."""
        data = message.SerializeToString()
        failure = ""
        for number in range(_MAX_ATTEMPTS):
            if number and self._closing.wait(_RETRY_DELAY):
                break
            failure, retryable = self._post(data)
            if not retryable:
                break
        self._log_change(failure)
        return not failure

    def _post(self, data: bytes) -> tuple[str, bool]:
        """Post once; returns the failure or "", and whether it is retryable."""
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

    def _log_change(self, failure: str) -> None:
        """Log when a collector fails or recovers."""
        if failure and self._healthy:
            log.warning("the collector %s accepts nothing: %s", self._url, failure)
        elif not failure and not self._healthy:
            log.warning("the collector %s accepts data again", self._url)
        self._healthy = not failure


class SpanExporter:
    """Exports traces in batches of one second."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        max_waiting: int,
        resource: Resource,
        semconv: SemanticConventions,
    ) -> None:
        """At most ``max_waiting`` traces are queued."""
        self._writer = BackgroundWriter[RequestTrace](
            "traces", max_waiting, self._export_batch, _SPAN_BATCH_DELAY
        )
        self._client = OtlpClient(f"{url}/v1/traces", headers, self._writer.closing)
        self._resource = resource
        self._semconv = semconv
        self.enqueue: Callable[[RequestTrace], None] = self._writer.enqueue
        """Queue a trace; it must not change afterwards."""
        self.start = self._writer.start
        self.close = self._writer.close

    def count_dropped(self) -> int:
        """The number of dropped traces."""
        return self._writer.dropped

    def _export_batch(self, batch: Sequence[RequestTrace]) -> int:
        scope = ScopeSpans(
            scope=_INSTRUMENTATION_SCOPE,
            spans=chain.from_iterable(build_spans(one, self._semconv) for one in batch),
        )
        resource_spans = ResourceSpans(resource=self._resource, scope_spans=[scope])
        accepted = self._client.send(ExportTraceServiceRequest(resource_spans=[resource_spans]))
        return 0 if accepted else len(batch)


class MetricExporter:
    """Exports metrics at an interval and once at the end."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        interval: float,
        resource: Resource,
        collect_metrics: Callable[[], Iterable[Metric]],
    ) -> None:
        """``collect_metrics`` is called from the exporter's thread."""
        self._closing = threading.Event()
        self._client = OtlpClient(f"{url}/v1/metrics", headers, self._closing)
        self._interval = interval
        self._resource = resource
        self._collect_metrics = collect_metrics
        self._thread = threading.Thread(
            target=self._export_periodically, name="metrics", daemon=True
        )
        self.start = self._thread.start

    def close(self, within: float) -> bool:
        """Export a last time within ``within`` seconds; False if it took longer."""
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
        resource_metrics = ResourceMetrics(resource=self._resource, scope_metrics=[scope])
        self._client.send(ExportMetricsServiceRequest(resource_metrics=[resource_metrics]))
