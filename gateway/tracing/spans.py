"""What is told of an exchange that is over: a SERVER span, and a CLIENT span for each try.

The names are those of the conventions for HTTP, and of a table for generative models. Never a
prompt, an answer, a key or what a worker said.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.core.types import GenerateRequest
from gateway.telemetry import Record
from gateway.tracing.follow import Trace, Try
from gateway.tracing.names import FINISHES, OPERATIONS, Names, Value
from gateway.tracing.parents import Parent

_NANOSECONDS: Final = 1_000_000_000
_SAMPLED: Final = 1
_REMOTE: Final = 0x300
"""It is known whether the parent is another process's, and it is."""
_LOCAL: Final = 0x100
_PORTS: Final = {"http": 80, "https": 443}
_INTERNAL: Final = 500
_HUGE: Final = 2**63
"""Whole numbers are sent in 64 bits, with their sign."""


def attributes(told: Mapping[str, Value | None]) -> Iterable[KeyValue]:
    """As they are sent; what is None, "" or empty says nothing."""
    return (
        KeyValue(key=name, value=_value(value))
        for name, value in told.items()
        if value not in (None, "", ())
    )


def spans(trace: Trace, names: Names) -> Iterator[Span]:
    """Those of one exchange, its own first. What was answered is told by who answered."""
    record, tries = trace.record, trace.attempts
    local = {} if tries else _asked(trace, record.backend, record.model) | _said(record)
    yield _server(trace, names.rename_attributes(local))
    for number, one in enumerate(tries, 1):
        told = _asked(trace, one.backend, one.model)
        told |= _said(record) if number == len(tries) else {}
        yield _client(trace, one, names.rename_attributes(told))


def _server(trace: Trace, told: Mapping[str, Value | None]) -> Span:
    record, remote = trace.record, trace.parent
    made = Span(
        trace_id=bytes.fromhex(record.trace),
        span_id=bytes.fromhex(record.span),
        trace_state="" if remote is None else remote.tracestate,
        parent_span_id=b"" if remote is None else bytes.fromhex(remote.span_id),
        flags=_SAMPLED | (_REMOTE if remote else _LOCAL),
        name=_sent(f"{trace.method} {record.dialect}"),
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=_nanoseconds(record.began),
        end_time_unix_nano=_nanoseconds(record.began + record.duration),
        attributes=attributes(
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
        links=[] if trace.linked_parent is None else [_link(trace.linked_parent)],
    )
    if record.status >= _INTERNAL or record.outcome in ("truncated", "worker_error"):
        made.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR))
    return made


def _client(trace: Trace, one: Try, told: Mapping[str, Value | None]) -> Span:
    record, url = trace.record, urlsplit(one.url)
    operation = OPERATIONS[record.operation]
    made = Span(
        trace_id=bytes.fromhex(record.trace),
        span_id=bytes.fromhex(one.span_id),
        parent_span_id=bytes.fromhex(record.span),
        flags=_SAMPLED | _LOCAL,
        name=_sent(f"{operation} {one.model}"),
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=_nanoseconds(one.started_at),
        end_time_unix_nano=_nanoseconds(one.ended_at),
        attributes=attributes(
            {
                "server.address": url.hostname,
                "server.port": url.port or _PORTS[url.scheme],
                "error.type": one.error,
                **told,
            }
        ),
    )
    if one.error:
        made.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR))
    return made


def _asked(trace: Trace, backend: str, model: str) -> dict[str, Value | None]:
    """What was asked of a model; nothing where nothing was.

    Of a call that is passed on as it is, little is read.
    """
    record, request = trace.record, trace.request
    if request is None:
        return {}
    told: dict[str, Value | None] = {
        "operation": OPERATIONS[record.operation],
        "backend": backend,
        "model": model,
    }
    if not isinstance(request, GenerateRequest):
        return told | {"dimensions": request.dimensions}
    sampling = request.sampling
    return told | {
        "stream": record.stream or None,
        "n": request.n if request.n != 1 else None,
        "max_tokens": request.stopping.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": _seed(sampling.seed),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }


def _said(record: Record) -> dict[str, Value | None]:
    """What was answered."""
    usage, first = record.usage, record.first_token
    told: dict[str, Value | None] = {
        "finishes": tuple(FINISHES.get(one, one) for one in record.finish),
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


def _link(linked: Parent) -> Span.Link:
    return Span.Link(
        trace_id=bytes.fromhex(linked.trace_id),
        span_id=bytes.fromhex(linked.span_id),
        trace_state=linked.tracestate,
        flags=_REMOTE | linked.sampled,
    )


def _seed(seed: int | None) -> int | None:
    """As a signed number of 64 bits, which is what there is room for."""
    return None if seed is None else (seed + _HUGE) % (2 * _HUGE) - _HUGE


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)


def _sent(text: str) -> str:
    """As UTF-8 can say it: a path may be any bytes."""
    return text.encode(errors="replace").decode()


def _value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=max(-_HUGE, min(value, _HUGE - 1)))
        case float():
            return AnyValue(double_value=value)
        case tuple():
            return AnyValue(array_value=ArrayValue(values=map(_value, value)))
        case _:
            return AnyValue(string_value=_sent(str(value)))
