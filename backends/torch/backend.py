"""The torch backend: supervises the engine process and streams its events.

If the process dies after a good start, its requests fail and it is restarted with exponential
backoff. A model that can't be loaded is not restarted, whatever the reason: the same error would
come again, and requests would wait for it. One that is loaded on demand is tried again at a request
after a pause: what it lacked, as free memory, may be there by then.
"""

import asyncio
import logging
import math
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from backends.interfaces import (
    Backend,
    BackendRequest,
    Deadline,
    EventSink,
    PreparedRequest,
    RequestContext,
    StreamItems,
    ignore_memory,
)
from backends.model_memory import ModelMemory
from backends.torch import commands, events, ipc
from backends.torch.engine_client import EngineEventQueue, EngineProcess
from backends.torch.model_files import estimate_memory
from backends.torch.settings import TorchSettings
from backends.torch.weight_summary import summarize_weights
from protocols.core.call_arguments import find_half_written_calls
from protocols.core.catalog import ModelFeatures, ModelState, ModelWeights
from protocols.core.custom_tools import has_custom_tools, replace_custom_tools
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

_log = logging.getLogger(__name__)

_ABSOLUTE_PATH = re.compile(r"(?<![\w./~-])(?:~?/[^\s/'\",:;()]+)*/([^\s/'\",:;()]+)")
"""Its last part is group 1."""
_RESTART_DELAY = 0.5
_MAX_RESTART_DELAY = 30.0
_CREDIT_BATCH = 128
"""Tokens per credit message."""
_LOAD_RETRY_AFTER = 5.0
"""When a client may try again that could not wait for the model to be loaded, in seconds."""
_LOAD_LOG_PAUSE = 5.0
"""Seconds between two lines of the log that tell how far a model is loaded."""
_LOAD_RETRY_PAUSE = 30.0
"""Seconds after which a model that could not be loaded on demand is tried again."""
_MAX_LOAD_SECONDS = 600.0
"""How long a request without content waits for its model to be loaded."""
_LONGEST_TIMER = 1e8
_PROCESS_BYTES = 512 << 20
"""About what the engine process takes without a model."""
_LOWEST_PRIORITY = 255
"""The priority of shadow traffic."""


class TorchBackend(Backend):
    """One local model; takes the fields of ``TorchSettings``."""

    computes_choices = True
    """See ``backends.interfaces.ComputesChoices``."""

    def __init__(
        self,
        *,
        memory: ModelMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        """``memory`` is shared by all models that are loaded on demand."""
        self._settings = msgspec.convert(settings, TorchSettings)
        self._memory = memory or ModelMemory()
        self._clock = clock
        self._process: EngineProcess | None = None
        self._ready = asyncio.Event()
        """Set while the process accepts requests, or when loading has failed."""
        self._load_error: str | None = None
        self._retry_at = math.inf
        """When a model that could not be loaded is tried again, if a request wants it."""
        self._supervisor_task: asyncio.Task[None] | None = None
        self._unload_task: asyncio.Task[None] | None = None
        self._restarts = 0
        self._load_started_at = 0.0
        self._was_loaded = False
        self._features: ModelFeatures | None = None
        self._weights: ModelWeights | None = None
        """Those in the files of a model that is loaded on demand."""
        self._estimates: dict[str, int] = {}
        """By device, about how much memory the model takes there."""
        self._size = 0
        """The memory that the model took when it was loaded last."""
        self._waiting = 0
        """The requests that wait for the model to be loaded."""
        self._changed = asyncio.Event()
        """Set when ``_waiting``, the requests of the process or ``_ready`` change."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._keep_alive: float | None = None
        """How long the last request wanted the model to stay, also after a restart."""
        self.last_used = 0.0
        """See ``backends.model_memory.LoadableModel``."""

    def __repr__(self) -> str:
        state = "loaded" if self.loaded else self._load_error or "not loaded"
        return f"<TorchBackend {self._settings.path}, {state}, {self._waiting} requests waiting>"

    @property
    def loads_on_demand(self) -> bool:
        """Whether the model is loaded at its first request."""
        return self._settings.keep_alive is not None

    @property
    def ready(self) -> bool:
        """Whether the model is loaded, or will be at the next request."""
        return self.failure is None and (self.loads_on_demand or self._ready.is_set())

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory and accepts requests."""
        return self._load_error is None and self._ready.is_set()

    @property
    def idle(self) -> bool:
        """See ``backends.model_memory.LoadableModel``."""
        return not self._waiting and not (self._process and self._process.request_count)

    @property
    def failure(self) -> str | None:
        """See ``backends.interfaces.ReportsFailure``: why the model can't be loaded now."""
        return None if self._clock() >= self._retry_at else self._load_error

    @property
    def loading(self) -> str | None:
        """See ``backends.interfaces.ReportsLoading``: none for a load that requests wait for."""
        if self.loads_on_demand or self._was_loaded or self._ready.is_set():
            return None
        return _ABSOLUTE_PATH.sub(r"\1", self._describe_load())

    def _describe_load(self) -> str:
        if self._process is None:
            return "waiting to be started"
        seconds = self._clock() - self._load_started_at
        return f"{self._process.progress} (for {seconds:.0f} s)"

    @property
    def features(self) -> ModelFeatures | None:
        """What the model is understood to support; None before it has been loaded once."""
        ready = None if self._process is None else self._process.ready
        if ready is not None:
            self._features = ready.features
        return self._features

    def report_model(self) -> ModelState:
        """See ``backends.interfaces.ReportsModel``."""
        if not self.loaded:
            return ModelState(
                loaded=False,
                on_demand=self.loads_on_demand,
                features=self.features,
                weights=self._weights if self.features is None else None,
            )
        return ModelState(
            loaded=True,
            on_demand=self.loads_on_demand,
            features=self.features,
            memory_bytes=self._measure_memory(),
            expires_in=self._expires_in,
        )

    @property
    def process(self) -> EngineProcess | None:
        """The current process, for the status page."""
        return self._process

    def read_stats(self) -> Mapping[str, float]:
        """The engine's state of at most a second ago, exported as gauges by the gateway."""
        process = self._process
        if process is None or not self.loaded:
            return _build_stats(0, 0, ipc.EngineStats(), self._restarts)
        return _build_stats(process.active, process.waiting, process.stats, self._restarts)

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        """See ``backends.interfaces.Backend``."""
        decoded, names = request.decode()
        replaced: tuple[UnsupportedParameter, ...] = ()
        if has_custom_tools(decoded):
            decoded, replaced = replace_custom_tools(decoded)
        decoded, foreign = remove_extra_fields(decoded)
        unsupported = commands.find_unsupported_params(
            decoded,
            names,
            templates=self._settings.trust_request_chat_template,
            features=self.features,
            on_demand=self.loads_on_demand,
        )
        if self.features is not None and self.features.problem is not None:
            unsupported += _find_unknown_calls(decoded, names, self.features)
        if isinstance(decoded, GenerationRequest):
            unsupported += tuple(find_half_written_calls(decoded))
        return PreparedRequest(decoded, unsupported + foreign + replaced)

    async def start(self) -> None:
        """Start to load the model; it answers requests once it is loaded."""
        if self.loads_on_demand:
            self._weights = await asyncio.to_thread(summarize_weights, self._settings.path)
        else:
            self._begin_load()

    async def warm_up(self) -> None:
        """Wait until the model is loaded. Raises WorkerUnreachable if it can't be."""
        if not self.loads_on_demand:
            await self._wait_ready()

    async def aclose(self) -> None:
        """Stop the process."""
        self._stop_idle_timer()
        tasks = [one for one in (self._unload_task, self._supervisor_task) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._load_error = self._load_error or "the local model has been shut down"
        self._retry_at = math.inf
        self._ready.set()

    # --- loading on demand ----------------------------------------------------------------------

    async def keep_model(self, seconds: float | None) -> bool:
        """See ``backends.interfaces.ReportsModel``."""
        if not self.loads_on_demand:
            return False
        if seconds == 0:
            await self.unload()
            return True
        clock = time.monotonic
        await self._get_process(
            RequestContext("", Deadline(clock, _MAX_LOAD_SECONDS), clock, ignore_memory)
        )
        self._restart_idle_timer(seconds)
        return True

    async def unload(self) -> None:
        """See ``backends.model_memory.LoadableModel``."""
        if self._supervisor_task is None:
            return
        if self._unload_task is None:
            self._unload_task = asyncio.get_running_loop().create_task(self._unload_idle())
        await asyncio.wait([self._unload_task])

    async def _unload_idle(self) -> None:
        """Unload once the requests that wait for the model have had their turn."""
        try:
            while self._waiting:
                await self._wait_change()
            if self._load_error is not None or self._supervisor_task is None:
                return
            self._ready.clear()  # from here on requests wait until it is loaded again
            while self._process is not None and self._process.request_count:
                await self._wait_change()
            _log.info("%s is unloaded", self._settings.path)
            task = self._supervisor_task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            self._unload_task = self._keep_alive = None
            self._stop_idle_timer()
        self._supervisor_task = None
        if not self.idle:
            self._begin_load()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _begin_load(self) -> None:
        self._load_started_at = self._clock()
        self._supervisor_task = asyncio.get_running_loop().create_task(self._run_model())

    async def _run_model(self) -> None:
        """Supervise the process, with memory reserved for it if the model is loaded on demand."""
        if not self.loads_on_demand:
            await self._supervise_process()
            return
        try:
            size = await asyncio.to_thread(self._estimate, self._settings.device)
            # Only the estimate is compared: a model that was loaded once can be loaded again. One
            # that took more than the limit has the memory alone.
            limit = self._memory.limit
            if limit is not None and size > limit:
                self._fail_to_load(
                    f"it needs about {size / 1e6:,.0f} MB, and limits.model_memory is "
                    f"{limit / 1e6:,.0f} MB; raise that, lower kv_cache_memory, or choose a "
                    "smaller model or dtype"
                )
                return
            await self._memory.reserve(self, self._size or size)
            await self._supervise_process()
        finally:
            self._memory.release(self)

    async def _watch_load(self) -> None:
        """Once a process has loaded the model, count its idle time and reserve what it takes."""
        while not self._ready.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), _LOAD_LOG_PAUSE)
                break
            _log.info("%s is not loaded yet: %s", self._settings.path, self._describe_load())
        self._was_loaded = True
        self._restart_idle_timer(self._keep_alive)
        if self.loads_on_demand:
            self._size = self._measure_memory()
            await self._memory.reserve(self, self._size)

    def _estimate(self, device: str) -> int:
        if device not in self._estimates:
            settings = self._settings
            weights = estimate_memory(settings.path, settings.dtype, device)
            cache = settings.kv_cache_memory if settings.model_task in (None, "chat") else 0
            self._estimates[device] = weights + cache + _PROCESS_BYTES
        return self._estimates[device]

    def _measure_memory(self) -> int:
        """What the loaded model takes; an estimate on an accelerator, whose memory isn't read."""
        ready = None if self._process is None else self._process.ready
        if ready is None:
            return 0
        if ready.device == "cpu":
            return ready.memory_bytes + ready.cache_bytes
        return self._estimate(ready.device)

    def _restart_idle_timer(self, keep_alive: float | None) -> None:
        """Count the time without requests; ``keep_alive`` is the last request's, in seconds."""
        self._keep_alive = keep_alive
        self._changed.set()
        self._stop_idle_timer()
        self.last_used = time.monotonic()
        if not self.loads_on_demand:
            return
        seconds = self._settings.keep_alive if keep_alive is None else keep_alive
        if not self.idle or not self.loaded or seconds is None or seconds < 0:
            return
        seconds = min(seconds, _LONGEST_TIMER)
        loop = asyncio.get_running_loop()
        self._idle_timer = loop.call_later(seconds, self._unload_unused)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = None

    @property
    def _expires_in(self) -> int | None:
        timer = self._idle_timer
        return None if timer is None else round(timer.when() - asyncio.get_running_loop().time())

    def _unload_unused(self) -> None:
        if self.idle and self._supervisor_task is not None and self._unload_task is None:
            self._unload_task = asyncio.get_running_loop().create_task(self._unload_idle())

    # --- the process ----------------------------------------------------------------------------

    async def _supervise_process(self) -> None:
        pause, was_ready = _RESTART_DELAY, False
        while self._load_error is None:
            process = self._process = EngineProcess(self._settings)
            watch = asyncio.get_running_loop().create_task(self._watch_load())
            try:
                await process.start()
                await process.read_events(self._ready)
            except OSError as error:
                _log.exception("engine process of %s can't be started", self._settings.path)
                if not was_ready:
                    process.load_error = f"the engine process can't be started: {error}"
            finally:
                watch.cancel()
                self._ready.clear()
                await process.stop_process()
            was_ready = was_ready or process.ready is not None
            if not was_ready and process.load_error is None:
                process.load_error = _describe_exit(process.exit_code)
            if process.load_error is not None:
                self._fail_to_load(process.load_error)
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

    def _fail_to_load(self, reason: str) -> None:
        _log.error("%s can't be loaded: %s", self._settings.path, reason)
        self._load_error = reason
        if self.loads_on_demand:
            self._retry_at = self._clock() + _LOAD_RETRY_PAUSE
        self._ready.set()
        self._changed.set()

    async def _get_process(self, context: RequestContext) -> EngineProcess:
        """The ready process. Raises Overloaded or WorkerUnreachable."""
        if self._clock() >= self._retry_at:
            self._load_error = self._supervisor_task = None
            self._retry_at = math.inf
            self._ready.clear()
        if self.loading is not None:
            raise Overloaded("the local model is still loading", retry_after=_LOAD_RETRY_AFTER)
        if not self._ready.is_set():
            if self._waiting >= self._settings.queue:
                message = f"{self._waiting} requests wait already for the local model to be loaded"
                raise Overloaded(message, retry_after=_LOAD_RETRY_AFTER)
            if self.loads_on_demand and self._supervisor_task is None:
                self._begin_load()
        self._waiting += 1
        try:
            async with asyncio.timeout(context.deadline.remaining(context.timeouts.first_token)):
                await self._wait_ready()
        except WorkerUnreachable as error:
            raise _hide_paths(error) from None
        except TimeoutError:
            message = "the local model is still loading"
            raise Overloaded(message, retry_after=_LOAD_RETRY_AFTER) from None
        finally:
            self._waiting -= 1
            self._changed.set()
        if self._process is None:
            raise WorkerUnreachable("the local model has not been started")
        return self._process

    async def _wait_ready(self) -> None:
        """Wait until the model is loaded. Raises WorkerUnreachable if it can't be."""
        await self._ready.wait()
        if self._load_error is not None:
            raise WorkerUnreachable(self._load_error)

    # --- requests -------------------------------------------------------------------------------

    async def send(
        self, prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
    ) -> StreamItems:
        """The events of the response. Closing the generator cancels the request."""
        del sink
        request = prepared.request
        if context.preempt is not None:
            request = msgspec.structs.replace(request, priority=_LOWEST_PRIORITY)
        sent_at = self._clock()
        process = await self._get_process(context)
        waited = self._clock() - sent_at
        job, inbox = process.open_request()
        self._stop_idle_timer()
        over = False
        try:
            process.send(
                self._build_command(request, job, context.deadline.remaining(), context.principal)
            )
            ready = process.ready
            exchange = _ResponseStream(
                request, context, inbox, None if ready is None else ready.context_length, waited
            )
            while not over:
                batch = await exchange.next_batch()
                over = exchange.finished
                yield None, batch
                if tokens := exchange.take_credit():
                    process.send(ipc.CreditCommand(job, tokens))
        finally:
            process.close_request(job, cancel=not over)
            self._restart_idle_timer(getattr(request, "keep_alive", None))

    def _build_command(
        self, request: AnyRequest, job: int, timeout: float, tenant: str | None
    ) -> ipc.RequestCommand:
        settings = self._settings
        templates = settings.trust_request_chat_template
        match request:
            case EmbeddingRequest():
                return commands.build_embed_command(request, job, timeout)
            case RerankRequest():
                return commands.build_rerank_command(request, job, timeout)
            case ClassifyRequest():
                return commands.build_classify_command(request, job, timeout)
            case TokenizeRequest():
                return commands.build_tokenize_command(request, job, templates=templates)
            case DetokenizeRequest():
                return ipc.DetokenizeCommand(job, request.token_ids)
            case GenerationRequest():
                return commands.build_generate_command(
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
    if not isinstance(request, GenerationRequest) or not commands.build_functions(request):
        return ()
    field, detail = names.get("tools", "tools"), f"calls are not understood: {features.problem}"
    return (UnsupportedParameter(field, "approximated", detail, "tools"),)


def _hide_paths(error: WorkerUnreachable) -> WorkerUnreachable:
    """The error for a client, which learns no absolute path; its operator does."""
    hidden = WorkerUnreachable(_ABSOLUTE_PATH.sub(r"\1", error.message))
    hidden.worker_text = error.message
    return hidden


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
        waited: float,
    ) -> None:
        """``context_length`` is the model's, in tokens; ``waited``: for it to be loaded."""
        self._context = context
        self._context_length = context_length
        self._waited = waited
        self._events_queue = inbox
        self._running_usage = (
            isinstance(request, GenerationRequest) and request.response_options.usage == "each"
        )
        self._hides_reasoning = (
            isinstance(request, GenerationRequest)
            and request.reasoning is not None
            and request.reasoning.include is False
        )
        self._at_end_only = isinstance(request, GenerationRequest) and commands.returns_best_only(
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
                raise events.build_engine_error(news)
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
                    self._waited + news.queue_seconds,
                    news.prefill_seconds,
                    news.decode_seconds,
                    news.max_batch,
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
                return [*events.map_engine_event(news), *self._count_tokens(count)]
            case ipc.PrefillDoneEvent(_, prompt_tokens):
                self._prompt_tokens = prompt_tokens
                return events.map_engine_event(news)
            case _:
                return events.map_engine_event(news)

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
        "draft_tokens": told.draft_tokens,
        "accepted_draft_tokens": told.accepted_draft_tokens,
        "restarts": restarts,
    }
