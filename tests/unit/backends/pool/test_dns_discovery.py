"""Discovery by DNS, with a scripted resolver."""

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

from backends import background_call
from backends.background_call import BackgroundCall
from backends.http.interfaces import WorkerConfig, make_bearer_credentials
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
from tests.support.waiting import PATIENCE

SK_1 = make_bearer_credentials("sk-1")


class FakeResolver:
    """A resolver with scripted answers."""

    def __init__(self) -> None:
        self.answers: dict[str, DnsAnswer | Exception] = {}
        self.queries: list[str] = []

    async def query(self, name: str, record_type: RecordType) -> DnsAnswer:
        self.queries.append(f"{record_type} {name}")
        response = self.answers.get(f"{record_type} {name}", DnsAnswer(name_exists=False))
        if isinstance(response, Exception):
            raise response
        return response


def make_address_answer(*addresses: str, ttl: int = 30) -> DnsAnswer:
    return DnsAnswer(addresses=addresses, ttl=ttl)


def make_service_answer(*targets: ServiceTarget, ttl: int = 30) -> DnsAnswer:
    return DnsAnswer(targets=targets, ttl=ttl)


def make_address_source(zone: FakeResolver, **options: Any) -> DnsSource:
    return DnsSource(DnsSettings("w.local:8000", nameserver="127.0.0.1", **options), resolver=zone)


def get_urls(workers: Sequence[WorkerConfig]) -> list[str]:
    return [worker.url for worker in workers]


# --- addresses -----------------------------------------------------------------------------------


async def test_each_dns_address_becomes_a_worker_from_the_template() -> None:
    zone = FakeResolver()
    zone.answers = {
        "A w.local": make_address_answer("10.0.0.2", "10.0.0.1"),
        "AAAA w.local": make_address_answer("fd00::1"),
    }
    template = WorkerTemplate(path="/base", weight=2, max_concurrency=4, credentials=SK_1)
    source = DnsSource(
        DnsSettings("W.local.:8000", nameserver="127.0.0.1"), template, resolver=zone
    )

    workers = await source.list_workers()

    assert workers == [
        WorkerConfig("http://10.0.0.1:8000/base", 2, 4, SK_1),
        WorkerConfig("http://10.0.0.2:8000/base", 2, 4, SK_1),
        WorkerConfig("http://[fd00::1]:8000/base", 2, 4, SK_1),
    ]
    assert "sk-1" not in repr(template)


@pytest.mark.parametrize(("ttls", "pause"), [((30, 60), 10), ((60, 4), 4), ((0, 60), 1)])
async def test_refresh_interval_follows_the_dns_ttl(ttls: tuple[int, int], pause: float) -> None:
    zone = FakeResolver()
    zone.answers = {
        "A w.local": make_address_answer("10.0.0.2", ttl=ttls[0]),
        "AAAA w.local": make_address_answer("fd00::1", ttl=ttls[1]),
    }
    source = make_address_source(zone)

    await source.list_workers()

    assert source.interval == pause


async def test_failed_query_resets_the_refresh_interval() -> None:
    zone = FakeResolver()
    zone.answers = {"A w.local": make_address_answer("10.0.0.2", ttl=2)}
    source = make_address_source(zone)
    await source.list_workers()
    zone.answers = {"A w.local": DiscoveryError("down")}

    with pytest.raises(DiscoveryError, match="down"):
        await source.list_workers()

    assert source.interval == 10


async def test_address_family_that_always_fails_is_ignored() -> None:
    zone = FakeResolver()
    zone.answers = {
        "A w.local": make_address_answer("10.0.0.2"),
        "AAAA w.local": DiscoveryError("SERVFAIL"),
    }

    assert get_urls(await make_address_source(zone).list_workers()) == ["http://10.0.0.2:8000"]


async def test_discovery_fails_if_both_address_families_fail() -> None:
    zone = FakeResolver()
    zone.answers = dict.fromkeys(("A w.local", "AAAA w.local"), DiscoveryError("SERVFAIL"))

    with pytest.raises(DiscoveryError, match="SERVFAIL"):
        await make_address_source(zone).list_workers()


async def test_discovery_fails_if_a_working_address_family_fails() -> None:
    zone = FakeResolver()
    zone.answers = {
        "A w.local": make_address_answer("10.0.0.2"),
        "AAAA w.local": make_address_answer("fd00::1"),
    }
    source = make_address_source(zone)
    await source.list_workers()
    zone.answers["AAAA w.local"] = DiscoveryError("SERVFAIL")

    with pytest.raises(DiscoveryError, match="SERVFAIL"):
        await source.list_workers()

    zone.answers["AAAA w.local"] = DnsAnswer()
    assert get_urls(await source.list_workers()) == ["http://10.0.0.2:8000"]


@pytest.mark.fault(61)
@pytest.mark.parametrize(
    "answer",
    [
        DnsAnswer(),
        DnsAnswer(name_exists=False),
        make_address_answer("169.254.169.254"),
        make_address_answer("0.0.0.0", "224.0.0.1"),
    ],
)
async def test_name_with_only_forbidden_addresses_fails(
    answer: DnsAnswer,
) -> None:
    zone = FakeResolver()
    zone.answers = {
        "A w.local": answer,
        "AAAA w.local": make_address_answer("fe80::1", "ff02::1", "::", "::ffff:169.254.169.254"),
    }

    with pytest.raises(DiscoveryError, match=r"w\.local: DNS has no address"):
        await make_address_source(zone).list_workers()


@pytest.mark.fault(61)
async def test_forbidden_address_is_omitted() -> None:
    zone = FakeResolver()
    zone.answers = {"A w.local": make_address_answer("169.254.169.254", "10.0.0.1", "10.0.0.1")}

    assert get_urls(await make_address_source(zone).list_workers()) == ["http://10.0.0.1:8000"]


async def test_dns_query_timeout_fails() -> None:
    class Silent:
        async def query(self, name: str, record_type: RecordType) -> DnsAnswer:
            await asyncio.Event().wait()
            return DnsAnswer()

    settings = DnsSettings("w.local:8000", nameserver="127.0.0.1", timeout=0.01)

    with pytest.raises(DiscoveryError, match=r"no answer in 0\.01 s"):
        await DnsSource(settings, resolver=Silent()).list_workers()


# --- the system's resolver ------------------------------------------------------------------------


async def test_system_resolver_is_used_without_a_nameserver() -> None:
    calls: list[tuple[Any, ...]] = []

    def getaddrinfo(*args: Any, **options: Any) -> list[Any]:
        calls.append((*args, options))
        return [(2, 1, 6, "", ("10.0.0.7", 8000)), (10, 1, 6, "", ("fd00::1", 8000, 0, 0))]

    source = DnsSource(DnsSettings("w:8000", refresh_interval=7), getaddrinfo=getaddrinfo)

    assert get_urls(await source.list_workers()) == [
        "http://10.0.0.7:8000",
        "http://[fd00::1]:8000",
    ]
    assert calls == [("w", 8000, {"type": socket.SOCK_STREAM})]
    assert source.interval == 7


async def test_localhost_is_resolved_by_the_system_resolver() -> None:
    assert "http://127.0.0.1:8000" in get_urls(
        await DnsSource(DnsSettings("localhost:8000")).list_workers()
    )


@pytest.mark.parametrize("fault", [socket.gaierror(-2, "not known"), UnicodeError("label")])
async def test_system_resolver_error_fails(fault: Exception) -> None:
    def getaddrinfo(*args: Any, **options: Any) -> list[Any]:
        raise fault

    with pytest.raises(DiscoveryError, match="w: "):
        await DnsSource(DnsSettings("w:8000"), getaddrinfo=getaddrinfo).list_workers()


async def test_hanging_system_resolver_is_called_once() -> None:
    go, calls = threading.Event(), []

    def getaddrinfo(*args: Any, **options: Any) -> list[Any]:
        calls.append(args)
        go.wait(5)
        return [(2, 1, 6, "", ("10.0.0.7", 8000))]

    source = DnsSource(DnsSettings("w:8000", timeout=0.02), getaddrinfo=getaddrinfo)
    for _ in range(3):
        with pytest.raises(DiscoveryError, match="no answer"):
            await source.list_workers()

    go.set()

    assert get_urls(await _list_workers_with_retries(source)) == ["http://10.0.0.7:8000"]
    assert len(calls) == 1


async def _list_workers_with_retries(source: DnsSource) -> Sequence[WorkerConfig]:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await source.list_workers()
            except DiscoveryError:
                continue


def test_hanging_background_call_does_not_block_the_event_loop_shutdown() -> None:
    go, done, messages = threading.Event(), threading.Event(), list[str]()

    def call() -> str:
        go.wait(30)
        messages.append("done")
        done.set()
        return "late"

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await BackgroundCall(call).wait_result()

    asyncio.run(main())
    assert messages == []

    go.set()
    assert done.wait(30)
    assert messages == ["done"]


async def test_call_whose_thread_could_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system may have no more threads for a while."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    call = BackgroundCall(lambda: "found")
    with monkeypatch.context() as patch:
        patch.setattr(background_call, "start_new_thread", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await call.wait_result()

    async with asyncio.timeout(30):
        assert await call.wait_result() == "found"


async def test_event_loop_does_not_wait_until_the_thread_of_a_call_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a new thread may run much later."""
    waiting = list[int]()
    wait = threading.Condition.wait

    def record_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        waiting.append(threading.get_ident())
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", record_wait)
    assert await BackgroundCall(lambda: "found").wait_result() == "found"

    assert threading.get_ident() not in waiting


def test_dnspython_is_imported_only_with_a_nameserver() -> None:
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


# --- SRV records ----------------------------------------------------------------------------------

SERVICE = "_http._tcp.w.local"


def make_service_source(zone: FakeResolver, scheme: Any = "http") -> DnsSource:
    return DnsSource(
        DnsSettings(SERVICE, record="srv"), WorkerTemplate(scheme=scheme), resolver=zone
    )


async def test_srv_targets_use_the_additional_addresses() -> None:
    zone = FakeResolver()
    response = make_service_answer(
        ServiceTarget(0, 10, 8000, "a.w.local"), ServiceTarget(0, 30, 8001, "b.w.local")
    )
    additional = (
        HostAddresses("a.w.local", ("10.0.0.1",), 5),
        HostAddresses("x.w.local", ("10.0.0.9",), 1),
    )
    zone.answers = {
        f"SRV {SERVICE}": msgspec.structs.replace(response, additional=additional),
        "A b.w.local": make_address_answer("10.0.0.2", "10.0.0.3", ttl=7),
    }
    source = make_service_source(zone)

    workers = await source.list_workers()

    assert [(worker.url, worker.weight) for worker in workers] == [
        ("http://10.0.0.1:8000", 1),
        ("http://10.0.0.2:8001", 3),
        ("http://10.0.0.3:8001", 3),
    ]
    assert source.interval == 5
    assert "A a.w.local" not in zone.queries


async def test_only_resolvable_srv_targets_of_the_first_priority_are_used() -> None:
    zone = FakeResolver()
    response = make_service_answer(
        ServiceTarget(2, 1, 80, "c.w.local"),
        ServiceTarget(1, 0, 80, "a.w.local"),
        ServiceTarget(0, 1, 0, "b.w.local"),
        ServiceTarget(0, 1, 80, ""),
        ServiceTarget(1, 0, 80, "gone.w.local"),
        ServiceTarget(1, 0, 80, "a\\046b"),
    )
    zone.answers = {f"SRV {SERVICE}": response, "A a.w.local": make_address_answer("10.0.0.1")}

    workers = await make_service_source(zone).list_workers()

    assert [(worker.url, worker.weight) for worker in workers] == [("http://10.0.0.1:80", 1)]
    assert not any("\\" in query for query in zone.queries)


async def test_failed_srv_target_lookup_fails_the_discovery() -> None:
    zone = FakeResolver()
    zone.answers = {
        f"SRV {SERVICE}": make_service_answer(
            ServiceTarget(0, 1, 80, "a.w.local"), ServiceTarget(0, 1, 80, "b.w.local")
        ),
        "A a.w.local": make_address_answer("10.0.0.1"),
        "A b.w.local": DiscoveryError("SERVFAIL"),
    }

    with pytest.raises(DiscoveryError, match="SERVFAIL"):
        await make_service_source(zone).list_workers()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (DnsAnswer(name_exists=False), "no such name"),
        (DnsAnswer(), "no address"),
        (make_service_answer(ServiceTarget(0, 0, 0, "")), "no"),
    ],
)
async def test_srv_record_without_a_target_fails(answer: DnsAnswer, message: str) -> None:
    zone = FakeResolver()
    zone.answers = {f"SRV {SERVICE}": answer}

    with pytest.raises(DiscoveryError, match=message):
        await make_service_source(zone).list_workers()


@pytest.mark.fault(61)
async def test_https_srv_targets_outside_the_domain_are_ignored() -> None:
    zone = FakeResolver()
    targets = ("a.w.local", "w.local", "evil.org", "xw.local", "w.local.evil.org", "a\\046.w.local")
    zone.answers = {
        f"SRV {SERVICE}": make_service_answer(
            *(ServiceTarget(0, 1, 443, one) for one in targets), ttl=3
        )
    }
    source = make_service_source(zone, "https")

    workers = await source.list_workers()

    assert get_urls(workers) == ["https://a.w.local:443", "https://w.local:443"]
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
def test_dns_name_without_a_valid_port_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"such as workers\.local:8000"):
        DnsSource(DnsSettings(name))


@pytest.mark.parametrize(
    "name", ["", ".", "a..b", ".a", "a b", "a/b", "ü", "a" * 64, ".".join(["a" * 63] * 4), "a\n"]
)
def test_invalid_dns_name_is_recognized(name: str) -> None:
    assert not is_dns_name(name)


@pytest.mark.parametrize("name", ["", "_http._tcp.w:80", "a b", "a@b", "a/b"])
def test_invalid_srv_name_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="name of a service"):
        DnsSource(DnsSettings(name, record="srv"))


def test_https_with_address_records_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"https needs a name to verify.*SRV"):
        DnsSource(DnsSettings("w:443"), WorkerTemplate(scheme="https"))


@pytest.mark.fault(61)
@pytest.mark.parametrize("path", ["base", "/a?b", "/a#b", "@evil", "/a\\b"])
def test_invalid_worker_path_is_rejected(path: str) -> None:
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
def test_nameserver_address_is_parsed(text: str, address: tuple[str, int]) -> None:
    assert parse_server_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "dns.local", "10.0.0.2:0", "10.0.0.2:x", "10.0.0.2:65536", "a@10.0.0.2", "1.2.3.4/"],
)
def test_invalid_nameserver_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a nameserver"):
        DnsSource(DnsSettings("w:80", nameserver=text))
