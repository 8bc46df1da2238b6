"""What a worker's error means. Its text is passed on only from known places, short and clean."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.core.errors import (
    ContentRefused,
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimited,
    Unsupported,
    WorkerFailed,
)

_decode = msgspec.json.Decoder().decode
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|max_model_len|maximum model length"
    r"|context (?:size|length|window)|longer than the model|exceed_context_size"
    r"|exceeds? (?:the )?(?:model'?s? )?max(?:imum)? (?:model |context )?(?:length|len)",
    re.IGNORECASE,
)
_COUNTS = re.compile(r"maximum context length (?:is|of) (\d+)", re.IGNORECASE)
_LONGEST = 300


class Fault(msgspec.Struct, frozen=True):
    """What is known of a worker's error."""

    text: str = ""
    code: str | int | None = None
    type: str = ""
    param: str | None = None


Judge = Callable[[int, Fault, float | None], GatewayError]
"""What a fault means, by its status (0: told inside an answer) and the seconds to wait, if told."""


def fault_in(got: Any) -> Fault | None:
    """The error that a worker's JSON tells of, or None if it tells of none.

    Known shapes: ``{"error": {...}}``, ``{"error": "text"}``, ``{"object": "error", "message"}``,
    ``{"error_code", "message"}``, ``{"detail"}``, ``{"message", "code"}`` without an answer.
    """
    match got:
        case {"error": dict() as inner}:
            return _fault(inner)
        case {"error": str() as text}:
            return Fault(_clean(text), type=_string(got.get("error_type")))
        case {"object": "error"} | {"error_code": _} | {"type": "error"}:
            return _fault(got)
        case {"detail": str() as text}:
            return Fault(_clean(text))
        case {"detail": list() as items}:
            return Fault(_clean("; ".join(_said(item) for item in items)))
        case {"message": str()} if "choices" not in got and "data" not in got:
            return _fault(got)
        case _:
            return None


def _fault(inner: Mapping[str, Any]) -> Fault:
    code = inner.get("code", inner.get("error_code"))
    param = inner.get("param")
    return Fault(
        _clean(_string(inner.get("message"))),
        code if isinstance(code, str | int) and not isinstance(code, bool) else None,
        _string(inner.get("type")),
        _clean(param)[:64] if isinstance(param, str) and param else None,
    )


def complain(body: bytes, judge: Judge | None = None) -> None:
    """Raises what a body that is no answer tells of; returns if it tells of nothing."""
    try:
        found = fault_in(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if found is not None:
        raise (judge or meaning)(0, found, None)


def read_error(
    status: int, headers: Mapping[str, str], body: bytes, judge: Judge | None = None
) -> GatewayError:
    """What an answer of this status means. ``headers`` have lower-case names."""
    try:
        found = fault_in(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    return (judge or meaning)(status, found or Fault(), _retry_after(headers))


def meaning(status: int, fault: Fault, retry_after: float | None = None) -> GatewayError:
    """The error of our own that a worker's stands for; its text is kept as a note for the log.

    The plain ``Judge``.
    """
    error = _meaning(status or status_of(fault), fault, retry_after)
    if fault.text and fault.text not in error.message:
        error.add_note(f"the worker said: {fault.text}")
    return error


def _meaning(status: int, fault: Fault, retry_after: float | None) -> GatewayError:
    if status in (400, 413, 422) and _TOO_LONG.search(f"{fault.code} {fault.type} {fault.text}"):
        limit = _COUNTS.search(fault.text)
        text = fault.text or "The prompt is longer than the model's context."
        return ContextTooLong(text, limit=int(limit[1]) if limit else None)
    match status:
        case 429:
            return RateLimited(
                "The model's workers take no more requests.", retry_after=retry_after
            )
        case 503 | 529:
            return Overloaded("The model's workers are busy.", retry_after=retry_after or 1.0)
        case 400 | 413 | 415 | 422 if fault.code in ("content_filter", "content_policy_violation"):
            return ContentRefused(fault.text or "The content was refused.")
        case 400 | 413 | 415 | 422:
            return Unsupported(fault.text or "The worker refused the request.", param=fault.param)
        case 404:
            return WorkerFailed("The worker does not know the model.", status=status)
        case 401 | 403:
            return WorkerFailed("The worker refused the gateway's key.", status=status)
        case _:
            return WorkerFailed(f"The worker answered with an error ({status}).", status=status)


def status_of(fault: Fault) -> int:
    """The status that an error without one stands for: inside a stream, or under 200."""
    shown = str(fault.code)
    code = int(shown) if shown.isascii() and shown.isdecimal() else 0
    if 400 <= code <= 599:  # noqa: PLR2004 - HTTP's errors
        return code
    if fault.type == "invalid_request_error" or fault.code in _CLIENT_CODES:
        return 400
    return {"rate_limit_exceeded": 429, "service_unavailable": 503}.get(shown, 500)


_CLIENT_CODES = ("context_length_exceeded", "content_filter", "INVALID_PARAMETER_VALUE")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / scale
        except (KeyError, ValueError):
            continue
        if 0 <= seconds <= 86_400:  # noqa: PLR2004 - a day; also keeps out what is no number
            return seconds
    return None


def _said(item: Any) -> str:
    """One complaint of a validator."""
    if not isinstance(item, dict):
        return ""
    place = item.get("loc")
    path = ".".join(str(step) for step in place) if isinstance(place, list) else ""
    return f"{path}: {_string(item.get('msg'))}"


def _string(got: Any) -> str:
    return got if isinstance(got, str) else ""


def _clean(text: str) -> str:
    return _CONTROL.sub(" ", text[: 4 * _LONGEST])[:_LONGEST].strip()
