"""A new gateway takes the place of one that runs, and no connection is lost.

    interlingua serve --handover /run/interlingua/handover gateway.yaml

The one that runs listens at that path, a Unix socket which is its user's alone. Who connects there
is given its listening sockets (SCM_RIGHTS), with a line of JSON that says whose they are, and says
with one byte that it serves. Then the old one takes no more connections, and drains. An heir that
ends before that byte has changed nothing.

For a while both have the same sockets: what neither has taken yet waits in a queue of both.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from msgspec import Struct

from gateway.config.listeners import ListenerId

_MAX_FDS: Final = 253
"""Descriptors that the system sends at a time."""
_MAX_MESSAGE_SIZE: Final = 1 << 16
_HANDOVER_TIMEOUT: Final = 10.0
"""Seconds in which the old one must give what it has."""
_SERVING_BYTE: Final = b"+"

ListenerFds = Mapping[ListenerId, Sequence[int]]
"""The descriptors that each listener has."""


class _ListenerSockets(Struct, frozen=True, array_like=True):
    """A listener, and how many of the descriptors are its own."""

    address: str
    number: int
    count: int


class InheritedSockets:
    """What the gateway at ``path`` gives; nothing where none runs there, or without a path.

    Used by ``with``: what nobody took at the end is closed. Raises OSError for one that gives
    nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._connection: socket.socket | None = None
        self._sockets: dict[ListenerId, list[socket.socket]] = {}
        if path is None:
            return
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(_HANDOVER_TIMEOUT)
            line.connect(path)
            self._sockets = _receive_sockets(line)
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
        except BaseException:
            line.close()
            raise
        else:
            self._connection = line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for several in self._sockets.values():
            for one in several:
                one.close()
        if self._connection is not None:
            self._connection.close()

    def take_sockets(self, listener_id: ListenerId) -> Sequence[socket.socket]:
        """The listener's sockets, which are the taker's from now on; none where it had none."""
        return self._sockets.pop(listener_id, ())

    def confirm_serving(self) -> None:
        """Tell the old one that it may go."""
        if self._connection is not None:
            with suppress(OSError):  # it is gone already
                self._connection.sendall(_SERVING_BYTE)


def _receive_sockets(line: socket.socket) -> dict[ListenerId, list[socket.socket]]:
    data, descriptors, _, _ = socket.recv_fds(line, _MAX_MESSAGE_SIZE, _MAX_FDS)
    made = [socket.socket(fileno=one) for one in descriptors]
    while data and not data.endswith(b"\n"):
        more = line.recv(_MAX_MESSAGE_SIZE)
        data = data + more if more else b""
    if not data:
        for one in made:
            one.close()
        raise ConnectionAbortedError("the gateway that runs there gives nothing")
    found = {}
    for held in msgspec.json.decode(data, type=list[_ListenerSockets]):
        found[held.address, held.number] = made[: held.count]
        del made[: held.count]
    return found


class SocketHandover:
    """What gives the sockets that ``sockets`` tells of to the gateway that asks at ``path``."""

    def __init__(self, path: str, sockets: Callable[[], ListenerFds]) -> None:
        self._path = Path(path)
        self._list_fds = sockets
        self._listener: socket.socket | None = None
        self._inode = 0

    def listen(self) -> None:
        """Listen there from now on, in the place of who did before. Raises OSError."""
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.unlink(missing_ok=True)
        made = self._listener = socket.socket(socket.AF_UNIX)
        made.setblocking(False)  # noqa: FBT003 - the standard library's
        made.bind(str(beside))
        beside.chmod(0o600)
        made.listen(1)
        self._inode = beside.stat().st_ino
        beside.rename(self._path)

    async def wait_for_successor(self) -> None:
        """Wait until another serves in this one's place; one that fails is forgotten."""
        assert self._listener is not None  # noqa: S101 - it listens
        loop = asyncio.get_running_loop()
        while True:
            line, _ = await loop.sock_accept(self._listener)
            with line, suppress(OSError):
                self._send_sockets(line)
                if await loop.sock_recv(line, 1) == _SERVING_BYTE:
                    return

    def close(self) -> None:
        """Nobody can ask any more, unless another listens there already."""
        if self._listener is not None:
            self._listener.close()
            with suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()

    def _send_sockets(self, line: socket.socket) -> None:
        sockets = self._list_fds()
        seated = [
            _ListenerSockets(*listener_id, len(several)) for listener_id, several in sockets.items()
        ]
        descriptors = [one for several in sockets.values() for one in several]
        socket.send_fds(line, [msgspec.json.encode(seated) + b"\n"], descriptors)
