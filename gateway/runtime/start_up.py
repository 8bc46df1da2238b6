"""What must be ready before requests arrive: backends, and the certificates of listeners."""

import asyncio
import logging
import ssl
from collections.abc import Mapping

from backends.interfaces import Backend, SupportsWarmup
from gateway.config import listeners, schema
from protocols.core.errors import WorkerError

log = logging.getLogger("interlingua")

TlsContexts = Mapping[listeners.ListenerId, ssl.SSLContext | None]
"""The TLS context of each listener; None without TLS."""


async def warm_backend(name: str, backend: Backend, warmup_timeout: float) -> str:
    """Start a backend and warm it up for at most ``warmup_timeout`` seconds.

    Returns the error, or "".
    """
    try:
        await backend.start()
        async with asyncio.timeout(warmup_timeout):
            if isinstance(backend, SupportsWarmup):
                await backend.warm_up()
    except TimeoutError:
        log.warning("%s is not ready after %g s and is used as it is", name, warmup_timeout)
    except WorkerError as error:
        return error.message
    return ""


def build_tls_contexts(config: schema.Config) -> TlsContexts:
    """Load the certificates of all listeners. Raises OSError."""
    return {
        listener_id: server_tls_context(listener.tls) if listener.tls else None
        for listener_id, listener in listeners.listeners_by_id(config).items()
    }


def server_tls_context(tls: schema.TlsConfig) -> ssl.SSLContext:
    """Create a TLS context. Raises OSError for unusable certificate or key files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        tls.cert, tls.key, password=str
    )  # otherwise OpenSSL asks for a password on the terminal
    context.set_alpn_protocols(["http/1.1"])
    return context
