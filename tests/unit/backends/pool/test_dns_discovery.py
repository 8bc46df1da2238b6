"""What a source makes of the answers it gets; who answers is scripted."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.aio import BackgroundCall
from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError
from backends.pool.dns_discovery import DnsSource, is_dns_name
from backends.pool.dns_resolver import (
    DnsAnswer,
    HostAddresses,
    RecordType,
    ServiceTarget,
    parse_server_address,
)
from backends.pool.settings import DnsSettings, WorkerTemplate


class Zone:
    """A resolver with scripted answers."""

    def __init__(self) -> None:
        self.known: dict[str, DnsAnswer | Exception] = {}
        self.queries: list[str] = []

    async def query(self, name: str, record_type: RecordType) -> DnsAnswer:
        self.queries.append(f"{record_type} {name}")
        answer = self.known.get(f"{record_type} {name}", DnsAnswer(name_exists=False))
        if isinstance(answer, Exception):
            raise answer
        return answer


def some(*addresses: str, ttl: int = 30) -> DnsAnswer:
    return DnsAnswer(addresses=addresses, ttl=ttl)


def service(*targets: ServiceTarget, ttl: int = 30) -> DnsAnswer:
    return DnsAnswer(targets=targets, ttl=ttl)


def by_address(zone: Zone, **more: Any) -> DnsSource:
    return DnsSource(DnsSettings("w.local:8000", nameserver="127.0.0.1", **more), resolver=zone)


def urls(workers: Sequence[WorkerConfig]) -> list[str]:
    return [worker.url for worker in workers]


# --- addresses -----------------------------------------------------------------------------------


async def test_each_address_is_a_worker_made_after_the_template() -> None:
    zone = Zone()
    zone.known = {"A w.local": some("10.0.0.2", "10.0.0.1"), "AAAA w.local": some("fd00::1")}
    template = WorkerTemplate(path="/base", weight=2, max_concurrency=4, bearer="sk-1")
    source = DnsSource(
        DnsSettings("W.local.:8000", nameserver="127.0.0.1"), template, resolver=zone
    )

    found = await source.list_workers()

    assert found == [
        WorkerConfig("http://10.0.0.1:8000/base", 2, 4, "sk-1"),
        WorkerConfig("http://10.0.0.2:8000/base", 2, 4, "sk-1"),
        WorkerConfig("http://[fd00::1]:8000/base", 2, 4, "sk-1"),
    ]
    assert "sk-1" not in repr(template)


@pytest.mark.parametrize(("ttls", "pause"), [((30, 60), 10), ((60, 4), 4), ((0, 60), 1)])
async def test_the_next_look_is_when_the_answer_no_longer_holds(
    ttls: tuple[int, int], pause: float
) -> None:
    zone = Zone()
    zone.known = {
        "A w.local": some("10.0.0.2", ttl=ttls[0]),
        "AAAA w.local": some("fd00::1", ttl=ttls[1]),
    }
    source = by_address(zone)

    await source.list_workers()

    assert source.interval == pause


async def test_after_a_failure_the_last_answers_time_does_not_count() -> None:
    zone = Zone()
    zone.known = {"A w.local": some("10.0.0.2", ttl=2)}
    source = by_address(zone)
    await source.list_workers()
    zone.known = {"A w.local": DiscoveryError("down")}

    with pytest.raises(DiscoveryError, match="down"):
        await source.list_workers()

    assert source.interval == 10


async def test_a_family_that_always_fails_is_done_without() -> None:
    zone = Zone()
    zone.known = {"A w.local": some("10.0.0.2"), "AAAA w.local": DiscoveryError("SERVFAIL")}

    assert urls(await by_address(zone).list_workers()) == ["http://10.0.0.2:8000"]


async def test_both_families_failing_is_a_failure() -> None:
    zone = Zone()
    zone.known = dict.fromkeys(("A w.local", "AAAA w.local"), DiscoveryError("SERVFAIL"))

    with pytest.raises(DiscoveryError, match="SERVFAIL"):
        await by_address(zone).list_workers()


async def test_a_family_that_fails_now_and_did_not_before_fails_the_whole() -> None:
    zone = Zone()
    zone.known = {"A w.local": some("10.0.0.2"), "AAAA w.local": some("fd00::1")}
    source = by_address(zone)
    await source.list_workers()
    zone.known["AAAA w.local"] = DiscoveryError("SERVFAIL")

    with pytest.raises(DiscoveryError, match="SERVFAIL"):
        await source.list_workers()

    zone.known["AAAA w.local"] = DnsAnswer()
    assert urls(await source.list_workers()) == ["http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    "answer",
    [
        DnsAnswer(),
        DnsAnswer(name_exists=False),
        some("169.254.169.254"),
        some("0.0.0.0", "224.0.0.1"),
    ],
)
async def test_61_a_name_without_an_address_that_a_worker_can_have_is_a_failure(
    answer: DnsAnswer,
) -> None:
    zone = Zone()
    zone.known = {
        "A w.local": answer,
        "AAAA w.local": some("fe80::1", "ff02::1", "::", "::ffff:169.254.169.254"),
    }

    with pytest.raises(DiscoveryError, match=r"w\.local: DNS has no address"):
        await by_address(zone).list_workers()


async def test_61_an_address_that_is_no_workers_is_left_out() -> None:
    zone = Zone()
    zone.known = {"A w.local": some("169.254.169.254", "10.0.0.1", "10.0.0.1")}

    assert urls(await by_address(zone).list_workers()) == ["http://10.0.0.1:8000"]


async def test_an_answer_that_does_not_come_is_a_failure() -> None:
    class Silent:
        async def query(self, name: str, record_type: RecordType) -> DnsAnswer:
            await asyncio.Event().wait()
            return DnsAnswer()

    settings = DnsSettings("w.local:8000", nameserver="127.0.0.1", timeout=0.01)

    with pytest.raises(DiscoveryError, match=r"no answer in 0\.01 s"):
        await DnsSource(settings, resolver=Silent()).list_workers()


# --- the system's way ----------------------------------------------------------------------------


async def test_without_a_nameserver_the_system_is_asked() -> None:
    asked: list[tuple[Any, ...]] = []

    def getaddrinfo(*args: Any, **more: Any) -> list[Any]:
        asked.append((*args, more))
        return [(2, 1, 6, "", ("10.0.0.7", 8000)), (10, 1, 6, "", ("fd00::1", 8000, 0, 0))]

    source = DnsSource(DnsSettings("w:8000", refresh_interval=7), getaddrinfo=getaddrinfo)

    assert urls(await source.list_workers()) == ["http://10.0.0.7:8000", "http://[fd00::1]:8000"]
    assert asked == [("w", 8000, {"type": socket.SOCK_STREAM})]
    assert source.interval == 7


async def test_this_machines_own_name_is_found_by_the_real_system() -> None:
    assert "http://127.0.0.1:8000" in urls(
        await DnsSource(DnsSettings("localhost:8000")).list_workers()
    )


@pytest.mark.parametrize("fault", [socket.gaierror(-2, "not known"), UnicodeError("label")])
async def test_what_the_system_can_t_find_is_a_failure(fault: Exception) -> None:
    def getaddrinfo(*args: Any, **more: Any) -> list[Any]:
        raise fault

    with pytest.raises(DiscoveryError, match="w: "):
        await DnsSource(DnsSettings("w:8000"), getaddrinfo=getaddrinfo).list_workers()


async def test_a_system_that_hangs_is_asked_once_and_waited_for_again() -> None:
    go, asked = threading.Event(), []

    def getaddrinfo(*args: Any, **more: Any) -> list[Any]:
        asked.append(args)
        go.wait(5)
        return [(2, 1, 6, "", ("10.0.0.7", 8000))]

    source = DnsSource(DnsSettings("w:8000", timeout=0.02), getaddrinfo=getaddrinfo)
    for _ in range(3):
        with pytest.raises(DiscoveryError, match="no answer"):
            await source.list_workers()
    go.set()

    assert urls(await _at_last(source)) == ["http://10.0.0.7:8000"]
    assert len(asked) == 1


async def _at_last(source: DnsSource) -> Sequence[WorkerConfig]:
    async with asyncio.timeout(5):
        while True:
            try:
                return await source.list_workers()
            except DiscoveryError:
                continue


def test_a_call_that_hangs_does_not_keep_the_loop_from_its_end() -> None:
    go, told = threading.Event(), list[str]()

    def call() -> str:
        go.wait(5)
        told.append("done")
        return "late"

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await BackgroundCall(call).wait_result()

    asyncio.run(main())
    assert told == []
    threads = [thread for thread in threading.enumerate() if thread.name == "background-call"]
    go.set()
    for thread in threads:
        thread.join(5)
    assert told == ["done"]


def test_without_a_nameserver_dnspython_is_not_loaded() -> None:
    code = (
        "import sys\n"
        "from backends.pool.dns_discovery import DnsSettings, DnsSource\n"
        "from backends.pool.pool import PoolBackend\n"
        "DnsSource(DnsSettings('w:80'))\n"
        "assert 'dns' not in sys.modules\n"
        "DnsSource(DnsSettings('w:80', nameserver='127.0.0.1'))\n"
        "assert 'dns' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], check=True)


# --- services ------------------------------------------------------------------------------------

SERVICE = "_http._tcp.w.local"


def by_service(zone: Zone, scheme: Any = "http") -> DnsSource:
    return DnsSource(
        DnsSettings(SERVICE, record="srv"), WorkerTemplate(scheme=scheme), resolver=zone
    )


async def test_a_services_places_have_the_addresses_told_along() -> None:
    zone = Zone()
    answer = service(
        ServiceTarget(0, 10, 8000, "a.w.local"), ServiceTarget(0, 30, 8001, "b.w.local")
    )
    additional = (
        HostAddresses("a.w.local", ("10.0.0.1",), 5),
        HostAddresses("x.w.local", ("10.0.0.9",), 1),
    )
    zone.known = {
        f"SRV {SERVICE}": msgspec.structs.replace(answer, additional=additional),
        "A b.w.local": some("10.0.0.2", "10.0.0.3", ttl=7),
    }
    source = by_service(zone)

    found = await source.list_workers()

    assert [(worker.url, worker.weight) for worker in found] == [
        ("http://10.0.0.1:8000", 1),
        ("http://10.0.0.2:8001", 3),
        ("http://10.0.0.3:8001", 3),
    ]
    assert source.interval == 5
    assert "A a.w.local" not in zone.queries


async def test_only_the_first_priority_counts_and_only_what_is_somewhere() -> None:
    zone = Zone()
    answer = service(
        ServiceTarget(2, 1, 80, "c.w.local"),
        ServiceTarget(1, 0, 80, "a.w.local"),
        ServiceTarget(0, 1, 0, "b.w.local"),
        ServiceTarget(0, 1, 80, ""),
        ServiceTarget(1, 0, 80, "gone.w.local"),
        ServiceTarget(1, 0, 80, "a\\046b"),
    )
    zone.known = {f"SRV {SERVICE}": answer, "A a.w.local": some("10.0.0.1")}

    found = await by_service(zone).list_workers()

    assert [(worker.url, worker.weight) for worker in found] == [("http://10.0.0.1:80", 1)]
    assert not any("\\" in query for query in zone.queries)


async def test_a_place_that_is_not_told_of_just_now_fails_the_whole() -> None:
    zone = Zone()
    zone.known = {
        f"SRV {SERVICE}": service(
            ServiceTarget(0, 1, 80, "a.w.local"), ServiceTarget(0, 1, 80, "b.w.local")
        ),
        "A a.w.local": some("10.0.0.1"),
        "A b.w.local": DiscoveryError("SERVFAIL"),
    }

    with pytest.raises(DiscoveryError, match="SERVFAIL"):
        await by_service(zone).list_workers()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (DnsAnswer(name_exists=False), "no such name"),
        (DnsAnswer(), "no address"),
        (service(ServiceTarget(0, 0, 0, "")), "no"),
    ],
)
async def test_a_service_that_is_nowhere_is_a_failure(answer: DnsAnswer, said: str) -> None:
    zone = Zone()
    zone.known = {f"SRV {SERVICE}": answer}

    with pytest.raises(DiscoveryError, match=said):
        await by_service(zone).list_workers()


async def test_61_over_https_only_names_of_the_services_own_domain_are_taken() -> None:
    zone = Zone()
    targets = ("a.w.local", "w.local", "evil.org", "xw.local", "w.local.evil.org", "a\\046.w.local")
    zone.known = {
        f"SRV {SERVICE}": service(*(ServiceTarget(0, 1, 443, one) for one in targets), ttl=3)
    }
    source = by_service(zone, "https")

    found = await source.list_workers()

    assert urls(found) == ["https://a.w.local:443", "https://w.local:443"]
    assert zone.queries == [f"SRV {SERVICE}"]
    assert source.interval == 3


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "w",
        "w:",
        "w:0",
        "w:65536",
        "w:x",
        ":80",
        "w w:80",
        "a@b:80",
        "http://w:80",
        "w\\:80",
        "w#:80",
    ],
)
def test_a_name_without_its_port_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"such as workers\.local:8000"):
        DnsSource(DnsSettings(name))


@pytest.mark.parametrize(
    "name", ["", ".", "a..b", ".a", "a b", "a/b", "ü", "a" * 64, ".".join(["a" * 63] * 4), "a\n"]
)
def test_what_is_no_name_is_not_queried(name: str) -> None:
    assert not is_dns_name(name)


@pytest.mark.parametrize("name", ["", "_http._tcp.w:80", "a b", "a@b", "a/b"])
def test_what_is_not_the_name_of_a_service_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name of a service"):
        DnsSource(DnsSettings(name, record="srv"))


def test_https_by_address_is_refused_with_what_would_be_right() -> None:
    with pytest.raises(ValueError, match=r"https needs a name to verify.*SRV"):
        DnsSource(DnsSettings("w:443"), WorkerTemplate(scheme="https"))


@pytest.mark.parametrize("path", ["base", "/a?b", "/a#b", "@evil", "/a\\b"])
def test_61_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        DnsSource(DnsSettings("w:80"), WorkerTemplate(path=path))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("127.0.0.1:5353", ("127.0.0.1", 5353)),
        ("::1", ("::1", 53)),
        ("[::1]:5353", ("::1", 5353)),
    ],
)
def test_a_nameservers_address(text: str, address: tuple[str, int]) -> None:
    assert parse_server_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "dns.local", "10.0.0.2:0", "10.0.0.2:x", "10.0.0.2:65536", "a@10.0.0.2", "1.2.3.4/"],
)
def test_what_is_no_nameservers_address(text: str) -> None:
    with pytest.raises(ValueError, match="not a nameserver"):
        DnsSource(DnsSettings("w:80", nameserver=text))
