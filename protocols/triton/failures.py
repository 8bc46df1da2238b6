"""What a worker's error means.

The original calls every failure of a model 400, whoever is to blame, and tells some inside a body
of status 200: only the text says which it is.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from msgspec import structs

from protocols.core.errors import ContextTooLong, GatewayError, WorkerFailed
from protocols.openai import faults
from protocols.openai.faults import WorkerErrorBody

_SERVER_ERROR_PATTERN: Final = re.compile(
    r"\[request id: |has invalid type\. It should|The schema can not convert"
)
"""What the server itself complains of is how it was asked, and no client's doing."""
_BUSY_PATTERN: Final = re.compile(
    r"maximum queue size|Request timeout expired|unavailable|not ready|out of memory",
    re.IGNORECASE,
)
_CONTEXT_LENGTH_PATTERN: Final = re.compile(
    r"exceeds? (?:the )?max(?:imum)?[ _](?:input|sequence|seq|context|prompt)[ _](?:length|len)"
    r"|prompt (?:is )?too long",
    re.IGNORECASE,
)
_PARAMETER_ERROR_PATTERN: Final = re.compile(
    r"\b(?:must (?:not )?be|should be|at (?:least|most)|(?:greater|less|larger|smaller) than"
    r"|out of range|not (?:supported|enabled|allowed)|invalid (?:value|parameter|argument))\b",
    re.IGNORECASE,
)
"""How models complain of a parameter."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """What an answer of this status means. A stream's first failure is framed as its event."""
    plain = body.removeprefix(b"data:").strip()
    return faults.read_worker_error(status, headers, plain, map_worker_error)


def raise_response_error(got: Any, text: str) -> None:
    """Raises what an answer tells of; returns if it has the output ``text`` and no error."""
    told = got.get("error") if isinstance(got, dict) else None
    if told is None and isinstance(got, dict) and text in got:
        return
    found = faults.find_worker_error(got)
    if found is not None or told is not None:
        raise map_model_error(found or WorkerErrorBody())


def raise_worker_error(body: bytes) -> None:
    """Raises what a line that is no event tells of; returns if it tells of nothing."""
    faults.raise_worker_error(body, map_worker_error)


def map_model_error(fault: WorkerErrorBody) -> GatewayError:
    """What the failure of a model, or a refusal of the server's, means."""
    text = fault.text
    if _BUSY_PATTERN.search(text):
        return faults.map_worker_error(HTTPStatus.SERVICE_UNAVAILABLE, fault)
    if _CONTEXT_LENGTH_PATTERN.search(text):
        fault = structs.replace(fault, code="context_length_exceeded")
    error = faults.map_worker_error(HTTPStatus.BAD_REQUEST, fault)
    if isinstance(error, ContextTooLong) or (
        _PARAMETER_ERROR_PATTERN.search(text) and not _SERVER_ERROR_PATTERN.search(text)
    ):
        return error
    failed = WorkerFailed("the worker answered with an error", status=HTTPStatus.BAD_REQUEST)
    if text:
        failed.add_note(f"the worker said: {text}")
    return failed


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """What a fault of this status means; 0: told inside an answer."""
    if status in (0, HTTPStatus.BAD_REQUEST):
        return map_model_error(fault)
    return faults.map_worker_error(status, fault, retry_after)
