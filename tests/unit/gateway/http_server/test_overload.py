"""Limits of connections and bodies: what is counted, rejected and evicted."""

import asyncio
import logging

import pytest
from msgspec.structs import replace

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.overload import ConnectionTracker, is_body_overdue
from tests.support.waiting import PATIENCE

LIMITS = ServerLimitsConfig(connections=4)


class FakeConnection:
    def __init__(self, peer: str = "192.0.2.1", rate: float | None = None) -> None:
        self.peer = peer
        self.rate = rate
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def get_rate(self) -> float | None:
        return self.rate


def admit_many(tracker: ConnectionTracker, *peers: str) -> list[bool]:
    return [tracker.admit(FakeConnection(peer)) for peer in peers]


async def test_one_address_may_use_half_of_the_connections_by_default() -> None:
    tracker = ConnectionTracker(LIMITS)
    assert admit_many(tracker, "192.0.2.1", "192.0.2.1", "192.0.2.1") == [True, True, False]
    assert admit_many(tracker, "192.0.2.2") == [True]
    assert tracker.refused_by_reason == {"address": 1}


async def test_default_limit_per_address_exempts_loopback_and_unix_sockets() -> None:
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1", ""):
        assert admit_many(ConnectionTracker(LIMITS), *[peer] * 4) == [True] * 4
        stated = ConnectionTracker(replace(LIMITS, connections_per_address=1))
        assert admit_many(stated, peer, peer) == [True, False]


async def test_addresses_of_one_ipv6_network_share_a_limit() -> None:
    tracker = ConnectionTracker(replace(LIMITS, connections_per_address=1))
    assert admit_many(tracker, "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1") == [
        True,
        False,
        True,
    ]

    mapped = ConnectionTracker(replace(LIMITS, connections_per_address=1))
    assert admit_many(mapped, "::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.2") == [
        True,
        False,
        True,
    ]


async def test_closed_connection_is_no_longer_counted() -> None:
    tracker = ConnectionTracker(replace(LIMITS, connections_per_address=1))
    connection = FakeConnection()
    assert tracker.admit(connection)

    tracker.release(connection)
    assert admit_many(tracker, connection.peer) == [True]


async def test_longest_idle_connection_is_evicted_before_one_with_a_body() -> None:
    tracker = ConnectionTracker(replace(LIMITS, connections=2))
    idle, receiving = FakeConnection("127.0.0.1"), FakeConnection("127.0.0.1", rate=1.0)
    for one in (receiving, idle):
        tracker.admit(one)
    del tracker.idle[receiving]
    tracker.waiting[receiving] = None

    assert tracker.admit(FakeConnection("127.0.0.1"))
    assert (idle.is_aborted, receiving.is_aborted) == (True, False)
    assert tracker.refused_by_reason == {"idle_evicted": 1}


async def test_slowest_body_is_evicted_if_no_connection_is_idle() -> None:
    tracker = ConnectionTracker(replace(LIMITS, connections=3))
    fast, slow, new = [FakeConnection("127.0.0.1", rate) for rate in (1e6, 2.0, None)]

    for one in (fast, slow, new):
        tracker.admit(one)
        del tracker.idle[one]
        tracker.waiting[one] = None

    assert tracker.admit(FakeConnection("127.0.0.1"))
    assert [one.is_aborted for one in (fast, slow, new)] == [False, True, False]
    assert tracker.refused_by_reason == {"slow_evicted": 1}


async def test_connection_is_rejected_if_none_can_be_evicted() -> None:
    tracker = ConnectionTracker(replace(LIMITS, connections=1))
    busy = FakeConnection()
    tracker.admit(busy)
    del tracker.idle[busy]

    assert not tracker.admit(FakeConnection("192.0.2.2"))
    assert tracker.refused_by_reason == {"connections": 1}


async def test_rejected_connections_are_logged_once_per_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http_server.overload._LOG_INTERVAL", 0.05)
    tracker = ConnectionTracker(replace(LIMITS, connections_per_address=1))
    with caplog.at_level(logging.WARNING, "interlingua"):
        admit_many(tracker, *["192.0.2.1"] * 101)
        tracker.count_refused("tls_handshake")

        assert caplog.messages == []

        async with asyncio.timeout(PATIENCE):
            while not caplog.messages:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
    [line] = caplog.messages

    assert line.endswith("address 100, tls_handshake 1")


def test_request_body_has_a_total_timeout_and_a_minimum_rate() -> None:
    limits = ServerLimitsConfig(body_total_timeout=300, min_body_rate=500)
    assert not is_body_overdue(limits, 19, 0)
    assert is_body_overdue(limits, 21, 0)
    assert not is_body_overdue(limits, 21, 1000)
    assert is_body_overdue(limits, 23, 1000)
    assert not is_body_overdue(limits, 299, 1 << 30)
    assert is_body_overdue(limits, 301, 1 << 30)
