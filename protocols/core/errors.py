"""Everything that can go wrong, in the gateway's own words.

GatewayError
├── ClientError                 the client can mend it
│   ├── Malformed               the body can't be read at all
│   ├── InvalidParameter        one field is missing, or of a wrong type or value
│   │   └── UnknownParameter
│   ├── Unsupported             understood, and the target can't do it
│   ├── ContextTooLong          the prompt does not fit the model
│   ├── ContentRefused          a policy refused the content
│   ├── ModelNotFound
│   │   └── VersionNotFound
│   ├── PathNotFound
│   ├── RequestNotFound         no running request of this id
│   ├── MethodNotAllowed        carries ``allowed``
│   ├── TooLarge                the body, or a header
│   ├── Unauthorized            no key, or a wrong one
│   ├── Forbidden               a good key, and not for this
│   ├── RateLimited             carries ``retry_after``
│   ├── QuotaExceeded
│   └── ClientGone              the client left; nobody reads what we say
├── Overloaded                  we, or every worker, are busy: try later
├── DeadlineExceeded            says which of the time limits it was
├── WorkerError                 the worker's fault
│   ├── WorkerUnreachable       it never saw the request
│   ├── WorkerFailed            it answered with an error, or not in its dialect
│   └── StreamBroken            its answer stopped before its end
└── InternalError               our fault

An error says who is to blame (``blame``) and whether the same request may be sent again
(``retryable``). It knows nothing of HTTP: a dialect's ``refuse`` turns it into a status and a body,
and nobody else does.
"""

from typing import Any, ClassVar, Literal, NamedTuple

ErrorOrigin = Literal["client", "worker", "gateway"]

ParameterProblem = Literal[
    "missing",
    "type",
    "below",
    "above",
    "value",
    "empty",
    "too_long",
    "conflict",
]
"""What is wrong with a parameter. ``below`` and ``above``: outside its range; ``value``: none of
those allowed; ``too_long``: a string or array; ``conflict``: with another field."""


class UpstreamErrorText(NamedTuple):
    """What a worker said to a client of its own dialect, short and clean."""

    status: int
    text: str
    in_stream: bool = False
    """Said as an event of a stream."""


class GatewayError(Exception):
    """The root. ``message`` may be shown to the client; ``param`` is the wire path of a field."""

    origin: ClassVar[ErrorOrigin] = "gateway"
    retryable: ClassVar[bool] = False
    retry_after: float | None = None
    """Seconds after which to try again, where known."""
    upstream_error: UpstreamErrorText | None = None
    """What the dialect says in place of words of its own, where a call was passed on as it was."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(GatewayError):
    """The client can mend it."""

    origin = "client"


class MalformedRequest(ClientError):
    """The body can't be read: not JSON, not UTF-8, nested too deep, or not an object.

    ``at`` is the byte offset where known; ``problem`` is ``json``, ``object`` or ``depth``.
    """

    def __init__(
        self,
        message: str,
        *,
        problem: Literal["json", "object", "depth", "encoding"] = "json",
        at: int | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = problem
        self.offset = at


class InvalidParameter(ClientError):
    """One field is missing or wrong.

    ``expected`` is the dialect's own description of what it wanted (a parameter's table row), for
    its error text; ``got`` is the offending value where it can be shown.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str,
        problem: ParameterProblem = "value",
        expected: object = None,
        got: Any = None,
    ) -> None:
        super().__init__(message, param=param)
        self.problem: ParameterProblem = problem
        self.expected = expected
        self.value = got


class UnknownParameter(InvalidParameter):
    """A field that the dialect does not have, where it insists."""


class UnsupportedFeature(ClientError):
    """Understood; the target can't do it."""


class ContextTooLong(ClientError):
    """The prompt does not fit. ``tokens`` and ``limit`` where known."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class ContentFiltered(ClientError):
    """A policy refused the content."""


class ModelNotFound(ClientError):
    """No model of this name."""

    def __init__(self, message: str, *, model: str) -> None:
        super().__init__(message, param="model")
        self.model = model


class VersionNotFound(ModelNotFound):
    """The model has no such version."""

    def __init__(self, message: str, *, model: str, version: str) -> None:
        super().__init__(message, model=model)
        self.version = version


class PathNotFound(ClientError):
    """No endpoint of this path. ``method`` and ``path`` are as they were sent, where known."""

    def __init__(self, message: str, *, method: str = "", path: str = "") -> None:
        super().__init__(message)
        self.method = method
        self.path = path


class RequestNotFound(ClientError):
    """No running request has this ``id``, which its client chose."""

    def __init__(self, message: str, *, id: str) -> None:  # noqa: A002 - the wire's word
        super().__init__(message)
        self.id = id


class MethodNotAllowed(ClientError):
    """The path exists, for other methods. ``path`` is as it was sent, where known."""

    def __init__(self, message: str, *, allowed: tuple[str, ...], path: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed
        self.path = path


class RequestTooLarge(ClientError):
    """The body or a header is over a limit of ``limit`` bytes."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class Unauthorized(ClientError):
    """No key, or a wrong one. ``missing`` tells which."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing


class Forbidden(ClientError):
    """A good key, and not for this."""


class RateLimitExceeded(ClientError):
    """Too much, for now. ``scope`` is ``requests``, ``tokens`` or ``concurrency``."""

    def __init__(
        self, message: str, *, retry_after: float | None = None, scope: str = "requests"
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.scope = scope


class QuotaExceeded(ClientError):
    """The budget is spent; trying again soon will not help."""


class ClientDisconnected(ClientError):
    """The client left, or told us to stop."""


class Overloaded(GatewayError):
    """No capacity now: every worker is down or busy, the queue is full, or we are draining."""

    retryable = True

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(GatewayError):
    """A time limit ran out: ``queue``, ``connect``, ``first_token``, ``idle`` or ``total``."""

    def __init__(self, message: str, *, which: str = "total") -> None:
        super().__init__(message)
        self.phase = which


class WorkerError(GatewayError):
    """The worker's fault. ``status`` is its HTTP status where it gave one."""

    origin = "worker"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WorkerUnreachable(WorkerError):
    """The worker never saw the request, so it may be sent again."""

    retryable = True


class WorkerFailed(WorkerError):
    """The worker answered with an error, or not in its dialect."""


class StreamBroken(WorkerError):
    """The answer stopped before its end."""


class InternalError(GatewayError):
    """Our fault; the log has the cause."""
