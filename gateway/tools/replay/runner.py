"""Sends recorded requests to a gateway of this process, and writes what came back.

The gateway is a real one, on loopback: requests are decoded, routed, translated and answered as in
production, and its own recorder writes the results. No tool that a model calls is executed.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import httpx
from msgspec import Struct
from msgspec.structs import replace

from gateway.observability.record import RequestOutcome, RequestRecord
from gateway.observability.recording import (
    PLAIN_SUFFIX,
    RecordedRequest,
    RecordedTiming,
    encode_recorded_request,
    read_recordings,
)
from gateway.runtime.gateway import Gateway, build_services
from gateway.tools.replay.target import ReplayRequest, ReplayTarget
from protocols.core.errors import WorkerUnreachable

INCOMING: Final = "incoming"
"""The folder in the output folder in which the gateway records."""
_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_MAX_RESPONSE_TEXT: Final = 4096
"""Characters of a response that only the client saw."""
_SERVER_ERROR: Final = 500
_CLIENT_ERROR: Final = 400

Pace = Literal["fast", "recorded"]


class ReplayProgress(Struct):
    """How far a replay is."""

    total: int
    sent: int = 0
    """Requests whose response is complete."""
    failed: int = 0
    """Those with a status of 400 or more, or without a response."""
    unsupported: int = 0
    """Requests of protocols that the target does not serve."""
    not_sent: int = 0
    """Requests that no worker could be reached for; they have no result."""
    is_interrupted: bool = False


class _ClientView(Struct):
    """A response as the client of the gateway saw it."""

    started_at: float
    duration: float
    status: int
    text: str


class Replay:
    """One run. ``folder`` is the output folder, see ``prepare_folder``."""

    def __init__(
        self,
        target: ReplayTarget,
        requests: Sequence[RecordedRequest],
        folder: Path,
        *,
        concurrency: int,
        pace: Pace,
        report: Callable[[ReplayProgress], None],
    ) -> None:
        self._target = target
        self._requests = requests
        self._folder = folder
        self._pace = pace
        self._report = report
        self._slots = asyncio.Semaphore(concurrency)
        self._views: dict[str, _ClientView] = {}
        self._unreachable: set[str] = set()
        """The ids of requests that reached no worker."""
        self._sending: asyncio.Task[None] | None = None
        self.progress = ReplayProgress(len(requests))

    def interrupt(self) -> None:
        """Send no more requests, and stop those that are running. Their results are lost."""
        self.progress.is_interrupted = True
        if self._sending is not None:
            self._sending.cancel()

    async def run(self) -> None:
        """Send all requests. Raises OSError, and WorkerError if a backend can't start."""
        services = replace(build_services(), observe_request=self._observe_request)
        limits = replace(self._target.config.limits, shutdown_delay=0.0, drain_timeout=1.0)
        gateway = Gateway(replace(self._target.config, limits=limits), services)
        try:
            urls = await gateway.start(warmed=True)
            async with httpx.AsyncClient(
                timeout=None,  # noqa: S113 - the gateway has its own
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            ) as client:
                await self._send_all(client, urls)
        finally:
            await gateway.stop()
            await asyncio.to_thread(self._collect)

    async def _send_all(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        self._sending = asyncio.current_task()
        try:
            if not self.progress.is_interrupted:
                await self._send_in_order(client, urls)
        except asyncio.CancelledError:
            if not self.progress.is_interrupted:
                raise
        finally:
            self._sending = None

    async def _send_in_order(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        started, first = loop.time(), self._requests[0].at if self._requests else 0.0
        async with asyncio.TaskGroup() as tasks:
            for recorded in self._requests:
                request = self._target.build_request(recorded)
                if request is None:
                    self.progress.unsupported += 1
                    continue
                if self._pace == "recorded":
                    await asyncio.sleep(started + recorded.at - first - loop.time())
                await self._slots.acquire()
                url = urls[request.listener] + request.path
                tasks.create_task(self._send(client, recorded, url, request))

    async def _send(
        self,
        client: httpx.AsyncClient,
        recorded: RecordedRequest,
        url: str,
        request: ReplayRequest,
    ) -> None:
        view = _ClientView(time.time(), 0.0, 0, "")  # noqa: TID251 - a recording has real times
        started = time.monotonic()
        try:
            async with client.stream(
                recorded.method, url, headers=request.headers, content=request.body
            ) as response:
                view.status = response.status_code
                async for text in response.aiter_text():
                    view.text = (view.text + text)[:_MAX_RESPONSE_TEXT]
        except httpx.HTTPError as error:
            view.text = view.text or str(error)
            self.progress.failed += 1
        else:
            self.progress.failed += view.status >= _CLIENT_ERROR
        finally:
            self._slots.release()
        view.duration = time.monotonic() - started
        self._views[recorded.id] = view
        self.progress.sent += 1
        self._report(self.progress)

    def _collect(self) -> None:
        """Write the results of this run, and those that a killed run left."""
        incoming = self._folder / INCOMING
        originals = {recorded.id: recorded for recorded in self._requests}
        with _open_results(self._folder) as write:
            for result in _read_results(incoming):
                view = self._views.pop(result.id, None)
                if view is None and result.outcome == "cancelled":
                    continue  # by the interruption
                if result.id in self._unreachable:
                    self._count_not_sent()
                    continue
                self._write(write, result)
            for request_id, view in self._views.items():
                self._write(write, _describe_view(originals[request_id], view))
        shutil.rmtree(incoming, ignore_errors=True)

    def _observe_request(self, record: RequestRecord) -> None:
        errors = {failure.error for failure in record.worker_failures}
        if record.status >= _SERVER_ERROR and errors == {WorkerUnreachable.__name__}:
            self._unreachable.add(record.id)

    def _count_not_sent(self) -> None:
        """A request did not reach its target, of which it says nothing; a further run sends it."""
        self.progress.sent -= 1
        self.progress.failed -= 1
        self.progress.not_sent += 1

    def _write(self, write: Callable[[bytes], object], result: RecordedRequest) -> None:
        result.replay_of, result.replay_target = result.id, self._target.name
        write(encode_recorded_request(result))


def prepare_folder(folder: Path) -> frozenset[str]:
    """Create the output folder; returns the ids of the requests that have a result there.

    Raises OSError.
    """
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    done = {result.replay_of for result in read_recordings(folder) if result.replay_of}
    return frozenset(done | {result.id for result in _read_results(folder / INCOMING)})


def _read_results(incoming: Path) -> Iterator[RecordedRequest]:
    return iter(read_recordings(incoming)) if incoming.is_dir() else iter(())


@contextlib.contextmanager
def _open_results(folder: Path) -> Iterator[Callable[[bytes], object]]:
    """Opens a new file of results; its function writes a line."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = folder / f"replay-{stamp}-{os.getpid()}{PLAIN_SUFFIX}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _FILE_MODE)
    with os.fdopen(descriptor, "ab") as file:
        yield file.write
    if not path.stat().st_size:
        path.unlink()


def _describe_view(original: RecordedRequest, view: _ClientView) -> RecordedRequest:
    """The result of a request that the gateway refused before it had a model, or never answered."""
    outcome: RequestOutcome = "ok"
    if view.status >= _CLIENT_ERROR:
        outcome = "client_error" if view.status < _SERVER_ERROR else "gateway_error"
    elif not view.status:
        outcome = "gateway_error"
    return RecordedRequest(
        id=original.id,
        at=view.started_at,
        protocol=original.protocol,
        method=original.method,
        path=original.path,
        operation=original.operation,
        model=original.model,
        stream=original.stream,
        request=original.request,
        request_text=original.request_text,
        request_size=original.request_size,
        response_text=view.text,
        response_size=len(view.text),
        status=view.status,
        outcome=outcome,
        timing=RecordedTiming(duration=view.duration),
    )
