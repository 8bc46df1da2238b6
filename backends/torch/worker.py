"""The engine's process: reads frames, steps the engine, and dies with the gateway.

It is started by ``client`` with one end of a socket pair, whose number and the settings are its
arguments. When the gateway's end closes, however the gateway came to its end, this process ends.
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

from backends.torch.settings import Settings
from backends.torch.spec import (
    PROTOCOL,
    Broken,
    Cancel,
    Credit,
    Embed,
    Failed,
    Generate,
    Heartbeat,
    News,
    Order,
    Progress,
    Ready,
    Tokenize,
    body_length,
    frame,
    read_orders,
)

_log = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between signs of life."""


class _Loop(Protocol):
    """What Engine and Embedder have in common."""

    @property
    def rows(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def cancel(self, number: int) -> None: ...
    def credit(self, number: int, tokens: int) -> None: ...
    def step(self) -> bool: ...


class Link:
    """The socket to the gateway: orders come in by a thread of their own, news are gathered."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._inbox: queue.SimpleQueue[list[Order]] = queue.SimpleQueue()
        self._outbox: list[News] = []
        threading.Thread(target=self._listen, daemon=True, name="orders").start()

    def tell(self, news: News) -> None:
        """To be sent with the next ``flush``."""
        self._outbox.append(news)

    def flush(self) -> None:
        """Send what was told, in one frame. The gateway gone is the end of this process."""
        if not self._outbox:
            return
        data = frame(self._outbox)
        self._outbox = []
        try:
            self._socket.sendall(data)
        except OSError:
            os._exit(0)

    def orders(self, wait: float) -> list[Order]:
        """What has come in; waits so long for the first."""
        found: list[Order] = []
        try:
            found.extend(self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait())
            while True:
                found.extend(self._inbox.get_nowait())
        except queue.Empty:
            return found

    def _listen(self) -> None:
        try:
            while True:
                length = body_length(self._exactly(4))
                self._inbox.put(read_orders(self._exactly(length)))
        except (OSError, EOFError):
            pass
        except (ValueError, msgspec.MsgspecError):
            _log.exception("the gateway sent what can't be read")
        # Even in the middle of a step: nobody is left to read its outcome.
        os._exit(0)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def serve(link: Link, loop: Any) -> None:
    """Step for ever. ``loop`` is an Engine or an Embedder."""
    busy, told = False, time.monotonic()
    while True:
        for order in link.orders(0.0 if busy else HEARTBEAT):
            _obey(link, loop, order)
        busy = loop.step()
        now = time.monotonic()
        if now - told >= HEARTBEAT:
            told = now
            link.tell(Heartbeat(loop.rows, loop.waiting))
        link.flush()


def _obey(link: Link, loop: _Loop, order: Order) -> None:
    match order:
        case Cancel(job):
            loop.cancel(job)
        case Credit(job, tokens):
            loop.credit(job, tokens)
        case Generate() | Embed() | Tokenize():
            _submit(link, loop, order)


def _submit(link: Link, loop: Any, order: Generate | Embed | Tokenize) -> None:
    from backends.torch.embed import Embedder  # noqa: PLC0415 - see _open

    try:
        if isinstance(order, Tokenize):
            loop.tokenize(order)
        elif isinstance(loop, Embedder) != isinstance(order, Embed):
            does = "gives vectors" if isinstance(loop, Embedder) else "makes text"
            link.tell(Failed(order.job, "unsupported", f"this model {does} only", "model"))
        else:
            loop.submit(order)
    except Exception as error:  # noqa: BLE001 - one request must not take the others with it
        _log.exception("a request could not be taken")
        link.tell(Failed(order.job, "failed", f"the local model failed: {type(error).__name__}"))


def _open(settings: Settings, link: Link) -> Any:
    """The model, loaded; tells Ready. Imports torch, which takes seconds, now that we listen."""
    import torch  # noqa: PLC0415

    from backends.torch.assembly import load_model  # noqa: PLC0415
    from backends.torch.embed import Embedder, load_encoder  # noqa: PLC0415
    from backends.torch.engine import Engine, Limits  # noqa: PLC0415
    from backends.torch.models import find  # noqa: PLC0415

    if settings.threads:
        torch.set_num_threads(settings.threads)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))

    def report(text: str) -> None:
        link.tell(Progress(text))
        link.flush()

    found = find(settings.path, report)
    report(f"loading {settings.path}")
    parts = (found, settings.device, settings.dtype, settings.context)
    if found.task == "embed":
        encoder = load_encoder(*parts)
        device, dimensions = str(encoder.model.device), encoder.dimensions
        link.tell(Ready("embed", PROTOCOL, encoder.length, device, dimensions))
        return Embedder(encoder, settings.queue, link.tell, time.monotonic)
    model = load_model(*parts)
    link.tell(Ready("generate", PROTOCOL, model.forward.context, str(model.forward.device)))
    limits = Limits(settings.max_concurrency, settings.queue)
    return Engine(model, limits, link.tell, time.monotonic)


def main(arguments: list[str]) -> None:
    """``worker FD SETTINGS``, with the settings as JSON."""
    # The gateway decides when this process ends: a signal to the whole group is meant for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    link = Link(socket.socket(fileno=int(arguments[0])))
    settings = msgspec.json.decode(arguments[1], type=Settings)
    from backends.torch.models import ModelError  # noqa: PLC0415 - imports torch

    try:
        loop = _open(settings, link)
    except ModelError as error:
        link.tell(Broken(str(error)))
        link.flush()
        return
    link.flush()
    serve(link, loop)


if __name__ == "__main__":
    main(sys.argv[1:])
