"""The record of a request: what the access log, metrics, usage rows and traces are made of.

It never contains prompts, responses or API keys, except what a worker quotes in its error text.
"""

import sys
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from backends.interfaces import WorkerFailure
from protocols.core.events import FinishReason, Usage
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import RequestKind

RequestOutcome = Literal[
    "ok", "client_error", "worker_error", "gateway_error", "cancelled", "truncated"
]


class RequestRecord(Struct, omit_defaults=True):
    """One request and its response. Times are in seconds."""

    id: str
    started_at: float = 0.0
    """Unix time in seconds."""
    protocol: str = ""
    path: str = ""
    method: str = ""
    client: str = ""
    """The client's address."""
    model: str = ""
    version: str = ""
    backend: str = ""
    worker: str = ""
    """The URL of the last worker that the request was sent to."""
    key: str = ""
    """The name of the API key."""
    operation: RequestKind | Literal[""] = ""
    """The kind of inference; "" for requests that no model answers."""
    stream: bool = False
    status: int = 0
    outcome: RequestOutcome = "ok"
    error: str = ""
    """The class of the error, or ""."""
    first_byte: float | None = None
    first_token: float | None = None
    """For streams: until the first token was sent to the client."""
    duration: float = 0.0
    overhead: float | None = None
    """From the end of the request body until the gateway asked for a worker or a queue slot."""
    usage: Usage | None = None
    tokens: int = 0
    """Completion tokens sent to the client so far, in a stream."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """The finish reason of each choice."""
    rule: str = ""
    """The name of the route that matched."""
    sticky: str = ""
    """The source of the sticky assignment: ``header:NAME``, ``body:FIELD``, ``key`` or ``address``;
    ``pinned`` if the client named the version."""
    split: str = ""
    """The name of the traffic split that chose the version; "" if no split did."""
    is_throttled: bool = False
    """Whether it is one of many with wrong API keys, which get no log lines of their own."""
    response_id: str = ""
    """The id in the response, if feedback is collected and the protocol has one."""
    user_hash: str = ""
    """The split's hash of the user, if feedback is collected and the assignment was sticky."""
    measures: dict[str, bool] = {}
    """What is measured of the response, if its model's rollout has guardrails on that."""
    shadow_of: str = ""
    """The id of the request of which this is a copy."""
    fallback_from: str = ""
    """The first target, as ``model@version``, if a fallback answered."""
    failed_attempts: tuple[str, ...] = ()
    """The targets that failed or were skipped before this one: ``model@version Error``."""
    worker_failures: tuple[WorkerFailure, ...] = ()
    """The first failed attempts at workers, also those after which a retry succeeded."""
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    config_hash: str = ""
    """The start of the SHA-256 of the configuration file."""
    trace_id: str = ""
    """The ids of the trace and of the request's span, if the trace is exported."""
    span_id: str = ""


FeedbackKind = Literal["boolean", "number", "category"]


class Feedback(Struct, frozen=True):
    """One judgement of a request. ``at`` is in Unix seconds."""

    at: float
    key: str
    """The name of the API key that judges."""
    any_key: bool
    """Whether it may judge the requests of other keys."""
    column: Literal["id", "response_id"]
    """What ``target`` is: the request's id, or that of its response in the client's protocol."""
    target: str
    name: str
    kind: FeedbackKind
    number: float | None
    category: str = ""
    comment: str = ""


RecordObserver = Callable[[RequestRecord], None]


def ignore_record(record: Struct) -> None:
    """Do nothing with the record."""
    del record


def write_log_line(record: Struct) -> None:
    """Write one JSON line to standard error. The commands use ``access_log`` instead."""
    sys.stderr.buffer.write(_encode(record) + b"\n")
    sys.stderr.buffer.flush()


_encode = msgspec.json.Encoder().encode
