"""A connection to a worker: its name, its socket, its certificate, all within one time."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Final

from aiohappyeyeballs import AddrInfoType, start_connection

from backends.http.connection import HttpConnection
from backends.http.origin import WorkerOrigin
from protocols.core.errors import WorkerUnreachable

_TCP_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, then between questions, and how many: a line that broke is found out in 30 s.

The system would wait two hours, and before a whole answer nothing else notices.
"""
_HAPPY_EYEBALLS_DELAY: Final = 0.25
"""Seconds that one of a name's addresses has before the next is tried beside it (RFC 8305)."""


async def connect(
    target: WorkerOrigin,
    tls: ssl.SSLContext | None,
    seconds: float,
    make: Callable[[], HttpConnection],
) -> HttpConnection:
    """A new connection. Raises WorkerUnreachable."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            return await _connect_any(_filter_addresses(found), target, tls, make)
    except (OSError, UnicodeError) as error:  # a time that is over is an OSError, too
        raise WorkerUnreachable("the worker can't be reached") from error


async def _connect_any(
    addresses: Sequence[AddrInfoType],
    target: WorkerOrigin,
    tls: ssl.SSLContext | None,
    make: Callable[[], HttpConnection],
) -> HttpConnection:
    """A connection to the first of these that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    name = target.host if tls is not None else None
    if len(addresses) == 1:
        # The loop's own way has one turn of it less, and no socket of Python's.
        host, port = addresses[0][4][:2]
        transport, connection = await loop.create_connection(
            make, str(host), int(port), ssl=tls, server_hostname=name
        )
    else:
        made = await start_connection(
            addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY, loop=loop
        )
        try:
            transport, connection = await loop.create_connection(
                make, sock=made, ssl=tls, server_hostname=name
            )
        except BaseException:
            made.close()
            raise
    line = transport.get_extra_info("socket")
    if line is not None:
        _enable_keepalive(line)
    return connection


def _filter_addresses(found: Sequence[AddrInfoType]) -> Sequence[AddrInfoType]:
    """Those that a worker may have. Raises OSError where there is none.

    None is on the link, where clouds tell machines their secrets, whatever a name leads to today.
    """
    left = [one for one in found if not _is_link_local(str(one[4][0]))]
    if not left:
        raise OSError(
            "it leads to an address that is no worker's (link-local, multicast or unspecified)"
        )
    return left


def _is_link_local(address: str) -> bool:
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    return found.is_link_local or found.is_multicast or found.is_unspecified


def _enable_keepalive(line: socket.socket) -> None:
    """Have a connection end where its line breaks."""
    with suppress(OSError):  # it has ended already
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not on every system
                line.setsockopt(socket.IPPROTO_TCP, option, value)
