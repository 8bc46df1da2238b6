"""Main of the engine process: reads commands, steps the engine, ends with the gateway.

``backends.torch.engine_client`` starts it with one end of a socket pair; its file descriptor and
the settings are the arguments. The process ends when the gateway's end closes, even after a crash.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from backends.log_format import configure_logging, inherit_log_format
from backends.torch.ipc import (
    IPC_VERSION,
    CancelCommand,
    ClassifyCommand,
    CreditCommand,
    DetokenizeCommand,
    EngineCommand,
    EngineEvent,
    EngineStats,
    HeartbeatEvent,
    LoadFailedEvent,
    ProgressEvent,
    ReadyEvent,
    RequestCommand,
    RequestFailedEvent,
    RerankCommand,
    TokenizeCommand,
    decode_commands,
    encode_frame,
    read_body_length,
)
from backends.torch.model_files import ENGINE_TASKS, EngineTask, ModelError
from backends.torch.prompt_lookup import describe_drafts
from backends.torch.settings import TorchSettings
from backends.torch.weight_summary import summarize_weights
from protocols.core.catalog import ModelWeights
from protocols.core.json_text import decode_json

_log = logging.getLogger(__name__)

_MAX_REASON_LENGTH = 1000
"""Characters of the reason why a model can't be loaded; some errors list all its weights."""
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
    @property
    def output(self) -> str:
        """What the model generates, for errors."""

    @property
    def commands(self) -> tuple[type, ...]:
        """The commands that ``submit`` takes."""

    def submit(self, command: Any) -> None: ...
    def tokenize(self, command: TokenizeCommand) -> None: ...
    def detokenize(self, command: DetokenizeCommand) -> None: ...
    def cancel(self, number: int) -> None: ...
    def credit(self, number: int, tokens: int) -> None: ...
    def step(self) -> bool: ...


class EngineChannel:
    """The socket to the gateway: a thread reads commands, and events are sent in batches."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._commands: queue.SimpleQueue[list[EngineCommand]] = queue.SimpleQueue()
        self._events: list[EngineEvent] = []
        self._send_lock = threading.Lock()
        threading.Thread(target=self._read_commands, daemon=True, name="commands").start()

    def queue_event(self, events: EngineEvent) -> None:
        """Queue an event for the next ``send_queued``."""
        self._events.append(events)

    def send_queued(self) -> None:
        """Send the collected events in one frame. The process ends if the gateway is gone."""
        if not self._events:
            return
        events, self._events = self._events, []
        self.send_now(*events)

    def send_now(self, *events: EngineEvent) -> None:
        """Send this now; may be called from any thread."""
        data = encode_frame(events)
        try:
            with self._send_lock:
                self._socket.sendall(data)
        except OSError:
            os._exit(0)

    def wake_reader(self) -> None:
        """End a wait for commands; may be called from any thread."""
        self._commands.put([])

    def receive_commands(self, timeout: float) -> list[EngineCommand]:
        """The received commands; waits at most ``wait`` seconds for the first."""
        commands: list[EngineCommand] = []
        try:
            commands.extend(
                self._commands.get(timeout=timeout) if timeout else self._commands.get_nowait()
            )
            while True:
                commands.extend(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _read_commands(self) -> None:
        try:
            while True:
                length = read_body_length(self._read_exactly(4))
                self._commands.put(decode_commands(self._read_exactly(length)))
        except (OSError, EOFError):
            pass
        except (ValueError, msgspec.MsgspecError):
            _log.exception("invalid frame from the gateway")
        # Even in the middle of a step: the gateway is gone.
        os._exit(0)

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            received = self._socket.recv(size - len(data))
            if not received:
                raise EOFError
            data += received
        return bytes(data)


class _HeartbeatThread:
    """A thread that sends heartbeats with the duration of the current step."""

    def __init__(self, channel: EngineChannel, loop: EngineLoop) -> None:
        self._channel = channel
        self._loop = loop
        self.step_started_at: float | None = None
        threading.Thread(target=self._send_heartbeats, daemon=True, name="heartbeats").start()

    def _send_heartbeats(self) -> None:
        while True:
            started_at, loop = self.step_started_at, self._loop
            step_seconds = 0.0 if started_at is None else time.monotonic() - started_at
            self._channel.send_now(
                HeartbeatEvent(loop.active_count, loop.waiting_count, step_seconds, loop.stats)
            )
            time.sleep(HEARTBEAT_INTERVAL)


def run_loop(channel: EngineChannel, loop: Any) -> None:
    """Execute commands and steps, for ever."""
    heartbeat, is_busy = _HeartbeatThread(channel, loop), False
    while True:
        commands = channel.receive_commands(0.0 if is_busy else HEARTBEAT_INTERVAL)
        heartbeat.step_started_at = time.monotonic()
        for command in commands:
            _execute_command(channel, loop, command)
        is_busy = loop.step()
        channel.send_queued()
        heartbeat.step_started_at = None


def _execute_command(channel: EngineChannel, loop: EngineLoop, command: EngineCommand) -> None:
    match command:
        case CancelCommand(job):
            loop.cancel(job)
        case CreditCommand(job, tokens):
            loop.credit(job, tokens)
        case _:
            _submit_request(channel, loop, command)


_API_NAMES: Final = {RerankCommand: "Rerank (Score)", ClassifyCommand: "Classify"}


def _submit_request(channel: EngineChannel, loop: EngineLoop, command: RequestCommand) -> None:
    try:
        if isinstance(command, TokenizeCommand):
            loop.tokenize(command)
        elif isinstance(command, DetokenizeCommand):
            loop.detokenize(command)
        elif isinstance(command, loop.commands):
            loop.submit(command)
        else:
            message = f"this model generates {loop.output} only"
            if (api := _API_NAMES.get(type(command))) is not None:
                message = f"The model does not support the {api} API: {message}."
            channel.queue_event(
                RequestFailedEvent(command.request_id, "unsupported", message, "model")
            )
    except Exception as error:  # noqa: BLE001 - one request must not end the others
        _log.exception("a request could not be accepted")
        channel.queue_event(
            RequestFailedEvent(
                command.request_id, "failed", f"the local model failed: {type(error).__name__}"
            )
        )


def _load_encoder_engine(location: Any, settings: TorchSettings, channel: EngineChannel) -> Any:
    """The same for a model that computes embeddings, scores or classes, at this ModelLocation."""
    from backends.torch.classification import load_classifier  # noqa: PLC0415
    from backends.torch.embedding_engine import EmbeddingEngine  # noqa: PLC0415
    from backends.torch.embeddings import TextEncoder, load_encoder  # noqa: PLC0415
    from backends.torch.loaded_model import summarize_encoder  # noqa: PLC0415
    from backends.torch.rerank import load_cross_encoder  # noqa: PLC0415

    loaders: dict[EngineTask, Any] = {
        "embed": load_encoder,
        "rerank": load_cross_encoder,
        "classify": load_classifier,
    }
    encoder: TextEncoder = loaders[location.task](location, settings)
    device, dimensions = str(encoder.model.device), encoder.dimensions
    channel.queue_event(
        ReadyEvent(
            location.task,
            IPC_VERSION,
            encoder.max_length,
            device,
            dimensions,
            memory_bytes=_read_resident_bytes(),
            features=summarize_encoder(location, settings.path, encoder.max_length),
        )
    )
    return EmbeddingEngine(
        encoder, settings.queue, channel.queue_event, time.monotonic, channel.wake_reader
    )


def _load_engine(settings: TorchSettings, channel: EngineChannel) -> Any:
    """Load the model and queue ReadyEvent. Imports torch, which takes seconds."""
    import torch  # noqa: PLC0415

    from backends.torch.engine import TorchEngine  # noqa: PLC0415
    from backends.torch.loaded_model import load_model  # noqa: PLC0415
    from backends.torch.loader import find_model  # noqa: PLC0415
    from backends.torch.model import compute_context_length  # noqa: PLC0415
    from backends.torch.scheduler import SchedulerConfig  # noqa: PLC0415

    if settings.threads:
        torch.set_num_threads(settings.threads)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))

    def report(text: str) -> None:
        channel.queue_event(ProgressEvent(text))
        channel.send_queued()

    location = find_model(
        settings.path,
        report,
        ENGINE_TASKS.get(settings.task),
        keep_quantized=settings.dtype == "quantized",
    )
    report(f"loading {settings.path}")
    if location.task != "generate":
        return _load_encoder_engine(location, settings, channel)
    options = (settings.device, settings.dtype, settings.context, settings.chat_template)
    model = load_model(location, *options, cache_bytes=settings.kv_cache_memory)
    model.input_processor.serves_unknown_calls = settings.unknown_tool_calls == "text"
    wanted = compute_context_length(model.runner.config, settings.context)
    if model.runner.context_length < wanted:
        report(
            f"the KV cache of {settings.kv_cache_memory >> 20} MB holds a context of "
            f"{model.runner.context_length} tokens, less than {wanted}: set kv_cache_memory"
        )
    limits = SchedulerConfig(
        settings.max_concurrency,
        settings.queue,
        max_chunk_tokens=settings.prefill_chunk,
        cache_bytes=settings.kv_cache_memory,
        share_prefix_cache=settings.share_prefix_cache,
        prompt_lookup=settings.prompt_lookup,
    )
    engine = TorchEngine(model, limits, channel.queue_event, time.monotonic, channel.wake_reader)
    engine.warm_up()
    weights = summarize_weights(settings.path, Path(location.source))
    channel.queue_event(_make_ready_event(engine, model, weights, settings))
    return engine


def _make_ready_event(
    engine: Any, model: Any, weights: ModelWeights | None, settings: TorchSettings
) -> ReadyEvent:
    """What a TorchEngine and its LoadedModel tell the gateway."""
    from backends.torch.loaded_model import summarize_model  # noqa: PLC0415

    runner = model.runner
    features = summarize_model(
        model.tokenizer, model.input_processor, runner.context_length, weights
    )
    drafts = describe_drafts(settings.prompt_lookup, is_exact=runner.is_batch_invariant)
    return ReadyEvent(
        "generate",
        IPC_VERSION,
        runner.context_length,
        str(runner.device),
        cache_bytes=engine.cache_bytes,
        memory_bytes=_read_resident_bytes(),
        features=msgspec.structs.replace(features, prompt_lookup=drafts),
    )


def _read_resident_bytes() -> int:
    """The memory of this process; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _try_load_engine(settings: TorchSettings, channel: EngineChannel) -> Any | None:
    """The engine; None, with a LoadFailedEvent queued, if it can't be loaded for any reason."""
    try:
        return _load_engine(settings, channel)
    except ModelError as error:
        text = str(error)
    except ImportError as error:
        text = f"missing dependency ({error}): pip install 'interlingua[torch]'"
    except Exception as error:  # noqa: BLE001 - whatever it is, it would come again
        _log.exception("%s can't be loaded", settings.path)
        text = f"{type(error).__name__}: {error}"
    channel.queue_event(LoadFailedEvent(text[:_MAX_REASON_LENGTH]))
    return None


def run_engine(arguments: list[str]) -> None:
    """Run the engine. The arguments are a file descriptor and the settings as JSON."""
    # The gateway decides when this process ends, not a signal to the process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(logging.WARNING, inherit_log_format(os.environ))
    channel = EngineChannel(socket.socket(fileno=int(arguments[0])))
    settings = decode_json(arguments[1], kind=TorchSettings)
    engine = _try_load_engine(settings, channel)
    channel.send_queued()
    if engine is not None:
        run_loop(channel, engine)


if __name__ == "__main__":
    run_engine(sys.argv[1:])
