"""Forwards requests that are not translated: audio, images, moderations.

1. read as much of the body as names the model: all of a JSON body, the beginning of a form
2. route by that model, or by the listener's default model, as for every other request
3. send the client's bytes to a worker that speaks the same protocol, with the worker's model name
4. pass the worker's bytes on as they come; if they stop early, close the client's connection
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Final

from backends.interfaces import (
    ForwardedRequest,
    ForwardedResponse,
    ForwardsRequests,
    RequestBody,
)
from gateway.pipeline.dispatcher import RoutedRequest
from gateway.pipeline.http import HttpRequest, StreamedHttpRequest
from gateway.routing.router import Route
from protocols.core.errors import (
    ClientDisconnected,
    ClientError,
    InvalidParameter,
    MalformedRequest,
    RequestTooLarge,
    UnsupportedFeature,
)
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
        self._is_whole = False
        """Whether ``_beginning`` is all of the body."""

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
            self._beginning, self._is_whole = await http.body(self._limit), True
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
        if self._model.name and model != self._model.name:
            beginning = self._model.rename(beginning, model)
        headers = _select_headers(self._http)
        if self._is_whole:
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


async def forward_request(request: RoutedRequest, route: Route, body: ProxiedBody) -> None:
    """Forward a routed request and its response.

    Raises UnsupportedFeature if no worker can answer it, and as ``ForwardsRequests.forward``.
    """
    target, record, context = route.target, request.record, request.context
    endpoint = request.client_request.endpoint
    path = None
    if isinstance(target.backend, ForwardsRequests):
        path = target.backend.find_forwarded_path(request.adapter, endpoint.operation)
    if path is None or not isinstance(target.backend, ForwardsRequests):
        raise UnsupportedFeature(
            f"the model {route.model.info.name!r} does not support {endpoint.path}: it has no "
            f"workers with the {request.adapter.name} protocol",
            param="model",
        )
    if request.explain_recorder.dry_run:
        raise UnsupportedFeature(f"a dry run of {endpoint.path} ends here: it is forwarded")
    forwarded = body.build_forwarded(path, target.backend_model)
    try:
        response = await target.backend.forward(forwarded, context)
    finally:
        record.worker = context.attempt_history.worker
        record.worker_failures = context.attempt_history.failures
    try:
        await _write_response(request, response)
    finally:
        record.worker_failures = context.attempt_history.failures
        response.close()


async def _write_response(request: RoutedRequest, response: ForwardedResponse) -> None:
    """Write the worker's response. Raises WorkerError and ClientDisconnected."""
    record, context, writer = request.record, request.context, request.writer
    chunks = await response.read()
    record.status = response.status
    record.first_byte = context.clock() - context.started_at
    record.overhead = (context.first_attempt_at or context.received_at) - context.received_at
    headers = (("x-request-id", record.id), *request.headers, *response.headers)
    if response.complete:
        chunks += await response.read()
        writer.send_response(response.status, headers, b"".join(chunks))
        return
    record.stream = True
    writer.start(response.status, headers)
    while chunks:
        writer.write(b"".join(chunks))
        if writer.needs_drain:
            try:
                async with asyncio.timeout(context.timeouts.idle):
                    await writer.drain()
            except TimeoutError:
                raise ClientDisconnected("the client does not read") from None
        chunks = await response.read()
    writer.finish()
