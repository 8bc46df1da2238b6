"""The engine process as the gateway sees it: start, commands, events, end.

``backends.torch.engine_process`` is what runs in it.
"""

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

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
from protocols.core.catalog import ModelFeatures

_log = logging.getLogger(__name__)

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
    # Products are then the same at every memory address and with any number of threads, at the same
    # speed, so that a token's logits do not depend on the other rows of a step.
    "MKL_CBWR": "AUTO,STRICT",
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
        self.progress = "starting the engine process"
        """What it does to load the model."""
        self.active = 0
        self.waiting = 0
        self.stats = EngineStats()
        self._unresponsive = False

    def __repr__(self) -> str:
        state = self.load_error or ("ready" if self.ready else self.progress)
        return f"<EngineProcess {self.pid}, {state}, {len(self._queues)} requests>"

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
                was_ready = self.ready is not None
                self._dispatch_events(decode_events(body))
                if self.ready is not None and not was_ready:
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
                self.progress = text
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
            pass
        finally:  # also if a shutdown cancels an unload that waits here
            if self._subprocess.returncode is None:
                self._subprocess.kill()
                await self._subprocess.wait()

    @property
    def request_count(self) -> int:
        """The number of open requests."""
        return len(self._queues)

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative: a signal."""
        return None if self._subprocess is None else self._subprocess.returncode


def _log_features(path: str, features: ModelFeatures) -> None:
    """Say what the model is understood to support."""
    if features.problem is not None:
        _log.warning("%s: tool calls are not understood: %s", path, features.problem)
    _log.info("%s: %s", path, "; ".join(f"{name}: {text}" for name, text in features.describe()))
