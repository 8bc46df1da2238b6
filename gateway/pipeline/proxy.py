"""Forwards requests that are not translated: audio, images, moderations.

1. read the body, which counts against the limits of all bodies, and its model
2. route by that model, or by the listener's default model, as for every other request
3. send a worker that speaks the same protocol what was read, with the worker's name of the model
4. pass the worker's bytes on as they come; if they stop early, close the client's connection

A fallback gets the request if its target fails before the response has begun. No body is sent on
while it arrives, since its last field may name another model than its first one.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Raw

from backends.interfaces import (
    ForwardedRequest,
    ForwardedResponse,
    ForwardsRequests,
)
from gateway.observability.record import RequestRecord
from gateway.pipeline.dispatcher import (
    FallbackAttempt,
    has_fallback_access,
    try_fallbacks,
)
from gateway.pipeline.http import LARGE_BODY, CancellableRequest, HttpRequest
from gateway.pipeline.state import RequestState
from gateway.pipeline.strategies import find_lost_arguments
from gateway.routing.fallback import (
    NO_ACCESS,
    FallbackHistory,
    describe_missing,
    is_fallback_error,
)
from gateway.routing.router import Route, Router
from protocols.core import loss
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    GatewayError,
    MalformedRequest,
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
from protocols.core.json_counts import BodyCounts
from protocols.core.response_headers import merge_headers

_USAGE_TYPES: Final = frozenset({"application/json", "text/event-stream"})
_USAGE_TAIL: Final = 64 << 10
"""How many bytes at the end of a response are searched for its usage."""
_HEADER_VALUE: Final = re.compile(r"[ -~]{1,512}")


class ProxiedBody:
    """The body of a request that is forwarded. ``limit`` is the largest in bytes."""

    def __init__(self, http: HttpRequest, limit: int, counts: BodyCounts) -> None:
        self._http = http
        self._limit = limit
        self._counts = counts
        self._proxied_model = ProxiedModel("", lambda _: ("", b""), tuple)

    async def find_model(
        self, adapter: SupportsProxy, make_call: Callable[[bytes], ClientRequest]
    ) -> ClientRequest:
        """Read the body and its model. Raises ClientError and Overloaded."""
        if (self._http.headers.get("content-encoding") or "identity").lower() != "identity":
            raise ClientError("unsupported content encoding: this endpoint takes plain bodies only")
        body = await self._http.body(self._limit)
        self._http.reserve_memory(len(body))  # for what is sent to the worker
        kind = self._http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data" and self._counts.needs_check(len(body)):
            await asyncio.to_thread(self._counts.check, (body,))  # adapters read it as JSON
        call = make_call(body)
        if len(body) < LARGE_BODY:
            self._proxied_model = adapter.find_proxied_model(call)
        else:
            self._proxied_model = await asyncio.to_thread(adapter.find_proxied_model, call)
        return call

    @property
    def model(self) -> str:
        """The model that the client named; "" if it named none."""
        return self._proxied_model.name

    def read_fields(self) -> Iterable[tuple[str, bytes | Raw]]:
        """The fields that a worker gets; see ``ProxiedModel``."""
        return self._proxied_model.read_fields()

    def build_forwarded(self, path: str, model: str, own_headers: Headers) -> ForwardedRequest:
        """The request for a worker, with its name of the model if the client named one.

        ``own_headers`` are those of the client's protocol that workers get.
        """
        content_type, body = self._proxied_model.write(model if self.model else "")
        headers = (("Content-Type", content_type), *_select_headers(self._http), *own_headers)
        return ForwardedRequest(UpstreamRequest(path, body), headers, model)


def _select_headers(http: HttpRequest) -> Headers:
    """The client's headers that workers get. Raises MalformedRequest."""
    value = http.headers.get("accept")
    if value is None:
        return ()
    if not _HEADER_VALUE.fullmatch(value):
        raise MalformedRequest("the header Accept is not printable ASCII", problem="encoding")
    return (("Accept", value),)


def get_proxy_adapter(adapter: ClientAdapter) -> SupportsProxy:
    """The adapter of a ``proxy`` endpoint, with its methods for that."""
    assert isinstance(adapter, SupportsProxy)  # noqa: S101 - it has the endpoint
    return adapter


class ProxiedRequest:
    """A running request that is forwarded; the interface is that of ``CancellableRequest``."""

    def __init__(self, request: RequestState, router: Router, body: ProxiedBody) -> None:
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
        return self._request.context.clock() - self._request.context.received_at

    @property
    def started(self) -> bool:
        """See ``gateway.pipeline.http.CancellableRequest``."""
        return self._request.writer.started

    def stop(self, error: GatewayError | None = None) -> None:
        """See ``gateway.pipeline.http.CancellableRequest``."""
        if self._task is not None and self._stop_reason is None:
            self._stop_reason = error or ClientDisconnected("the request was stopped")
            self._task.cancel()

    async def run(self, running_requests: set[CancellableRequest]) -> None:
        """Forward the request and its response; in ``running_requests`` meanwhile.

        Raises UnsupportedFeature if no worker can answer it, and as ``ForwardsRequests.forward``.
        """
        task = self._task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled = task.cancelling()
        running_requests.add(self)
        try:
            await self._forward_with_fallback(self._request.route)
        except asyncio.CancelledError:
            if self._stop_reason is None or task.cancelling() > cancelled + 1:
                raise  # somebody else cancels it, too
            task.uncancel()
            raise self._stop_reason from None
        finally:
            self._task = None
            running_requests.discard(self)

    async def _forward_with_fallback(self, route: Route) -> None:
        """Forward to the target, or to a fallback."""
        request, router = self._request, self._router
        try:
            await self._forward(route)
        except GatewayError as error:
            if request.writer.started or not is_fallback_error(error):
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
        if request.is_dry_run:
            raise UnsupportedFeature(f"a dry run of {endpoint.path} ends here: it is forwarded")
        adapter, call = request.adapter, request.client_request
        own_headers = adapter.request_headers.select_forwarded(call.headers)
        forwarded = self._body.build_forwarded(path, target.backend_model, own_headers)
        if route.model.on_loss != "ignore":
            lost = find_lost_arguments(adapter, call, forwarded.headers, route.model)
            request.record.unsupported_parameters = lost
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


async def _write_response(request: RequestState, response: ForwardedResponse) -> None:
    """Write the worker's response. Raises WorkerError and ClientDisconnected."""
    record, context, writer = request.record, request.context, request.writer
    chunks = await response.read()
    record.status = response.status
    record.first_byte = context.clock() - context.received_at
    record.overhead = (context.first_attempt_at or context.received_at) - context.received_at
    headers = (
        ("x-request-id", record.id),
        *request.headers,
        *merge_headers((), response.headers, request.headers),
        *loss.build_loss_headers(record.unsupported_parameters),
    )
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
