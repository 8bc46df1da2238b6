"""What turns sockets into requests and sinks (``gateway.seam``). One line per front."""

import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from gateway.front.limits import ConnectionLimits
from gateway.seam import HttpRequest, ResponseWriter

LISTENER_CLASSES: Final[Mapping[str, str]] = {
    "native": "gateway.front.native:NativeListener",
    "reference": "gateway.front.reference:AiohttpListener",
}
"""By the name that a listener's configuration gives; each is imported where it is used."""

HandleRequest = Callable[[HttpRequest, ResponseWriter], Awaitable[None]]


class Listener(Protocol):
    """One listening address.

    ``serve`` is called for each request, in a task that is cancelled when the client leaves. It may
    be put in another's place at any time: a request that runs keeps the one that it began with.
    """

    handle_request: HandleRequest
    is_draining: bool
    """Whether each answer is the last of its connection."""

    def set_limits(self, limits: ConnectionLimits) -> None:
        """What new connections are held to, and how many there may be."""

    def set_tls_context(self, tls: ssl.SSLContext | None) -> None:
        """With which certificate new connections are met; None where they are plain."""

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
        given: Sequence[socket.socket] = (),
    ) -> int:
        """Bind; gives the port, which the system chooses for 0.

        With ``reuse_port`` other processes may listen there too. Sockets that are ``given`` listen
        already, and nothing is bound.
        """

    @property
    def socket_fds(self) -> Sequence[int]:
        """The descriptors of its listening sockets."""

    @property
    def connections(self) -> int:
        """How many clients have now."""

    @property
    def malformed_by_status(self) -> Mapping[int, int]:
        """How often what came could not be read as a request, by the status that said so."""

    def stop_accepting(self) -> None:
        """Take no more connections. Those that are there go on."""

    async def drain(self, seconds: float) -> None:
        """Leave and shut, end what rests, and wait for what runs, so long at most."""

    async def close(self) -> None:
        """Cut what is left."""
