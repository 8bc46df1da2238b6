"""Interfaces of backends, and the context of one request: deadline, timeouts, observers."""

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Protocol, runtime_checkable

from msgspec import Struct, field
from msgspec.structs import replace

from protocols.core.catalog import ModelState, ModelTask
from protocols.core.errors import DeadlineExceeded, GatewayError
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Clock,
    PassthroughRequest,
    ResponseContext,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import AnyRequest
from protocols.core.response_headers import COMMON_RESPONSE_HEADERS, ResponseHeaders
from protocols.core.units import ConfigSection, Timeout

if TYPE_CHECKING:
    from protocols.core.interfaces import Headers, UpstreamRequest


# --- failures of workers --------------------------------------------------------------------------

MAX_WORKER_FAILURES: Final = 8
"""How many failures of one request are kept."""
_MAX_FAILURE_TEXT: Final = 300
_MAX_READ_TEXT: Final = 4 * _MAX_FAILURE_TEXT
"""How much of a text is read, before markup is removed."""
_MARKUP: Final = re.compile(r"<[^<>]{0,200}>|[\x00-\x20\x7f-\x9f\u2028\u2029]+")
_SECRET: Final = re.compile(
    r"(?P<before>\b(?:bearer|basic) +"
    r"|\b(?:api[-_ ]?key|access[-_ ]?key|(?:access|auth|api|bearer|refresh)[-_ ]?token|secret"
    r"|password|authorization)(?: provided)?[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:(?:bearer|basic) +)?"
    r"|://(?=[^\s/@]{1,200}@))[^\s\"'<>,;&@}]+"
    r"|\b(?:sk|pk|gsk|hf|nvapi|xai|ghp)[-_](?=[\w.-]*[0-9*])[\w.*-]{6,}|\beyJ[\w-]{8,}\.[\w.-]+",
    re.IGNORECASE,
)
"""What looks like a key: after a word that announces one, or by the form of known kinds of keys."""


class WorkerFailure(Struct, frozen=True, omit_defaults=True):
    """A failed attempt at a worker, for operators only.

    ``worker`` is its URL and ``error`` the class of the error. ``status`` is its HTTP status, if it
    sent one that is an error. ``text`` is its own error text, or why it could not be reached: at
    most 300 characters of one line, in which keys are masked.
    """

    worker: str
    error: str
    status: int | None = None
    text: str = ""


def describe_failure(
    url: str, error: GatewayError, mask_secrets: Callable[[str], str] | None = None
) -> WorkerFailure:
    """The failure of an attempt at a worker. ``mask_secrets`` masks the worker's own key."""
    text = error.worker_text
    if not text and isinstance(cause := error.__cause__, OSError):
        text = cause.strerror or str(cause)
    text = text[:_MAX_READ_TEXT]
    if mask_secrets is not None:
        text = mask_secrets(text)
    text = _SECRET.sub(_mask_secret, _MARKUP.sub(" ", text))
    text = " ".join(text.split())[:_MAX_FAILURE_TEXT]
    return WorkerFailure(url, type(error).__name__, error.worker_status, text)


def _mask_secret(match: re.Match[str]) -> str:
    return f"{match['before'] or ''}***"


# --- observers ------------------------------------------------------------------------------------


class WorkerCandidate(Struct, frozen=True, kw_only=True):
    """The state of one worker during a worker selection.

    ``state`` is ``up``, ``trial`` or ``out``. ``latency`` is seconds to the first token.
    ``availability``: whether the worker can take the request now; ``full`` if it is at its limit,
    ``tried`` if it already failed for this request. ``score`` is the value that the load balancing
    policy compares, None if the policy does not consider the worker.
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
    """The inputs of a worker selection, just before it happens. Times are in seconds.

    ``score_rule``: the worker with the least or the most score wins, or one is drawn at random.
    ``expected_url`` is the worker that would be selected now, "" if all are busy and the request
    queues. ``max_retries`` is the number of further attempts after ``retryable_failures``;
    ``retry_budget`` is the largest share of recent requests that may be retried.
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
    """Receives the attempts of one request, for tracing."""

    def set_request(self, request: "AnyRequest") -> None:
        """Set the request that the target gets."""

    def start_attempt(self, url: str) -> "Headers":
        """An attempt at a worker starts. Returns the trace headers to send to it."""

    def end_attempt(self, error: GatewayError | None) -> None:
        """The attempt ended, with its error if it failed. A second call has no effect."""


class RequestObserver(Protocol):
    """Receives the steps of one request in a backend. It may raise to end the request."""

    @property
    def dry_run(self) -> bool:
        """Nothing may be sent: ``on_selection`` ends the request."""

    def on_selection(self, selection: WorkerSelection, wire: "UpstreamRequest") -> None:
        """A worker is about to be selected; ``wire`` is the request for the expected one."""

    def on_send(self, url: str, wire: "UpstreamRequest") -> None:
        """The request is sent to a worker."""

    def on_failure(self, failure: WorkerFailure) -> None:
        """The attempt failed, before its response started or within it."""


class Deadline:
    """The time by which a request must be complete, shared by everything that waits for it."""

    __slots__ = ("_clock", "expires_at")

    def __init__(self, clock: Clock, seconds: float, since: float | None = None) -> None:
        """``seconds`` count from ``since``, a time of ``clock``; None means now."""
        self._clock = clock
        self.expires_at = (clock() if since is None else since) + seconds
        """Time of expiry, in seconds of the clock."""

    def remaining(self, limit: float | None = None) -> float:
        """Seconds left, at most ``limit``. Raises DeadlineExceeded when there are none."""
        seconds = self.expires_at - self._clock()
        if seconds <= 0:
            raise DeadlineExceeded(TIME_IS_UP)
        return seconds if limit is None or seconds < limit else limit

    def expiry_within(self, seconds: float) -> float:
        """The time in ``seconds`` from now, or ``expires_at`` if sooner.

        Raises DeadlineExceeded as ``remaining`` does.
        """
        now, deadline = self._clock(), self.expires_at
        if deadline <= now:
            raise DeadlineExceeded(TIME_IS_UP)
        expiry = now + seconds
        if expiry < deadline:
            return expiry
        return deadline

    def shorten(self, seconds: float) -> None:
        """Move ``expires_at`` to ``seconds`` from now, if that is sooner."""
        self.expires_at = min(self.expires_at, self._clock() + seconds)


class Timeouts(ConfigSection, frozen=True):
    """Time limits of a request, in seconds."""

    connect: Timeout = 2.0
    """The time limit to connect to a worker."""
    first_token: Timeout = 600.0
    """The time limit until the first part of a stream."""
    idle: Timeout = 300.0
    """The longest time between two parts of a stream."""
    idle_max: Timeout = 600.0
    """The longest time without a part of a stream while the worker sends comments, each of which
    lets the stream go on for another ``idle``."""
    total: Timeout = 3600.0
    """The time limit for the whole response."""


class ModelTimeouts(ConfigSection, frozen=True):
    """Time limits of one model's streams, in seconds; those of its backend where there is none."""

    first_token: Timeout | None = None
    """The time limit until the first part of a stream."""
    idle: Timeout | None = None
    """The longest time between two parts of a stream."""
    idle_max: Timeout | None = None
    """The longest time without a part of a stream while the worker sends comments."""

    def override(self, timeouts: Timeouts) -> Timeouts:
        """The timeouts with those of the model."""
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return replace(timeouts, **{name: value for name, value in fields if value is not None})


TIME_IS_UP: Final = "the request's time is up (timeouts.total, or the client's own limit)"


class BackendSettings(ConfigSection, frozen=True, tag_field="kind"):
    """The settings of one backend."""

    implied_by: ClassVar[str | None] = None
    """The key that makes ``kind`` unnecessary."""

    @property
    def kind(self) -> str:
        """The kind of backend: its name in the registry."""
        return str(self.__struct_config__.tag)

    @property
    def model_task(self) -> ModelTask | None:
        """The task of its only model; None if it has several, or if that is not known."""
        return None


WorkerModel = tuple[str, str]
"""A worker's URL, and its name of one of its models; "" for all of them."""


class AttemptHistory(Struct):
    """The workers that got one request, over all its targets: pools may share workers."""

    worker: str = ""
    """The last worker that the request was sent to."""
    failed: frozenset[WorkerModel] = frozenset()
    """The workers that failed, and the models that workers refused."""
    failed_pools: frozenset[WorkerModel] = frozenset()
    """All workers of the pools in which the request failed, or failed for this model only."""
    workers_killed: int = 0
    """See ``backends.pool.retry.RetryState``; for the last of these pools."""
    failures: tuple[WorkerFailure, ...] = ()
    """The first failed attempts, also those after which a retry succeeded."""

    def add_failure(self, failure: WorkerFailure) -> None:
        """Keep a failed attempt, if there are not too many."""
        if len(self.failures) < MAX_WORKER_FAILURES:
            self.failures += (failure,)


def ignore_memory(size: int) -> None:
    """The ``reserve_memory`` of a request that is none of a client's, such as a probe."""
    del size


class RequestContext(Struct):
    """The context of one request: id, deadline, timeouts, principal and observers."""

    id: str
    deadline: Deadline
    clock: Clock
    reserve_memory: Callable[[int], None]
    """Takes so many bytes of the gateway's memory for the response until the request ends; gives
    them back if negative. Raises MemoryExhausted."""
    timeouts: Timeouts = Timeouts()
    principal: str | None = None
    """The name of the API key, never the key."""
    traceparent: str | None = None
    """The client's ``traceparent`` header, forwarded unchanged."""
    observer: RequestObserver | None = None
    """Receives the steps of the request, if it is explained."""
    received_at: float = 0.0
    """When the request was received completely, by ``clock``."""
    tracestate: str | None = None
    attempt_trace: AttemptTrace | None = None
    """Receives the attempts and supplies their trace headers, if the request is traced."""
    offload_to_thread: bool = False
    """Whether to encode and decode in a thread, because a large body would block the event loop."""
    preempt: Callable[[], None] | None = None
    """Cancels the request to free capacity for clients. Only background requests such as shadow
    traffic have it: they queue last, make one attempt and do not affect the worker's health."""
    first_attempt_at: float | None = None
    """When the first attempt was queued or sent, by ``clock``."""
    attempt_history: AttemptHistory = field(default_factory=AttemptHistory)
    model_timeouts: ModelTimeouts | None = None
    """Those of the model whose target gets the request."""
    worker_protocol: str = ""
    """That of the worker whose response has begun; "" if it is of no worker."""
    worker_headers: tuple[tuple[str, str], ...] = ()
    """Those of its response; see ``protocols.core.response_headers``."""
    worker_header_rules: ResponseHeaders = COMMON_RESPONSE_HEADERS
    """Those of its protocol."""


class PassthroughSource(Struct, frozen=True):
    """What a backend needs to pass a request through.

    See ``protocols.core.interfaces.SupportsPassthrough``.
    """

    adapter: ClientAdapter
    client_request: ClientRequest
    response_context: ResponseContext


class BackendRequest(Struct, frozen=True):
    """A client's request to one backend."""

    decode: Callable[[], tuple[AnyRequest, Mapping[str, str]]]
    """Returns the internal request with the backend's model name, and the client's wire names by
    field path of the request. Raises ClientError."""
    passthrough: PassthroughSource | None = None
    """None if the request has to be translated."""


class PreparedRequest(Struct, frozen=True):
    """A request that a backend can send.

    It is translated unless ``passthrough`` is set. The backend encodes it when it is sent, since
    emulation may change ``request`` before. With ``passthrough``, ``request`` has only the fields
    that load balancing and metrics need.
    """

    request: AnyRequest
    unsupported_parameters: tuple[UnsupportedParameter, ...] = ()
    """The parameters of the request that the backend cannot honour."""
    passthrough: PassthroughRequest | None = None
    """The client's own bytes, and the reader of the worker's."""
    prepare_again: "Callable[[], PreparedRequest] | None" = None
    """Of a pass-through: prepares the same request, if the backend has learned how. Raises
    ClientError."""


StreamItem = tuple[bytes | None, Sequence[Event]]
"""Events, and their bytes in the client's protocol if a worker encoded them already."""
StreamItems = AsyncGenerator[StreamItem, None]
EventSink = Callable[[bytes | None, Sequence[Event]], bool]
"""Accepts a batch at once. Returns whether it accepts another one directly."""


async def collect_items(items: StreamItems) -> Sequence[StreamItem]:
    """All items of a response."""
    return [item async for item in items]


class Backend(Protocol):
    """Answers requests: a worker pool, a local model, or a script.

    A subclass inherits ``send_unary``.
    """

    @property
    def ready(self) -> bool:
        """Whether it can accept a request now."""

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        """Choose between pass-through and translation. Does no I/O. Raises ClientError."""

    def send(
        self, prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
    ) -> StreamItems:
        """The events of the response, in batches; ends with StreamEnd or raises.

        Batches may go to ``sink`` instead of being yielded, until it is full; an empty one is
        yielded then. Closing the generator, or cancelling its task, cancels the work at once.
        """

    async def send_unary(
        self, prepared: PreparedRequest, context: RequestContext
    ) -> Sequence[StreamItem]:
        """All items of ``send``, for a unary response; a pool needs no generator for them."""
        return await collect_items(self.send(prepared, context))

    async def start(self) -> None:
        """Start; called once. Does not wait for workers that are down."""

    async def aclose(self) -> None:
        """Cancel all work and release all resources."""


@runtime_checkable
class SupportsWarmup(Protocol):
    """A backend that needs time to warm up after its start."""

    async def warm_up(self) -> None:
        """Wait until it is warm, or cannot improve now. Raises WorkerError if it failed."""


@runtime_checkable
class ReportsFailure(Protocol):
    """A backend that may fail for good, or for a time."""

    @property
    def failure(self) -> str | None:
        """Why it refuses requests; None while it may become ready."""


@runtime_checkable
class ReportsLoading(Protocol):
    """A backend that answers nothing until it has loaded its model."""

    @property
    def loading(self) -> str | None:
        """How far it is, for people; None once it has loaded, or failed to."""


@runtime_checkable
class ReportsModel(Protocol):
    """A backend that runs one model in the gateway's own processes."""

    def report_model(self) -> ModelState:
        """Its state now."""

    async def keep_model(self, seconds: float | None) -> bool:
        """Load the model, and keep it for this long after its last request; 0 unloads it.

        A negative number is for ever; None: as configured. Returns False if the model is not loaded
        on demand. Raises WorkerUnreachable if it can't be loaded, or Overloaded.
        """


@runtime_checkable
class ExplainsSelection(Protocol):
    """A backend that calls ``RequestContext.observer`` before it selects a worker."""

    explains_selection: bool
    """Always true."""


@runtime_checkable
class ComputesChoices(Protocol):
    """A backend that computes the choices of a request itself: a local model."""

    computes_choices: bool
    """Always true."""


class ForwardedRequest(Struct, frozen=True):
    """A client's request that is forwarded without translation.

    ``headers`` are the headers of this request alone.
    """

    upstream_request: "UpstreamRequest"
    headers: "Headers"
    model: str = ""
    """The target's own name of its model."""


class ForwardedResponse(Protocol):
    """A worker's response that is forwarded as it is. ``close`` must be called."""

    status: int
    headers: "Headers"
    """Those that a client gets."""

    @property
    def complete(self) -> bool:
        """Whether all of the body was received; ``read`` may still return some of it."""

    async def read(self) -> list[bytes]:
        """The next bytes, as soon as there are any; [] at the end. Raises WorkerError."""

    def close(self) -> None:
        """Stop: free the worker, and close the connection if the response is unfinished."""


@runtime_checkable
class ForwardsRequests(Protocol):
    """A backend whose workers may get requests of clients without translation."""

    def find_forwarded_path(self, client: ClientAdapter, operation: str, model: str) -> str | None:
        """The workers' path for the client's operation and their name of the model.

        None if they do not speak its protocol.
        """

    async def forward(
        self, request: ForwardedRequest, context: RequestContext
    ) -> ForwardedResponse:
        """Send the request; returns once the worker has accepted it.

        Another worker gets it if one can't be reached. Raises Overloaded, DeadlineExceeded,
        WorkerError, and the errors that the protocol's adapter reads from the worker.
        """
