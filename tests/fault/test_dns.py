"""DNS returns other workers, or fails (faults 15 and 16), with a real nameserver over UDP."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError, WorkerDiscovery
from backends.pool.dns_discovery import DnsSource
from backends.pool.dns_resolver import DnsAnswer, StubResolver
from backends.pool.settings import DnsSettings
from tests.fault.line_protocol import collect_events, encode_line, join_text, run_pool
from tests.fault.nameserver import Fault, StubNameserver, bind_same_port
from tests.support.fakes import CHUNKED, END, Reply, ScriptedWorker, chunk, chunked
from tests.support.waiting import wait_until

SERVICE = "_http._tcp.w.local"
FAULTS: Sequence[Fault] = ("silence", "garbage", "servfail", "empty", "other", "oversized")


class RecordedSleep:
    """Sleeps that return at once. ``requested`` are the durations."""

    def __init__(self) -> None:
        self.durations: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.durations.append(seconds)
        await asyncio.sleep(0.001)


class RecordedWorkerSets:
    def __init__(self) -> None:
        self.sets: list[list[str]] = []

    def replace(self, workers: Sequence[WorkerConfig]) -> None:
        self.sets.append(sorted(worker.url for worker in workers))


@asynccontextmanager
async def run_discovery(
    stub: StubNameserver, pauses: RecordedSleep, *, service: bool = False
) -> AsyncIterator[tuple[WorkerDiscovery, RecordedWorkerSets]]:
    resolver = StubResolver(stub.address, timeout=0.05)
    if service:
        settings = DnsSettings(SERVICE, record="srv", nameserver=stub.address)
    else:
        settings = DnsSettings("w.local:8000", nameserver=stub.address)
    source = DnsSource(settings, resolver=resolver)
    pool = RecordedWorkerSets()
    discovery = WorkerDiscovery("gpu", [], [source], pool.replace, sleep=pauses)
    await discovery.start()
    await wait_until(lambda: bool(pool.sets))
    try:
        yield discovery, pool
    finally:
        await discovery.aclose()


@pytest.fixture
async def stub() -> AsyncIterator[StubNameserver]:
    async with StubNameserver() as running:
        running.zone["A", "w.local"] = [(3, "127.0.0.1"), (3, "127.0.0.2")]
        running.zone["SRV", SERVICE] = [(3, (0, 1, 8000, "a.w.local"))]
        running.zone["A", "a.w.local"] = [(30, "127.0.0.1")]
        yield running


# --- 15 ------------------------------------------------------------------------------------------


@pytest.mark.fault(15)
async def test_new_address_becomes_a_worker_within_ttl_plus_one_second(
    stub: StubNameserver,
) -> None:
    pauses = RecordedSleep()
    async with run_discovery(stub, pauses) as (_, pool):
        assert pool.sets == [["http://127.0.0.1:8000", "http://127.0.0.2:8000"]]
        stub.zone["A", "w.local"] = [(3, "127.0.0.2"), (3, "127.0.0.3")]
        await wait_until(lambda: len(pool.sets) == 2)

    assert pool.sets[1] == ["http://127.0.0.2:8000", "http://127.0.0.3:8000"]
    assert max(pauses.durations) <= 3 + 1


@pytest.mark.fault(15)
async def test_new_srv_record_becomes_a_worker(stub: StubNameserver) -> None:
    pauses = RecordedSleep()
    async with run_discovery(stub, pauses, service=True) as (_, pool):
        stub.zone["A", "b.w.local"] = [(30, "127.0.0.7")]
        stub.zone["SRV", SERVICE].append((3, (0, 1, 8001, "b.w.local")))
        await wait_until(lambda: len(pool.sets) == 2)

    assert pool.sets == [
        ["http://127.0.0.1:8000"],
        ["http://127.0.0.1:8000", "http://127.0.0.7:8001"],
    ]
    assert max(pauses.durations) <= 3 + 1


@pytest.mark.fault(15)
async def test_dns_change_moves_requests_and_lets_old_streams_finish(
    stub: StubNameserver,
) -> None:
    first, second = bind_same_port(
        *((host, socket.SOCK_STREAM) for host in ("127.0.0.1", "127.0.0.2"))
    )
    gate = asyncio.Event()
    slow: Reply = [
        CHUNKED,
        chunk(encode_line("old ")),
        gate,
        chunk(encode_line("stream")),
        chunk(b"end\n"),
        END,
    ]
    port = first.getsockname()[1]
    stub.zone["A", "w.local"] = [(3, "127.0.0.1")]
    source = DnsSource(DnsSettings(f"w.local:{port}", nameserver=stub.address))
    async with (
        ScriptedWorker(slow, listener=first) as old,
        ScriptedWorker([chunked(encode_line("new"), b"end\n")], listener=second) as new,
        run_pool() as backend,
    ):
        discovery = WorkerDiscovery(
            "gpu", [], [source], backend.replace_workers, sleep=RecordedSleep()
        )
        await discovery.start()
        running = asyncio.get_running_loop().create_task(collect_events(backend))
        await old.wait_for_request()
        stub.zone["A", "w.local"] = [(3, "127.0.0.2")]
        await wait_until(lambda: [worker.url for worker in discovery.workers] == [new.url])

        answers = [join_text(await collect_events(backend)) for _ in range(3)]
        gate.set()

        assert join_text(await running) == "old stream"
        assert answers == ["new"] * 3
        assert (old.request_count, new.request_count) == (1, 3)

        await discovery.aclose()


@pytest.mark.fault(15)
async def test_dns_refresh_works_with_the_real_clock(stub: StubNameserver) -> None:
    stub.zone["A", "w.local"] = [(1, "127.0.0.1")]
    pool = RecordedWorkerSets()
    source = DnsSource(DnsSettings("w.local:8000", nameserver=stub.address))
    discovery = WorkerDiscovery("gpu", [], [source], pool.replace)
    await discovery.start()
    stub.zone["A", "w.local"] = [(1, "127.0.0.2")]

    await wait_until(lambda: len(pool.sets) == 2)

    assert pool.sets == [["http://127.0.0.1:8000"], ["http://127.0.0.2:8000"]]

    await discovery.aclose()


# --- 16 ------------------------------------------------------------------------------------------


@pytest.mark.fault(16)
@pytest.mark.parametrize("service", [False, True], ids=["addresses", "service"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_dns_failure_keeps_the_last_workers_and_is_counted(
    stub: StubNameserver, fault: Fault, *, service: bool
) -> None:
    async with run_discovery(stub, RecordedSleep(), service=service) as (discovery, pool):
        workers, before = list(discovery.workers), discovery.failures
        stub.fault = fault

        await wait_until(lambda: discovery.failures >= before + 2)

        assert list(discovery.workers) == workers
        assert len(pool.sets) == 1
        assert discovery.source_errors

        stub.fault = None
        for name in ("w.local", "a.w.local"):
            stub.zone["A", name] = [(3, "127.0.0.9")]
        await wait_until(lambda: len(pool.sets) == 2)

    assert pool.sets[1] == ["http://127.0.0.9:8000"]
    assert discovery.source_errors == []


@pytest.mark.fault(16)
async def test_unreachable_nameserver_does_not_delay_the_start(
    stub: StubNameserver,
) -> None:
    stub._transport.abort()
    pool = RecordedWorkerSets()
    source = DnsSource(DnsSettings("w.local:8000", nameserver=stub.address))
    discovery = WorkerDiscovery("gpu", [WorkerConfig("http://127.0.0.1:1")], [source], pool.replace)

    await discovery.start()

    assert discovery.failures == 1
    assert "cannot be queried" in discovery.source_errors[0]
    assert len(discovery.workers) == 1

    await discovery.aclose()


# --- DNS queries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("silence", "does not answer"),
        ("other", "does not answer"),
        ("garbage", "a malformed response"),
        ("servfail", "SERVFAIL"),
        ("oversized", "truncated even over TCP"),
    ],
)
async def test_dns_failure_names_its_cause(
    stub: StubNameserver, fault: Fault, message: str
) -> None:
    stub.fault = fault
    timeout = 0.05 if message == "does not answer" else 5.0

    with pytest.raises(DiscoveryError, match=f"A of w.local: .*{message}"):
        await StubResolver(stub.address, timeout=timeout).query("w.local", "A")

    assert stub.questions.count(("A", "w.local")) >= 2


async def test_stray_and_duplicate_dns_datagrams_are_ignored(stub: StubNameserver) -> None:
    stub.strays = True

    response = await StubResolver(stub.address).query("w.local", "A")

    assert response.addresses == ("127.0.0.1", "127.0.0.2")


async def test_truncated_dns_response_is_retried_over_tcp(stub: StubNameserver) -> None:
    many = [f"127.0.{n // 250}.{n % 250 + 1}" for n in range(600)]
    stub.zone["A", "w.local"] = [(30, one) for one in many]

    response = await StubResolver(stub.address).query("w.local", "A")

    assert list(response.addresses) == many
    assert stub.over_tcp == [("A", "w.local")]


async def test_dns_over_tcp_connection_failure_is_an_error(stub: StubNameserver) -> None:
    stub.room = 20
    await stub.hang_up()

    with pytest.raises(DiscoveryError, match="cannot be queried"):
        await StubResolver(stub.address).query("w.local", "A")


async def test_nameserver_without_edns_gets_a_query_without_edns(stub: StubNameserver) -> None:
    stub.extended = False

    response = await StubResolver(stub.address).query("w.local", "A")

    assert len(response.addresses) == 2

    size = bytes.fromhex("0000 2904d0 00000000 0000")  # OPT: a datagram may have 1232 bytes
    assert [question.endswith(size) for question in stub.messages] == [True, False]


async def test_nxdomain_response_is_not_retried(stub: StubNameserver) -> None:
    response = await StubResolver(stub.address).query("nobody.local", "A")

    assert response == DnsAnswer(name_exists=False)
    assert len(stub.questions) == 1


async def test_resolv_conf_nameservers_are_used_in_order(tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text("# nobody\nsearch local\nnameserver\nnameserver 127.0.0.1\nnameserver ::1\n")

    servers = StubResolver(resolv_conf=conf)._list_servers()

    assert servers == [("127.0.0.1", 53), ("::1", 53)]


@pytest.mark.parametrize("text", [None, "", "nameserver dns.local\n"])
async def test_missing_nameserver_configuration_is_an_error(
    tmp_path: Path, text: str | None
) -> None:
    conf = tmp_path / "resolv.conf"
    if text is not None:
        conf.write_text(text)

    with pytest.raises(DiscoveryError, match="no nameserver"):
        await StubResolver(resolv_conf=conf).query("w.local", "A")
