"""TLS with a certificate that may be another for each new connection."""

import ssl
from collections.abc import Callable
from typing import Any


def outer(trusted: Callable[[], ssl.SSLContext | None]) -> ssl.SSLContext:
    """What a connection is met with at first: it has no certificate but that of ``trusted``."""

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = trusted()

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.sni_callback = choose
    return made
