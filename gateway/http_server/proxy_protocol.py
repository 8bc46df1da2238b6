"""The PROXY protocol, version 2: a proxy tells the client's address before anything else.

https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt
"""

import asyncio
import ipaddress
import struct
from collections.abc import Callable
from typing import Final, cast

from gateway.http_server.overload import ConnectionTracker, TrackedConnection, get_peer_address

_SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
_HEAD: Final = struct.Struct("!12sBBH")
_MAX_LENGTH: Final = 4096
"""Bytes of addresses and of the fields after them, which are not read."""
_LOCAL: Final = 0x20
_PROXY: Final = 0x21
_UNSPECIFIED: Final = 0x00
_ADDRESS_SIZES: Final = {0x11: 4, 0x21: 16}
"""Bytes of an address, by family and transport: TCP over IPv4 and IPv6."""


class ProxyHeaderError(Exception):
    """The bytes are not a valid header."""


def parse_header(data: bytes) -> tuple[str | None, int] | None:
    """The client's address and the size of the header; None if it is incomplete.

    The address is None if the connection is the proxy's own, such as of a health check. Raises
    ProxyHeaderError.
    """
    if not _SIGNATURE.startswith(data[: len(_SIGNATURE)]):
        raise ProxyHeaderError("the connection does not start with a PROXY protocol v2 header")
    if len(data) < _HEAD.size:
        return None
    _, command, family, length = _HEAD.unpack_from(data)
    if command not in {_LOCAL, _PROXY}:
        raise ProxyHeaderError(f"version and command {command:#04x} instead of 0x20 or 0x21")
    if length > _MAX_LENGTH:
        raise ProxyHeaderError(f"a header of {length} bytes; at most {_MAX_LENGTH} are accepted")
    size = _HEAD.size + length
    if len(data) < size:
        return None
    if command == _LOCAL or family == _UNSPECIFIED:
        return None, size
    address_size = _ADDRESS_SIZES.get(family)
    if address_size is None:
        raise ProxyHeaderError(f"address family {family:#04x}; TCP over IPv4 or IPv6 is accepted")
    if length < 2 * address_size + 4:  # two addresses and two ports
        raise ProxyHeaderError(f"{length} bytes do not have the addresses")
    address = ipaddress.ip_address(data[_HEAD.size : _HEAD.size + address_size])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), size


class ProxyHeaderReader(asyncio.Protocol):
    """A connection until its header has arrived; then ``build_next`` makes its protocol."""

    def __init__(
        self, build_next: Callable[[], asyncio.Protocol], tracker: ConnectionTracker
    ) -> None:
        self._build_next = build_next
        self._tracker = tracker
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._data = b""
        self.peer = ""
        """The proxy's address."""

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self.peer = get_peer_address(transport)
        is_admitted = self._tracker.admit(self)
        if is_admitted and not self._tracker.trusted.has(self.peer):
            self._tracker.count_refused("proxy_untrusted")
            is_admitted = False
        if not is_admitted:
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(
            self._tracker.limits.header_timeout, self.abort
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._end()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._transport is None or self._transport.is_closing():
            return
        self._data += data
        try:
            header = parse_header(self._data)
        except ProxyHeaderError:
            self._tracker.count_refused("proxy_header")
            self._transport.abort()
            return
        if header is None:
            return
        client, size = header
        transport, rest = self._transport, self._data[size:]
        self._end()
        protocol = self._build_next()
        cast("TrackedConnection", protocol).peer = client or self.peer
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if rest and not transport.is_closing():
            protocol.data_received(rest)

    def _end(self) -> None:
        """Stop counting the connection here."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport = None
            self._tracker.release(self)
