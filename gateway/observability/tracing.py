"""OpenTelemetry traces of requests: a SERVER span, and a CLIENT span per attempt at a worker.

By default a client's ``traceparent`` becomes a link, and the request starts a trace of its own:
untrusted clients can neither add spans to a trace nor choose what is sampled. With
``trust_parent``, the request continues the client's trace and follows its sampling flag.

Attribute names are those of the conventions for HTTP and for generative AI. Spans never contain
prompts, responses, keys or error messages of workers.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol
from urllib.parse import urlsplit

from msgspec import Struct, field
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway import __version__
from gateway.observability.record import RequestRecord
from gateway.observability.semconv import (
    FINISH_REASON_NAMES,
    OPERATION_NAMES,
    AttributeValue,
    SemanticConventions,
)
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Headers
from protocols.core.request import AnyRequest, EmbeddingRequest, GenerationRequest

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NO_PARENT: Final = Context()
_NANOSECONDS_PER_SECOND: Final = 1_000_000_000
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_FIRST_SERVER_ERROR: Final = 500
_INT64_LIMIT: Final = 2**63
"""Integers are sent as signed 64-bit numbers."""


class _Attempt(Struct):
    """An attempt at a worker. Its span ends with the request, when its attributes are known."""

    span: Span
    url: str
    backend: str
    model: str
    ended_at: float = 0.0
    """Unix seconds."""
    error: str = ""
    """The class of the error, or ""."""


class RequestTrace(Struct, eq=False):
    """The trace of one request; a ``backends.interfaces.AttemptTrace``."""

    record: RequestRecord
    method: str
    span: Span
    tracer: Tracer
    now: Callable[[], float]
    request: AnyRequest | None = None
    attempts: list[_Attempt] = field(default_factory=list[_Attempt])

    def set_request(self, request: AnyRequest) -> None:
        """See ``backends.interfaces.AttemptTrace``."""
        self.request = request

    def start_attempt(self, url: str) -> Headers:
        """See ``backends.interfaces.AttemptTrace``."""
        record = self.record
        span = self.tracer.start_span(
            url,
            set_span_in_context(self.span, _NO_PARENT),
            SpanKind.CLIENT,
            start_time=_to_nanoseconds(self.now()),
        )
        self.attempts.append(_Attempt(span, url, record.backend, record.model))
        context = span.get_span_context()
        # Not the SDK's inject: it also sets the flag of random trace ids, and OpenTelemetry for
        # Rust (TGI's router, for example) ignores a traceparent with that flag.
        traceparent = f"00-{record.trace_id}-{format_span_id(context.span_id)}-01"
        headers: Headers = (("traceparent", traceparent),)
        state = context.trace_state.to_header()
        return (*headers, ("tracestate", state)) if state else headers

    def end_attempt(self, error: GatewayError | None) -> None:
        """See ``backends.interfaces.AttemptTrace``."""
        attempt = self.attempts[-1]
        if not attempt.ended_at:
            attempt.ended_at = self.now()
            attempt.error = "" if error is None else type(error).__name__

    def end(self, names: SemanticConventions) -> None:
        """Set the attributes of all spans and end them, the SERVER span first.

        The last attempt has the response's attributes; without attempts, the SERVER span has them.
        """
        record, attempts = self.record, self.attempts
        attributes = (
            {}
            if attempts
            else self._build_request_attributes(record.backend, record.model)
            | _build_response_attributes(record)
        )
        self._end_server_span(names.rename_attributes(attributes))
        for number, attempt in enumerate(attempts, 1):
            attributes = self._build_request_attributes(attempt.backend, attempt.model)
            attributes |= _build_response_attributes(record) if number == len(attempts) else {}
            self._end_client_span(attempt, names.rename_attributes(attributes))

    def _end_server_span(self, attributes: Mapping[str, AttributeValue | None]) -> None:
        record, span = self.record, self.span
        span.update_name(_clean_text(f"{self.method} {record.protocol}"))
        span.set_attributes(
            clean_attributes(
                {
                    "http.request.method": self.method,
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
            )
        )
        if record.status >= _FIRST_SERVER_ERROR or record.outcome in ("truncated", "worker_error"):
            span.set_status(StatusCode.ERROR)
        span.end(_to_nanoseconds(record.started_at + record.duration))

    def _end_client_span(
        self, attempt: _Attempt, attributes: Mapping[str, AttributeValue | None]
    ) -> None:
        span, url = attempt.span, urlsplit(attempt.url)
        span.update_name(_clean_text(f"{OPERATION_NAMES[self.record.operation]} {attempt.model}"))
        span.set_attributes(
            clean_attributes(
                {
                    "server.address": url.hostname,
                    "server.port": url.port or _DEFAULT_PORTS[url.scheme],
                    "error.type": attempt.error,
                    **attributes,
                }
            )
        )
        if attempt.error:
            span.set_status(StatusCode.ERROR)
        span.end(_to_nanoseconds(attempt.ended_at))

    def _build_request_attributes(
        self, backend: str, model: str
    ) -> dict[str, AttributeValue | None]:
        """Attributes of the inference request; empty if no model was called.

        Passed-through requests are decoded only in part.
        """
        record, request = self.record, self.request
        if request is None:
            return {}
        attributes: dict[str, AttributeValue | None] = {
            "operation": OPERATION_NAMES[record.operation],
            "backend": backend,
            "model": model,
        }
        if isinstance(request, EmbeddingRequest):
            return attributes | {"dimensions": request.dimensions}
        if not isinstance(request, GenerationRequest):
            return attributes
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


class TracedRequest(Protocol):
    """The parts of an HTTP request that a trace reads."""

    @property
    def method(self) -> str:
        """The HTTP method."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by lower-case name."""


class TraceQueue(Protocol):
    """Where the traces of ended requests wait for their export."""

    def reserve(self) -> bool:
        """Make room for one trace; False if the queue is full: the trace is dropped."""


class RequestTracer:
    """Samples requests and ends their spans when they end. ``now`` gives Unix seconds."""

    def __init__(
        self,
        provider: TracerProvider,
        queue: TraceQueue,
        names: SemanticConventions,
        *,
        trust_parent: bool,
        now: Callable[[], float],
    ) -> None:
        self._tracer = provider.get_tracer("interlingua", __version__)
        self._queue = queue
        self._names = names
        self._trust_parent = trust_parent
        self._now = now
        self._open_traces: dict[str, RequestTrace] = {}
        """By span id."""

    def start_trace(self, record: RequestRecord, http: TracedRequest) -> None:
        """See ``gateway.pipeline.handler.Tracer``."""
        parent = _PROPAGATOR.extract(http.headers, _NO_PARENT) if self._trust_parent else _NO_PARENT
        start_time = _to_nanoseconds(record.started_at)
        span = self._tracer.start_span(http.method, parent, SpanKind.SERVER, start_time=start_time)
        if not span.is_recording():
            return
        if not self._trust_parent:
            client = _PROPAGATOR.extract(http.headers, _NO_PARENT)
            span.add_link(get_current_span(client).get_span_context())
        context = span.get_span_context()
        record.trace_id = format_trace_id(context.trace_id)
        record.span_id = format_span_id(context.span_id)
        self._open_traces[record.span_id] = RequestTrace(
            record, http.method, span, self._tracer, self._now
        )

    def get_trace(self, record: RequestRecord) -> RequestTrace | None:
        """See ``gateway.pipeline.handler.Tracer``."""
        return self._open_traces.get(record.span_id) if record.span_id else None

    def end_trace(self, record: RequestRecord) -> None:
        """End the spans of a request that has ended, if it is sampled; they are then exported."""
        trace = self._open_traces.pop(record.span_id, None) if record.span_id else None
        if trace is not None and self._queue.reserve():
            trace.end(self._names)


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


def _convert_seed(seed: int | None) -> int | None:
    """Wrap a seed to a signed 64-bit number."""
    return None if seed is None else (seed + _INT64_LIMIT) % (2 * _INT64_LIMIT) - _INT64_LIMIT


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS_PER_SECOND)


# The SDK drops an attribute that it cannot encode, and a batch of spans with such a name.


def clean_attributes(
    attributes: Mapping[str, AttributeValue | None],
) -> dict[str, AttributeValue]:
    """Make values encodable; None, "" and empty values are omitted."""
    return {
        name: _clean_value(value)
        for name, value in attributes.items()
        if value is not None and value not in ("", ())
    }


def _clean_value(value: AttributeValue) -> AttributeValue:
    match value:
        case bool() | float():
            return value
        case int():
            return max(-_INT64_LIMIT, min(value, _INT64_LIMIT - 1))
        case tuple():
            return tuple(map(_clean_text, value))
        case _:
            return _clean_text(value)


def _clean_text(text: str) -> str:
    """Replace what UTF-8 cannot encode: a path may be any bytes."""
    return text.encode(errors="replace").decode()
