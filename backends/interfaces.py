"""What belongs to one exchange and not to the client's request."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from msgspec import Struct

from protocols.core.errors import DeadlineExceeded, GatewayError
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    PassthroughRequest,
    ResponseContext,
    Token,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import Request

if TYPE_CHECKING:
    from protocols.core.interfaces import Headers, UpstreamRequest


# What looks on while an answer comes about. Nobody does, unless a request is to be explained.


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


class Backend(Protocol):
    """Something that answers a request."""

    @property
    def ready(self) -> bool:
        """Whether it can take a request now."""

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """What it will not do of the request."""

    def stream(
        self, request: Request, context: RequestContext
    ) -> AsyncGenerator[Sequence[Event], None]:
        """The events, in the batches in which they came about; ends with Done or raises.

        Closing the generator, or cancelling its task, stops the work at once.
        """

    async def start(self) -> None:
        """Get ready; called once. Does not wait for workers that are down."""

    async def aclose(self) -> None:
        """Stop the work and let everything go."""


@runtime_checkable
class SupportsWarmup(Protocol):
    """What a backend may also be: one that takes a while, once started, until it is at its best."""

    async def warm_up(self) -> None:
        """Wait until it is, or is as good as it will be now. Raises WorkerError if it never is."""


StreamItem = tuple[bytes | None, Sequence[Event]]
"""Some events, with their bytes in the client's dialect where a worker wrote them already."""
StreamItems = AsyncGenerator[StreamItem, None]
EventBatches = AsyncGenerator[Sequence[Event], None]
EventSink = Callable[[bytes | None, Sequence[Event]], bool]
"""Takes such a batch, at once; whether it takes another before anything else is done."""


@runtime_checkable
class SupportsPush(Protocol):
    """What a backend may also be: one that gives its events to who takes them at once."""

    def stream_to(self, request: Request, context: RequestContext, take: EventSink) -> EventBatches:
        """As ``answer``; ``take`` may get batches at once, until it is full: then one is empty."""

    async def collect(self, request: Request, context: RequestContext) -> Sequence[StreamItem]:
        """All that ``answer`` gives. Cancelling its task stops the work at once."""


@runtime_checkable
class PassthroughBackend(Protocol):
    """What a backend may also be: one whose workers may speak the client's own dialect."""

    def prepare_passthrough(
        self, client: ClientAdapter, call: ClientRequest, about: ResponseContext
    ) -> PassthroughRequest | None:
        """See ``Relaying.relay``."""

    def stream_passthrough(
        self, relay: PassthroughRequest, context: RequestContext, take: EventSink | None = None
    ) -> StreamItems:
        """The answer, as ``Backend.answer`` gives it; with ``take``, as ``Pouring.pour`` does."""

    async def collect_passthrough(
        self, relay: PassthroughRequest, context: RequestContext
    ) -> Sequence[StreamItem]:
        """The same of an answer in one piece. Cancelling its task stops the work at once."""


@runtime_checkable
class ExplainsSelection(Protocol):
    """What a backend may also be: one that tells ``Context.watch`` before it asks a worker."""

    explains_selection: bool
    """Always true."""


@runtime_checkable
class Tokenizer(Protocol):
    """What a backend may also be: one that tells how its model cuts a text."""

    async def tokenize(self, text: str, context: RequestContext) -> Sequence[Token]:
        """The tokens of ``text``, and those that the model puts around it. May be cancelled."""
