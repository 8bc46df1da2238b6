"""All errors of the gateway, independent of protocols and HTTP.

GatewayError
├── ClientError                 the client can fix the request
│   ├── MalformedRequest        the body cannot be decoded
│   ├── InvalidParameter        a field is missing or has a wrong type or value
│   │   └── UnknownParameter
│   ├── UnsupportedFeature      valid, but the target does not support it
│   │   └── UnsupportedEndpoint the target's workers do not have the endpoint at all
│   ├── ContextTooLong          the prompt does not fit the model's context
│   ├── ContentFiltered         a content policy rejected the request
│   ├── ModelNotFound
│   │   ├── VersionNotFound
│   │   └── Forbidden           the API key may not use the model
│   ├── PathNotFound
│   ├── RequestNotFound         no running request has this id
│   ├── StoredObjectNotFound    no stored response or item has this id
│   ├── MethodNotAllowed        has ``allowed``
│   ├── RequestTooLarge         the body or a header
│   ├── UnsupportedEncoding     of the body, by its Content-Encoding
│   ├── Unauthorized            no API key, or an invalid one
│   ├── RateLimitExceeded       has ``retry_after``
│   ├── QuotaExceeded
│   └── ClientDisconnected      the client closed the connection or cancelled
├── Overloaded                  the gateway or every worker is busy
│   ├── RetriesExhausted        no further worker may get the request
│   └── MemoryExhausted         the gateway has no memory for the request or its response
├── DeadlineExceeded            ``phase`` names the timeout
├── WorkerError                 the worker's fault
│   ├── WorkerUnreachable       the worker did not get the request
│   ├── WorkerFailed            the worker sent an error or an invalid response
│   │   └── ResponseAborted     the response ended by a word for an incomplete one, or without one
│   │       └── UnknownFinishReason the gateway does not know the word
│   └── StreamBroken            the response stopped before its end
└── InternalError               the gateway's fault

An error has an ``origin`` and says whether the same request may be sent again (``retryable``).
Only ``ClientAdapter.encode_error`` maps errors to HTTP statuses and bodies.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

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
"""What is wrong with a parameter. ``below`` and ``above``: outside its range; ``value``: not one of
the allowed values; ``too_long``: a string or array; ``conflict``: with another field.
"""


class UpstreamErrorText(NamedTuple):
    """A worker's error text for clients of the same protocol, cleaned and truncated."""

    status: int
    text: str
    in_stream: bool = False
    """The error is an event of a stream."""


class GatewayError(Exception):
    """The base class. ``message`` may be shown to clients; ``param`` is a field's wire path."""

    origin: ClassVar[ErrorOrigin] = "gateway"
    retryable: ClassVar[bool] = False
    retry_after: float | None = None
    """Seconds until a retry makes sense, if known."""
    upstream_error: UpstreamErrorText | None = None
    """The worker's error for clients of the same protocol, if the request was passed through."""
    request_id: str | None = None
    """The gateway's id of the failed request, for protocols that show it in the body."""
    worker_status: int | None = None
    """The HTTP status of the worker's response, if that is the error."""
    worker_text: str = ""
    """The worker's own text, for operators only: it may contain anything."""
    worker_body: Mapping[str, Any] | None = None
    """The worker's error as it came, for clients of its protocol; see ``worker_error_keys``."""
    worker_protocol: str = ""
    """The worker's protocol."""
    worker_headers: tuple[tuple[str, str], ...] = ()
    """Headers of the worker's response; see ``protocols.core.response_headers``."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def mask_secrets(self, mask: Callable[[str], str]) -> None:
        """Mask secrets in all that a worker may have written: a client may see it."""
        self.message, self.worker_text = mask(self.message), mask(self.worker_text)
        self.worker_body = _mask_texts(self.worker_body, mask)
        if self.upstream_error is not None:
            self.upstream_error = self.upstream_error._replace(text=mask(self.upstream_error.text))


def _mask_texts(value: Any, mask: Callable[[str], str]) -> Any:
    """The same with ``mask`` applied to all texts in it."""
    if isinstance(value, dict):
        return {mask(key): _mask_texts(one, mask) for key, one in value.items()}
    if isinstance(value, list):
        return [_mask_texts(one, mask) for one in value]
    return mask(value) if isinstance(value, str) else value


def drop_tracebacks(error: BaseException) -> None:
    """Drop those of an error that is reported otherwise, and of its causes.

    Their frames hold what the request was doing, such as a response, and often the error itself: a
    reference cycle, which only the garbage collector would free.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


class ClientError(GatewayError):
    """The client can fix the request."""

    origin = "client"


class MalformedRequest(ClientError):
    """The body can't be decoded: not JSON, not UTF-8, nested too deep, not an object, or no form.

    Nested too deep is JSON of more than 128 levels. ``at`` is the byte offset, if known;
    ``problem`` is ``json``, ``object``, ``depth`` or ``form``.
    """

    def __init__(
        self,
        message: str,
        *,
        problem: Literal["json", "object", "depth", "encoding", "form"] = "json",
        at: int | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = problem
        self.offset = at


class InvalidParameter(ClientError):
    """One field is missing or wrong.

    ``expected`` is the protocol's own description of the field (a row of its parameter table), for
    the error text; ``got`` is the received value, if it can be shown.
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
    """The protocol does not have this field, and the listener rejects unknown fields."""


class UnsupportedFeature(ClientError):
    """Valid, but the target does not support it."""


class UnsupportedEndpoint(UnsupportedFeature):
    """The target's workers have no endpoint for requests of this kind."""


class ContextTooLong(ClientError):
    """The prompt does not fit the model's context, alone or with the tokens asked for.

    If known, ``tokens`` are all that were requested, ``max_tokens`` those of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        tokens: int | None = None,
        limit: int | None = None,
        max_tokens: int = 0,
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit
        self.max_tokens = max_tokens


class ContentFiltered(ClientError):
    """A content policy rejected the request."""

    filter_results: Mapping[str, Any] | None = None
    """The worker's result for each category, if it sent them."""


class ModelNotFound(ClientError):
    """No model has this name."""

    def __init__(self, message: str, *, model: str) -> None:
        super().__init__(message, param="model")
        self.model = model


class VersionNotFound(ModelNotFound):
    """The model has no such version."""

    def __init__(self, message: str, *, model: str, version: str) -> None:
        super().__init__(message, model=model)
        self.version = version


class Forbidden(ModelNotFound):
    """The API key may not use the model: only the operator learns that it exists."""


class PathNotFound(ClientError):
    """No endpoint has this path. ``method`` and ``path`` are as the client sent them, if known."""

    def __init__(self, message: str, *, method: str = "", path: str = "") -> None:
        super().__init__(message)
        self.method = method
        self.path = path


class RequestNotFound(ClientError):
    """No running request has this ``id``, which the client chose."""

    def __init__(self, message: str, *, id: str) -> None:  # noqa: A002 - the wire's word
        super().__init__(message)
        self.id = id


class StoredObjectNotFound(ClientError):
    """No stored response, or item of one, has this ``id``; ``param`` is the field that names it."""

    def __init__(self, message: str, *, id: str, param: str | None = None) -> None:  # noqa: A002 - the wire's word
        super().__init__(message, param=param)
        self.id = id


class MethodNotAllowed(ClientError):
    """The path allows other methods. ``path`` is as the client sent it, if known."""

    def __init__(self, message: str, *, allowed: tuple[str, ...], path: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed
        self.path = path


class RequestTooLarge(ClientError):
    """The body or a header is over a limit of ``limit`` bytes; None if it is a worker's own."""

    def __init__(self, message: str, *, limit: int | None) -> None:
        super().__init__(message)
        self.limit = limit


class UnsupportedEncoding(ClientError):
    """The body's Content-Encoding is none that the gateway reads."""


class Unauthorized(ClientError):
    """No API key, or an invalid one. ``missing``: there is none."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing


class RateLimitExceeded(ClientError):
    """A rate limit is exceeded. ``scope`` is ``requests``, ``tokens`` or ``concurrency``."""

    def __init__(
        self, message: str, *, retry_after: float | None = None, scope: str = "requests"
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.scope = scope


class QuotaExceeded(ClientError):
    """The quota is used up; a retry will not help soon."""


class ClientDisconnected(ClientError):
    """The client disconnected or cancelled the request."""


class Overloaded(GatewayError):
    """No capacity: every worker is down or busy, the queue is full, or the gateway drains."""

    retryable = True

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RetriesExhausted(Overloaded):
    """A fallback may send the request to no worker: all were tried, or the retry budget is spent.

    The client gets the error of the target before it.
    """


class MemoryExhausted(Overloaded):
    """The gateway has no memory for the request or its response: no worker could change that."""


class DeadlineExceeded(GatewayError):
    """A timeout expired: ``queue``, ``connect``, ``first_token``, ``idle`` or ``total``."""

    def __init__(self, message: str, *, which: str = "total") -> None:
        super().__init__(message)
        self.phase = which


class WorkerError(GatewayError):
    """The worker's fault. ``status`` is its HTTP status, if it sent one."""

    origin = "worker"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WorkerUnreachable(WorkerError):
    """The worker did not get the request, so a retry is safe."""

    retryable = True


class WorkerFailed(WorkerError):
    """The worker sent an error or an invalid response."""


class WorkerModelNotFound(WorkerFailed):
    """The worker does not have the model, which says nothing of its other models."""


class ResponseAborted(WorkerFailed):
    """The response ended by a word for an incomplete one, or without any."""


class UnknownFinishReason(ResponseAborted):
    """The response ended with a word that the gateway does not know, so it may be incomplete."""


class StreamBroken(WorkerError):
    """The response stopped before its end."""


class InternalError(GatewayError):
    """The gateway's fault; its log has the cause."""


EntryT = TypeVar("EntryT")


def find_entry(table: Mapping[type[GatewayError], EntryT], error: GatewayError) -> EntryT:
    """The entry of the error's class, or of its nearest base class; GatewayError must have one."""
    return next(table[kind] for kind in type(error).__mro__ if kind in table)
