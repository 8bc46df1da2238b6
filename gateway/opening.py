"""What must be there before a request: backends that are ready, listeners that are bound."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from backends.interfaces import Backend, SupportsWarmup
from gateway.config import listeners, schema
from gateway.http_server.listener import Listener
from protocols.core.errors import WorkerError

log = logging.getLogger("interlingua")

TlsContexts = Mapping[listeners.ListenerId, ssl.SSLContext | None]
"""Each listener's certificate; None where connections are plain."""
ADMIN_LISTENER: Final[listeners.ListenerId] = ("admin", 0)
"""The admin listener's, in the place of an address."""


class SocketSource(Protocol):
    """Sockets that listen already."""

    def take_sockets(self, listener_id: listeners.ListenerId) -> Sequence[socket.socket]:
        """The listener's, which are the taker's from now on; none where it has none."""


async def warm_backend(name: str, backend: Backend, within: float) -> str:
    """Start a backend, and let it get ready for so many seconds; why it never will, or ""."""
    try:
        await backend.start()
        async with asyncio.timeout(within):
            if isinstance(backend, SupportsWarmup):
                await backend.warm_up()
    except TimeoutError:
        log.warning("%s is not ready after %g s, and is taken as it is", name, within)
    except WorkerError as error:
        return error.message
    return ""


async def bind_listener(
    front: Listener,
    listener: schema.ListenerConfig,
    tls: ssl.SSLContext | None,
    *,
    reuse_port: bool,
    given: Sequence[socket.socket] = (),
) -> str:
    """Let it listen; gives its URL. Raises OSError."""
    host, _, port = listener.address.rpartition(":")
    bound = await front.listen(host.strip("[]"), int(port), tls, reuse_port=reuse_port, given=given)
    return f"{'https' if tls else 'http'}://{host}:{bound}"


def build_tls_contexts(config: schema.Config) -> TlsContexts:
    """Every listener's certificate, as it is in its file now."""
    return {
        listener_id: server_tls_context(listener.tls) if listener.tls else None
        for listener_id, listener in listeners.listeners_by_id(config).items()
    }


def server_tls_context(tls: schema.TlsConfig) -> ssl.SSLContext:
    """TLS with this certificate chain and key. Raises OSError for files that can't be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key, password=str)  # or it would ask at the terminal
    return context
