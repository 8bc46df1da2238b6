"""Listening sockets, and the TLS handshakes of their connections."""

import asyncio
import asyncio.sslproto
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from gateway.http_server.overload import (
    ConnectionTracker,
    TrackedConnection,
    TrustedProxies,
    get_peer_address,
)
from gateway.http_server.proxy_protocol import ProxyHeaderReader
from gateway.memory import MemoryBudget

_MAX_UNSENT: Final = 128 << 10
"""Bytes that the system holds unsent for one client, which is less than its send buffer takes."""
_BACKLOG: Final = 1024
"""Connections that the system holds until they are accepted."""
_MAX_ACCEPTS: Final = 16
"""Connections that asyncio accepts in a turn of the event loop; it takes the backlog for it."""
_PENDING_ACCEPT_TURNS: Final = 2
"""Iterations of the loop until accepted connections have their protocol."""
_TLS_BUFFER: Final = 32 << 10
"""Bytes that a connection's TLS decrypts at once; asyncio's 256 KiB are kept for each of them."""
TLS_SIZE: Final = 80 << 10
"""Bytes of memory that the TLS of a connection takes, as measured."""
ProtocolFactory = Callable[[], asyncio.Protocol]


class _SharedSocket(socket.socket):
    """A socket that the process which hands it over still serves: its backlog is not lowered."""

    def listen(self, backlog: int = 0, /) -> None:
        super().listen(max(backlog, _BACKLOG))


class ListenSockets:
    """The listening sockets of one address; ``protocol_factory`` handles their connections.

    ``tracker`` counts them: with TLS, this class reports a connection to it during the handshake.
    After that, its protocol does.
    """

    def __init__(
        self,
        protocol_factory: ProtocolFactory,
        tracker: ConnectionTracker,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._protocol_factory = protocol_factory
        self._tracker = tracker
        self._memory = memory or MemoryBudget()
        self._servers: list[asyncio.Server] = []
        self._tls: ssl.SSLContext | None = None
        self._closing_task: asyncio.Task[None] | None = None
        self._requires_proxy_header = False

    def set_proxies(self, trusted: TrustedProxies, *, requires_header: bool) -> None:
        """Set the proxies of new connections, and whether these begin with a PROXY header."""
        self._tracker.trusted = trusted
        self._requires_proxy_header = requires_header

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """Set the certificate of new connections; None without TLS."""
        self._tls = tls
        if tls is not None:
            asyncio.sslproto.SSLProtocol.max_size = _TLS_BUFFER

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        sockets: Sequence[socket.socket] = (),
    ) -> int:
        """Bind; returns the port, which the system chooses for 0. Raises OSError.

        With ``reuse_port``, other processes may bind it too. With ``sockets``, nothing is bound:
        these are used.
        """
        self.set_tls_context(tls)
        loop = asyncio.get_running_loop()
        self._on_listen(loop)
        takes_accepts = isinstance(loop, asyncio.SelectorEventLoop)
        backlog = _MAX_ACCEPTS if takes_accepts else _BACKLOG
        for bound_socket in sockets:
            shared_socket = _SharedSocket(fileno=bound_socket.detach())
            self._servers.append(
                await loop.create_server(self._build_protocol, sock=shared_socket, backlog=backlog)
            )
        if not sockets:
            server = await loop.create_server(
                self._build_protocol,
                host or None,
                port,
                backlog=_MAX_ACCEPTS,
                reuse_port=reuse_port,
            )
            self._servers.append(server)
        for server in self._servers:
            for item in server.sockets:
                with item.dup() as same:
                    same.listen(_BACKLOG)
                if item.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT)
        bound_port: int = self._servers[0].sockets[0].getsockname()[1]
        return bound_port

    @property
    def socket_fds(self) -> Sequence[int]:
        """The file descriptors of the sockets."""
        return [item.fileno() for server in self._servers for item in server.sockets]

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._tracker.connections)

    @property
    def refused_by_reason(self) -> Mapping[str, int]:
        """Connections that were closed at a limit."""
        return self._tracker.refused_by_reason

    def stop_accepting(self) -> None:
        """Accept no more connections; those accepted already are served."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, asyncio.SelectorEventLoop):
            self._close_servers()
        elif self._closing_task is None:
            # Before Python 3.12, closing leaks connections that are being accepted.
            for descriptor in self.socket_fds:
                loop.remove_reader(descriptor)
            self._closing_task = loop.create_task(self._close_later())

    async def close_sockets(self) -> None:
        """Close the sockets and wait until they are closed."""
        self.stop_accepting()
        if self._closing_task is not None:
            await asyncio.shield(self._closing_task)

    def _on_listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called before the first connection is accepted."""

    def _build_protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        if self._requires_proxy_header:
            return ProxyHeaderReader(self._build_http_protocol, self._tracker)
        return self._build_http_protocol()

    def _build_http_protocol(self) -> asyncio.Protocol:
        """The protocol of a connection after its PROXY header, if there is one."""
        if self._tls is None:
            return self._protocol_factory()
        return _TlsHandshake(self._protocol_factory, self._tracker, self._tls, self._memory)

    async def _close_later(self) -> None:
        for _ in range(_PENDING_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._close_servers()

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()


class _TlsHandshake(asyncio.Protocol):
    """A connection from its accept to the end of its TLS handshake."""

    def __init__(
        self,
        protocol_factory: ProtocolFactory,
        tracker: ConnectionTracker,
        tls: ssl.SSLContext,
        memory: MemoryBudget,
    ) -> None:
        self._protocol_factory = protocol_factory
        self._tracker = tracker
        self._tls = tls
        self._memory = memory
        self._held_bytes = 0
        """Taken of the memory budget."""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early_data = b""
        """What came before the next protocol was there to receive it."""
        self.peer = ""
        """The client's address."""

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        self._release_memory()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self.peer = self.peer or get_peer_address(transport)
        self._held_bytes = TLS_SIZE
        self._memory.record_held("connections", TLS_SIZE)
        if self._tracker.admit(self):
            coroutine = self._shake_hands(self._transport)
            self._task = asyncio.get_running_loop().create_task(coroutine)
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol; during the handshake, only ``_shake_hands`` learns of it."""
        del exc
        self._end()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._early_data += data

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        """Do the handshake, then hand the connection to its protocol."""
        loop, time_limit = asyncio.get_running_loop(), self._tracker.limits.tls_handshake_timeout
        started = loop.time()
        loop.call_soon(self._pass_early_data, transport)
        try:
            encrypted = await loop.start_tls(
                transport, self, self._tls, server_side=True, ssl_handshake_timeout=time_limit
            )
        except OSError:
            if loop.time() - started >= time_limit:
                self._tracker.count_refused("tls_handshake")
            encrypted = None
        finally:
            is_open = self._end()
        if encrypted is None or not is_open or transport.is_closing():
            transport.abort()
            return
        protocol = self._protocol_factory()
        cast("TrackedConnection", protocol).peer = self.peer
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._early_data:
            protocol.data_received(self._early_data)

    def _pass_early_data(self, transport: asyncio.Transport) -> None:
        """Give what came before ``start_tls`` to the TLS protocol, before it begins."""
        size = len(self._early_data)
        if size and not transport.is_closing():
            tls_protocol = cast("asyncio.BufferedProtocol", transport.get_protocol())
            cast("memoryview", tls_protocol.get_buffer(size))[:size] = self._early_data
            tls_protocol.buffer_updated(size)
            self._early_data = b""

    def _end(self) -> bool:
        """Release the connection; returns whether it was still counted."""
        if self._transport is None:
            return False
        self._transport = self._task = None
        self._tracker.release(self)
        self._release_memory()
        return True

    def _release_memory(self) -> None:
        held, self._held_bytes = self._held_bytes, 0
        self._memory.record_held("connections", -held)
