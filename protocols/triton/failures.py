"""What a worker's error means.

The original calls every failure of a model 400, whoever is to blame, and tells some inside a body
of status 200: only the text says which it is.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from msgspec import structs

from gateway.core.errors import ContextTooLong, GatewayError, WorkerFailed
from protocols.openai import faults
from protocols.openai.faults import Fault

_OURS: Final = re.compile(r"\[request id: |has invalid type\. It should|The schema can not convert")
"""What the server itself complains of is how it was asked, and no client's doing."""
_BUSY: Final = re.compile(
    r"maximum queue size|Request timeout expired|unavailable|not ready|out of memory",
    re.IGNORECASE,
)
_TOO_LONG: Final = re.compile(
    r"exceeds? (?:the )?max(?:imum)?[ _](?:input|sequence|seq|context|prompt)[ _](?:length|len)"
    r"|prompt (?:is )?too long",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(
    r"\b(?:must (?:not )?be|should be|at (?:least|most)|(?:greater|less|larger|smaller) than"
    r"|out of range|not (?:supported|enabled|allowed)|invalid (?:value|parameter|argument))\b",
    re.IGNORECASE,
)
"""How models complain of a parameter."""


def read_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """What an answer of this status means. A stream's first failure is framed as its event."""
    plain = body.removeprefix(b"data:").strip()
    return faults.read_error(status, headers, plain, judge)


def complain(got: Any, text: str) -> None:
    """Raises what an answer tells of; returns if it has the output ``text`` and no error."""
    told = got.get("error") if isinstance(got, dict) else None
    if told is None and isinstance(got, dict) and text in got:
        return
    found = faults.fault_in(got)
    if found is not None or told is not None:
        raise of_model(found or Fault())


def complain_of(body: bytes) -> None:
    """Raises what a line that is no event tells of; returns if it tells of nothing."""
    faults.complain(body, judge)


def of_model(fault: Fault) -> GatewayError:
    """What the failure of a model, or a refusal of the server's, means."""
    text = fault.text
    if _BUSY.search(text):
        return faults.meaning(HTTPStatus.SERVICE_UNAVAILABLE, fault)
    if _TOO_LONG.search(text):
        fault = structs.replace(fault, code="context_length_exceeded")
    error = faults.meaning(HTTPStatus.BAD_REQUEST, fault)
    if isinstance(error, ContextTooLong) or (_REFUSED.search(text) and not _OURS.search(text)):
        return error
    failed = WorkerFailed("the worker answered with an error", status=HTTPStatus.BAD_REQUEST)
    if text:
        failed.add_note(f"the worker said: {text}")
    return failed


def judge(status: int, fault: Fault, retry_after: float | None) -> GatewayError:
    """What a fault of this status means; 0: told inside an answer."""
    if status in (0, HTTPStatus.BAD_REQUEST):
        return of_model(fault)
    return faults.meaning(status, fault, retry_after)
