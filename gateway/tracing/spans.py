"""What is told of an exchange that is over: a SERVER span, and a CLIENT span for each try.

The names are those of the conventions for HTTP, and of a table for generative models. Never a
prompt, an answer, a key or what a worker said.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.telemetry import RequestRecord
from gateway.tracing.follow import AttemptSpan, RequestTrace
from gateway.tracing.names import (
    FINISH_REASON_NAMES,
    OPERATION_NAMES,
    AttributeValue,
    SemanticConventions,
)
from gateway.tracing.parents import ParentSpan
from protocols.core.request import GenerationRequest

_NANOSECONDS_PER_SECOND: Final = 1_000_000_000
_SAMPLED_FLAG: Final = 1
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
        trace_id=bytes.fromhex(record.trace),
        span_id=bytes.fromhex(record.span),
        trace_state="" if remote is None else remote.tracestate,
        parent_span_id=b"" if remote is None else bytes.fromhex(remote.span_id),
        flags=_SAMPLED_FLAG | (_REMOTE_PARENT_FLAGS if remote else _LOCAL_PARENT_FLAGS),
        name=_clean_text(f"{trace.method} {record.dialect}"),
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=_to_nanoseconds(record.began),
        end_time_unix_nano=_to_nanoseconds(record.began + record.duration),
        attributes=encode_attributes(
            {
                "http.request.method": trace.method,
                "url.path": record.path,
                "http.response.status_code": record.status or None,
                "error.type": record.error,
                "interlingua.request.id": record.id,
                "interlingua.dialect": record.dialect,
                "interlingua.model": record.model,
                "interlingua.version": record.version,
                "interlingua.backend": record.backend,
                "interlingua.outcome": record.outcome,
                "interlingua.diverted": record.diverted,
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
        trace_id=bytes.fromhex(record.trace),
        span_id=bytes.fromhex(one.span_id),
        parent_span_id=bytes.fromhex(record.span),
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
        "finishes": tuple(FINISH_REASON_NAMES.get(one, one) for one in record.finish),
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
