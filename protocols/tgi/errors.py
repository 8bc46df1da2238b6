"""Worker errors.

TGI's own endpoints return errors as ``{"error", "error_type"}``, with a status or, in a stream of
``/generate_stream``, without one. A stream of ``/v1`` sends ``{"error": {"message"}}`` with 422 for
any error, so only the text tells errors apart (``router/src/infer/mod.rs``).
"""

import re
from collections.abc import Mapping
from typing import Final

from protocols.chat import errors
from protocols.chat.errors import WorkerErrorBody, map_worker_error
from protocols.core.errors import ContextTooLong, GatewayError

_CONTEXT_LENGTH_PATTERN = re.compile(
    r"`inputs` must have less than (?P<limit>\d+) tokens\. Given: (?P<prompt>\d+)"
    r"|`max_new_tokens` must be <= (?P<whole>\d+)\. Given: (?P<inputs>\d+) `inputs` tokens"
    r" and (?P<new>\d+)"
)
_STATUS_BY_PREFIX: Final[Mapping[str, int]] = {
    "Input validation error": 422,
    "Template error": 422,
    "Missing template vatiable": 422,  # TGI's spelling
    "Tool error": 422,
    "Model is overloaded": 429,
    "Request failed during generation": 424,
}
"""Statuses by the start of the text; 500 is an interrupted response."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    return errors.read_worker_error(status, headers, body, _map_worker_error)


def raise_worker_error(body: bytes) -> None:
    """Raise the error in a body; returns if there is none."""
    errors.raise_worker_error(body, _map_worker_error)


def _map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    text = fault.text
    statuses = (known for prefix, known in _STATUS_BY_PREFIX.items() if text.startswith(prefix))
    context_error = _read_context_error(fault)
    return context_error or map_worker_error(status or next(statuses, 500), fault, retry_after)


def _read_context_error(fault: WorkerErrorBody) -> GatewayError | None:
    match = _CONTEXT_LENGTH_PATTERN.search(fault.text)
    if match is None:
        return None
    counts = {name: int(count[:18]) for name, count in match.groupdict().items() if count}
    if "whole" in counts:
        tokens, limit = counts["inputs"] + counts["new"], counts["whole"]
    else:
        tokens, limit = counts["prompt"], counts["limit"]
    return ContextTooLong(fault.text, tokens=tokens, limit=limit)
