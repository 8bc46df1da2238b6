"""Worker discovery by DNS: A and AAAA records of a host, or SRV records of a service."""

import asyncio
import ipaddress
import math
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from backends.aio import BackgroundCall
from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError
from backends.pool.settings import DnsSettings, WorkerTemplate

# DNS messages: a question to bytes, and bytes to what they answer. Pure.
#
# Only what finding workers needs: one question about a name's addresses or its service, and the
# records A, AAAA, CNAME and SRV; others are stepped over. RFC 1035 says how a message is made, 2782
# has SRV, 3596 AAAA and 6891 the word about how long an answer may be.

RecordType = Literal["A", "AAAA", "SRV"]

MAX_UDP_PAYLOAD: Final = 1232
"""Bytes of an answer that come through in one datagram nearly everywhere."""
_TYPE_CODES: Final[Mapping[RecordType, int]] = {"A": 1, "AAAA": 28, "SRV": 33}
_TYPE_CNAME: Final = 5
_TYPE_OPT: Final = 41
_CLASS_INTERNET: Final = 1
_HEADER_SIZE: Final = 12
_FLAG_RECURSION_DESIRED: Final = 0x0100
"""Flags of a question: the nameserver is to find out what it does not know."""
_FLAG_RESPONSE, _OPCODE_MASK, _FLAG_TRUNCATED, _RCODE_MASK = 0x8000, 0x7800, 0x0200, 0x000F
_MAX_LABEL, _MAX_NAME = 63, 255
_POINTER_BITS: Final = 0xC0
_MAX_POINTERS: Final = 32
"""Pointers in one name. Honest names need a few; many make a short message long to read."""
_TTL_SIGN_BIT: Final = 1 << 31
_PLAIN_LABEL = re.compile(rb"[A-Za-z0-9_-]+")
_DNS_NAME = re.compile(r"(?=.{1,253}\.?\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_RCODE_TEXTS: Final[Mapping[int, str]] = {
    1: "it does not understand the question",
    2: "it failed",
    3: "there is no such name",
    4: "it does not know such questions",
    5: "it refuses",
}


class DnsError(Exception):
    """What came is no answer. Its text says why, for a log."""


class MismatchedResponse(DnsError):
    """It answers another question, or none: the answer may still come."""


class MalformedMessage(DnsError):
    """It is not a DNS message."""


class ServiceTarget(Struct, frozen=True):
    """Where a service is. Of several, the lowest ``priority`` is meant; "" means: nowhere."""

    priority: int
    weight: int
    port: int
    target: str


class DnsRecord(Struct, frozen=True):
    """A fact about a name. ``ttl``: for how many seconds it holds. An address is its text."""

    name: str
    ttl: int
    value: str | ServiceTarget


class DnsAnswer(Struct, frozen=True):
    """``found``: what was asked for, in the message's order. ``more``: addresses told unasked.

    ``ttl`` is in seconds, None where nothing was found. An answer that was ``cut`` off holds
    nothing; the whole of it is to be had over TCP.
    """

    code: int = 0
    truncated: bool = False
    records: tuple[DnsRecord, ...] = ()
    additional_addresses: tuple[DnsRecord, ...] = ()
    ttl: int | None = None

    @property
    def error_text(self) -> str:
        """What its code means, "" where all went well."""
        return (
            _RCODE_TEXTS.get(self.code, f"it answers with the code {self.code}")
            if self.code
            else ""
        )


def is_dns_name(text: str) -> bool:
    """Whether DNS can be asked about it."""
    return bool(_DNS_NAME.fullmatch(text))


def encode_query(number: int, name: str, kind: RecordType, *, extended: bool = True) -> bytes:
    """The question with this ``number`` (16 bits). Raises ValueError unless ``is_name(name)``.

    ``extended`` lets an answer be as long as LARGEST; not every nameserver knows what that is.
    """
    if not is_dns_name(name):
        raise ValueError(f"{name!r} is not a name that DNS can be asked about")
    head = _encode_numbers(number, _FLAG_RECURSION_DESIRED, 1, 0, 0, int(extended))
    labels = name.encode("ascii").rstrip(b".").split(b".")
    question = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    extension = b"\0" + _encode_numbers(_TYPE_OPT, MAX_UDP_PAYLOAD, 0, 0, 0) if extended else b""
    return head + question + _encode_numbers(_TYPE_CODES[kind], _CLASS_INTERNET) + extension


def decode_answer(data: bytes, number: int, name: str, kind: RecordType) -> DnsAnswer:
    """What ``data`` answers to the question with this ``number``. Raises DnsError."""
    if len(data) < _HEADER_SIZE:
        raise MismatchedResponse("it is too short for an answer")
    reader = _MessageReader(data)
    head = [reader.read_number(2) for _ in range(6)]
    flags, counts = head[1], head[2:]
    if head[0] != number or not flags & _FLAG_RESPONSE or flags & _OPCODE_MASK:
        raise MismatchedResponse("it is not an answer to the question's number")
    code = flags & _RCODE_MASK
    if counts[0] == 0 and code:
        return DnsAnswer(code)  # some leave the question out when they fail
    if counts[0] != 1:
        raise MalformedMessage("it does not repeat the one question")
    asked = name.lower().rstrip(".")
    if (reader.read_name(), reader.read_number(2), reader.read_number(2)) != (
        asked,
        _TYPE_CODES[kind],
        _CLASS_INTERNET,
    ):
        raise MismatchedResponse("it answers another question")
    if flags & _FLAG_TRUNCATED:
        return DnsAnswer(code, truncated=True)
    answers, _, more = ([reader.read_record() for _ in range(count)] for count in counts[1:])
    return _select_records(code, answers, more, asked, kind)


class _ResourceRecord(Struct, frozen=True):
    """A record of any kind that we know; ``kind`` 0 is one that we do not."""

    kind: int
    record: DnsRecord


def _select_records(
    code: int,
    answers: Sequence[_ResourceRecord],
    more: Sequence[_ResourceRecord],
    asked: str,
    kind: RecordType,
) -> DnsAnswer:
    """The records under the name asked for, or under what it is another name of."""
    aliases = {raw.record.name: raw.record for raw in answers if raw.kind == _TYPE_CNAME}
    name, ttls, left = asked, list[int](), dict(aliases)
    while alias := left.pop(name, None):
        ttls.append(alias.ttl)
        name = str(alias.value)
    wanted = _TYPE_CODES[kind]
    found = [raw.record for raw in answers if raw.kind == wanted and raw.record.name == name]
    ttls += [record.ttl for record in found]
    addresses = (_TYPE_CODES["A"], _TYPE_CODES["AAAA"])
    return DnsAnswer(
        code,
        records=tuple(dict.fromkeys(found)),
        additional_addresses=tuple(
            dict.fromkeys(raw.record for raw in more if raw.kind in addresses)
        ),
        ttl=min(ttls) if found else None,
    )


class _MessageReader:
    """Steps through a message. Whatever would lead out of it is Malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def read_number(self, size: int) -> int:
        """The next ``size`` bytes as a number."""
        return int.from_bytes(self._read_bytes(size))

    def read_name(self) -> str:
        """A name in lower case, without the dot at its end; odd bytes as numbers."""
        labels: list[str] = []
        back: int | None = None
        lowest, room, leaps = self._position, _MAX_NAME - 1, 0
        while length := self.read_number(1):
            if length >= _POINTER_BITS:
                target = (length - _POINTER_BITS) << 8 | self.read_number(1)
                back = self._position if back is None else back
                leaps += 1
                if target >= lowest or leaps > _MAX_POINTERS:
                    raise MalformedMessage("a name leads in circles")
                self._position = lowest = target
                continue
            if length > _MAX_LABEL:
                raise MalformedMessage("a name has a part of an unknown sort")
            room -= length + 1
            if room < 0:
                raise MalformedMessage("a name is too long")
            labels.append(_escape_label(self._read_bytes(length)))
        if back is not None:
            self._position = back
        return ".".join(labels)

    def read_record(self) -> _ResourceRecord:
        """The next record. One of a kind that we do not know, or not of the internet, is 0."""
        name, kind, family = self.read_name(), self.read_number(2), self.read_number(2)
        ttl, size = self.read_number(4), self.read_number(2)
        end = self._position + size
        if end > len(self._data):
            raise MalformedMessage("it ends too early")
        value = self._read_value(kind, size) if family == _CLASS_INTERNET else None
        if value is None:
            self._position, kind, value = end, 0, ""
        if self._position != end:
            raise MalformedMessage("a record is not as long as it says")
        # RFC 2181, 8: what would be a negative number of seconds is none
        return _ResourceRecord(kind, DnsRecord(name, ttl if ttl < _TTL_SIGN_BIT else 0, value))

    def _read_value(self, kind: int, size: int) -> str | ServiceTarget | None:
        if kind == _TYPE_CODES["A"]:
            return str(ipaddress.IPv4Address(self._read_exactly(4, size)))
        if kind == _TYPE_CODES["AAAA"]:
            return str(ipaddress.IPv6Address(self._read_exactly(16, size)))
        if kind == _TYPE_CODES["SRV"]:
            return ServiceTarget(
                self.read_number(2), self.read_number(2), self.read_number(2), self.read_name()
            )
        return self.read_name() if kind == _TYPE_CNAME else None

    def _read_exactly(self, wanted: int, size: int) -> bytes:
        if size != wanted:
            raise MalformedMessage("an address is not as long as it must be")
        return self._read_bytes(size)

    def _read_bytes(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise MalformedMessage("it ends too early")
        taken = self._data[self._position : end]
        self._position = end
        return taken


def _escape_label(label: bytes) -> str:
    if _PLAIN_LABEL.fullmatch(label):
        return label.decode("ascii").lower()
    return "".join(
        chr(byte).lower() if _PLAIN_LABEL.fullmatch(bytes((byte,))) else f"\\{byte:03d}"
        for byte in label
    )


def _encode_numbers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(2) for number in numbers)


# Asks nameservers, each in its turn: in a datagram, and over TCP where the answer is too long.

ServerAddress = tuple[str, int]

_DNS_PORT: Final = 53
_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_MAX_SERVERS: Final = 3
"""As many of the system's as other resolvers heed."""
_ROUNDS: Final = 2
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

    async def query(self, name: str, kind: RecordType) -> DnsAnswer:
        """The first answer that settles it, be it that there is none. Raises DiscoveryError."""
        why = "there is no nameserver to ask"
        for server in list(self._list_servers()) * _ROUNDS:
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await _query_server(server, name, kind)
            except TimeoutError:
                why = f"the nameserver {server[0]} does not answer"
            except DnsError as error:
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


async def _query_server(server: ServerAddress, name: str, kind: RecordType) -> DnsAnswer:
    answer = await _query_udp(server, name, kind, extended=True)
    if answer.code in _EDNS_ERROR_CODES:
        answer = await _query_udp(server, name, kind, extended=False)
    return await _query_tcp(server, name, kind) if answer.truncated else answer


async def _query_udp(
    server: ServerAddress, name: str, kind: RecordType, *, extended: bool
) -> DnsAnswer:
    number = secrets.randbelow(1 << 16)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[DnsAnswer] = loop.create_future()

    # Connected, so that the system drops what other addresses send.
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _UdpQuery(answer, number, name, kind), remote_addr=server
    )
    try:
        transport.sendto(encode_query(number, name, kind, extended=extended))
        return await answer
    finally:
        transport.abort()


class _UdpQuery(asyncio.DatagramProtocol):
    """Waits for the answer, whatever else comes."""

    def __init__(
        self, answer: asyncio.Future[DnsAnswer], number: int, name: str, kind: RecordType
    ) -> None:
        self._answer = answer
        self._question = number, name, kind

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr  # the socket is connected
        if self._answer.done():
            return
        with suppress(MismatchedResponse):
            try:
                self._answer.set_result(decode_answer(data, *self._question))
            except MalformedMessage as error:
                self._answer.set_exception(error)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


async def _query_tcp(server: ServerAddress, name: str, kind: RecordType) -> DnsAnswer:
    number = secrets.randbelow(1 << 16)
    question = encode_query(number, name, kind)
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(len(question).to_bytes(2) + question)
        size = int.from_bytes(await reader.readexactly(2))
        answer = decode_answer(await reader.readexactly(size), number, name, kind)
    finally:
        writer.transport.abort()
    if answer.truncated:
        raise MalformedMessage("it is cut off even over TCP")
    return answer


_NXDOMAIN: Final = 3
_MIN_INTERVAL: Final = 1.0
_MAX_CONCURRENT_QUERIES: Final = 8
_SERVICE_PREFIX = re.compile(r"\A(_[^.]*\.)*")
_ADDRESS_TYPES: Final[tuple[RecordType, ...]] = ("A", "AAAA")

GetAddrInfo = Callable[..., Sequence[tuple[Any, ...]]]
"""As ``socket.getaddrinfo``."""


class DnsResolver(Protocol):
    """Asks the DNS, as Nameservers do."""

    async def query(self, name: str, kind: RecordType) -> DnsAnswer:
        """An answer, be it that there is none. Raises DiscoveryError."""


class _ResolvedWorkers(Struct):
    """Workers, and for how many seconds they hold."""

    workers: Sequence[WorkerConfig]
    ttl: float = math.inf


class DnsSource:
    """A Source. Raises ValueError for settings that make no sense.

    A worker found by its address is asked by its address, which no certificate names: https works
    for services only. Their workers keep the names that DNS gives them, at or below the service's
    own domain, so that nobody who forges an answer is shown a key: the certificate must name that.
    """

    def __init__(
        self,
        settings: DnsSettings,
        template: WorkerTemplate | None = None,
        *,
        getaddrinfo: GetAddrInfo = socket.getaddrinfo,
        resolver: DnsResolver | None = None,
    ) -> None:
        self._template = template or WorkerTemplate()
        self._settings = settings
        self._name, self._port = _parse_name(settings)
        if settings.record == "a" and self._template.scheme == "https":
            raise ValueError(
                f"{settings.name!r}: https needs a name to verify, and DNS gives addresses; "
                "list the workers by their names, or find them by SRV records"
            )
        self._template.make_worker("name", 1)  # raises for a path that no URL has
        self._resolver = resolver or StubResolver(settings.nameserver)
        self._uses_system_resolver = settings.record == "a" and settings.nameserver is None
        self._system_lookup = BackgroundCall(
            lambda: getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        )
        self._answered_types: set[RecordType] = set()
        self._every = settings.refresh_interval

    @property
    def interval(self) -> float:
        """In how many seconds to look again."""
        return self._every

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """See WorkerSource."""
        self._every = self._settings.refresh_interval
        within = self._settings.within
        try:
            async with asyncio.timeout(within):
                found = await self._resolve_workers()
        except TimeoutError:
            raise DiscoveryError(f"{self._name}: no answer in {within:g} s") from None
        if not found.workers:
            raise DiscoveryError(f"{self._name}: DNS tells no address that a worker can have")
        self._every = min(self._every, max(found.ttl, _MIN_INTERVAL))
        return found.workers

    async def _resolve_workers(self) -> _ResolvedWorkers:
        if self._settings.record == "srv":
            return await self._resolve_services()
        addresses, ttl = await (
            self._resolve_with_system()
            if self._uses_system_resolver
            else self._resolve_addresses(self._name)
        )
        return _ResolvedWorkers(
            [self._template.make_worker(one, self._port) for one in _filter_addresses(addresses)],
            ttl,
        )

    async def _resolve_with_system(self) -> tuple[list[str], float]:
        try:
            found = await self._system_lookup.wait_result()
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"{self._name}: {error}") from None
        return [str(address[0]) for *_, address in found], math.inf

    async def _resolve_addresses(self, name: str) -> tuple[list[str], float]:
        """Of both families. One that fails is done without, unless it has told something before.

        There are nameservers that never answer for the family that they have no address of; but a
        set that lacks those which are merely not told of just now must not pass for the whole.
        """
        answers = await asyncio.gather(
            *(self._resolver.query(name, kind) for kind in _ADDRESS_TYPES), return_exceptions=True
        )
        found: list[str] = []
        ttl = math.inf
        failures: list[BaseException] = []
        for kind, answer in zip(_ADDRESS_TYPES, answers, strict=True):
            if isinstance(answer, BaseException):
                failures.append(answer)
                if kind in self._answered_types or not isinstance(answer, DiscoveryError):
                    raise answer
            elif answer.ttl is not None:
                self._answered_types.add(kind)
                found += [str(record.value) for record in answer.records]
                ttl = min(ttl, answer.ttl)
        if failures and not found:
            raise failures[0]
        return found, ttl

    async def _resolve_services(self) -> _ResolvedWorkers:
        answer = await self._resolver.query(self._name, "SRV")
        if answer.code == _NXDOMAIN:
            raise DiscoveryError(f"{self._name}: {answer.error_text}")
        told = [one.value for one in answer.records if isinstance(one.value, ServiceTarget)]
        told = [one for one in told if one.target and one.port]
        first = min((one.priority for one in told), default=0)
        places = [one for one in told if one.priority == first]
        ttl = math.inf if answer.ttl is None else float(answer.ttl)
        if self._template.scheme == "https":
            hosts = {
                one.target: [one.target] for one in places if self._is_allowed_target(one.target)
            }
        else:
            hosts, sooner = await self._resolve_targets(places, answer.additional_addresses)
            ttl = min(ttl, sooner)
        return _ResolvedWorkers(list(self._make_workers(places, hosts)), ttl)

    def _is_allowed_target(self, target: str) -> bool:
        domain = _SERVICE_PREFIX.sub("", self._name)
        return is_dns_name(target) and (target == domain or target.endswith(f".{domain}"))

    async def _resolve_targets(
        self, places: Sequence[ServiceTarget], more: Sequence[DnsRecord]
    ) -> tuple[dict[str, list[str]], float]:
        """The addresses of each target: told along with the service, or else asked for."""
        hosts: dict[str, list[str]] = {one.target: [] for one in places}
        ttl = math.inf
        for record in more:
            if record.name in hosts:
                hosts[record.name].append(str(record.value))
                ttl = min(ttl, record.ttl)
        turns = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

        async def ask(target: str) -> float:
            if not is_dns_name(target):
                return math.inf
            async with turns:
                hosts[target], seconds = await self._resolve_addresses(target)
            return seconds

        unknown = [target for target, known in hosts.items() if not known]
        ttls = await asyncio.gather(*(ask(one) for one in unknown), return_exceptions=True)
        for one in ttls:
            if isinstance(one, BaseException):
                raise one
            ttl = min(ttl, one)
        return hosts, ttl

    def _make_workers(
        self, places: Sequence[ServiceTarget], hosts: dict[str, list[str]]
    ) -> Iterable[WorkerConfig]:
        """Weights are made as small as their ratios allow, to stand beside those of others."""
        unit = math.gcd(*(one.weight for one in places)) or 1
        by_name = self._template.scheme == "https"
        for one in sorted(places, key=lambda one: (one.target, one.port)):
            found = hosts.get(one.target, [])
            for host in found if by_name else _filter_addresses(found):
                yield self._template.make_worker(host, one.port, max(one.weight // unit, 1))


def _parse_name(settings: DnsSettings) -> tuple[str, int]:
    """The name, and its port: 0 for a service."""
    text = settings.name
    name, colon, port = text.rpartition(":")
    if settings.record == "srv":
        if not is_dns_name(text):
            raise ValueError(f"{text!r} is not the name of a service, such as _http._tcp.host")
        return text.lower().rstrip("."), 0
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0  # noqa: PLR2004
    if not colon or not is_dns_name(name) or not 0 < number < 1 << 16:
        raise ValueError(f"{text!r} is not a name and its port, such as workers.local:8000")
    return name.lower().rstrip("."), number


def _filter_addresses(addresses: Iterable[str]) -> list[str]:
    """Those that a worker can have, each once, in an order of their own.

    A link-local address may be that of a cloud's metadata, which would be handed prompts and keys.
    """
    found = set[tuple[int, int, str]]()
    for text in addresses:
        address = ip_address(text)
        plain = (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
        if not (plain.is_link_local or plain.is_multicast or plain.is_unspecified):
            found.add((plain.version, int(plain), str(plain)))
    return [text for *_, text in sorted(found)]
