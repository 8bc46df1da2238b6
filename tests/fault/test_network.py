"""A faulty network to a worker (9 to 14): packets are lost, rejected, delayed or slow."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import pytest

from backends.http import client as http_client
from tests.conftest import RunningGateway, Serve
from tests.fault.network_namespace import NetworkLink
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import (
    CLIENTS,
    TIMEOUTS,
    build_good_reply,
    create_raw_worker,
    get_worker_reports,
    send_request,
    serve_gateway,
    stream_or_unary,
)
from tests.fault.streaming_request import StreamingRequest, wait_for_end, wait_for_word
from tests.support.fakes import RESET
from tests.support.waiting import PATIENCE, wait_until

CHAT = CLIENTS[0]
RARE_HEALTH_CHECKS = {"interval": "60s"}
"""Requests must detect the fault, not probes."""


@pytest.fixture
async def network_link() -> AsyncIterator[NetworkLink]:
    """A link to another network, without faults at first."""
    with NetworkLink() as one:
        yield one


async def send_to_all_protocols(gateway: RunningGateway, *, stream: bool) -> list[int]:
    """Send one request of every protocol at once; return the statuses of complete responses."""
    hearings = [StreamingRequest(gateway, client, stream=stream) for client in CLIENTS]
    await wait_for_end(hearings)
    return [one.status for one in hearings if one.words == list(range(5))]


# ── 9: SYNs are lost ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(9)
@stream_or_unary
async def test_dropped_connection_attempts_time_out_and_are_retried_elsewhere(
    serve: Serve, network_link: NetworkLink, *, stream: bool
) -> None:
    limits = TIMEOUTS | {"connect": "300ms"}
    async with network_link.worker(words=5) as far, WorkerProcess(words=5) as near:
        network_link.get_delay = network_link.lose_calls
        gateway = await serve_gateway(
            serve, far.url, near.url, timeouts=limits, health=RARE_HEALTH_CHECKS
        )
        statuses = await send_to_all_protocols(gateway, stream=stream)

        assert statuses == [200] * len(CLIENTS)
        assert network_link.lost > 0

        far_now, near_now = get_worker_reports(gateway)
        assert (far_now.error, far_now.in_flight) == ("connect", 0)
        assert far_now.state != "up"
        assert (near_now.state, near_now.error, near_now.in_flight) == ("up", "", 0)


@contextmanager
def run_full_backlog() -> Iterator[str]:
    """A listener whose backlog is full, so that the kernel drops each SYN."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        for _ in range(3):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            waiting.append(one)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for one in waiting:
                one.close()


@pytest.mark.fault(9)
async def test_full_accept_backlog_times_out_and_is_retried_elsewhere(
    serve: Serve,
) -> None:
    limits = TIMEOUTS | {"connect": "300ms"}
    with run_full_backlog() as url:
        async with WorkerProcess(words=5) as near:
            gateway = await serve_gateway(
                serve, url, near.url, timeouts=limits, health=RARE_HEALTH_CHECKS
            )
            statuses = await send_to_all_protocols(gateway, stream=True)

            assert statuses == [200] * len(CLIENTS)
            assert get_worker_reports(gateway)[0].error == "connect"
            assert get_worker_reports(gateway)[0].state != "up"


# ── 10: RST ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(10)
@stream_or_unary
async def test_rejected_connections_are_retried_elsewhere_at_once(
    serve: Serve, network_link: NetworkLink, *, stream: bool
) -> None:
    """This holds for kept and for new connections, without waiting for a timeout."""
    limits = TIMEOUTS | {"connect": "60s", "first_token": "60s", "total": "60s"}
    async with network_link.worker(words=5) as far, WorkerProcess(words=5) as near:
        gateway = await serve_gateway(
            serve, far.url, near.url, timeouts=limits, health=RARE_HEALTH_CHECKS
        )
        assert await send_to_all_protocols(gateway, stream=stream) == [200] * len(CLIENTS)
        assert [one.state for one in get_worker_reports(gateway)] == ["up", "up"]

        network_link.get_delay = network_link.reset
        statuses = await send_to_all_protocols(gateway, stream=stream)

        assert statuses == [200] * len(CLIENTS)

        far_now, near_now = get_worker_reports(gateway)
        assert (far_now.error, far_now.in_flight) == ("connect", 0)
        assert far_now.state != "up"
        assert (near_now.state, near_now.in_flight) == ("up", 0)


@pytest.mark.fault(10)
@stream_or_unary
async def test_connection_reset_is_retried_on_another_worker_at_once(
    serve: Serve, *, stream: bool
) -> None:
    well = build_good_reply(stream=stream)
    async with create_raw_worker(well, [RESET]) as bad, create_raw_worker(well) as other:
        gateway = await serve_gateway(serve, bad, other, health=RARE_HEALTH_CHECKS)
        answers = [await send_request(gateway, CHAT, stream=stream) for _ in range(4)]

    assert {answer.status_code for answer in answers} == {200}
    assert all(b"Hello" in answer.content for answer in answers)
    assert bad.request_count == 3, "one more than requested: a kept connection may have been stale"
    assert get_worker_reports(gateway)[0].error == "disconnect"


# ── 11: half-open connections ─────────────────────────────────────────────────────────────────────


@pytest.mark.fault(11)
async def test_network_loss_mid_stream_ends_streams_and_closes_connections(
    serve: Serve, network_link: NetworkLink
) -> None:
    limits = TIMEOUTS | {"idle": "2s"}
    health = {"interval": "200ms", "timeout": "2s", "fall": 2, "rise": 1}
    patient = {"consecutive_failures": 100, "min_requests": 100}
    async with network_link.worker(words=500, pace=0.03) as far:
        gateway = await serve_gateway(
            serve, far.url, timeouts=limits, health=health, breaker=patient
        )
        hearings = [StreamingRequest(gateway, client) for client in CLIENTS]
        await wait_for_word(hearings, 4)
        network_link.get_delay = network_link.lose_all
        await wait_for_end(hearings)

        for one in hearings:
            assert one.has_error, (one.client.name, bytes(one.data))
            assert 5 <= len(one.words) < 500

        word_counts = sorted(len(one.words) for one in hearings)
        assert sorted(record.tokens for record in gateway.records) == word_counts
        assert {record.outcome for record in gateway.records} == {"truncated"}

        await wait_until(lambda: get_worker_reports(gateway)[0].state == "out")
        assert get_worker_reports(gateway)[0].in_flight == 0

        await wait_until(lambda: not list_connections(network_link))

        network_link.get_delay = network_link.carry
        await wait_until(lambda: get_worker_reports(gateway)[0].state == "up")


def list_connections(network_link: NetworkLink) -> list[str]:
    """Return the open TCP connections to the other network, as the kernel lists them."""
    number = socket.inet_aton(network_link.there)[::-1].hex().upper()
    with open("/proc/net/tcp", encoding="ascii") as table:  # noqa: PTH123 - no file
        rows = [line.split() for line in table.readlines()[1:]]
    return [row[2] for row in rows if row[2].startswith(number) and row[3] == "01"]


@pytest.mark.fault(11)
async def test_tcp_keepalive_detects_network_loss_for_unary_requests(
    serve: Serve, network_link: NetworkLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte is expected before the end, so only keep-alive probes notice the loss.

    The request is retried. The probes are more frequent here than by default.
    """
    monkeypatch.setattr(http_client, "_TCP_KEEPALIVE", dict.fromkeys(http_client._TCP_KEEPALIVE, 1))
    async with network_link.worker(first=60.0) as far, WorkerProcess() as near:
        limits = TIMEOUTS | {"total": "60s"}
        gateway = await serve_gateway(
            serve, far.url, near.url, timeouts=limits, health=RARE_HEALTH_CHECKS
        )
        task = asyncio.get_running_loop().create_task(send_request(gateway, CHAT, stream=False))
        await wait_until(lambda: get_worker_reports(gateway)[0].in_flight == 1)
        await asyncio.sleep(0.1)
        network_link.get_delay = network_link.lose_all
        async with asyncio.timeout(PATIENCE):
            response = await task

    assert response.status_code == 200
    assert get_worker_reports(gateway)[0].error in {"disconnect", "connect"}, (
        "it may have been called again first"
    )
    assert get_worker_reports(gateway)[0].in_flight == 0


# ── 12: loss ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(12)
async def test_packet_loss_causes_no_client_errors(serve: Serve, network_link: NetworkLink) -> None:
    """The kernel repeats lost SYNs after 1 s and 3 s; the timeout allows for it."""
    limits = TIMEOUTS | {"connect": "5s", "first_token": "10s", "idle": "10s", "total": "30s"}
    async with (
        network_link.worker(words=20, pace=0.01) as far,
        network_link.worker(port=8001, words=20, pace=0.01) as other,
    ):
        gateway = await serve_gateway(
            serve, far.url, other.url, timeouts=limits, health=RARE_HEALTH_CHECKS
        )
        network_link.get_delay = network_link.lose_some(0.05)
        hearings = [
            StreamingRequest(gateway, client, stream=stream)
            for client, stream, _ in product(CLIENTS, (True, False), range(3))
        ]
        await wait_for_end(hearings)

    assert network_link.lost >= 10
    for one in hearings:
        assert one.status == 200
        assert one.words == list(range(20)), one.client.name
    assert {record.outcome for record in gateway.records} == {"ok"}
    assert [(one.state, one.in_flight) for one in get_worker_reports(gateway)] == [("up", 0)] * 2


# ── 13: latency ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(13)
async def test_load_balancing_prefers_the_worker_with_low_latency(
    serve: Serve, network_link: NetworkLink, tmp_path: Path
) -> None:
    """One worker has a round trip of 200 ms ± 50 %, the other none: 80 requests, four at a time."""
    log = tmp_path / "log"
    async with network_link.worker(log=log) as far, WorkerProcess() as near:
        network_link.get_delay = network_link.delay(0.05, 0.15)
        gateway = await serve_gateway(
            serve, far.url, near.url, policy="two_choices", health=RARE_HEALTH_CHECKS
        )
        places = asyncio.Semaphore(4)

        async def one() -> list[int]:
            async with places:
                hearing = StreamingRequest(gateway, CHAT)
                await hearing.task
                return hearing.words

        answers = await asyncio.gather(*(one() for _ in range(80)))
        far_now, near_now = get_worker_reports(gateway)

    assert answers == [list(range(5))] * 80
    assert far_now.latency is not None
    assert near_now.latency is not None
    assert near_now.latency < far_now.latency
    assert 0 < log.read_bytes().count(b"received") < 16, "at most a fifth"


# ── 14: low bandwidth ─────────────────────────────────────────────────────────────────────────────

TWO_POOLS = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
limits: {{drain_timeout: 1s}}
backends:
  near: {{protocol: openai, workers: ["{near}"]}}
  far: {{protocol: openai, workers: ["{far}"]}}
models: {{near: {{backend: near}}, far: {{backend: far}}}}
"""


async def measure_gaps(gateway: RunningGateway) -> list[float]:
    """Return the seconds between the words of three streams of the near worker."""
    hearings = [StreamingRequest(gateway, CHAT, "near") for _ in range(3)]
    await wait_for_end(hearings)
    assert all(one.is_complete and one.words == list(range(40)) for one in hearings)
    return [later - sooner for one in hearings for sooner, later in pairwise(one.times)]


@pytest.mark.fault(14)
async def test_slow_worker_does_not_delay_streams_of_other_workers(
    serve: Serve, network_link: NetworkLink, record_property: Callable[[str, object], None]
) -> None:
    """Streams of another worker finish while the slow ones still run."""
    async with (
        network_link.worker(words=60, size=2000) as far,
        WorkerProcess(words=40, pace=0.01) as near,
    ):
        gateway = await serve(TWO_POOLS.format(near=near.url, far=far.url))
        alone = await measure_gaps(gateway)
        network_link.rate = 125_000.0
        slow = [StreamingRequest(gateway, client, "far") for client in CLIENTS[:2]]
        await wait_for_word(slow, 0)
        other_gaps = await measure_gaps(gateway)
        unfinished = [one for one in slow if not one.task.done()]
        await wait_for_end(slow)

    record_property("median milliseconds between words, alone", round(1000 * median(alone), 2))
    record_property(
        "median milliseconds between words, beside", round(1000 * median(other_gaps), 2)
    )

    assert len(unfinished) == len(slow)
    for one in slow:
        assert one.is_complete
        assert one.words == list(range(60))
