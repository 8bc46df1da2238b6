"""The torch backend: supervises the engine process and streams its events.

If the process dies after a good start, its requests fail and it is restarted with exponential
backoff. A model that can't be loaded is not tried again, whatever the reason: the same error would
come again, and requests would wait for it.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backends.interfaces import (
    Backend,
    BackendRequest,
    EventSink,
    PreparedRequest,
    RequestContext,
    StreamItems,
)
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
from backends.torch.model_features import ModelFeatures
from backends.torch.settings import TorchSettings
from protocols.core.errors import (
    DeadlineExceeded,
    Overloaded,
    StreamBroken,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.events import DetokenizedText, Event, StreamEnd, Timing, TokenList, Usage
from protocols.core.extra import remove_extra_fields
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AnyRequest,
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
    TokenizeRequest,
)

# The engine process, seen from the gateway: start, commands, events, end.

MAX_SILENCE = 15.0
"""Seconds without a heartbeat after which a ready process is killed. A thread of the process sends
one each second."""
MAX_STEP_SECONDS = 300.0
"""Seconds after which a step counts as stuck. A large model on a slow machine takes long."""
_EXIT_TIMEOUT = 5.0
"""Seconds until a process that does not exit is killed."""
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {
    # OpenMP threads that spin while they wait take the cores from the gateway: twice the CPU time
    # of a token with one row, and far fewer tokens on a busy machine.
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

EngineEventQueue = asyncio.Queue[Sequence[EngineEvent] | None]
"""Events of one request, in batches; None: the process has ended."""


class EngineProcess:
    """One run of the engine process."""

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self._subprocess: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._queues: dict[int, EngineEventQueue] = {}
        self._request_ids = itertools.count(1)
        self.ready: ReadyEvent | None = None
        self.load_error: str | None = None
        """Why the model can't be loaded; a restart would not help."""
        self.active = 0
        self.waiting = 0
        self.stats = EngineStats()
        self._unresponsive = False

    @property
    def pid(self) -> int | None:
        """The process id, once started."""
        return None if self._subprocess is None else self._subprocess.pid

    async def start(self) -> None:
        """Start the process. It ends when the gateway's end of the socket closes."""
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
        """Dispatch events until the process ends. Sets ``ready`` when the model is loaded."""
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
            _log.exception("engine process of %s does not respond", self._settings.path)

    def _dispatch_events(self, news: Sequence[EngineEvent]) -> None:
        """Dispatch events; consecutive events of one request form one batch."""
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
                    self.load_error = "the engine process has another version than the gateway"
                    return
                self.ready = news
                _log.info(
                    "%s is ready: %s on %s, context of %d tokens, KV cache of %d MB",
                    self._settings.path,
                    task,
                    device,
                    context,
                    memory >> 20,
                )
                if news.features is not None:
                    _log_features(self._settings.path, news.features)
            case LoadFailedEvent(text):
                self.load_error = text
            case HeartbeatEvent(rows, waiting, busy, figures):
                self.active, self.waiting, self.stats = rows, waiting, figures
                if busy > MAX_STEP_SECONDS:
                    raise TimeoutError(f"a step of the engine takes {busy:.0f} s")
            case _:
                pass

    def open_request(self) -> tuple[int, EngineEventQueue]:
        """An id for a new request, and the queue of its events."""
        number = next(self._request_ids)
        inbox: EngineEventQueue = asyncio.Queue()
        self._queues[number] = inbox
        return number, inbox

    def close_request(self, number: int, *, cancel: bool) -> None:
        """End a request; ``cancel`` stops its generation."""
        if self._queues.pop(number, None) is not None and cancel:
            self.send(CancelCommand(number))

    def send(self, order: EngineCommand) -> None:
        """Send a command. It is dropped if the process has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame([order]))

    async def stop_process(self) -> None:
        """End the process, and all its requests."""
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
        """The exit code; negative: a signal."""
        return None if self._subprocess is None else self._subprocess.returncode


_log = logging.getLogger(__name__)

_RESTART_DELAY = 0.5
_MAX_RESTART_DELAY = 30.0
_CREDIT_BATCH = 128
"""Tokens per credit message."""
_LOWEST_PRIORITY = 255
"""The priority of shadow traffic."""


def _log_features(path: str, features: ModelFeatures) -> None:
    """Say what the model is understood to support."""
    if features.tool_calls is None:
        _log.warning("%s: tool calls are not understood: %s", path, features.problem)
    _log.info(
        "%s: tool calls %s (found by: %s), enforced %s; reasoning %s",
        path,
        features.tool_calls or "not understood",
        features.found_by or "nothing",
        features.enforced,
        features.reasoning or "none",
    )


class TorchBackend(Backend):
    """One local model; takes the fields of ``TorchSettings``."""

    computes_choices = True
    """See ``backends.interfaces.ComputesChoices``."""

    def __init__(self, **settings: Any) -> None:
        self._settings = msgspec.convert(settings, TorchSettings)
        self._process: EngineProcess | None = None
        self._ready = asyncio.Event()
        """Set while the process accepts requests, or when loading has failed for good."""
        self._load_error: str | None = None
        self._supervisor_task: asyncio.Task[None] | None = None
        self._restarts = 0

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._ready.is_set() and self._load_error is None

    @property
    def failure(self) -> str | None:
        """See ``backends.interfaces.ReportsFailure``: why the model can't be loaded."""
        return self._load_error

    @property
    def features(self) -> ModelFeatures | None:
        """What the model is understood to support; None while it is not loaded."""
        ready = None if self._process is None else self._process.ready
        return None if ready is None else ready.features

    @property
    def process(self) -> EngineProcess | None:
        """The current process, for the status page."""
        return self._process

    def read_stats(self) -> Mapping[str, float]:
        """The engine's state of at most a second ago, exported as gauges by the gateway."""
        process = self._process
        if process is None or not self.ready:
            return _build_stats(0, 0, ipc.EngineStats(), self._restarts)
        return _build_stats(process.active, process.waiting, process.stats, self._restarts)

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        """See ``backends.interfaces.Backend``."""
        decoded, names = request.decode()
        decoded, foreign = remove_extra_fields(decoded)
        unsupported = ipc.find_unsupported_params(
            decoded,
            names,
            templates=self._settings.trust_request_chat_template,
            features=self.features,
        )
        if self.features is not None and self.features.tool_calls is None:
            unsupported += _find_unknown_calls(decoded, names, self.features)
        return PreparedRequest(decoded, unsupported + foreign)

    async def start(self) -> None:
        """Start to load the model; earlier requests wait for it."""
        self._supervisor_task = asyncio.get_running_loop().create_task(self._supervise_process())

    async def warm_up(self) -> None:
        """Wait until the model is loaded. Raises WorkerUnreachable if it can't be."""
        await self._ready.wait()
        if self._load_error is not None:
            raise WorkerUnreachable(self._load_error)

    async def aclose(self) -> None:
        """Stop the process."""
        if self._supervisor_task is not None:
            self._supervisor_task.cancel()
            await asyncio.gather(self._supervisor_task, return_exceptions=True)
        self._load_error = self._load_error or "the local model has been shut down"
        self._ready.set()

    # --- the process ----------------------------------------------------------------------------

    async def _supervise_process(self) -> None:
        pause, was_ready = _RESTART_DELAY, False
        while self._load_error is None:
            process = self._process = EngineProcess(self._settings)
            try:
                await process.start()
                await process.read_events(self._ready)
            except OSError as error:
                _log.exception("engine process of %s can't be started", self._settings.path)
                if not was_ready:
                    process.load_error = f"the engine process can't be started: {error}"
            finally:
                self._ready.clear()
                await process.stop_process()
            was_ready = was_ready or process.ready is not None
            if not was_ready and process.load_error is None:
                process.load_error = _describe_exit(process.exit_code)
            if process.load_error is not None:
                _log.error("%s can't be loaded: %s", self._settings.path, process.load_error)
                self._load_error = process.load_error
                self._ready.set()
                return
            pause = _RESTART_DELAY if process.ready else min(pause * 2, _MAX_RESTART_DELAY)
            _log.error(
                "engine process of %s ended (%s); restarting in %.1f s",
                self._settings.path,
                process.exit_code,
                pause,
            )
            await asyncio.sleep(pause)
            self._restarts += 1

    async def _get_process(self, context: RequestContext) -> EngineProcess:
        """The ready process. Raises Overloaded or WorkerUnreachable."""
        try:
            async with asyncio.timeout(context.deadline.remaining(context.timeouts.first_token)):
                await self._ready.wait()
        except TimeoutError:
            raise Overloaded("the local model is still loading", retry_after=5.0) from None
        if self._load_error is not None:
            raise WorkerUnreachable(self._load_error)
        if self._process is None:
            raise WorkerUnreachable("the local model has not been started")
        return self._process

    # --- requests -------------------------------------------------------------------------------

    async def send(
        self, prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
    ) -> StreamItems:
        """The events of the response. Closing the generator cancels the request."""
        del sink
        request = prepared.request
        if context.preempt is not None:
            request = msgspec.structs.replace(request, priority=_LOWEST_PRIORITY)
        process = await self._get_process(context)
        job, inbox = process.open_request()
        over = False
        try:
            process.send(
                self._build_command(request, job, context.deadline.remaining(), context.principal)
            )
            ready = process.ready
            exchange = _ResponseStream(
                request, context, inbox, None if ready is None else ready.context_length
            )
            while not over:
                batch = await exchange.next_batch()
                over = exchange.finished
                yield None, batch
                if tokens := exchange.take_credit():
                    process.send(ipc.CreditCommand(job, tokens))
        finally:
            process.close_request(job, cancel=not over)

    def _build_command(
        self, request: AnyRequest, job: int, timeout: float, tenant: str | None
    ) -> ipc.RequestCommand:
        settings = self._settings
        templates = settings.trust_request_chat_template
        match request:
            case EmbeddingRequest():
                return ipc.build_embed_command(request, job, timeout)
            case RerankRequest():
                return ipc.build_rerank_command(request, job, timeout)
            case ClassifyRequest():
                return ipc.build_classify_command(request, job, timeout)
            case TokenizeRequest():
                return ipc.build_tokenize_command(request, job, templates=templates)
            case DetokenizeRequest():
                return ipc.DetokenizeCommand(job, request.token_ids)
            case GenerationRequest():
                return ipc.build_generate_command(
                    request,
                    job,
                    timeout,
                    templates=templates,
                    watermark=settings.watermark,
                    tenant=tenant,
                )


def _find_unknown_calls(
    request: AnyRequest, names: Mapping[str, str], features: ModelFeatures
) -> tuple[UnsupportedParameter, ...]:
    """The loss of tools whose calls are not understood: they arrive as text."""
    if not isinstance(request, GenerationRequest) or not ipc.build_functions(request):
        return ()
    field, detail = names.get("tools", "tools"), f"calls are not understood: {features.problem}"
    return (UnsupportedParameter(field, "approximated", detail, "tools"),)


def _describe_exit(code: int | None) -> str:
    """The reason of a process that ended before its model was loaded."""
    reason = f"exit code {code}"
    if code is not None and code < 0:
        reason = signal.Signals(-code).name
    hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
    return f"the engine process ended while it loaded the model ({reason}){hint}"


class _ResponseStream:
    """Maps the engine's events of one request to core events."""

    def __init__(
        self,
        request: AnyRequest,
        context: RequestContext,
        inbox: EngineEventQueue,
        context_length: int | None,
    ) -> None:
        """``context_length`` is the model's, in tokens."""
        self._context = context
        self._context_length = context_length
        self._events_queue = inbox
        self._running_usage = (
            isinstance(request, GenerationRequest) and request.response_options.usage == "each"
        )
        self._hides_reasoning = (
            isinstance(request, GenerationRequest)
            and request.reasoning is not None
            and request.reasoning.include is False
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
        """The next events. Raises the request's failure."""
        while True:
            news = await self._next_engine_events()
            if news is None:
                if self._started:
                    raise StreamBroken("the engine process ended before its response was complete")
                raise WorkerFailed("the engine process ended")
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
            # With best_of, nothing arrives before the last sample ends.
            async with asyncio.timeout(
                self._context.deadline.remaining(None if self._at_end_only else limit)
            ):
                return await self._events_queue.get()
        except TimeoutError:
            self._context.deadline.remaining()  # raises if the deadline has passed
            which = "idle" if self._started else "first_token"
            raise DeadlineExceeded("the local model did not answer in time", which=which) from None

    def _map_event(self, news: ipc.EngineEvent) -> list[Event]:
        match news:
            case ipc.RequestFailedEvent():
                self.finished = True
                raise ipc.build_engine_error(news)
            case ipc.TokensEvent(_, ids, texts):
                self.finished = True
                return [TokenList(ids, texts, self._context_length), StreamEnd()]
            case ipc.DetokenizedEvent(_, text):
                self.finished = True
                return [DetokenizedText(text), StreamEnd()]
            case ipc.RequestFinishedEvent():
                self.finished = True
                usage = Usage(
                    news.prompt_tokens,
                    news.completion_tokens,
                    news.cached_tokens or None,
                    news.reasoning_tokens,
                )
                timing = Timing(
                    news.queue_seconds, news.prefill_seconds, news.decode_seconds, news.max_batch
                )
                return [usage, timing, StreamEnd()]
            case ipc.ReasoningEvent(token_count=count) if self._hides_reasoning:
                return self._count_tokens(count)
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
        """Count tokens; returns a usage event if the client wants running usage."""
        self._completion_tokens += tokens
        self._uncredited_tokens += tokens
        return [Usage(self._prompt_tokens, self._completion_tokens)] if self._running_usage else []

    def take_credit(self) -> int:
        """The tokens to credit to the engine, once there are enough."""
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
