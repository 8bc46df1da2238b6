"""The ports that all processes bind, and that nobody else can take meanwhile."""

import socket

from gateway.config import listeners
from gateway.processes.shares import ListenerPorts


class PortReservations:
    """Holds each listener's port with a socket of its own, that never listens."""

    def __init__(self) -> None:
        self._sockets: dict[listeners.ListenerId, socket.socket] = {}

    @property
    def ports(self) -> ListenerPorts:
        """Those that are held."""
        return {listener_id: one.getsockname()[1] for listener_id, one in self._sockets.items()}

    def reserve(self, listener_id: listeners.ListenerId) -> None:
        """Hold this listener's port too, of which 0 is any that is free. Raises OSError."""
        host, _, port = listener_id[0].rpartition(":")
        self._sockets[listener_id] = _reserve_port(host.strip("[]"), int(port))

    def release_others(self, listener_ids: frozenset[listeners.ListenerId]) -> None:
        """Hold only these."""
        for listener_id in self._sockets.keys() - listener_ids:
            self._sockets.pop(listener_id).close()


def _reserve_port(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError, also where another gateway's processes share the port."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, address = socket.AddressFamily(found[0][0]), found[0][4]
    with _create_socket(family) as alone:
        alone.bind(address)
        address = alone.getsockname()
    held = _create_socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(address)
    return held


def _create_socket(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made
