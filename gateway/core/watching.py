"""What looks on while an answer comes about. Nobody does, unless a request is to be explained."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from gateway.core.errors import GatewayError

if TYPE_CHECKING:
    from gateway.core.ports import Headers, UpstreamRequest
    from gateway.core.request import Request


class WorkerCandidate(Struct, frozen=True, kw_only=True):
    """A worker as one request finds it.

    ``state`` is ``up``, ``trial`` or ``out``. ``latency`` is in seconds to the first token.
    ``can``: whether the request may go there now; ``full`` where no place is free, ``tried`` where
    it failed at this request already. ``score`` is what the policy compares: None where it does
    not look at the worker.
    """

    url: str
    state: str
    weight: float
    in_flight: int
    limit: int | None
    latency: float | None
    availability: Literal["yes", "no", "full", "tried"]
    score: float | None


class WorkerSelection(Struct, frozen=True, kw_only=True):
    """How a worker is chosen, just before one is. Times are in seconds.

    ``wins`` tells which score does, or that luck has a part in it. ``likely`` is the URL of the one
    that would be taken now, "" where all are busy and the request waits. ``retries`` is how many
    more workers may be asked, after the failures ``retried``, while no more than the part
    ``budget`` of recent requests is asked again.
    """

    policy: str
    score_rule: Literal["least", "most", "drawn"]
    candidates: Sequence[WorkerCandidate]
    expected_url: str
    queue_length: int
    queue_limit: int
    queue_timeout: float
    timeouts: Mapping[str, float]
    max_retries: int
    retry_budget: float
    retryable_failures: Sequence[str]


class AttemptTrace(Protocol):
    """Is told of the tries at one request, where these are to be told elsewhere."""

    def set_request(self, request: "Request") -> None:
        """What is asked of a target."""

    def start_attempt(self, url: str) -> "Headers":
        """A worker is asked; gives what it is told of the trace, in place of all it would be."""

    def end_attempt(self, error: GatewayError | None) -> None:
        """It is done with, and why if it failed. May be called again, for nothing."""


class RequestObserver(Protocol):
    """Is told what a backend does for one request. It may raise, to end the request there."""

    @property
    def dry_run(self) -> bool:
        """Nothing may be sent: ``chooses`` will end it."""

    def on_selection(self, choice: WorkerSelection, wire: "UpstreamRequest") -> None:
        """A worker is about to be chosen; ``wire`` is what the likely one would get."""

    def on_send(self, url: str, wire: "UpstreamRequest") -> None:
        """A worker is asked."""

    def on_failure(self, url: str, error: GatewayError) -> None:
        """It failed before its answer began."""
