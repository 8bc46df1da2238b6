"""Worker discovery by DNS: A and AAAA records of a host, or SRV records of a service."""

import asyncio
import math
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol

from backends.background_call import BackgroundCall
from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError
from backends.pool.settings import DnsSettings, WorkerTemplate

if TYPE_CHECKING:
    from backends.pool.dns_resolver import DnsAnswer, HostAddresses, RecordType, ServiceTarget

_MIN_INTERVAL: Final = 1.0
_MAX_CONCURRENT_QUERIES: Final = 8
_SERVICE_PREFIX = re.compile(r"\A(_[^.]*\.)*")
_ADDRESS_TYPES: Final[tuple["RecordType", ...]] = ("A", "AAAA")
_DNS_NAME = re.compile(r"(?=.{1,253}\.?\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_PORT: Final = 65535

GetAddrInfo = Callable[..., Sequence[tuple[Any, ...]]]
"""As ``socket.getaddrinfo``."""


class DnsResolver(Protocol):
    """Queries nameservers."""

    async def query(self, name: str, record_type: "RecordType") -> "DnsAnswer":
        """The answer, also if it has no records. Raises DiscoveryError."""


class DnsSource:
    """A WorkerSource. Raises ValueError for settings that contradict each other.

    A worker found by its address is requested by its address, which no certificate names: https
    works for services only. Their workers keep the host names of the SRV records, which must be
    those of the service's own domain or below: a forged response cannot direct API keys to another
    host, since the certificate must have the name.
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
        self._template.make_worker("name", 1)  # raises ValueError for an invalid path
        self._resolver = resolver
        if resolver is None and (settings.record == "srv" or settings.nameserver is not None):
            self._resolver = _make_resolver(settings.nameserver)
        self._system_lookup = BackgroundCall(
            lambda: getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        )
        self._answered_types: set[RecordType] = set()
        self._interval = settings.refresh_interval

    @property
    def interval(self) -> float:
        """Seconds until the next lookup."""
        return self._interval

    async def list_workers(self) -> Sequence[WorkerConfig]:
        """See WorkerSource."""
        self._interval = self._settings.refresh_interval
        timeout = self._settings.timeout
        try:
            async with asyncio.timeout(timeout):
                workers, ttl = await self._resolve_workers()
        except TimeoutError:
            raise DiscoveryError(f"{self._name}: no answer in {timeout:g} s") from None
        if not workers:
            raise DiscoveryError(f"{self._name}: DNS has no address that a worker can have")
        self._interval = min(self._interval, max(ttl, _MIN_INTERVAL))
        return workers

    async def _resolve_workers(self) -> tuple[Sequence[WorkerConfig], float]:
        """The workers and the TTL."""
        if self._resolver is None:
            addresses, ttl = await self._resolve_with_system(), math.inf
        elif self._settings.record == "srv":
            return await self._resolve_service(self._resolver)
        else:
            addresses, ttl = await self._resolve_addresses(self._resolver, self._name)
        workers = [
            self._template.make_worker(address, self._port)
            for address in _filter_addresses(addresses)
        ]
        return workers, ttl

    async def _resolve_with_system(self) -> list[str]:
        try:
            results = await self._system_lookup.wait_result()
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"{self._name}: {error}") from None
        return [str(address[0]) for *_, address in results]

    async def _resolve_addresses(self, resolver: DnsResolver, name: str) -> tuple[list[str], float]:
        """The IPv4 and IPv6 addresses, and their TTL.

        Some nameservers never answer queries for a type of which a name has no records, so one of
        the two queries may fail. But if that type has ever had an answer, the whole lookup fails:
        half of the addresses must not replace them all.
        """
        answers = await asyncio.gather(
            *(resolver.query(name, record_type) for record_type in _ADDRESS_TYPES),
            return_exceptions=True,
        )
        addresses: list[str] = []
        ttl = math.inf
        failures: list[BaseException] = []
        for record_type, answer in zip(_ADDRESS_TYPES, answers, strict=True):
            if isinstance(answer, BaseException):
                failures.append(answer)
                if record_type in self._answered_types or not isinstance(answer, DiscoveryError):
                    raise answer
            elif answer.ttl is not None:
                self._answered_types.add(record_type)
                addresses += answer.addresses
                ttl = min(ttl, answer.ttl)
        if failures and not addresses:
            raise failures[0]
        return addresses, ttl

    async def _resolve_service(self, resolver: DnsResolver) -> tuple[Sequence[WorkerConfig], float]:
        """The workers of the lowest priority, and their TTL."""
        answer = await resolver.query(self._name, "SRV")
        if not answer.name_exists:
            raise DiscoveryError(f"{self._name}: there is no such name")
        targets = [target for target in answer.targets if target.host and target.port]
        lowest = min((target.priority for target in targets), default=0)
        targets = [target for target in targets if target.priority == lowest]
        ttl = math.inf if answer.ttl is None else float(answer.ttl)
        if self._template.scheme == "https":
            hosts = {
                target.host: [target.host]
                for target in targets
                if self._is_allowed_host(target.host)
            }
        else:
            hosts, host_ttl = await self._resolve_hosts(resolver, targets, answer.additional)
            ttl = min(ttl, host_ttl)
        return list(self._make_workers(targets, hosts)), ttl

    def _is_allowed_host(self, host: str) -> bool:
        domain = _SERVICE_PREFIX.sub("", self._name)
        return is_dns_name(host) and (host == domain or host.endswith(f".{domain}"))

    async def _resolve_hosts(
        self,
        resolver: DnsResolver,
        targets: Sequence["ServiceTarget"],
        additional: Sequence["HostAddresses"],
    ) -> tuple[dict[str, list[str]], float]:
        """The addresses of each host, sent along with the targets or else queried, and the TTL."""
        hosts: dict[str, list[str]] = {target.host: [] for target in targets}
        ttl = math.inf
        for entry in additional:
            if entry.host in hosts:
                hosts[entry.host] += entry.addresses
                ttl = min(ttl, entry.ttl)
        slots = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

        async def resolve(host: str) -> float:
            if not is_dns_name(host):
                return math.inf
            async with slots:
                hosts[host], host_ttl = await self._resolve_addresses(resolver, host)
            return host_ttl

        unknown = [host for host, addresses in hosts.items() if not addresses]
        results = await asyncio.gather(*map(resolve, unknown), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
            ttl = min(ttl, result)
        return hosts, ttl

    def _make_workers(
        self, targets: Sequence["ServiceTarget"], hosts: dict[str, list[str]]
    ) -> Iterable[WorkerConfig]:
        """The workers, their weights divided by the greatest common divisor."""
        divisor = math.gcd(*(target.weight for target in targets)) or 1
        by_name = self._template.scheme == "https"
        for target in sorted(targets, key=lambda target: (target.host, target.port)):
            addresses = hosts.get(target.host, [])
            for host in addresses if by_name else _filter_addresses(addresses):
                factor = max(target.weight // divisor, 1)
                yield self._template.make_worker(host, target.port, factor)


def is_dns_name(text: str) -> bool:
    """Whether DNS can be queried for it."""
    return bool(_DNS_NAME.fullmatch(text))


def _make_resolver(nameserver: str | None) -> DnsResolver:
    from backends.pool.dns_resolver import StubResolver  # noqa: PLC0415 - it loads dnspython

    return StubResolver(nameserver)


def _parse_name(settings: DnsSettings) -> tuple[str, int]:
    """The name and its port; 0 for a service."""
    text = settings.name
    if settings.record == "srv":
        if not is_dns_name(text):
            raise ValueError(f"{text!r} is not the name of a service, such as _http._tcp.host")
        return text.lower().rstrip("."), 0
    name, _, digits = text.rpartition(":")
    port = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 5 else 0  # noqa: PLR2004
    if not is_dns_name(name) or not 0 < port <= _MAX_PORT:
        raise ValueError(f"{text!r} is not a name and its port, such as workers.local:8000")
    return name.lower().rstrip("."), port


def _filter_addresses(addresses: Iterable[str]) -> list[str]:
    """The addresses that a worker can have, sorted, each once.

    A link-local address may be that of a cloud's metadata service, which must not receive prompts
    and API keys.
    """
    allowed = set[tuple[int, int, str]]()
    for text in addresses:
        address = ip_address(text)
        address = (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
        if not (address.is_link_local or address.is_multicast or address.is_unspecified):
            allowed.add((address.version, int(address), str(address)))
    return [text for *_, text in sorted(allowed)]
