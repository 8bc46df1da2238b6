"""Sends recorded requests to a gateway of this process, and writes what came back.

The gateway is a real one, on loopback: requests are decoded, routed, translated and answered as in
production, and its own recorder writes the results. No tool that a model calls is executed.

With two targets each has a gateway of its own, and each request goes to both, one right after the
other in random order: whatever slows the machine meets both alike.

A worker that answers 429 may only be busy with the replay itself. Such requests are sent
once more at the end, one at a time, and only that result counts.
"""

import asyncio
import contextlib
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
from gateway.pipeline.http import parse_seconds
from gateway.runtime.gateway import Gateway, build_services
from gateway.tools.replay.target import ReplayRequest, ReplayTarget

INCOMING: Final = "incoming"
"""The folder in the output folder in which the gateway records."""
_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_MAX_RESPONSE_TEXT: Final = 4096
"""Characters of a response that only the client saw."""
_SERVER_ERROR: Final = 500
_CLIENT_ERROR: Final = 400
_BUSY: Final = 429
_PAUSE: Final = 0.1
"""Seconds before a request is sent again to a worker that was busy, if it names none."""
_MAX_PAUSE: Final = 30.0

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
    """Requests that no worker was free for or could be reached for; they have no result."""
    repeated: int = 0
    """Requests that were sent once more, since the worker was busy."""
    is_interrupted: bool = False


class _ClientView(Struct):
    """A response as the client of the gateway saw it."""

    started_at: float
    duration: float
    status: int
    text: str
    pause: float = 0.0
    """Seconds after which a busy worker wants the request again."""
    is_repeated: bool = False


class ReplaySide:
    """A target and its output folder, see ``prepare_folder``."""

    def __init__(self, target: ReplayTarget, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.urls: Sequence[str] = ()
        """Of the listeners of its gateway."""
        self.views: dict[str, _ClientView] = {}
        """By the id of the request."""
        self.not_sent: set[str] = set()
        """The ids of requests that reached no worker."""

    def build_gateway(self) -> Gateway:
        """The gateway that answers."""
        services = replace(build_services(), observe_request=self._observe_request)
        limits = replace(self.target.config.limits, shutdown_delay=0.0, drain_timeout=1.0)
        return Gateway(replace(self.target.config, limits=limits), services)

    def _observe_request(self, record: RequestRecord) -> None:
        if not self.target.has_sent(record):
            self.not_sent.add(record.id)


_Attempt = tuple[ReplaySide, RecordedRequest, ReplayRequest]


class Replay:
    """One run, to one or several targets."""

    def __init__(
        self,
        sides: Sequence[ReplaySide],
        requests: Sequence[RecordedRequest],
        *,
        concurrency: int,
        pace: Pace,
        report: Callable[[ReplayProgress], None],
        seed: int = 0,
    ) -> None:
        self._sides = sides
        self._requests = requests
        self._pace = pace
        self._report = report
        self._slots = asyncio.Semaphore(concurrency)
        self._rng = random.Random(seed)  # noqa: S311 - the order of two targets
        self._run_id = uuid.uuid4().hex if len(sides) > 1 else ""
        self._busy: list[_Attempt] = []
        """What is sent again at the end."""
        self._sending: asyncio.Task[None] | None = None
        self.progress = ReplayProgress(len(requests) * len(sides))

    def interrupt(self) -> None:
        """Send no more requests, and stop those that are running. Their results are lost."""
        self.progress.is_interrupted = True
        if self._sending is not None:
            self._sending.cancel()

    async def run(self) -> None:
        """Send all requests. Raises OSError, and WorkerError if a backend can't start."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._collect)
            for side in self._sides:
                gateway = side.build_gateway()
                stack.push_async_callback(gateway.stop)
                side.urls = await gateway.start(warmed=True)
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    timeout=None,  # noqa: S113 - the gateway has its own
                    limits=httpx.Limits(max_connections=None),
                    trust_env=False,
                )
            )
            await self._send_all(client)

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        self._sending = asyncio.current_task()
        try:
            if not self.progress.is_interrupted:
                await self._send_in_order(client)
                for attempt in self._busy:
                    await self._send_again(client, attempt)
        except asyncio.CancelledError:
            if not self.progress.is_interrupted:
                raise
        finally:
            self._sending = None

    async def _send_in_order(self, client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        started, first = loop.time(), self._requests[0].at if self._requests else 0.0
        async with asyncio.TaskGroup() as tasks:
            for recorded in self._requests:
                attempts = [
                    (side, recorded, request)
                    for side in self._sides
                    if (request := side.target.build_request(recorded)) is not None
                ]
                if len(attempts) < len(self._sides):
                    self.progress.unsupported += len(self._sides)
                    continue
                if self._pace == "recorded":
                    await asyncio.sleep(started + recorded.at - first - loop.time())
                await self._slots.acquire()
                self._rng.shuffle(attempts)
                tasks.create_task(self._send_attempts(client, attempts))

    async def _send_attempts(self, client: httpx.AsyncClient, attempts: Sequence[_Attempt]) -> None:
        """Send a request to each target, one after the other."""
        try:
            for attempt in attempts:
                view = await _send(client, attempt)
                if view.status == _BUSY:
                    view.pause = min(view.pause or _PAUSE, _MAX_PAUSE)
                    self._busy.append(attempt)
                self._count(attempt, view)
        finally:
            self._slots.release()

    async def _send_again(self, client: httpx.AsyncClient, attempt: _Attempt) -> None:
        side, recorded, _ = attempt
        await asyncio.sleep(side.views[recorded.id].pause)
        self.progress.repeated += 1
        self.progress.sent -= 1
        self.progress.failed -= 1
        view = await _send(client, attempt)
        view.is_repeated = True
        self._count(attempt, view)

    def _count(self, attempt: _Attempt, view: _ClientView) -> None:
        side, recorded, _ = attempt
        side.views[recorded.id] = view
        self.progress.sent += 1
        self.progress.failed += not view.status or view.status >= _CLIENT_ERROR
        self._report(self.progress)

    def _collect(self) -> None:
        """Write the results of this run, and those that a killed run left."""
        originals = {recorded.id: recorded for recorded in self._requests}
        for side in self._sides:
            self._collect_side(side, originals)

    def _collect_side(self, side: ReplaySide, originals: Mapping[str, RecordedRequest]) -> None:
        incoming = side.folder / INCOMING
        results = {result.id: result for result in _read_results(incoming)}  # the last one counts
        with _open_results(side.folder) as write:
            write_result = partial(self._write, write, side.target)
            for result in results.values():
                view = side.views.pop(result.id, None)
                if view is None and result.outcome == "cancelled":
                    continue  # by the interruption
                if result.id in side.not_sent:
                    self._count_not_sent()
                    continue
                if view is not None and view.is_repeated:
                    result.timing = RecordedTiming()  # of another load than the first requests had
                write_result(result)
            for request_id, view in side.views.items():
                if request_id in side.not_sent:
                    self._count_not_sent()
                else:
                    write_result(_describe_view(originals[request_id], view))
        shutil.rmtree(incoming, ignore_errors=True)

    def _count_not_sent(self) -> None:
        """A request did not reach its target, of which it says nothing; a further run sends it."""
        self.progress.sent -= 1
        self.progress.failed -= 1
        self.progress.not_sent += 1

    def _write(
        self, write: Callable[[bytes], object], target: ReplayTarget, result: RecordedRequest
    ) -> None:
        result.replay_of, result.replay_target = result.id, target.name
        result.replay_run = self._run_id
        write(encode_recorded_request(result))


async def _send(client: httpx.AsyncClient, attempt: _Attempt) -> _ClientView:
    side, recorded, request = attempt
    view = _ClientView(time.time(), 0.0, 0, "")  # noqa: TID251 - a recording has real times
    started = time.monotonic()
    try:
        async with client.stream(
            recorded.method,
            side.urls[request.listener] + request.path,
            headers=request.headers,
            content=request.body,
        ) as response:
            view.pause = parse_seconds(response.headers.get("retry-after")) or 0.0
            async for text in response.aiter_text():
                view.text = (view.text + text)[:_MAX_RESPONSE_TEXT]
            view.status = response.status_code
    except httpx.HTTPError as error:
        view.text = view.text or str(error)
    view.duration = time.monotonic() - started
    return view


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
