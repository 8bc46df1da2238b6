"""What a worker's error means. Its text is passed on only from known places, short and clean."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from protocols.core.errors import (
    ContentFiltered,
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    UnsupportedFeature,
    WorkerFailed,
)

_decode = msgspec.json.Decoder().decode
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_CONTEXT_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|max_model_len|maximum model length"
    r"|context (?:size|length|window)|longer than the model|exceed_context_size"
    r"|exceeds? (?:the )?(?:model'?s? )?max(?:imum)? (?:model |context )?(?:length|len)",
    re.IGNORECASE,
)
_CONTEXT_LENGTH = re.compile(r"maximum context length (?:is|of) (\d+)", re.IGNORECASE)
_MAX_TEXT_LENGTH = 300


class WorkerErrorBody(msgspec.Struct, frozen=True):
    """What is known of a worker's error."""

    text: str = ""
    code: str | int | None = None
    type: str = ""
    param: str | None = None


WorkerErrorMapper = Callable[[int, WorkerErrorBody, float | None], GatewayError]
"""What a fault means, by its status (0: told inside an answer) and the seconds to wait, if told."""


def find_worker_error(got: Any) -> WorkerErrorBody | None:
    """The error that a worker's JSON tells of, or None if it tells of none.

    Known shapes: ``{"error": {...}}``, ``{"error": "text"}``, ``{"object": "error", "message"}``,
    ``{"error_code", "message"}``, ``{"detail"}``, ``{"message", "code"}`` without an answer.
    """
    match got:
        case {"error": dict() as inner}:
            return _read_error_object(inner)
        case {"error": str() as text}:
            return WorkerErrorBody(_clean_text(text), type=_as_string(got.get("error_type")))
        case {"object": "error"} | {"error_code": _} | {"type": "error"}:
            return _read_error_object(got)
        case {"detail": str() as text}:
            return WorkerErrorBody(_clean_text(text))
        case {"detail": list() as items}:
            return WorkerErrorBody(
                _clean_text("; ".join(_format_validation_error(item) for item in items))
            )
        case {"message": str()} if "choices" not in got and "data" not in got:
            return _read_error_object(got)
        case _:
            return None


def _read_error_object(inner: Mapping[str, Any]) -> WorkerErrorBody:
    code = inner.get("code", inner.get("error_code"))
    param = inner.get("param")
    return WorkerErrorBody(
        _clean_text(_as_string(inner.get("message"))),
        code if isinstance(code, str | int) and not isinstance(code, bool) else None,
        _as_string(inner.get("type")),
        _clean_text(param)[:64] if isinstance(param, str) and param else None,
    )


def raise_worker_error(body: bytes, judge: WorkerErrorMapper | None = None) -> None:
    """Raises what a body that is no answer tells of; returns if it tells of nothing."""
    try:
        found = find_worker_error(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if found is not None:
        raise (judge or map_worker_error)(0, found, None)


def read_worker_error(
    status: int, headers: Mapping[str, str], body: bytes, judge: WorkerErrorMapper | None = None
) -> GatewayError:
    """What an answer of this status means. ``headers`` have lower-case names."""
    try:
        found = find_worker_error(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    return (judge or map_worker_error)(
        status, found or WorkerErrorBody(), _read_retry_after(headers)
    )


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None = None
) -> GatewayError:
    """The error of our own that a worker's stands for; its text is kept as a note for the log.

    The plain ``Judge``.
    """
    error = _map_status(status or find_error_status(fault), fault, retry_after)
    if fault.text and fault.text not in error.message:
        error.add_note(f"the worker said: {fault.text}")
    return error


def _map_status(status: int, fault: WorkerErrorBody, retry_after: float | None) -> GatewayError:
    if status in (400, 413, 422) and _CONTEXT_TOO_LONG.search(
        f"{fault.code} {fault.type} {fault.text}"
    ):
        limit = _CONTEXT_LENGTH.search(fault.text)
        text = fault.text or "The prompt is longer than the model's context."
        return ContextTooLong(text, limit=int(limit[1]) if limit else None)
    match status:
        case 429:
            return RateLimitExceeded(
                "The model's workers take no more requests.", retry_after=retry_after
            )
        case 503 | 529:
            return Overloaded("The model's workers are busy.", retry_after=retry_after or 1.0)
        case 400 | 413 | 415 | 422 if fault.code in ("content_filter", "content_policy_violation"):
            return ContentFiltered(fault.text or "The content was refused.")
        case 400 | 413 | 415 | 422:
            return UnsupportedFeature(
                fault.text or "The worker refused the request.", param=fault.param
            )
        case 404:
            return WorkerFailed("The worker does not know the model.", status=status)
        case 401 | 403:
            return WorkerFailed("The worker refused the gateway's key.", status=status)
        case _:
            return WorkerFailed(f"The worker answered with an error ({status}).", status=status)


def find_error_status(fault: WorkerErrorBody) -> int:
    """The status that an error without one stands for: inside a stream, or under 200."""
    shown = str(fault.code)
    code = int(shown) if shown.isascii() and shown.isdecimal() else 0
    if 400 <= code <= 599:  # noqa: PLR2004 - HTTP's errors
        return code
    if fault.type == "invalid_request_error" or fault.code in _CLIENT_ERROR_CODES:
        return 400
    return {"rate_limit_exceeded": 429, "service_unavailable": 503}.get(shown, 500)


_CLIENT_ERROR_CODES = ("context_length_exceeded", "content_filter", "INVALID_PARAMETER_VALUE")


def _read_retry_after(headers: Mapping[str, str]) -> float | None:
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / scale
        except (KeyError, ValueError):
            continue
        if 0 <= seconds <= 86_400:  # noqa: PLR2004 - a day; also keeps out what is no number
            return seconds
    return None


def _format_validation_error(item: Any) -> str:
    """One complaint of a validator."""
    if not isinstance(item, dict):
        return ""
    place = item.get("loc")
    path = ".".join(str(step) for step in place) if isinstance(place, list) else ""
    return f"{path}: {_as_string(item.get('msg'))}"


def _as_string(got: Any) -> str:
    return got if isinstance(got, str) else ""


def _clean_text(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(" ", text[: 4 * _MAX_TEXT_LENGTH])[:_MAX_TEXT_LENGTH].strip()
