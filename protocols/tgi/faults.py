"""What TGI's errors mean.

Its own answers tell of an error as ``{"error", "error_type"}``, with a status or, in the stream of
``/generate_stream``, without one; a stream of ``/v1`` says ``{"error": {"message"}}`` and 422
whatever went wrong, so that only the text tells (``router/src/infer/mod.rs``).
"""

import re
from collections.abc import Mapping
from typing import Final

from gateway.core.errors import ContextTooLong, GatewayError
from protocols.openai import faults
from protocols.openai.faults import Fault, meaning

_TOO_LONG = re.compile(
    r"`inputs` must have less than (?P<limit>\d+) tokens\. Given: (?P<prompt>\d+)"
    r"|`max_new_tokens` must be <= (?P<whole>\d+)\. Given: (?P<inputs>\d+) `inputs` tokens"
    r" and (?P<new>\d+)"
)
_STATUSES: Final[Mapping[str, int]] = {
    "Input validation error": 422,
    "Template error": 422,
    "Missing template vatiable": 422,  # as it is spelt there
    "Tool error": 422,
    "Model is overloaded": 429,
    "Request failed during generation": 424,
}
"""By how the text begins; an answer that did not come to its end is 500."""


def read_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """See ``gateway.core.ports.WorkerDialect``."""
    return faults.read_error(status, headers, body, _judge)


def complain(body: bytes) -> None:
    """Raises what a body that is no answer tells of; returns if it tells of nothing."""
    faults.complain(body, _judge)


def _judge(status: int, fault: Fault, retry_after: float | None) -> GatewayError:
    begun = (known for text, known in _STATUSES.items() if fault.text.startswith(text))
    long = _too_long(fault)
    return long or meaning(status or next(begun, 500), fault, retry_after)


def _too_long(fault: Fault) -> GatewayError | None:
    found = _TOO_LONG.search(fault.text)
    if found is None:
        return None
    told = {name: int(count[:18]) for name, count in found.groupdict().items() if count}
    if "whole" in told:
        tokens, limit = told["inputs"] + told["new"], told["whole"]
    else:
        tokens, limit = told["prompt"], told["limit"]
    return ContextTooLong(fault.text, tokens=tokens, limit=limit)
