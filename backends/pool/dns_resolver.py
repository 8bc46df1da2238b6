"""DNS queries for A, AAAA and SRV records, by dnspython.

This module loads dnspython, and is itself loaded only if a pool queries a nameserver.

``dns.asyncresolver`` is not used, only messages and sockets of dnspython: the resolver sends no
EDNS by default and does not repeat a query without it, and its unconnected sockets make it wait for
a nameserver whose port is closed.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import dns.asyncbackend
import dns.asyncquery
import dns.exception
import dns.flags
import dns.inet
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from msgspec import Struct

from backends.pool.discovery import DiscoveryError

RecordType = Literal["A", "AAAA", "SRV"]
ServerAddress = tuple[str, int]

_DNS_PORT: Final = 53
_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_MAX_SERVERS: Final = 3
"""The first nameservers of the system are used, as by other resolvers."""
_ROUNDS: Final = 2
_MAX_UDP_PAYLOAD: Final = 1232
"""Bytes of a response that fit into one datagram nearly everywhere."""
_HEADER_SIZE: Final = 12
_NO_EDNS_CODES: Final = (dns.rcode.FORMERR, dns.rcode.NOTIMP)
"""Responses of nameservers that do not know EDNS."""
_ADDRESS_TYPES: Final = (dns.rdatatype.A, dns.rdatatype.AAAA)


class ServiceTarget(Struct, frozen=True):
    """The data of an SRV record. The lowest ``priority`` is used first; no ``host``: no service."""

    priority: int
    weight: int
    port: int
    host: str


class HostAddresses(Struct, frozen=True):
    """Addresses of a host, of one family, that were sent along with SRV records."""

    host: str
    addresses: tuple[str, ...]
    ttl: int


class DnsAnswer(Struct, frozen=True):
    """The addresses of a host or the targets of a service. ``ttl`` is None if there are none."""

    name_exists: bool = True
    addresses: tuple[str, ...] = ()
    targets: tuple[ServiceTarget, ...] = ()
    additional: tuple[HostAddresses, ...] = ()
    ttl: int | None = None


def parse_server_address(text: str) -> ServerAddress:
    """A nameserver's address: an IP address, and a port if it is not 53. Raises ValueError."""
    is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    try:
        parts = urlsplit(f"//[{text}]" if is_bare_ipv6 else f"//{text}")
        host, port = parts.hostname or "", parts.port
        ip_address(host)
        if port == 0 or parts.netloc not in (text, f"[{text}]") or "@" in text:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is not a nameserver; write its IP address, such as 10.0.0.2 or [::1]:5353"
        ) from None
    return host, port or _DNS_PORT


class StubResolver:
    """Queries the ``nameserver``, or else those of the system, in turn and twice.

    Each query has a timeout of ``timeout`` seconds.
    """

    def __init__(
        self,
        nameserver: str | None = None,
        *,
        timeout: float = 1.0,
        resolv_conf: Path = _RESOLV_CONF,
    ) -> None:
        self._configured_server = None if nameserver is None else parse_server_address(nameserver)
        self._timeout = timeout
        self._resolv_conf = resolv_conf

    async def query(self, name: str, record_type: RecordType) -> DnsAnswer:
        """The first answer, also if it has no records. Raises DiscoveryError."""
        reason = "there is no nameserver to query"
        for server in [*self._list_servers()] * _ROUNDS:
            try:
                async with asyncio.timeout(self._timeout):
                    response = await _query_server(server, name, record_type)
                if response.rcode() in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
                    return read_answer(response)
                reason = f"answered {dns.rcode.to_text(response.rcode())}"
            except TimeoutError:
                reason = "does not answer"
            except dns.exception.DNSException as error:
                reason = f"sent a malformed response: {error}"
            except (OSError, EOFError) as error:
                reason = f"cannot be queried: {error}"
            reason = f"the nameserver {server[0]} {reason}"
        raise DiscoveryError(f"{record_type} of {name}: {reason}")

    def _list_servers(self) -> Sequence[ServerAddress]:
        if self._configured_server is not None:
            return [self._configured_server]
        try:
            lines = self._resolv_conf.read_text("utf-8", "replace").splitlines()
        except OSError:
            return []
        servers: list[ServerAddress] = []
        for fields in map(str.split, lines):
            if len(fields) > 1 and fields[0] == "nameserver":
                with suppress(ValueError):
                    servers.append(parse_server_address(fields[1]))
        return servers[:_MAX_SERVERS]


async def _query_server(
    server: ServerAddress, name: str, record_type: RecordType
) -> dns.message.QueryMessage:
    """Query with EDNS; without, if the nameserver does not know it; by TCP, if truncated."""
    query = dns.message.make_query(name, record_type, use_edns=0, payload=_MAX_UDP_PAYLOAD)
    response = await _query_udp(server, query)
    if response.rcode() in _NO_EDNS_CODES:
        query = dns.message.make_query(name, record_type)
        response = await _query_udp(server, query)
    if response.flags & dns.flags.TC:
        host, port = server
        by_tcp = await dns.asyncquery.tcp(query, host, port=port, ignore_trailing=True)
        response = cast("dns.message.QueryMessage", by_tcp)
        if response.flags & dns.flags.TC:
            raise OSError("the response is truncated even over TCP")
    return response


async def _query_udp(
    server: ServerAddress, query: dns.message.QueryMessage
) -> dns.message.QueryMessage:
    family = dns.inet.af_for_address(server[0])
    # Connected, so that the system drops datagrams of other senders and reports a closed port.
    backend: Any = dns.asyncbackend.get_backend("asyncio")
    sock = await backend.make_socket(family, socket.SOCK_DGRAM, destination=server)
    async with sock:
        await sock.sendto(query.to_wire(), None, None)
        while True:
            data, _ = await sock.recvfrom(_MAX_UDP_PAYLOAD, None)
            if (response := decode_datagram(data, query)) is not None:
                return response


def decode_datagram(
    data: bytes, query: dns.message.QueryMessage
) -> dns.message.QueryMessage | None:
    """The response to ``query``; None for any other datagram. Raises DNSException.

    A truncated response has the flag TC, and perhaps some of its records.
    """
    if len(data) < _HEADER_SIZE or data[:2] != query.id.to_bytes(2):
        return None  # not ours, malformed or not
    try:
        response = dns.message.from_wire(data, ignore_trailing=True, raise_on_truncation=True)
    except dns.message.Truncated as error:
        response = error.kwargs["message"]
    return cast("dns.message.QueryMessage", response) if query.is_response(response) else None


def read_answer(response: dns.message.QueryMessage) -> DnsAnswer:
    """The records of the name in the question, or of its canonical name. Raises DNSException."""
    chain = response.resolve_chaining()
    if chain.answer is None:
        return DnsAnswer(name_exists=response.rcode() != dns.rcode.NXDOMAIN)
    if chain.answer.rdtype != dns.rdatatype.SRV:
        return DnsAnswer(addresses=_read_addresses(chain.answer), ttl=chain.minimum_ttl)
    return DnsAnswer(
        targets=tuple(
            ServiceTarget(record.priority, record.weight, record.port, _format_host(record.target))
            for record in chain.answer
        ),
        additional=tuple(
            HostAddresses(_format_host(rrset.name), _read_addresses(rrset), rrset.ttl)
            for rrset in response.additional
            if rrset.rdclass == dns.rdataclass.IN and rrset.rdtype in _ADDRESS_TYPES
        ),
        ttl=chain.minimum_ttl,
    )


def _read_addresses(rrset: dns.rrset.RRset) -> tuple[str, ...]:
    return tuple(record.address for record in rrset)


def _format_host(name: dns.name.Name) -> str:
    """The name in lower case without the dot at its end; "" for the root."""
    return "" if name == dns.name.root else name.to_text(omit_final_dot=True).lower()
