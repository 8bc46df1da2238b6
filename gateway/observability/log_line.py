"""The line of a request for people, similar to that of web servers."""

from collections.abc import Iterator
from typing import Final

from backends.log_format import escape_controls, format_time
from gateway.observability.record import RequestRecord

_SERVER_ERROR: Final = 500


def get_level(record: RequestRecord) -> str:
    """The level of its line."""
    return "INFO" if record.status < _SERVER_ERROR else "WARNING"


def format_record(record: RequestRecord) -> str:
    """A request's line of text. What clients and workers sent cannot start another line."""
    parts = [
        format_time(record.started_at + record.duration, "text"),
        f"{get_level(record)} access:",
        f'{record.client or "-"} "{record.method} {record.path}" {record.status}',
        *_describe_target(record),
        *_describe_response(record),
        f"{record.duration:.3f}s",
        f"id={record.id}",
    ]
    if record.error:
        parts.append(f"error={record.error}")
    elif record.outcome != "ok":
        parts.append(f"outcome={record.outcome}")
    for failure in record.worker_failures:
        status = f" {failure.status}" if failure.status is not None else ""
        parts.append(f'worker_error="{failure.worker}{status}: {failure.text or failure.error}"')
    return escape_line(" ".join(parts))


def _describe_target(record: RequestRecord) -> Iterator[str]:
    if record.key:
        yield f"key={record.key}"
    if record.model:
        yield f"model={record.model}" + (f"@{record.version}" if record.version else "")
    if record.worker or record.backend:
        yield f"worker={record.worker}" if record.worker else f"backend={record.backend}"
    if record.fallback_from:
        yield f"fallback_from={record.fallback_from}"


def _describe_response(record: RequestRecord) -> Iterator[str]:
    if record.first_token is not None:
        yield f"ttft={record.first_token:.3f}s"
    if record.usage is not None:
        yield f"tokens={record.usage.prompt_tokens}+{record.usage.completion_tokens}"
    elif record.tokens:
        yield f"tokens=?+{record.tokens}"


def escape_line(line: str) -> str:
    """The line with controls, such as ends of lines, as escapes."""
    if line.isprintable():
        return line
    return escape_controls(line).replace("\n", "\\n").replace("\t", "\\t")
