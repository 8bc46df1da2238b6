"""The record of one request: what the access log, usage and metrics are made from.

It never holds a prompt, an API key or a token of the response.
"""

import sys
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from protocols.core.events import FinishReason, Usage
from protocols.core.loss import UnsupportedParameter

RequestOutcome = Literal[
    "ok", "client_error", "worker_error", "gateway_error", "cancelled", "truncated"
]


class RequestRecord(Struct, omit_defaults=True):
    """One request and its response. Times are in seconds."""

    id: str
    began: float = 0.0
    """Unix seconds."""
    dialect: str = ""
    path: str = ""
    model: str = ""
    version: str = ""
    backend: str = ""
    key: str = ""
    """The API key's name."""
    operation: Literal["", "chat", "completion", "embedding"] = ""
    """The kind of request to a model."""
    stream: bool = False
    status: int = 0
    outcome: RequestOutcome = "ok"
    error: str = ""
    """The class name of the error."""
    first_byte: float | None = None
    first_token: float | None = None
    """Of a stream: until the first content was written."""
    duration: float = 0.0
    overhead: float | None = None
    """From the request's last byte until the first attempt, or until it was queued."""
    usage: Usage | None = None
    tokens: int = 0
    """The text tokens that were streamed."""
    finish: tuple[FinishReason, ...] = ()
    """The finish reason of each choice."""
    rule: str = ""
    """The name of the route that matched."""
    sticky: str = ""
    """The source of the sticky assignment: ``header:NAME``, ``body:FIELD``, ``key``, ``address``;
    ``pinned`` if the client named the version."""
    split: str = ""
    """The name of the traffic split that chose the version; "" if none did."""
    diverted: str = ""
    """The first target, if a fallback answered: ``model@version``."""
    fell_back: tuple[str, ...] = ()
    """The targets that failed or were skipped before this one: ``model@version Error``."""
    losses: tuple[UnsupportedParameter, ...] = ()
    config: str = ""
    """The first digits of the configuration's SHA-256."""
    trace: str = ""
    """The id of the exported trace that the request is part of."""
    span: str = ""
    """The id of its span."""


RecordObserver = Callable[[RequestRecord], None]


def ignore_record(record: Struct) -> None:
    """Does nothing: a ``RecordObserver``."""
    del record


def write_log_line(record: Struct) -> None:
    """Write one JSON line to standard error at once. ``serve`` uses ``access_log`` instead."""
    sys.stderr.buffer.write(_encode(record) + b"\n")
    sys.stderr.buffer.flush()


_encode = msgspec.json.Encoder().encode
