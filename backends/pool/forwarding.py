"""One request that is forwarded to a worker without translation, and its response."""

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from backends.http.interfaces import UpstreamResponse
from backends.interfaces import Deadline, ForwardedRequest
from backends.pool.attempt import AttemptServices
from backends.pool.attempt_request import ErrorReader
from backends.pool.worker_response import build_worker_error, check_content_encoding, select_headers
from backends.pool.worker_state import get_error_kind
from backends.pool.workers import WorkerPool, WorkerSlot
from protocols.core.errors import ClientError, DeadlineExceeded, GatewayError, RateLimitExceeded

if TYPE_CHECKING:
    from protocols.core.interfaces import Headers

_FORWARDED_HEADERS: Final = (
    ("content-type", "Content-Type"),
    ("content-disposition", "Content-Disposition"),
)
"""The headers of the body; see ``protocols.core.response_headers`` for others."""
_MAX_ERROR_BYTES: Final = 64 << 10
_ERROR_TIMEOUT: Final = 1.0


class ForwardedAttempt:
    """A ``ForwardedResponse`` of one worker. Its outcome is recorded in the worker's health."""

    def __init__(
        self, slot: WorkerSlot, workers: WorkerPool, services: AttemptServices, deadline: Deadline
    ) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.worker = slot.worker
        self._model = slot.model
        self._slot: WorkerSlot | None = slot
        self._workers = workers
        self._services = services
        self._deadline = deadline
        self._response: UpstreamResponse | None = None
        self._has_ended = False

    @property
    def complete(self) -> bool:
        """See ``backends.interfaces.ForwardedResponse``."""
        return self._response is not None and self._response.complete

    async def begin(self, request: ForwardedRequest, read_error: ErrorReader) -> None:
        """Send the request and wait for the headers. Raises as ``ForwardsRequests.forward``."""
        worker = self.worker
        try:
            response = self._response = await self._send(request)
            if worker.logged_state != "up":
                worker.record_connected()
            if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
                raise await self._read_error(response, read_error)
            if "content-encoding" in response.headers:
                check_content_encoding(response.headers["content-encoding"])
        except GatewayError as error:
            if self._response is not None:
                error.worker_headers = self._select_headers(self._response)
            self._record_failure(error)
            raise
        self.status = response.status
        named = [
            (shown, response.headers[name])
            for name, shown in _FORWARDED_HEADERS
            if name in response.headers
        ]
        self.headers = (*named, *self._select_headers(response))

    async def read(self) -> list[bytes]:
        """See ``backends.interfaces.ForwardedResponse``."""
        assert self._response is not None  # noqa: S101 - it has begun
        try:
            async with asyncio.timeout(self._deadline.remaining(self._services.timeouts.idle)):
                chunks = await self._response.read()
        except TimeoutError:
            message = "the worker stopped sending in the middle of its response (timeouts.idle)"
            error = DeadlineExceeded(message, which="idle")
            self._record_failure(error)
            raise error from None
        except GatewayError as error:
            self._record_failure(error)
            raise
        if not chunks and not self._has_ended:
            self._has_ended = True
            self.worker.record_success(self._model)
        return chunks

    def close(self) -> None:
        """See ``backends.interfaces.ForwardedResponse``."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        if self._response is not None:
            if not self._has_ended:
                self._services.metrics.abandoned += 1
            self._response.release()
        self._workers.release(slot)

    def _select_headers(self, response: UpstreamResponse) -> "Headers":
        table = self._services.response_headers
        return select_headers(table, response.headers, self.worker.config)

    async def _send(self, request: ForwardedRequest) -> UpstreamResponse:
        config, services = self.worker.config, self._services
        upstream_request, headers = request.upstream_request, request.headers
        if config.credentials is not None:
            upstream_request, headers = config.credentials.authorize(upstream_request, headers)
        client, timeout = services.http_client, services.timeouts.connect
        try:
            async with asyncio.timeout(self._deadline.remaining()):
                return await client.send(config.url, upstream_request, timeout, headers)
        except TimeoutError:
            raise DeadlineExceeded("the request's time is up") from None

    async def _read_error(
        self, response: UpstreamResponse, read_error: ErrorReader
    ) -> GatewayError:
        payload = bytearray()
        try:
            async with asyncio.timeout(_ERROR_TIMEOUT):
                while len(payload) < _MAX_ERROR_BYTES and (chunks := await response.read()):
                    payload += b"".join(chunks)
        except (TimeoutError, GatewayError):
            pass  # a part of the body is enough
        return build_worker_error(
            read_error, response.status, response.headers, bytes(payload[:_MAX_ERROR_BYTES])
        )

    def _record_failure(self, error: GatewayError) -> None:
        """Record the failure, unless the client's body broke off before the worker answered."""
        self._has_ended = True
        is_worker_failure = not isinstance(error, ClientError) or isinstance(
            error, RateLimitExceeded
        )
        if is_worker_failure:
            self._services.metrics.failures[get_error_kind(error)] += 1
        if is_worker_failure or self._response is not None:
            self.worker.record_failure(error, model=self._model)
