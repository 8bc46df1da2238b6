"""Workers that DNS tells of: the addresses of a name, or the places of a service."""

import asyncio
import math
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, Literal, Protocol

from msgspec import Struct

from backends.aio import BackgroundCall
from backends.pool import dns
from backends.pool.discovery.nameserver import StubResolver
from backends.pool.discovery.source import DiscoveryError
from backends.upstream import WorkerConfig

_NXDOMAIN: Final = 3
_MIN_INTERVAL: Final = 1.0
_MAX_CONCURRENT_QUERIES: Final = 8
_SERVICE_PREFIX = re.compile(r"\A(_[^.]*\.)*")
_ADDRESS_TYPES: Final[tuple[dns.RecordType, ...]] = ("A", "AAAA")

GetAddrInfo = Callable[..., Sequence[tuple[Any, ...]]]
"""As ``socket.getaddrinfo``."""


class DnsResolver(Protocol):
    """Asks the DNS, as Nameservers do."""

    async def query(self, name: str, kind: dns.RecordType) -> dns.DnsAnswer:
        """An answer, be it that there is none. Raises DiscoveryFailed."""


class WorkerTemplate(Struct, frozen=True):
    """What the workers of one name have in common. ``path`` is the end of their base URL."""

    scheme: Literal["http", "https"] = "http"
    path: str = ""
    weight: int = 1
    max_concurrency: int | None = None
    bearer: str | None = None

    def __repr__(self) -> str:
        return f"Template({self.scheme!r}, {self.path!r})"

    def make_worker(self, host: str, port: int, share: int = 1) -> WorkerConfig:
        """The worker at an address or a name, with ``share`` times the weight."""
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        url = f"{self.scheme}://{place}{self.path}"
        return WorkerConfig(url, self.weight * share, self.max_concurrency, self.bearer)


class DnsSettings(Struct, frozen=True):
    """What to ask for, and how often.

    ``name`` is ``host:port`` for the addresses of a host, and the name alone for a service (SRV):
    ``_http._tcp.triton.models.svc.cluster.local``. It is asked again after ``every`` seconds, or
    sooner where the answer holds for less; an answer may take ``within`` seconds. ``nameserver`` is
    an IP address, with a port if it is not 53. Without one the system finds addresses, as it does
    for every program; services are asked of its nameservers, for which a name must be whole.
    """

    name: str
    record: Literal["a", "srv"] = "a"
    every: float = 10.0
    within: float = 5.0
    nameserver: str | None = None


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
        self._answered_types: set[dns.RecordType] = set()
        self._every = settings.every

    @property
    def interval(self) -> float:
        """In how many seconds to look again."""
        return self._every

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """See Source."""
        self._every = self._settings.every
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
        told = [one.value for one in answer.records if isinstance(one.value, dns.ServiceTarget)]
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
        return dns.is_dns_name(target) and (target == domain or target.endswith(f".{domain}"))

    async def _resolve_targets(
        self, places: Sequence[dns.ServiceTarget], more: Sequence[dns.DnsRecord]
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
            if not dns.is_dns_name(target):
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
        self, places: Sequence[dns.ServiceTarget], hosts: dict[str, list[str]]
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
        if not dns.is_dns_name(text):
            raise ValueError(f"{text!r} is not the name of a service, such as _http._tcp.host")
        return text.lower().rstrip("."), 0
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0  # noqa: PLR2004
    if not colon or not dns.is_dns_name(name) or not 0 < number < 1 << 16:
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
