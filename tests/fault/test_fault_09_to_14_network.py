"""A bad line to a worker (9 to 14): packets that vanish, are refused, come late, or come slowly."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import pytest

from backends.http import client as http_client
from tests.conftest import Running, Serve
from tests.fakes import RESET
from tests.fault.elsewhere import Wire
from tests.fault.fronts import CLIENTS, TIMEOUTS, ask, before, both, good, raw, reports, until
from tests.fault.hearing import Hearing, all_heard, all_over
from tests.fault.processes import WorkerProcess

CHAT = CLIENTS[0]
SELDOM = {"interval": "60s"}
"""Probes do not tell what requests are to find out."""


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A line to another network, which is good so far."""
    with Wire() as one:
        yield one


async def ask_all(front: Running, *, stream: bool) -> list[int]:
    """One request of every dialect, at once; the statuses of the answers that are complete."""
    hearings = [Hearing(front, client, stream=stream) for client in CLIENTS]
    await all_over(hearings, within=10.0)
    return [one.status for one in hearings if one.words == list(range(5))]


# ── 9: nobody answers a SYN ─────────────────────────────────────────────────────────────────────


@both
async def test_fault_09_calls_that_vanish_are_given_up_and_made_elsewhere(
    serve: Serve, wire: Wire, *, stream: bool
) -> None:
    limits = TIMEOUTS | {"connect": "300ms"}
    async with wire.worker(words=5) as far, WorkerProcess(words=5) as near:
        wire.fate = wire.lose_calls
        front = await before(serve, far.url, near.url, timeouts=limits, health=SELDOM)
        statuses = await ask_all(front, stream=stream)

        assert statuses == [200] * len(CLIENTS)
        assert wire.lost > 0
        far_now, near_now = reports(front)
        assert (far_now.error, far_now.in_flight) == ("connect", 0)
        assert far_now.state != "up"
        assert (near_now.state, near_now.error, near_now.in_flight) == ("up", "", 0)


@contextmanager
def full() -> Iterator[str]:
    """An address where the kernel drops each SYN: whoever listens takes nobody in."""
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


async def test_fault_09_nor_is_a_worker_that_takes_nobody_in_waited_for(serve: Serve) -> None:
    limits = TIMEOUTS | {"connect": "300ms"}
    with full() as url:
        async with WorkerProcess(words=5) as near:
            front = await before(serve, url, near.url, timeouts=limits, health=SELDOM)
            statuses = await ask_all(front, stream=True)

            assert statuses == [200] * len(CLIENTS)
            assert reports(front)[0].error == "connect"
            assert reports(front)[0].state != "up"


# ── 10: RST ─────────────────────────────────────────────────────────────────────────────────────


@both
async def test_fault_10_what_is_rejected_is_asked_elsewhere_at_once(
    serve: Serve, wire: Wire, *, stream: bool
) -> None:
    """Both on connections that are kept, and on new ones. A long time limit is not waited for."""
    limits = TIMEOUTS | {"connect": "60s", "first_token": "60s", "total": "60s"}
    async with wire.worker(words=5) as far, WorkerProcess(words=5) as near:
        front = await before(serve, far.url, near.url, timeouts=limits, health=SELDOM)
        assert await ask_all(front, stream=stream) == [200] * len(CLIENTS)
        assert [one.state for one in reports(front)] == ["up", "up"]
        wire.fate = wire.reset
        statuses = await ask_all(front, stream=stream)

        assert statuses == [200] * len(CLIENTS)
        far_now, near_now = reports(front)
        assert (far_now.error, far_now.in_flight) == ("connect", 0)
        assert far_now.state != "up"
        assert (near_now.state, near_now.in_flight) == ("up", 0)


@both
async def test_fault_10_a_worker_that_resets_is_replaced_at_once(
    serve: Serve, *, stream: bool
) -> None:
    well = good(stream=stream)
    async with raw(well, [RESET]) as bad, raw(well) as other:
        front = await before(serve, bad, other, health=SELDOM)
        answers = [await ask(front, CHAT, stream=stream) for _ in range(4)]

    assert {answer.status_code for answer in answers} == {200}
    assert all(b"Hello" in answer.content for answer in answers)
    assert bad.asked == 3, "one more than was asked: a kept connection may have been stale"
    assert reports(front)[0].error == "disconnect"


# ── 11: half open ───────────────────────────────────────────────────────────────────────────────


async def test_fault_11_a_line_that_breaks_mid_stream_is_told_and_its_connections_go(
    serve: Serve, wire: Wire
) -> None:
    limits = TIMEOUTS | {"connect": "300ms", "idle": "500ms"}
    health = {"interval": "200ms", "timeout": "400ms", "fall": 2, "rise": 1}
    patient = {"consecutive_failures": 100, "min_requests": 100}
    async with wire.worker(words=50, pace=0.03) as far:
        front = await before(serve, far.url, timeouts=limits, health=health, breaker=patient)
        hearings = [Hearing(front, client) for client in CLIENTS]
        await all_heard(hearings, 4)
        wire.fate = wire.lose_all
        await all_over(hearings, within=5.0)

        for one in hearings:
            assert one.is_told, (one.client.name, bytes(one.data))
            assert 5 <= len(one.words) < 50
        heard = sorted(len(one.words) for one in hearings)
        assert sorted(record.tokens for record in front.records) == heard
        assert {record.outcome for record in front.records} == {"truncated"}
        await until(lambda: reports(front)[0].state == "out")
        assert reports(front)[0].in_flight == 0
        await until(lambda: not connections_to(wire))

        wire.fate = wire.carry
        await until(lambda: reports(front)[0].state == "up")


def connections_to(wire: Wire) -> list[str]:
    """The TCP connections of this network to the other that are still open, by the kernel."""
    number = socket.inet_aton(wire.there)[::-1].hex().upper()
    with open("/proc/net/tcp", encoding="ascii") as table:  # noqa: PTH123 - no file
        rows = [line.split() for line in table.readlines()[1:]]
    return [row[2] for row in rows if row[2].startswith(number) and row[3] == "01"]


async def test_fault_11_nobody_waits_long_for_a_whole_answer_over_a_broken_line(
    serve: Serve, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is to come before its end; only the kernel's own probes find out, and it is retried.

    Here they come sooner than they otherwise would.
    """
    monkeypatch.setattr(http_client, "_TCP_KEEPALIVE", dict.fromkeys(http_client._TCP_KEEPALIVE, 1))
    async with wire.worker(first=60.0) as far, WorkerProcess() as near:
        limits = TIMEOUTS | {"total": "60s"}
        front = await before(serve, far.url, near.url, timeouts=limits, health=SELDOM)
        asked = asyncio.get_running_loop().create_task(ask(front, CHAT, stream=False))
        await until(lambda: reports(front)[0].in_flight == 1)
        await asyncio.sleep(0.1)
        wire.fate = wire.lose_all
        async with asyncio.timeout(10):
            answer = await asked

    assert answer.status_code == 200
    assert reports(front)[0].error in {"disconnect", "connect"}, (
        "it may have been called again first"
    )
    assert reports(front)[0].in_flight == 0


# ── 12: loss ────────────────────────────────────────────────────────────────────────────────────


async def test_fault_12_a_line_that_loses_packets_costs_no_client_an_error(
    serve: Serve, wire: Wire
) -> None:
    """Calls that are lost are repeated by the kernel after 1 s and 3 s: there is time for that."""
    limits = TIMEOUTS | {"connect": "5s", "first_token": "10s", "idle": "10s", "total": "30s"}
    async with (
        wire.worker(words=20, pace=0.01) as far,
        wire.worker(port=8001, words=20, pace=0.01) as other,
    ):
        front = await before(serve, far.url, other.url, timeouts=limits, health=SELDOM)
        wire.fate = wire.lose_some(0.05)
        hearings = [
            Hearing(front, client, stream=stream)
            for client, stream, _ in product(CLIENTS, (True, False), range(3))
        ]
        await all_over(hearings, within=30.0)

    assert wire.lost >= 10
    for one in hearings:
        assert one.status == 200
        assert one.words == list(range(20)), one.client.name
    assert {record.outcome for record in front.records} == {"ok"}
    assert [(one.state, one.in_flight) for one in reports(front)] == [("up", 0)] * 2


# ── 13: latency ─────────────────────────────────────────────────────────────────────────────────


async def test_fault_13_requests_go_to_the_worker_that_is_near(
    serve: Serve, wire: Wire, tmp_path: Path
) -> None:
    """200 ms there and back, a half more or less, against none: 80 requests, four at a time."""
    log = tmp_path / "log"
    async with wire.worker(log=log) as far, WorkerProcess() as near:
        wire.fate = wire.delay(0.05, 0.15)
        front = await before(serve, far.url, near.url, policy="two_choices", health=SELDOM)
        places = asyncio.Semaphore(4)

        async def one() -> list[int]:
            async with places:
                hearing = Hearing(front, CHAT)
                await hearing.task
                return hearing.words

        answers = await asyncio.gather(*(one() for _ in range(80)))
        far_now, near_now = reports(front)

    assert answers == [list(range(5))] * 80
    assert far_now.latency is not None
    assert near_now.latency is not None
    assert near_now.latency < far_now.latency
    assert 0 < log.read_bytes().count(b"asked") < 16, "a fifth of all at most"


# ── 14: a narrow line ───────────────────────────────────────────────────────────────────────────

TWO_POOLS = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
limits: {{drain_timeout: 1s}}
backends:
  near: {{protocol: openai, workers: ["{near}"]}}
  far: {{protocol: openai, workers: ["{far}"]}}
models: {{near: {{backend: near}}, far: {{backend: far}}}}
"""


async def gaps(front: Running) -> list[float]:
    """Seconds between the words of three streams of the near worker."""
    hearings = [Hearing(front, CHAT, "near") for _ in range(3)]
    await all_over(hearings, within=10.0)
    assert all(one.is_complete and one.words == list(range(40)) for one in hearings)
    return [later - sooner for one in hearings for sooner, later in pairwise(one.times)]


async def test_fault_14_a_worker_at_1_mbit_a_second_holds_up_nobody_elses_stream(
    serve: Serve, wire: Wire, record_property: Callable[[str, object], None]
) -> None:
    """Streams of another worker come to their end while the slow ones are still at it."""
    async with wire.worker(words=60, size=2000) as far, WorkerProcess(words=40, pace=0.01) as near:
        front = await serve(TWO_POOLS.format(near=near.url, far=far.url))
        alone = await gaps(front)
        wire.rate = 125_000.0
        slow = [Hearing(front, client, "far") for client in CLIENTS[:2]]
        await all_heard(slow, 0)
        beside = await gaps(front)
        unfinished = [one for one in slow if not one.task.done()]
        await all_over(slow, within=20.0)

    record_property("median milliseconds between words, alone", round(1000 * median(alone), 2))
    record_property("median milliseconds between words, beside", round(1000 * median(beside), 2))
    assert len(unfinished) == len(slow)
    for one in slow:
        assert one.is_complete
        assert one.words == list(range(60))
