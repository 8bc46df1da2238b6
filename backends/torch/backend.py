"""The local model as a backend: its engine runs in a process of its own, kept alive from here.

A process that dies is started anew, after a pause that grows while it keeps dying; the requests it
had fail. A model that can't be served at all (not found, not understood) is not tried again.
"""

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backends.interfaces import RequestContext
from backends.torch import ipc
from backends.torch.ipc import (
    IPC_VERSION,
    CancelCommand,
    EngineCommand,
    EngineEvent,
    EngineStats,
    HeartbeatEvent,
    LoadFailedEvent,
    ProgressEvent,
    ReadyEvent,
    decode_events,
    encode_frame,
    read_body_length,
)
from backends.torch.settings import TorchSettings
from protocols.core.errors import (
    DeadlineExceeded,
    Overloaded,
    StreamBroken,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.events import Event, StreamEnd, Timing, Usage
from protocols.core.interfaces import Token
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import EmbeddingRequest, GenerationRequest, Request

# One life of the engine's process, from the gateway's side: start, orders, news, end.

MAX_SILENCE = 15.0
"""Seconds without a sign of life after which a process that was ready is given up: it tells of
itself each second, from a thread of its own."""
MAX_STEP_SECONDS = 300.0
"""Seconds after which a step is held to be stuck. A large model on a slow machine takes many."""
_EXIT_TIMEOUT = 5.0
"""Seconds it has to end by itself."""
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {
    # Threads that spin while they wait for each other take the cores from the gateway: twice the
    # CPU time of a token with one row, and far fewer tokens beside a busy neighbour.
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

EngineEventQueue = asyncio.Queue[Sequence[EngineEvent] | None]
"""What is told of one job, in the batches in which it came; None: the process has ended."""


class EngineProcess:
    """A process that is started once and ends once."""

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self._subprocess: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._queues: dict[int, EngineEventQueue] = {}
        self._request_ids = itertools.count(1)
        self.ready: ReadyEvent | None = None
        self.load_error: str | None = None
        """Why another start would not help."""
        self.active = 0
        self.waiting = 0
        self.stats = EngineStats()
        self._unresponsive = False

    @property
    def pid(self) -> int | None:
        """Of the process, once it is started."""
        return None if self._subprocess is None else self._subprocess.pid

    async def start(self) -> None:
        """Start it. It has only this socket in common with us, and ends when our end closes."""
        ours, theirs = socket.socketpair()
        try:
            path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
            self._subprocess = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "backends.torch.engine_process",
                str(theirs.fileno()),
                msgspec.json.encode(self._settings).decode(),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def read_events(self, ready: asyncio.Event) -> None:
        """Hand out what it tells, until it ends. Sets ``ready`` when it is."""
        if self._reader is None:
            return
        try:
            while True:
                async with asyncio.timeout(MAX_SILENCE if self.ready else None):
                    length = read_body_length(await self._reader.readexactly(4))
                    body = await self._reader.readexactly(length)
                self._dispatch_events(decode_events(body))
                if self.ready is not None:
                    ready.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (TimeoutError, ValueError, msgspec.MsgspecError):
            self._unresponsive = True
            _log.exception("the process of %s is given up", self._settings.path)

    def _dispatch_events(self, news: Sequence[EngineEvent]) -> None:
        """Neighbours of one job stay together: they become one batch of events."""
        for job, told in itertools.groupby(news, key=lambda one: getattr(one, "request_id", None)):
            if job is None:
                for one in told:
                    self._handle_event(one)
            elif inbox := self._queues.get(job):
                inbox.put_nowait(list(told))

    def _handle_event(self, news: EngineEvent) -> None:
        match news:
            case ProgressEvent(text):
                _log.info("%s", text)
            case ReadyEvent(task, protocol, context, device, cache_bytes=memory):
                if protocol != IPC_VERSION:
                    self.load_error = "the engine is of another version than the gateway"
                    return
                self.ready = news
                _log.info(
                    "%s is ready: %s on %s, %d tokens, %d MB for keys and values",
                    self._settings.path,
                    task,
                    device,
                    context,
                    memory >> 20,
                )
            case LoadFailedEvent(text):
                self.load_error = text
            case HeartbeatEvent(rows, waiting, busy, figures):
                self.active, self.waiting, self.stats = rows, waiting, figures
                if busy > MAX_STEP_SECONDS:
                    raise TimeoutError(f"a step has taken {busy:.0f} s")
            case _:
                pass

    def open_request(self) -> tuple[int, EngineEventQueue]:
        """A number for a new job, and where news of it will lie."""
        number = next(self._request_ids)
        inbox: EngineEventQueue = asyncio.Queue()
        self._queues[number] = inbox
        return number, inbox

    def close_request(self, number: int, *, cancel: bool) -> None:
        """Nobody asks for this job any more."""
        if self._queues.pop(number, None) is not None and cancel:
            self.send(CancelCommand(number))

    def send(self, order: EngineCommand) -> None:
        """Give an order. One to a process that has ended is lost, as the process's news tell."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame([order]))

    async def stop_process(self) -> None:
        """See to it that it ends, and tell all who wait."""
        for inbox in self._queues.values():
            inbox.put_nowait(None)
        self._queues.clear()
        if self._writer is not None:
            self._writer.close()
        if self._subprocess is None or self._subprocess.returncode is not None:
            return
        try:
            async with asyncio.timeout(0 if self._unresponsive else _EXIT_TIMEOUT):
                await self._subprocess.wait()
        except TimeoutError:
            self._subprocess.kill()
            await self._subprocess.wait()

    @property
    def exit_code(self) -> int | None:
        """As the system gave it; negative is a signal."""
        return None if self._subprocess is None else self._subprocess.returncode


_log = logging.getLogger(__name__)

_RESTART_DELAY = 0.5
_MAX_RESTART_DELAY = 30.0
_CREDIT_BATCH = 128
"""Credit is given back in lumps of so many tokens."""
_LOWEST_PRIORITY = 255
"""The priority of a request for whose answer nobody waits."""


class TorchBackend:
    """One local model. Its settings are those of ``settings.Settings``."""

    def __init__(self, **settings: Any) -> None:
        self._settings = msgspec.convert(settings, TorchSettings)
        self._process: EngineProcess | None = None
        self._ready = asyncio.Event()
        """Set while there is a process that takes requests, or there never will be."""
        self._load_error: str | None = None
        self._supervisor_task: asyncio.Task[None] | None = None
        self._restarts = 0

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._ready.is_set() and self._load_error is None

    @property
    def process(self) -> EngineProcess | None:
        """The process as it is now, for the status page."""
        return self._process

    def read_stats(self) -> Mapping[str, float]:
        """The engine's state of at most a second ago, exported as gauges by the gateway."""
        process = self._process
        if process is None or not self.ready:
            return _build_stats(0, 0, ipc.EngineStats(), self._restarts)
        return _build_stats(process.active, process.waiting, process.stats, self._restarts)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """What the engine will not do of the request."""
        return ipc.find_unsupported_params(
            request, names, templates=self._settings.trust_request_chat_template
        )

    async def start(self) -> None:
        """Begin to load the model; requests that come before it is loaded wait for it."""
        self._supervisor_task = asyncio.get_running_loop().create_task(self._supervise_process())

    async def warm_up(self) -> None:
        """Wait until the model is loaded. Raises WorkerUnreachable if it can't be."""
        await self._ready.wait()
        if self._load_error is not None:
            raise WorkerUnreachable(self._load_error)

    async def aclose(self) -> None:
        """End the process."""
        if self._supervisor_task is not None:
            self._supervisor_task.cancel()
            await asyncio.gather(self._supervisor_task, return_exceptions=True)
        self._load_error = self._load_error or "the local model is shut down"
        self._ready.set()

    # --- the process ----------------------------------------------------------------------------

    async def _supervise_process(self) -> None:
        pause = _RESTART_DELAY
        while self._load_error is None:
            process = self._process = EngineProcess(self._settings)
            try:
                await process.start()
                await process.read_events(self._ready)
            except OSError:
                _log.exception("the process of %s can't be started", self._settings.path)
            finally:
                self._ready.clear()
                await process.stop_process()
            if process.load_error is not None:
                _log.error("%s: %s", self._settings.path, process.load_error)
                self._load_error = process.load_error
                self._ready.set()
                return
            pause = _RESTART_DELAY if process.ready else min(pause * 2, _MAX_RESTART_DELAY)
            _log.error(
                "the process of %s ended (%s); starting it again in %.1f s",
                self._settings.path,
                process.exit_code,
                pause,
            )
            await asyncio.sleep(pause)
            self._restarts += 1

    async def _get_process(self, context: RequestContext) -> EngineProcess:
        """The process, when it takes requests. Raises Overloaded, WorkerUnreachable."""
        try:
            async with asyncio.timeout(context.deadline.remaining(context.timeouts.first_token)):
                await self._ready.wait()
        except TimeoutError:
            raise Overloaded("the local model is still being loaded", retry_after=5.0) from None
        if self._load_error is not None:
            raise WorkerUnreachable(self._load_error)
        if self._process is None:
            raise WorkerUnreachable("the local model is not started")
        return self._process

    # --- requests -------------------------------------------------------------------------------

    async def stream(
        self, request: Request, context: RequestContext
    ) -> AsyncGenerator[Sequence[Event], None]:
        """The events of the answer. Closing the generator frees the request's rows."""
        if context.preempt is not None:
            request = msgspec.structs.replace(request, priority=_LOWEST_PRIORITY)
        process = await self._get_process(context)
        job, inbox = process.open_request()
        over = False
        try:
            process.send(
                self._build_command(request, job, context.deadline.remaining(), context.principal)
            )
            exchange = _ResponseStream(request, context, inbox)
            while not over:
                batch = await exchange.next_batch()
                over = exchange.finished
                yield batch
                if tokens := exchange.take_credit():
                    process.send(ipc.CreditCommand(job, tokens))
        finally:
            process.close_request(job, cancel=not over)

    async def tokenize(self, text: str, context: RequestContext) -> Sequence[Token]:
        """The model's tokens; a special token has no text."""
        process = await self._get_process(context)
        job, inbox = process.open_request()
        try:
            process.send(ipc.TokenizeCommand(job, text))
            news = await inbox.get()
        finally:
            process.close_request(job, cancel=False)
        match news:
            case [ipc.TokensEvent(_, ids, texts)]:
                return list(zip(ids, texts, strict=True))
            case [ipc.RequestFailedEvent() as failed]:
                raise ipc.build_engine_error(failed)
            case _:
                raise WorkerFailed("the local model's process ended")

    def _build_command(
        self, request: Request, job: int, timeout: float, tenant: str | None
    ) -> ipc.GenerateCommand | ipc.EmbedCommand:
        if isinstance(request, EmbeddingRequest):
            return ipc.build_embed_command(request, job, timeout)
        settings = self._settings
        return ipc.build_generate_command(
            request,
            job,
            timeout,
            templates=settings.trust_request_chat_template,
            watermark=settings.watermark,
            tenant=tenant,
        )


class _ResponseStream:
    """News of one job, made events."""

    def __init__(self, request: Request, context: RequestContext, inbox: EngineEventQueue) -> None:
        self._context = context
        self._events_queue = inbox
        self._running_usage = (
            isinstance(request, GenerationRequest) and request.response_options.usage == "each"
        )
        self._at_end_only = isinstance(request, GenerationRequest) and ipc.returns_best_only(
            request
        )
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._uncredited_tokens = 0
        self._started = False
        self.finished = False

    async def next_batch(self) -> list[Event]:
        """The next events. Raises what the failure of the job means."""
        while True:
            news = await self._next_engine_events()
            if news is None:
                if self._started:
                    raise StreamBroken("the local model's process ended before its answer did")
                raise WorkerFailed("the local model's process ended")
            found: list[Event] = []
            for one in news:
                found.extend(self._map_event(one))
            if found:
                self._started = True
                return found

    async def _next_engine_events(self) -> Sequence[ipc.EngineEvent] | None:
        times = self._context.timeouts
        limit = times.idle if self._started else times.first_token
        try:
            # The best of several come only after the last of them.
            async with asyncio.timeout(
                self._context.deadline.remaining(None if self._at_end_only else limit)
            ):
                return await self._events_queue.get()
        except TimeoutError:
            self._context.deadline.remaining()  # raises, if that was it
            which = "idle" if self._started else "first_token"
            raise DeadlineExceeded("the local model took too long", which=which) from None

    def _map_event(self, news: ipc.EngineEvent) -> list[Event]:
        match news:
            case ipc.RequestFailedEvent():
                self.finished = True
                raise ipc.build_engine_error(news)
            case ipc.RequestFinishedEvent():
                self.finished = True
                usage = Usage(
                    news.prompt_tokens, news.completion_tokens, news.cached_tokens or None
                )
                timing = Timing(
                    news.queue_seconds, news.prefill_seconds, news.decode_seconds, news.max_batch
                )
                return [usage, timing, StreamEnd()]
            case (
                ipc.TextEvent(token_count=count)
                | ipc.ToolCallEvent(token_count=count)
                | ipc.ToolArgumentsEvent(token_count=count)
                | ipc.ReasoningEvent(token_count=count)
            ):
                return [*ipc.map_engine_event(news), *self._count_tokens(count)]
            case ipc.PrefillDoneEvent(_, prompt_tokens):
                self._prompt_tokens = prompt_tokens
                return ipc.map_engine_event(news)
            case _:
                return ipc.map_engine_event(news)

    def _count_tokens(self, tokens: int) -> list[Event]:
        """Tokens came; tells of them where running usage is wanted."""
        self._completion_tokens += tokens
        self._uncredited_tokens += tokens
        return [Usage(self._prompt_tokens, self._completion_tokens)] if self._running_usage else []

    def take_credit(self) -> int:
        """Tokens that may be credited to the engine, once there are enough of them."""
        if self._uncredited_tokens < _CREDIT_BATCH or self._at_end_only or self.finished:
            return 0
        tokens, self._uncredited_tokens = self._uncredited_tokens, 0
        return tokens


def _build_stats(
    rows: int, waiting: int, told: ipc.EngineStats, restarts: int
) -> Mapping[str, float]:
    return {
        "running": rows,
        "waiting": waiting,
        "batch_size": told.batched_sequences if rows else 0,
        "kv_cache_usage": told.used_blocks / max(told.blocks, 1),
        "kv_cache_blocks": told.blocks,
        "prompt_tokens": told.prompt_tokens,
        "completion_tokens": told.completion_tokens,
        "prefix_cache_hit_tokens": told.cached_tokens,
        "preemptions": told.preemptions,
        "steps": told.steps,
        "step_seconds": told.seconds,
        "queue_seconds": told.queue_seconds,
        "prefill_seconds": told.prefill_seconds,
        "decode_seconds": told.decode_seconds,
        "restarts": restarts,
    }
