"""What belongs to one exchange and not to the client's request."""

from collections.abc import Callable

from msgspec import Struct

from gateway.core.errors import DeadlineExceeded
from gateway.core.watching import AttemptTrace, RequestObserver

Clock = Callable[[], float]
"""Monotonic seconds."""


class Deadline:
    """The one moment by which an exchange must be over; whoever waits takes what remains of it."""

    __slots__ = ("_clock", "expires_at")

    def __init__(self, clock: Clock, seconds: float, since: float | None = None) -> None:
        """``since``: from when on, by the clock; None: from now."""
        self._clock = clock
        self.expires_at = (clock() if since is None else since) + seconds
        """When that is, by the clock."""

    def remaining(self, limit: float | None = None) -> float:
        """Seconds left, at most ``limit``. Raises DeadlineExceeded when there are none."""
        left = self.expires_at - self._clock()
        if left <= 0:
            raise DeadlineExceeded("the request's time is up")
        return left if limit is None or left < limit else limit

    def expiry_within(self, seconds: float) -> float:
        """The moment in so many seconds, or its own if that is sooner; raises as ``remaining``."""
        now, ends = self._clock(), self.expires_at
        if ends <= now:
            raise DeadlineExceeded("the request's time is up")
        soon = now + seconds
        if soon < ends:
            return soon
        return ends

    def shorten(self, seconds: float) -> None:
        """Let it end within ``seconds`` from now, if that is sooner."""
        self.expires_at = min(self.expires_at, self._clock() + seconds)


class Timeouts(Struct, frozen=True):
    """Separate limits, in seconds; each also ends with the deadline."""

    connect: float = 2.0
    first_token: float = 60.0
    idle: float = 30.0
    total: float = 600.0


class RequestContext(Struct):
    """One exchange: its id, its deadline and limits, and who asks."""

    id: str
    deadline: Deadline
    clock: Clock
    timeouts: Timeouts = Timeouts()
    principal: str | None = None
    """The name of the key, never the key."""
    traceparent: str | None = None
    """What the client said of its trace, which is passed on as it is."""
    started_at: float = 0.0
    """By ``clock``."""
    observer: RequestObserver | None = None
    """Who is to be told how the answer comes about."""
    received_at: float = 0.0
    """When the whole request was here, by ``clock``."""
    tracestate: str | None = None
    attempt_trace: AttemptTrace | None = None
    """Who is to be told of the workers that are asked, and says what they are told instead."""
    offload_to_thread: bool = False
    """Whether the request is so large that reading and writing it would hold up all others: it is
    then done in a thread."""
    preempt: Callable[[], None] | None = None
    """Ends it, to make room for what a client waits for. Only a request for whose answer nobody
    waits has this: it comes after all others, is sent to one worker, and says nothing of how well
    that is."""
    first_attempt_at: float | None = None
    """When a worker, or a place at one, was first asked for, by ``clock``."""
