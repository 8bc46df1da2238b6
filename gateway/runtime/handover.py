"""Zero-downtime upgrade: a running gateway passes its listening sockets to a new process.

    interlingua serve --handover /run/interlingua/handover gateway.yaml

The running gateway listens on that Unix socket, which only its user can access. A new process that
connects gets the listening sockets (SCM_RIGHTS) and a JSON line that maps them to listeners. When
it serves, it sends one byte; then the old process stops accepting connections and drains. A new
process that ends before that byte changes nothing.

Meanwhile both processes share the sockets, so pending connections are accepted by one of them.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from msgspec import Struct

from gateway.config.listeners import ListenerId
from protocols.core.json_text import decode_json

_MAX_FDS: Final = 253
"""Maximum descriptors per message (SCM_MAX_FD)."""
_MAX_MESSAGE_SIZE: Final = 1 << 16
_HANDOVER_TIMEOUT: Final = 10.0
"""Seconds to receive the sockets."""
_SERVING_BYTE: Final = b"+"

ListenerFds = Mapping[ListenerId, Sequence[int]]
"""File descriptors by listener."""


class _ListenerSockets(Struct, frozen=True, array_like=True):
    """A listener and the number of its descriptors."""

    address: str
    number: int
    count: int


class InheritedSockets:
    """Sockets received from the gateway at ``path``; none if there is none, or without a path.

    A context manager that closes unused sockets. Raises OSError if the gateway sends nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._connection: socket.socket | None = None
        self._sockets: dict[ListenerId, list[socket.socket]] = {}
        if path is None:
            return
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_HANDOVER_TIMEOUT)
            connection.connect(path)
            self._sockets = _receive_sockets(connection)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            self._connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for listener_sockets in self._sockets.values():
            for one in listener_sockets:
                one.close()
        if self._connection is not None:
            self._connection.close()

    @property
    def has_sockets(self) -> bool:
        """Whether another process serves on sockets that this one may take."""
        return bool(self._sockets)

    def take_sockets(self, listener_id: ListenerId) -> Sequence[socket.socket]:
        """Hand over the sockets of a listener to the caller; empty if it has none."""
        return self._sockets.pop(listener_id, ())

    def confirm_serving(self) -> None:
        """Tell the old process that this one serves."""
        if self._connection is not None:
            with suppress(OSError):  # it has ended already
                self._connection.sendall(_SERVING_BYTE)


def _receive_sockets(connection: socket.socket) -> dict[ListenerId, list[socket.socket]]:
    data, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_SIZE, _MAX_FDS)
    sockets = [socket.socket(fileno=sock) for sock in descriptors]
    while data and not data.endswith(b"\n"):
        more = connection.recv(_MAX_MESSAGE_SIZE)
        data = data + more if more else b""
    if not data:
        for sock in sockets:
            sock.close()
        raise ConnectionAbortedError("the gateway that runs there gives nothing")
    listener_ids = {}
    for ids in decode_json(data, kind=list[_ListenerSockets]):
        listener_ids[ids.address, ids.number] = sockets[: ids.count]
        del sockets[: ids.count]
    return listener_ids


class SocketHandover:
    """Listens at ``path`` and sends the sockets of ``list_fds`` to a new process."""

    def __init__(self, path: str, list_fds: Callable[[], ListenerFds]) -> None:
        self._path = Path(path)
        self._list_fds = list_fds
        self._listener: socket.socket | None = None
        self._inode = 0

    def listen(self) -> None:
        """Listen at the path, replacing a socket that is there. Raises OSError with the path.

        A file that is no socket is never replaced: the path is mistaken.
        """
        temporary = self._path.with_name(f"{self._path.name}.new")
        for path in (self._path, temporary):
            if path.exists() and not path.is_socket():
                raise OSError(errno.EEXIST, "a file that is not a socket has this name", str(path))
        temporary.unlink(missing_ok=True)
        server = self._listener = socket.socket(socket.AF_UNIX)
        server.setblocking(False)  # noqa: FBT003 - the standard library's
        try:
            server.bind(str(temporary))
        except OSError as error:  # the system's names no path
            raise OSError(error.errno or 0, str(error.strerror or error), str(self._path)) from None
        temporary.chmod(0o600)
        server.listen(1)
        self._inode = temporary.stat().st_ino
        temporary.rename(self._path)

    async def wait_for_successor(self) -> None:
        """Wait until a new process serves; failed ones are ignored."""
        assert self._listener is not None  # noqa: S101 - it listens
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            with connection, suppress(OSError):
                self._send_sockets(connection)
                if await loop.sock_recv(connection, 1) == _SERVING_BYTE:
                    return

    def close(self) -> None:
        """Stop listening and remove the socket, unless a new process has replaced it."""
        if self._listener is not None:
            self._listener.close()
            with suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()

    def _send_sockets(self, connection: socket.socket) -> None:
        sockets = self._list_fds()
        listener_sockets = [
            _ListenerSockets(*listener_id, len(several)) for listener_id, several in sockets.items()
        ]
        descriptors = [one for several in sockets.values() for one in several]
        socket.send_fds(connection, [msgspec.json.encode(listener_sockets) + b"\n"], descriptors)
