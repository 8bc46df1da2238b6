"""Listening sockets, with TLS certificates that can be replaced while they listen."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

_BACKLOG: Final = 1024
_PENDING_ACCEPT_TURNS: Final = 2
"""Iterations of the loop until accepted connections have their protocol."""


class ListenSockets:
    """The listening sockets of one address; ``protocol_factory`` handles their connections."""

    def __init__(self, protocol_factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol_factory = protocol_factory
        self._servers: list[asyncio.Server] = []
        self._tls: ssl.SSLContext | None = None
        self._closing_task: asyncio.Task[None] | None = None

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """Set the certificate of new connections; None without TLS."""
        self._tls = tls

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """Bind; returns the port, which the system chooses for 0. Raises OSError.

        With ``reuse_port``, other processes may bind it too. If sockets are ``given``, they are
        used and nothing is bound.
        """
        self.set_tls_context(tls)
        loop = asyncio.get_running_loop()
        context = None if tls is None else _make_reloadable_context(lambda: self._tls)
        for one in given:
            self._servers.append(
                await loop.create_server(
                    self._protocol_factory, sock=one, ssl=context, backlog=_BACKLOG
                )
            )
        if not given:
            bound = await loop.create_server(
                self._protocol_factory,
                host or None,
                port,
                ssl=context,
                backlog=_BACKLOG,
                reuse_port=reuse_port,
            )
            self._servers.append(bound)
        at: int = self._servers[0].sockets[0].getsockname()[1]
        return at

    @property
    def fds(self) -> Sequence[int]:
        """The file descriptors of the sockets."""
        return [one.fileno() for server in self._servers for one in server.sockets]

    def stop_accepting(self) -> None:
        """Accept no more connections; those accepted already are served."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, asyncio.SelectorEventLoop):
            self._close()
        elif self._closing_task is None:
            # Before Python 3.12, closing leaks connections that are being accepted.
            for descriptor in self.fds:
                loop.remove_reader(descriptor)
            self._closing_task = loop.create_task(self._close_later())

    async def wait_closed(self) -> None:
        """Close the sockets and wait until they are closed."""
        self.stop_accepting()
        if self._closing_task is not None:
            await asyncio.shield(self._closing_task)

    async def _close_later(self) -> None:
        for _ in range(_PENDING_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._close()

    def _close(self) -> None:
        for server in self._servers:
            server.close()


def _make_reloadable_context(get_context: Callable[[], ssl.SSLContext | None]) -> ssl.SSLContext:
    """Make a context that takes the certificate of ``get_context`` for each connection."""

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = get_context()

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.sni_callback = choose
    return made
