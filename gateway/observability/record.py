"""What is told of each exchange: one record at its end, with the same labels everywhere.

Never a prompt, a key or a token of the answer.
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
    """One exchange. Times are in seconds."""

    id: str
    began: float = 0.0
    """In Unix seconds."""
    dialect: str = ""
    path: str = ""
    model: str = ""
    version: str = ""
    backend: str = ""
    key: str = ""
    """The key's name."""
    operation: Literal["", "chat", "completion", "embedding"] = ""
    """What is asked of a model."""
    stream: bool = False
    status: int = 0
    outcome: RequestOutcome = "ok"
    error: str = ""
    """The class of the error."""
    first_byte: float | None = None
    first_token: float | None = None
    """Of a stream: until something of an answer was passed on, and not only its heading."""
    duration: float = 0.0
    overhead: float | None = None
    """From the whole request's arrival until a worker, or a place at one, was asked for."""
    usage: Usage | None = None
    tokens: int = 0
    """Of the answer, as far as they were passed on in a stream."""
    finish: tuple[FinishReason, ...] = ()
    """Why each choice ended."""
    rule: str = ""
    """The rule that was followed, by its name."""
    sticky: str = ""
    """What held the client to its version: ``header:NAME``, ``body:FIELD``, ``key``, ``address``;
    ``pinned`` where it named the version."""
    split: str = ""
    """The split that shared it out, by its name; "" where a pin, a rule or nothing had to."""
    diverted: str = ""
    """Where it was sent first, if another target answered in its stead: ``model@version``."""
    fell_back: tuple[str, ...] = ()
    """The targets that were tried before this one, and why they failed: ``model@version Error``."""
    losses: tuple[UnsupportedParameter, ...] = ()
    config: str = ""
    """What the SHA-256 of the configuration begins with."""
    trace: str = ""
    """The trace's id where the exchange is part of one that is exported, and its span's."""
    span: str = ""


RecordObserver = Callable[[RequestRecord], None]


def ignore_record(record: Struct) -> None:
    """Tells nobody."""
    del record


def write_log_line(record: Struct) -> None:
    """One JSON line on standard error, at once: the command has gateway/observability/access_log.py."""
    sys.stderr.buffer.write(_encode(record) + b"\n")
    sys.stderr.buffer.flush()


_encode = msgspec.json.Encoder().encode
