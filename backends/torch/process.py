"""One life of the engine's process, from the gateway's side: start, orders, news, end."""

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from backends.torch.settings import TorchSettings
from backends.torch.spec import (
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

_log = logging.getLogger(__name__)

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
                "backends.torch.worker",
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
