"""Forwards requests that are not translated: audio, images, moderations.

1. read as much of the body as names the model: all of a JSON body, the beginning of a form
2. route by that model, or by the listener's default model, as for every other request
3. send the client's bytes to a worker that speaks the same protocol, with the worker's model name
4. pass the worker's bytes on as they come; if they stop early, close the client's connection

A fallback gets the request if its target fails before the response has begun and all of the body
was read before: JSON, but no form that is sent on while it arrives.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final

from backends.interfaces import (
    ForwardedRequest,
    ForwardedResponse,
    ForwardsRequests,
    RequestBody,
)
from gateway.observability.record import RequestRecord
from gateway.pipeline.dispatcher import (
    FallbackAttempt,
    RoutedRequest,
    has_fallback_access,
    try_fallbacks,
)
from gateway.pipeline.http import CancellableRequest, HttpRequest, StreamedHttpRequest
from gateway.routing.fallback import (
    NO_ACCESS,
    FallbackHistory,
    describe_missing,
    is_fallback_error,
)
from gateway.routing.router import Route, Router
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    RequestTooLarge,
    UnsupportedFeature,
)
from protocols.core.events import Usage
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Headers,
    ProxiedModel,
    SupportsProxy,
    UpstreamRequest,
)

_PREFIX_SIZES: Final = (0, 16 << 10, 256 << 10, 1 << 20, 4 << 20)
"""How many bytes of a form are read, step by step, to find the model."""
_USAGE_TYPES: Final = frozenset({"application/json", "text/event-stream"})
_USAGE_TAIL: Final = 64 << 10
"""How many bytes at the end of a response are searched for its usage."""
_HEADER_VALUE: Final = re.compile(r"[ -~]{1,512}")
_FORWARDED_HEADERS: Final = (("content-type", "Content-Type"), ("accept", "Accept"))


class ProxiedBody:
    """The body of a request, of which the beginning is read to find the model.

    ``limit`` is the largest body in bytes.
    """

    def __init__(self, http: HttpRequest, limit: int) -> None:
        self._http = http
        self._limit = limit
        self._beginning = b""
        self._model = ProxiedModel("", lambda body, _: body)
        self.is_whole = False
        """Whether all of the body was read, so that it can be sent more than once."""

    async def find_model(
        self, adapter: SupportsProxy, make_call: Callable[[bytes], ClientRequest]
    ) -> ClientRequest:
        """Read until the model is known; returns the request with the body so far.

        Raises ClientError and Overloaded.
        """
        http, headers = self._http, self._http.headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ClientError("unsupported content encoding: this endpoint takes plain bodies only")
        self._check_size(self._get_size() or 0)
        is_form = headers.get("content-type", "").lower().startswith("multipart/")
        if not is_form or not isinstance(http, StreamedHttpRequest):
            self._beginning, self.is_whole = await http.body(self._limit), True
            call = make_call(self._beginning)
            found = adapter.find_proxied_model(call, is_complete=True)
            self._model = found or self._model
            return call
        for size in _PREFIX_SIZES:
            self._beginning, is_complete = await http.peek_body(min(size, self._limit))
            self._check_size(len(self._beginning))
            call = make_call(self._beginning)
            found = adapter.find_proxied_model(call, is_complete=is_complete)
            if found is not None:
                self._model = found
                return call
        text = f"the form must have its field 'model' in its first {_PREFIX_SIZES[-1]} bytes"
        raise InvalidParameter(text, param="model", problem="missing")

    @property
    def model(self) -> str:
        """The model that the client named; "" if it named none."""
        return self._model.name

    def build_forwarded(self, path: str, model: str) -> ForwardedRequest:
        """The request for a worker, with another name of the model if it has one."""
        beginning = self._beginning
        name = self._model.name
        if name and (model != name or not self._model.is_in_body):
            beginning = self._model.rename(beginning, model)
        headers = _select_headers(self._http)
        if self.is_whole:
            return ForwardedRequest(UpstreamRequest(path, beginning), headers)
        size = self._get_size()
        if size is not None:
            size += len(beginning) - len(self._beginning)
        body = RequestBody(size, lambda: self._read_pieces(beginning))
        return ForwardedRequest(UpstreamRequest(path, b""), headers, body)

    async def _read_pieces(self, beginning: bytes) -> AsyncIterator[bytes]:
        """The body with this beginning, in pieces. Raises RequestTooLarge and MalformedRequest."""
        http = self._http
        assert isinstance(http, StreamedHttpRequest)  # noqa: S101 - else it was read as a whole
        piece = await http.read_body_piece()
        size = len(piece)
        yield beginning + piece[len(self._beginning) :]
        while piece := await http.read_body_piece():
            size += len(piece)
            self._check_size(size)
            yield piece

    def _get_size(self) -> int | None:
        text = self._http.headers.get("content-length", "")
        return int(text) if text.isascii() and text.isdigit() else None

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            text = f"the body is larger than {self._limit} bytes"
            raise RequestTooLarge(text, limit=self._limit)


def _select_headers(http: HttpRequest) -> Headers:
    """The client's headers that workers get. Raises MalformedRequest."""
    headers: Headers = ()
    for name, shown in _FORWARDED_HEADERS:
        value = http.headers.get(name)
        if value is None:
            continue
        if not _HEADER_VALUE.fullmatch(value):
            raise MalformedRequest(f"the header {shown} is not printable ASCII", problem="encoding")
        headers += ((shown, value),)
    return headers


def get_proxy_adapter(adapter: ClientAdapter) -> SupportsProxy:
    """The adapter of a ``proxy`` endpoint, with its methods for that."""
    assert isinstance(adapter, SupportsProxy)  # noqa: S101 - it has the endpoint
    return adapter


class ProxiedRequest:
    """A running request that is forwarded; the interface is that of ``CancellableRequest``."""

    def __init__(self, request: RoutedRequest, router: Router, body: ProxiedBody) -> None:
        self._request = request
        self._router = router
        self._body = body
        self._task: asyncio.Task[Any] | None = None
        """The task that forwards it, as long as it may be cancelled."""
        self._stop_reason: GatewayError | None = None
        """Why ``stop`` was called, if it was."""

    @property
    def record(self) -> RequestRecord:
        """See ``gateway.pipeline.http.CancellableRequest``."""
        return self._request.record

    @property
    def age(self) -> float:
        """See ``gateway.pipeline.http.CancellableRequest``."""
        return self._request.context.clock() - self._request.context.started_at

    @property
    def started(self) -> bool:
        """See ``gateway.pipeline.http.CancellableRequest``."""
        return self._request.writer.started

    def stop(self, error: GatewayError | None = None) -> None:
        """See ``gateway.pipeline.http.CancellableRequest``."""
        if self._task is not None and self._stop_reason is None:
            self._stop_reason = error or ClientDisconnected("the request was stopped")
            self._task.cancel()

    async def run(self, running_requests: set[CancellableRequest], route: Route) -> None:
        """Forward the request and its response; in ``running_requests`` meanwhile.

        Raises UnsupportedFeature if no worker can answer it, and as ``ForwardsRequests.forward``.
        """
        task = self._task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        running_requests.add(self)
        try:
            await self._forward_with_fallback(route)
        except asyncio.CancelledError:
            if self._stop_reason is None or task.cancelling() > cancelled + 1:
                raise  # somebody else cancels it, too
            task.uncancel()
            raise self._stop_reason from None
        finally:
            self._task = None
            running_requests.discard(self)

    async def _forward_with_fallback(self, route: Route) -> None:
        """Forward to the target, or to a fallback if the whole body was read before."""
        request, router = self._request, self._router
        try:
            await self._forward(route)
        except GatewayError as error:
            can_repeat = self._body.is_whole and not request.writer.started
            if not can_repeat or not is_fallback_error(error):
                raise

            async def prepare(fallback: Route) -> FallbackAttempt | str:
                if not has_fallback_access(request, fallback, route.model):
                    return NO_ACCESS
                if self._find_path(fallback) is None:
                    return describe_missing(request.client_request.endpoint.operation)
                return partial(self._forward, fallback)

            fallbacks = router.list_fallbacks(route, request.get_attributes)
            await try_fallbacks(request, FallbackHistory(route, error), fallbacks, prepare)

    def _find_path(self, route: Route) -> str | None:
        """The path of the target's workers; None if it can't get the request."""
        target, request = route.target, self._request
        if not isinstance(target.backend, ForwardsRequests):
            return None
        operation = request.client_request.endpoint.operation
        return target.backend.find_forwarded_path(request.adapter, operation, target.backend_model)

    async def _forward(self, route: Route) -> None:
        """Make one attempt at a target."""
        request, target, context = self._request, route.target, self._request.context
        endpoint, path = request.client_request.endpoint, self._find_path(route)
        if path is None or not isinstance(target.backend, ForwardsRequests):
            raise UnsupportedFeature(
                f"the model {route.model.info.name!r} does not support {endpoint.path}: it has no "
                f"workers with the {request.adapter.name} protocol",
                param="model",
            )
        if request.explain_recorder.dry_run:
            raise UnsupportedFeature(f"a dry run of {endpoint.path} ends here: it is forwarded")
        forwarded = self._body.build_forwarded(path, target.backend_model)
        try:
            response = await target.backend.forward(forwarded, context)
        finally:
            request.record.worker = context.attempt_history.worker
            request.record.worker_failures = context.attempt_history.failures
        try:
            await _write_response(request, response)
        finally:
            request.record.worker_failures = context.attempt_history.failures
            response.close()


class _UsageTail:
    """Keeps the end of a response, in which its usage stands."""

    def __init__(self, headers: Headers) -> None:
        kind = next((value for name, value in headers if name.lower() == "content-type"), "")
        self._is_read = kind.partition(";")[0].strip().lower() in _USAGE_TYPES
        self._tail = b""

    def add(self, chunks: Sequence[bytes]) -> None:
        """Note the next bytes of the response."""
        if self._is_read:
            self._tail = b"".join((self._tail, *chunks))[-_USAGE_TAIL:]

    def read_usage(self, adapter: ClientAdapter) -> Usage | None:
        """The usage, if the worker reported one."""
        return get_proxy_adapter(adapter).read_proxied_usage(self._tail)


async def _write_response(request: RoutedRequest, response: ForwardedResponse) -> None:
    """Write the worker's response. Raises WorkerError and ClientDisconnected."""
    record, context, writer = request.record, request.context, request.writer
    chunks = await response.read()
    record.status = response.status
    record.first_byte = context.clock() - context.started_at
    record.overhead = (context.first_attempt_at or context.received_at) - context.received_at
    headers = (("x-request-id", record.id), *request.headers, *response.headers)
    tail = _UsageTail(response.headers)
    if response.complete:
        chunks += await response.read()
        tail.add(chunks)
        record.usage = tail.read_usage(request.adapter)
        writer.send_response(response.status, headers, b"".join(chunks))
        return
    record.stream = True
    writer.start(response.status, headers)
    while chunks:
        tail.add(chunks)
        writer.write(b"".join(chunks))
        if writer.needs_drain:
            try:
                async with asyncio.timeout(context.timeouts.idle):
                    await writer.drain()
            except TimeoutError:
                raise ClientDisconnected("the client does not read") from None
        chunks = await response.read()
    record.usage = tail.read_usage(request.adapter)
    writer.finish()
