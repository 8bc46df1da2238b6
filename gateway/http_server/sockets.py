"""The sockets on which somebody listens, and TLS whose certificate may change meanwhile."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

_BACKLOG: Final = 1024
_PENDING_ACCEPT_TURNS: Final = 2
"""Of the loop, until who was let in is met."""


class ListenSockets:
    """Where connections come in; ``make`` makes what meets each of them."""

    def __init__(self, make: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol_factory = make
        self._servers: list[asyncio.Server] = []
        self._tls: ssl.SSLContext | None = None
        self._closing_task: asyncio.Task[None] | None = None

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""
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
        """Bind; gives the port, which the system chooses for 0. Raises OSError.

        With ``reuse_port`` other processes may listen there too. Sockets that are ``given`` listen
        already, and nothing is bound.
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
        """Those of its sockets."""
        return [one.fileno() for server in self._servers for one in server.sockets]

    def stop_accepting(self) -> None:
        """Let no more connections in. Who was let in already is met."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, asyncio.SelectorEventLoop):
            self._close()
        elif self._closing_task is None:
            # Until Python 3.12 it loses whom it lets in as it closes, and does not hang up either.
            for descriptor in self.fds:
                loop.remove_reader(descriptor)
            self._closing_task = loop.create_task(self._close_later())

    async def wait_closed(self) -> None:
        """Shut it, and wait until it is."""
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


def _make_reloadable_context(trusted: Callable[[], ssl.SSLContext | None]) -> ssl.SSLContext:
    """What a connection is met with at first: it has no certificate but that of ``trusted``."""

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = trusted()

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.sni_callback = choose
    return made
