"""Asks nameservers, each in its turn: in a datagram, and over TCP where the answer is too long."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from backends.pool import dns
from backends.pool.discovery.source import DiscoveryError

ServerAddress = tuple[str, int]

_DNS_PORT: Final = 53
_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_MAX_SERVERS: Final = 3
"""As many of the system's as other resolvers heed."""
_ROUNDS: Final = 2
_NXDOMAIN: Final = 3
_EDNS_ERROR_CODES: Final = (1, 4)


def parse_server_address(text: str) -> ServerAddress:
    """A nameserver's address: an IP, and a port if it is not 53. Raises ValueError."""
    bare = text.count(":") > 1 and not text.startswith("[")
    try:
        parts = urlsplit(f"//[{text}]" if bare else f"//{text}")
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
    """Those to ask: the one that is given, or the system's. Each has ``patience`` seconds."""

    def __init__(
        self, given: str | None = None, *, patience: float = 1.0, system: Path = _RESOLV_CONF
    ) -> None:
        self._configured_server = parse_server_address(given) if given is not None else None
        self._timeout = patience
        self._resolv_conf = system

    async def query(self, name: str, kind: dns.RecordType) -> dns.DnsAnswer:
        """The first answer that settles it, be it that there is none. Raises DiscoveryFailed."""
        why = "there is no nameserver to ask"
        for server in list(self._list_servers()) * _ROUNDS:
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await _query_server(server, name, kind)
            except TimeoutError:
                why = f"the nameserver {server[0]} does not answer"
            except dns.DnsError as error:
                why = f"the nameserver {server[0]} sent something else than an answer: {error}"
            except (OSError, EOFError) as error:
                why = f"the nameserver {server[0]} can't be asked: {error}"
            else:
                if answer.code in (0, _NXDOMAIN):
                    return answer
                why = f"the nameserver {server[0]} does not tell: {answer.error_text}"
        raise DiscoveryError(f"{kind} of {name}: {why}")

    def _list_servers(self) -> Sequence[ServerAddress]:
        if self._configured_server is not None:
            return [self._configured_server]
        try:
            lines = self._resolv_conf.read_text("utf-8", "replace").splitlines()
        except OSError:
            return []
        found: list[ServerAddress] = []
        for words in map(str.split, lines):
            if len(words) > 1 and words[0] == "nameserver":
                with suppress(ValueError):
                    found.append(parse_server_address(words[1]))
        return found[:_MAX_SERVERS]


async def _query_server(server: ServerAddress, name: str, kind: dns.RecordType) -> dns.DnsAnswer:
    answer = await _query_udp(server, name, kind, extended=True)
    if answer.code in _EDNS_ERROR_CODES:
        answer = await _query_udp(server, name, kind, extended=False)
    return await _query_tcp(server, name, kind) if answer.truncated else answer


async def _query_udp(
    server: ServerAddress, name: str, kind: dns.RecordType, *, extended: bool
) -> dns.DnsAnswer:
    number = secrets.randbelow(1 << 16)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[dns.DnsAnswer] = loop.create_future()

    # Connected, so that the system drops what other addresses send.
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _UdpQuery(answer, number, name, kind), remote_addr=server
    )
    try:
        transport.sendto(dns.encode_query(number, name, kind, extended=extended))
        return await answer
    finally:
        transport.abort()


class _UdpQuery(asyncio.DatagramProtocol):
    """Waits for the answer, whatever else comes."""

    def __init__(
        self, answer: asyncio.Future[dns.DnsAnswer], number: int, name: str, kind: dns.RecordType
    ) -> None:
        self._answer = answer
        self._question = number, name, kind

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr  # the socket is connected
        if self._answer.done():
            return
        with suppress(dns.MismatchedResponse):
            try:
                self._answer.set_result(dns.decode_answer(data, *self._question))
            except dns.MalformedMessage as error:
                self._answer.set_exception(error)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


async def _query_tcp(server: ServerAddress, name: str, kind: dns.RecordType) -> dns.DnsAnswer:
    number = secrets.randbelow(1 << 16)
    question = dns.encode_query(number, name, kind)
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(len(question).to_bytes(2) + question)
        size = int.from_bytes(await reader.readexactly(2))
        answer = dns.decode_answer(await reader.readexactly(size), number, name, kind)
    finally:
        writer.transport.abort()
    if answer.truncated:
        raise dns.MalformedMessage("it is cut off even over TCP")
    return answer
