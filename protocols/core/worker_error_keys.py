"""The keys of a worker's error, for clients of the worker's own protocol.

An adapter writes the gateway's error, which has a text and the keys of every error of the protocol.
``restore_worker_keys`` adds what the worker said beside its text: codes, parameters, ids, and keys
that nobody knows. Clients of another protocol get what the adapter's table of errors says.

The text itself is as the gateway wrote it. An error that is no mistake of the client may hold
anything, such as addresses and paths: of its keys those stay whose values are single words and
numbers. Of an error about the gateway's own request (its key, its path), nothing stays.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from protocols.core.errors import (
    ClientError,
    GatewayError,
    ModelNotFound,
    RateLimitExceeded,
    WorkerError,
)
from protocols.core.json_text import JsonDecoder, encode_ascii

_decode: Final = JsonDecoder(dict[str, Any]).decode
_DATA: Final = b"data: "
_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_GATEWAY_STATUSES: Final = frozenset({401, 402, 403, 404, 405, 407})
"""Statuses of a worker that concern the gateway: its key, its account, the path it called."""
_TEXTS: Final = frozenset({"message", "error", "error_message", "detail"})
"""Keys under which servers write an error's text."""


def restore_worker_keys(written: bytes, error: GatewayError, protocol: str) -> bytes:
    """The error that an adapter wrote, with the keys of the worker that spoke this protocol.

    ``written`` is a JSON document, or ends with the event of a stream that has one; anything else
    stays as it is.
    """
    if error.worker_body is None or error.worker_protocol != protocol:
        return written
    given = _select(error.worker_body, only_words=_is_only_words(error))
    if not given or _is_about_gateway(error):
        return written
    begin = 0 if written.startswith(b"{") else written.rfind(_DATA) + len(_DATA)
    text = written[begin:].rstrip()
    try:
        own = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return written
    merged = encode_ascii(_merge_document(own, given))
    return b"".join((written[:begin], merged, written[begin + len(text) :]))


def _is_about_gateway(error: GatewayError) -> bool:
    return isinstance(error, WorkerError) and error.status in _GATEWAY_STATUSES


def _is_only_words(error: GatewayError) -> bool:
    """Whether the worker's text is for operators only, and so are other texts of its error."""
    hidden = RateLimitExceeded | ModelNotFound
    return not isinstance(error, ClientError) or isinstance(error, hidden)


def _select(value: Any, *, only_words: bool) -> Any:
    """What a client may see of the error; None for a text that it may not."""
    if isinstance(value, dict):
        found = {key: _select(one, only_words=only_words) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not None or value[key] is None}
    if isinstance(value, list):
        items = (_select(one, only_words=only_words) for one in value)
        return [one for one in items if one is not None]
    if isinstance(value, str) and only_words and _WORD.fullmatch(value) is None:
        return None
    return value


def _merge_document(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The document with the worker's keys; its error is where the gateway's is."""
    response = own.get("response")
    if isinstance(response, dict):  # the last event of the Responses API
        error = given.get("error", given)
        added = {key: one for key, one in given.items() if key not in response}
        return {**own, "response": _merge(response, {**added, "error": error})}
    if not isinstance(own.get("error"), dict):
        return _merge(own, given)
    if "error" not in given:  # an error without an envelope
        given = {"error": given}
    return _merge(own, {key: one for key, one in given.items() if key != "type" or key not in own})


def _merge(own: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; what clients know by its type keeps that."""
    merged = dict(own)
    for key, value in given.items():
        present = own.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            merged[key] = _merge(present, value)
        elif key == "error" and isinstance(present, str) and isinstance(value, dict):
            merged[key] = {**value, "message": present}
        elif isinstance(value, str) and key in _TEXTS:
            pass  # the gateway's own text says it
        elif present is None or (key == "code" and isinstance(value, str)):
            merged[key] = value  # a number as code repeats the status of the response
        elif key != "param" and type(value) is type(present) and key != "code":
            merged[key] = value
    return merged
