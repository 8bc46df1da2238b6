"""What is told of each exchange: one record at its end, with the same labels everywhere.

Never a prompt, a key or a token of the answer.
"""

import sys
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from gateway.core.loss import Loss
from gateway.core.types import Usage

Outcome = Literal["ok", "client_error", "worker_error", "gateway_error", "cancelled", "truncated"]


class Record(Struct, omit_defaults=True):
    """One exchange. Times are in seconds."""

    id: str
    dialect: str = ""
    path: str = ""
    model: str = ""
    version: str = ""
    backend: str = ""
    key: str = ""
    """The key's name."""
    stream: bool = False
    status: int = 0
    outcome: Outcome = "ok"
    error: str = ""
    """The class of the error."""
    first_byte: float | None = None
    duration: float = 0.0
    usage: Usage | None = None
    tokens: int = 0
    """Of the answer, as far as they were passed on in a stream."""
    rule: str = ""
    """The rule that was followed, by its name."""
    sticky: str = ""
    """What held the client to its version: ``header:NAME``, ``body:FIELD``, ``key``, ``address``;
    ``pinned`` where it named the version."""
    fell_back: tuple[str, ...] = ()
    """The targets that were tried before this one, and why they failed: ``model@version Error``."""
    losses: tuple[Loss, ...] = ()


Observer = Callable[[Record], None]


def silent(record: Record) -> None:
    """Tells nobody."""
    del record


def log_line(record: Record) -> None:
    """One JSON line on standard error."""
    sys.stderr.buffer.write(_encode(record) + b"\n")
    sys.stderr.buffer.flush()


_encode = msgspec.json.Encoder().encode
