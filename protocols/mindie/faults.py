"""What a server's error means, beyond what ``protocols.openai.faults`` knows of it.

Sources: MindIE-LLM 0695772, http_rest_resource.h (names of errors), llm_manager_impl.cpp
(VerifyInputTokenSize), single_llm_pnd_req_handler.cpp (what ends a stream); for the coordinator's
429 Ascend/MindIE-Motor 5dfb024.
"""

import re
from collections.abc import Mapping
from typing import Final

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    RequestTooLarge,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.mindie.errors import ERROR_TYPES
from protocols.openai import faults
from protocols.openai.faults import WorkerErrorBody, map_worker_error

_STATUS_BY_TYPE: Final = {name: status for status, name in ERROR_TYPES.items()} | {
    "overloaded": 429
}
_TOKEN_LIMIT_PATTERN = re.compile(
    r"maximum input ids length cannot be greater than (?:\w+ )?(?P<limit>\d{1,12}),\s*"
    r"the input ids length is (?P<got>\d{1,12})"
    r"|token length must be in \(0, (?P<most>\d{1,12})\], but got (?P<tokens>\d{1,12})"
)
_TEXT_LIMIT_PATTERN = re.compile(
    r"(?:length|len not) in \(0, \d+\]?, but the length of inputs is [1-9]"
)
_UNKNOWN_MODEL_PATTERN = re.compile(r"Model .* not found\.|Got model .*, but not found in server")
_BODY_LIMIT_PATTERN = re.compile(r"Maximum allowed size is (\d{1,6}) ?MB")
_ENQUEUE_ERROR = "Failed to enqueue inferRequest."
_STREAM_ERROR_PATTERN = re.compile(
    rb"Engine callback timeout: (?:client timeout|server (?:token|e2e)Timeout)"
    rb"|Failed to get engine response"
)
"""What a stream that fails ends with."""


def read_worker_error(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """What an answer of this status means. ``headers`` have lower-case names."""
    return faults.read_worker_error(status, headers, body, _map_worker_error)


def raise_worker_error(body: bytes) -> None:
    """Raises what a body that is no answer tells of, or text outside every event of a stream.

    Returns if it tells of nothing.
    """
    faults.raise_worker_error(body, _map_worker_error)
    if (found := _STREAM_ERROR_PATTERN.search(body)) is not None:
        error = WorkerFailed("The worker broke off its answer.")
        error.add_note(f"the worker said: {found[0].decode()}")
        raise error


def _map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    status = status or _STATUS_BY_TYPE.get(fault.type, 0)
    return _map_mindie_error(status, fault) or map_worker_error(status, fault, retry_after)


def _map_mindie_error(status: int, fault: WorkerErrorBody) -> GatewayError | None:
    """What only this server says."""
    text = fault.text
    if status in (404, 422) and _UNKNOWN_MODEL_PATTERN.fullmatch(text):
        return WorkerFailed("The worker does not know the model.", status=status)
    if (found := _TOKEN_LIMIT_PATTERN.search(text)) is not None:
        got, limit = found["got"] or found["tokens"], found["limit"] or found["most"]
        return ContextTooLong(text, tokens=int(got), limit=int(limit))
    if _TEXT_LIMIT_PATTERN.search(text):
        return ContextTooLong(text)
    if status == 413 and (found := _BODY_LIMIT_PATTERN.search(text)) is not None:  # noqa: PLR2004 - HTTP's
        return RequestTooLarge(text, limit=int(found[1]) << 20)
    if status == 424 and text.startswith(_ENQUEUE_ERROR):  # noqa: PLR2004 - HTTP's
        return UnsupportedFeature(text)  # the engine calls it an invalid argument
    return None
