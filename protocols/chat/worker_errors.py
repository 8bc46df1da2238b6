"""Errors of workers. Their texts are used only from known fields, cleaned and truncated."""

import math
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
    RequestTooLarge,
    UnsupportedFeature,
    WorkerFailed,
    WorkerModelNotFound,
)
from protocols.core.json_text import JsonDecoder

_decode = JsonDecoder().decode
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_CONTEXT_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|max_model_len|maximum model length"
    r"|context (?:size|length|window)|longer than the model|exceed_context_size"
    r"|exceeds? (?:the )?(?:model'?s? )?max(?:imum)? (?:model |context )?(?:length|len)",
    re.IGNORECASE,
)
_REQUESTED_TOKENS = re.compile(
    r"(?:requested(?: about)?|resulted in|request has|prompt contains(?: at least)?"
    r"|(?:input|request) \()\s*(\d+)\s+(?:input )?tokens",
    re.IGNORECASE,
)
"""The texts of vLLM, OpenAI, SGLang and llama.cpp."""
_RESPONSE_TOKENS = re.compile(r"(\d+) in the completion|max_\w+' is too large: (\d+)")
"""How vLLM and OpenAI name the tokens of the response: as a part of all, or beside the prompt's."""
_UNKNOWN_MODEL = re.compile(
    r"model|deployment|adapter|graph definition|(?-i:RESOURCE_DOES_NOT_EXIST|\bNOT_FOUND\b)",
    re.IGNORECASE,
)
"""OpenAI, vLLM, SGLang, Ollama and Anthropic name the model, Azure its deployment, OVMS its graph;
Databricks has codes."""
_UNKNOWN_PATH = re.compile(r"invalid url|cannot (?:GET|POST)|no (?:such )?route", re.IGNORECASE)
_MAX_TEXT_LENGTH = 300
CONTEXT_LENGTH = re.compile(
    r"(?:maximum context length (?:is|of)|context (?:length|size|window) \(?)\s*(\d+)",
    re.IGNORECASE,
)
"""Finds a worker's context length in its error text."""


class WorkerErrorBody(msgspec.Struct, frozen=True):
    """The fields of a worker's error."""

    text: str = ""
    code: str | int | None = None
    type: str = ""
    param: str | None = None
    body: Mapping[str, Any] | None = None
    """All that the worker sent; see ``GatewayError.worker_body``."""


WorkerErrorMapper = Callable[[int, WorkerErrorBody, float | None], GatewayError]
"""Maps a worker's error by status (0: inside a response) and seconds to wait, if known."""


def find_worker_error(value: Any) -> WorkerErrorBody | None:
    """The error in a worker's JSON, or None if there is none.

    Known formats: ``{"error": {...}}``, ``{"error": "text"}``, ``{"object": "error", "message"}``,
    ``{"error_code", "message"}``, ``{"detail"}``, ``{"message", "code"}`` without a response.
    """
    match value:
        case {"error": dict() as inner}:
            return _read_error_object(inner, value)
        case {"error": str() as text}:
            kind = _as_string(value.get("error_type"))
            return WorkerErrorBody(_clean_text(text), type=kind, body=value)
        case {"object": "error"} | {"error_code": _} | {"type": "error"}:
            return _read_error_object(value, value)
        case {"detail": str() as text}:
            return WorkerErrorBody(_clean_text(text), body=value)
        case {"detail": list() as items}:
            text = "; ".join(_format_validation_error(item) for item in items)
            return WorkerErrorBody(_clean_text(text), body=value)
        case {"message": str()} if "choices" not in value and "data" not in value:
            return _read_error_object(value, value)
        case _:
            return None


def _read_error_object(inner: Mapping[str, Any], body: Mapping[str, Any]) -> WorkerErrorBody:
    code = inner.get("code", inner.get("error_code"))
    param = inner.get("param")
    return WorkerErrorBody(
        _clean_text(_as_string(inner.get("message"))),
        code if isinstance(code, str | int) and not isinstance(code, bool) else None,
        _as_string(inner.get("type")),
        _clean_text(param)[:64] if isinstance(param, str) and param else None,
        body,
    )


def raise_worker_error(body: bytes, judge: WorkerErrorMapper | None = None) -> None:
    """Raise the error in a body that is no response; return if it has none."""
    try:
        fault = find_worker_error(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if fault is not None:
        raise apply_mapper(judge or map_worker_error, 0, fault)


def read_worker_error(
    status: int, headers: Mapping[str, str], body: bytes, judge: WorkerErrorMapper | None = None
) -> GatewayError:
    """The error for a response of this status. ``headers`` have lower-case names."""
    try:
        fault = find_worker_error(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        fault = None
    fault = fault or WorkerErrorBody()
    return apply_mapper(judge or map_worker_error, status, fault, _read_retry_after(headers))


def apply_mapper(
    judge: WorkerErrorMapper,
    status: int,
    fault: WorkerErrorBody,
    retry_after: float | None = None,
) -> GatewayError:
    """Our error for a worker's error, with what clients of the same protocol get of it."""
    error = judge(status, fault, retry_after)
    error.worker_body = fault.body
    return error


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None = None
) -> GatewayError:
    """Our error for a worker's error; the worker's text is kept for operators.

    The default ``WorkerErrorMapper``.
    """
    error = _map_status(status or find_error_status(fault), fault, retry_after)
    error.worker_text = fault.text
    return error


def _map_status(status: int, fault: WorkerErrorBody, retry_after: float | None) -> GatewayError:
    if status in (400, 413, 422) and _CONTEXT_TOO_LONG.search(
        f"{fault.code} {fault.type} {fault.text}"
    ):
        limit = CONTEXT_LENGTH.search(fault.text)
        tokens = _REQUESTED_TOKENS.search(fault.text)
        text = fault.text or "The prompt is longer than the model's context."
        most = _RESPONSE_TOKENS.search(fault.text)
        part, beside = (int((one or "0")[:18]) for one in most.groups()) if most else (0, 0)
        return ContextTooLong(
            text,
            tokens=int(tokens[1][:18]) + beside if tokens else None,
            limit=int(limit[1][:18]) if limit else None,
            max_tokens=part or beside,
        )
    match status:
        case 429:
            return RateLimitExceeded(
                "The model's workers take no more requests.", retry_after=retry_after
            )
        case 503 | 529:
            return Overloaded("The model's workers are busy.", retry_after=retry_after or 1.0)
        case 400 | 413 | 415 | 422 if fault.code in ("content_filter", "content_policy_violation"):
            return ContentFiltered(fault.text or "The content was refused.")
        case 413:
            text = fault.text or "The request is larger than a worker, or a proxy before it, takes."
            return RequestTooLarge(text, limit=None)
        case 400 | 415 | 422:
            return UnsupportedFeature(
                fault.text or "The worker refused the request.", param=fault.param
            )
        case 404 if _is_unknown_model(fault):
            return WorkerModelNotFound("The worker does not know the model.", status=status)
        case 404:
            return WorkerFailed("The worker does not know the gateway's path.", status=status)
        case 401 | 403:
            return WorkerFailed("The worker refused the gateway's key.", status=status)
        case _:
            return WorkerFailed(f"The worker answered with an error ({status}).", status=status)


def _is_unknown_model(fault: WorkerErrorBody) -> bool:
    """Whether 404 is about the model, and not about the path: the texts of servers say which."""
    text = f"{fault.code} {fault.type} {fault.text}"
    return _UNKNOWN_MODEL.search(text) is not None and _UNKNOWN_PATH.search(text) is None


def find_error_status(fault: WorkerErrorBody) -> int:
    """The status of an error without one: inside a stream, or under 200."""
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
        if 0 <= seconds <= _MAX_RETRY_AFTER:  # this also keeps out what is no number
            return seconds
    resets = [
        _read_duration(headers.get(f"x-ratelimit-reset-{scope}", ""))
        for scope in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{scope}") == "0"
    ]
    return max((one for one in resets if one <= _MAX_RETRY_AFTER), default=None)


_MAX_RETRY_AFTER = 86_400.0
_DURATION = re.compile(
    r"(?:(\d{1,9})h)?(?:(\d{1,9})m(?!s))?(?:(\d{1,9}(?:\.\d{1,9})?)s?)?(?:(\d{1,9})ms)?"
)


def _read_duration(text: str) -> float:
    """Seconds of a duration such as ``1h2m1.5s``, ``20ms`` or ``59``; infinite if it is none."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        return math.inf
    hours, minutes, seconds, milliseconds = (float(one or 0) for one in found.groups())
    return 3600 * hours + 60 * minutes + seconds + milliseconds / 1000


def _format_validation_error(item: Any) -> str:
    """One error of a validator."""
    if not isinstance(item, dict):
        return ""
    place = item.get("loc")
    path = ".".join(str(step) for step in place) if isinstance(place, list) else ""
    return f"{path}: {_as_string(item.get('msg'))}"


def _as_string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _clean_text(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(" ", text[: 4 * _MAX_TEXT_LENGTH])[:_MAX_TEXT_LENGTH].strip()
