"""TCP ports for servers that must be told a port before they start."""

import socket


def reserve_port() -> int:
    """Return a TCP port of 127.0.0.1 that the kernel assigns to no other socket (bind to port 0).

    A bound socket that does not listen holds the port until this process ends. A server that sets
    SO_REUSEADDR or SO_REUSEPORT can listen on it; no other process gets it before the server
    starts, nor while it is stopped.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    holder.detach()
    return port
