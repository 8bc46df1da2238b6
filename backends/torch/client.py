"""The local model as a backend: its engine runs in a process of its own, kept alive from here.

A process that dies is started anew, after a pause that grows while it keeps dying; the requests it
had fail. A model that can't be served at all (not found, not understood) is not tried again.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from backends.torch import mapping, spec
from backends.torch.process import Inbox, Process
from backends.torch.settings import Settings
from gateway.core.context import Context
from gateway.core.errors import (
    DeadlineExceeded,
    Overloaded,
    StreamBroken,
    WorkerFailed,
    WorkerUnreachable,
)
from gateway.core.loss import Loss
from gateway.core.ports import Token
from gateway.core.types import (
    Done,
    EmbedRequest,
    Event,
    GenerateRequest,
    Request,
    Timing,
    Usage,
)

_log = logging.getLogger(__name__)

_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LUMP = 128
"""Credit is given back in lumps of so many tokens."""
_LAST = 255
"""The priority of a request for whose answer nobody waits."""


class TorchBackend:
    """One local model. Its settings are those of ``settings.Settings``."""

    def __init__(self, **settings: Any) -> None:
        self._settings = msgspec.convert(settings, Settings)
        self._process: Process | None = None
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
    def process(self) -> Process | None:
        """The process as it is now, for the status page."""
        return self._process

    def read_stats(self) -> Mapping[str, float]:
        """What the engine holds and does, a second ago; see ``gateway.engines``."""
        process = self._process
        if process is None or not self.ready:
            return _figures(0, 0, spec.Figures(), self._restarts)
        return _figures(process.active, process.waiting, process.stats, self._restarts)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """What the engine will not do of the request."""
        return mapping.lost(request, names, templates=self._settings.trust_templates)

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
        pause = _PAUSE
        while self._load_error is None:
            process = self._process = Process(self._settings)
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
            pause = _PAUSE if process.ready else min(pause * 2, _LONGEST_PAUSE)
            _log.error(
                "the process of %s ended (%s); starting it again in %.1f s",
                self._settings.path,
                process.exit_code,
                pause,
            )
            await asyncio.sleep(pause)
            self._restarts += 1

    async def _get_process(self, context: Context) -> Process:
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
        self, request: Request, context: Context
    ) -> AsyncGenerator[Sequence[Event], None]:
        """The events of the answer. Closing the generator frees the request's rows."""
        if context.preempt is not None:
            request = msgspec.structs.replace(request, priority=_LAST)
        process = await self._get_process(context)
        job, inbox = process.open_request()
        over = False
        try:
            process.send(
                self._build_command(request, job, context.deadline.remaining(), context.principal)
            )
            exchange = _Exchange(request, context, inbox)
            while not over:
                batch = await exchange.next_batch()
                over = exchange.finished
                yield batch
                if tokens := exchange.take_credit():
                    process.send(spec.Credit(job, tokens))
        finally:
            process.close_request(job, cancel=not over)

    async def tokenize(self, text: str, context: Context) -> Sequence[Token]:
        """The model's tokens; a special token has no text."""
        process = await self._get_process(context)
        job, inbox = process.open_request()
        try:
            process.send(spec.Tokenize(job, text))
            news = await inbox.get()
        finally:
            process.close_request(job, cancel=False)
        match news:
            case [spec.Tokens(_, ids, texts)]:
                return list(zip(ids, texts, strict=True))
            case [spec.Failed() as failed]:
                raise mapping.error(failed)
            case _:
                raise WorkerFailed("the local model's process ended")

    def _build_command(
        self, request: Request, job: int, timeout: float, tenant: str | None
    ) -> spec.Generate | spec.Embed:
        if isinstance(request, EmbedRequest):
            return mapping.embed(request, job, timeout)
        settings = self._settings
        return mapping.generate(
            request,
            job,
            timeout,
            templates=settings.trust_templates,
            watermark=settings.watermark,
            tenant=tenant,
        )


class _Exchange:
    """News of one job, made events."""

    def __init__(self, request: Request, context: Context, inbox: Inbox) -> None:
        self._context = context
        self._events_queue = inbox
        self._running_usage = isinstance(request, GenerateRequest) and request.want.usage == "each"
        self._at_end_only = isinstance(request, GenerateRequest) and mapping.whole(request)
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

    async def _next_engine_events(self) -> Sequence[spec.News] | None:
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

    def _map_event(self, news: spec.News) -> list[Event]:
        match news:
            case spec.Failed():
                self.finished = True
                raise mapping.error(news)
            case spec.Finished():
                self.finished = True
                usage = Usage(
                    news.prompt_tokens, news.completion_tokens, news.cached_tokens or None
                )
                timing = Timing(
                    news.queue_seconds, news.prefill_seconds, news.decode_seconds, news.max_batch
                )
                return [usage, timing, Done()]
            case (
                spec.Piece(token_count=count)
                | spec.Called(token_count=count)
                | spec.Argued(token_count=count)
                | spec.Thinking(token_count=count)
            ):
                return [*mapping.events(news), *self._count_tokens(count)]
            case spec.Started(_, prompt_tokens):
                self._prompt_tokens = prompt_tokens
                return mapping.events(news)
            case _:
                return mapping.events(news)

    def _count_tokens(self, tokens: int) -> list[Event]:
        """Tokens came; tells of them where running usage is wanted."""
        self._completion_tokens += tokens
        self._uncredited_tokens += tokens
        return [Usage(self._prompt_tokens, self._completion_tokens)] if self._running_usage else []

    def take_credit(self) -> int:
        """Tokens that may be credited to the engine, once there are enough of them."""
        if self._uncredited_tokens < _LUMP or self._at_end_only or self.finished:
            return 0
        tokens, self._uncredited_tokens = self._uncredited_tokens, 0
        return tokens


def _figures(rows: int, waiting: int, told: spec.Figures, restarts: int) -> Mapping[str, float]:
    return {
        "running": rows,
        "waiting": waiting,
        "batch": told.batched_sequences if rows else 0,
        "kv_usage": told.used_blocks / max(told.blocks, 1),
        "kv_blocks": told.blocks,
        "prompt_tokens": told.prompt_tokens,
        "completion_tokens": told.completion_tokens,
        "prefix_hits": told.cached_tokens,
        "preemptions": told.preemptions,
        "steps": told.steps,
        "step_seconds": told.seconds,
        "queue_seconds": told.queue_seconds,
        "prefill_seconds": told.prefill_seconds,
        "decode_seconds": told.decode_seconds,
        "restarts": restarts,
    }
