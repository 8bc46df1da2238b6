"""Main of the engine process: reads commands, steps the engine, ends with the gateway.

``backends.torch.backend`` starts it with one end of a socket pair; its file descriptor and the
settings are the arguments. The process ends when the gateway's end closes, even after a crash.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, Protocol

import msgspec

from backends.torch.ipc import (
    IPC_VERSION,
    CancelCommand,
    CreditCommand,
    EmbedCommand,
    EngineCommand,
    EngineEvent,
    EngineStats,
    GenerateCommand,
    HeartbeatEvent,
    LoadFailedEvent,
    ProgressEvent,
    ReadyEvent,
    RequestFailedEvent,
    TokenizeCommand,
    decode_commands,
    encode_frame,
    read_body_length,
)
from backends.torch.settings import TorchSettings

_log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0
"""Seconds between heartbeats."""


class EngineLoop(Protocol):
    """The common interface of TorchEngine and EmbeddingEngine."""

    @property
    def active_count(self) -> int: ...
    @property
    def waiting_count(self) -> int: ...
    @property
    def stats(self) -> EngineStats: ...
    def cancel(self, number: int) -> None: ...
    def credit(self, number: int, tokens: int) -> None: ...
    def step(self) -> bool: ...


class EngineChannel:
    """The socket to the gateway: orders come in by a thread of their own, news are gathered."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._commands: queue.SimpleQueue[list[EngineCommand]] = queue.SimpleQueue()
        self._events: list[EngineEvent] = []
        self._send_lock = threading.Lock()
        threading.Thread(target=self._read_commands, daemon=True, name="orders").start()

    def queue_event(self, news: EngineEvent) -> None:
        """To be sent with the next ``flush``."""
        self._events.append(news)

    def send_queued(self) -> None:
        """Send the collected events in one frame. The process ends if the gateway is gone."""
        if not self._events:
            return
        news, self._events = self._events, []
        self.send_now(*news)

    def send_now(self, *news: EngineEvent) -> None:
        """Send this now; may be called from any thread."""
        data = encode_frame(news)
        try:
            with self._send_lock:
                self._socket.sendall(data)
        except OSError:
            os._exit(0)

    def wake_reader(self) -> None:
        """End a wait for orders; may be called from any thread."""
        self._commands.put([])

    def receive_commands(self, wait: float) -> list[EngineCommand]:
        """What has come in; waits so long for the first."""
        found: list[EngineCommand] = []
        try:
            found.extend(self._commands.get(timeout=wait) if wait else self._commands.get_nowait())
            while True:
                found.extend(self._commands.get_nowait())
        except queue.Empty:
            return found

    def _read_commands(self) -> None:
        try:
            while True:
                length = read_body_length(self._read_exactly(4))
                self._commands.put(decode_commands(self._read_exactly(length)))
        except (OSError, EOFError):
            pass
        except (ValueError, msgspec.MsgspecError):
            _log.exception("invalid frame from the gateway")
        # Even in the middle of a step: nobody is left to read its outcome.
        os._exit(0)

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class _HeartbeatThread:
    """Tells that the process lives, and how long the present step has taken, from a thread."""

    def __init__(self, link: EngineChannel, loop: EngineLoop) -> None:
        self._channel = link
        self._loop = loop
        self.step_started_at: float | None = None
        threading.Thread(target=self._send_heartbeats, daemon=True, name="pulse").start()

    def _send_heartbeats(self) -> None:
        while True:
            began, loop = self.step_started_at, self._loop
            busy = 0.0 if began is None else time.monotonic() - began
            self._channel.send_now(
                HeartbeatEvent(loop.active_count, loop.waiting_count, busy, loop.stats)
            )
            time.sleep(HEARTBEAT_INTERVAL)


def run_loop(link: EngineChannel, loop: Any) -> None:
    """Step for ever. ``loop`` is an Engine or an Embedder."""
    pulse, busy = _HeartbeatThread(link, loop), False
    while True:
        orders = link.receive_commands(0.0 if busy else HEARTBEAT_INTERVAL)
        pulse.step_started_at = time.monotonic()
        for order in orders:
            _execute_command(link, loop, order)
        busy = loop.step()
        link.send_queued()
        pulse.step_started_at = None


def _execute_command(link: EngineChannel, loop: EngineLoop, order: EngineCommand) -> None:
    match order:
        case CancelCommand(job):
            loop.cancel(job)
        case CreditCommand(job, tokens):
            loop.credit(job, tokens)
        case GenerateCommand() | EmbedCommand() | TokenizeCommand():
            _submit_request(link, loop, order)


def _submit_request(
    link: EngineChannel, loop: Any, order: GenerateCommand | EmbedCommand | TokenizeCommand
) -> None:
    from backends.torch.embeddings import EmbeddingEngine  # noqa: PLC0415 - see _open

    try:
        if isinstance(order, TokenizeCommand):
            loop.tokenize(order)
        elif isinstance(loop, EmbeddingEngine) != isinstance(order, EmbedCommand):
            does = "gives vectors" if isinstance(loop, EmbeddingEngine) else "makes text"
            link.queue_event(
                RequestFailedEvent(
                    order.request_id, "unsupported", f"this model {does} only", "model"
                )
            )
        else:
            loop.submit(order)
    except Exception as error:  # noqa: BLE001 - one request must not take the others with it
        _log.exception("a request could not be accepted")
        link.queue_event(
            RequestFailedEvent(
                order.request_id, "failed", f"the local model failed: {type(error).__name__}"
            )
        )


def _load_engine(settings: TorchSettings, link: EngineChannel) -> Any:
    """Load the model and queue ReadyEvent. Imports torch, which takes seconds."""
    import torch  # noqa: PLC0415

    from backends.torch.embeddings import EmbeddingEngine, load_encoder  # noqa: PLC0415
    from backends.torch.engine import TorchEngine  # noqa: PLC0415
    from backends.torch.loaded_model import load_model  # noqa: PLC0415
    from backends.torch.loader import EngineTask, find_model  # noqa: PLC0415
    from backends.torch.scheduler import SchedulerConfig  # noqa: PLC0415

    if settings.threads:
        torch.set_num_threads(settings.threads)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))

    def report(text: str) -> None:
        link.queue_event(ProgressEvent(text))
        link.send_queued()

    tasks: dict[str | None, EngineTask] = {"generate": "generate", "embedding": "embed"}
    found = find_model(settings.path, report, tasks.get(settings.task))
    report(f"loading {settings.path}")
    if found.task == "embed":
        encoder = load_encoder(found, settings)
        device, dimensions = str(encoder.model.device), encoder.dimensions
        link.queue_event(ReadyEvent("embed", IPC_VERSION, encoder.max_length, device, dimensions))
        return EmbeddingEngine(
            encoder, settings.queue, link.queue_event, time.monotonic, link.wake_reader
        )
    how = (settings.device, settings.dtype, settings.context, settings.chat_template)
    model = load_model(found, *how)
    limits = SchedulerConfig(
        settings.max_concurrency,
        settings.queue,
        cache_bytes=settings.kv_cache_memory,
        share_prefix_cache=settings.share_prefix_cache,
    )
    engine = TorchEngine(model, limits, link.queue_event, time.monotonic, link.wake_reader)
    engine.warm_up()
    forward = model.runner
    ready = ReadyEvent(
        "generate",
        IPC_VERSION,
        forward.context_length,
        str(forward.device),
        cache_bytes=engine.cache_bytes,
    )
    link.queue_event(ready)
    return engine


def _try_load_engine(settings: TorchSettings, link: EngineChannel) -> Any | None:
    """The engine; None, with a LoadFailedEvent queued, if the model or torch is missing."""
    try:
        from backends.torch.loader import ModelError  # noqa: PLC0415 - imports torch

        try:
            return _load_engine(settings, link)
        except ModelError as error:
            text = str(error)
    except ImportError as error:
        text = f"missing dependency ({error}): pip install 'interlingua[torch]'"
    link.queue_event(LoadFailedEvent(text))
    return None


def run_engine(arguments: list[str]) -> None:
    """``worker FD SETTINGS``, with the settings as JSON."""
    # The gateway decides when this process ends: a signal to the whole group is meant for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    link = EngineChannel(socket.socket(fileno=int(arguments[0])))
    settings = msgspec.json.decode(arguments[1], type=TorchSettings)
    engine = _try_load_engine(settings, link)
    link.send_queued()
    if engine is not None:
        run_loop(link, engine)


if __name__ == "__main__":
    run_engine(sys.argv[1:])
