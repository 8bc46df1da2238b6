"""Failed keys are throttled by address, without effect on others, and logged in summary."""

import asyncio
import hashlib
import logging

import pytest

from gateway.auth import failed_keys
from gateway.auth.failed_keys import FailedKeyThrottle
from protocols.core.errors import ClientError, RateLimitExceeded, Unauthorized
from tests.conftest import Serve
from tests.support.fakes import FakeClock

ERROR = Unauthorized("the API key is not known", missing=False)


def count_failures(throttle: FailedKeyThrottle, address: str, count: int) -> list[bool]:
    """Return which of the failures are throttled."""
    answers = [throttle.count_failure(address, ERROR)[0] for _ in range(count)]
    assert all(answer is ERROR or isinstance(answer, RateLimitExceeded) for answer in answers)
    return [answer is not ERROR for answer in answers]


async def test_failures_after_the_first_hundred_are_throttled_for_a_while() -> None:
    clock = FakeClock()
    throttle = FailedKeyThrottle(clock)

    assert count_failures(throttle, "10.0.0.1", 150) == [False] * 100 + [True] * 50

    clock.now += 1.0
    assert count_failures(throttle, "10.0.0.1", 20) == [False] * 10 + [True] * 10

    clock.now += 60.0
    assert not any(count_failures(throttle, "10.0.0.1", 100))


async def test_throttled_failure_has_retry_after() -> None:
    throttle = FailedKeyThrottle(FakeClock())
    count_failures(throttle, "10.0.0.1", 100)

    response, is_logged = throttle.count_failure("10.0.0.1", ERROR)

    assert not is_logged
    assert isinstance(response, RateLimitExceeded)
    assert response.retry_after == 1.0


async def test_networks_are_throttled_on_their_own() -> None:
    throttle = FailedKeyThrottle(FakeClock())
    count_failures(throttle, "2001:db8::1", 100)

    assert count_failures(throttle, "2001:db8::2", 1) == [True]
    assert count_failures(throttle, "2001:db8:0:1::1", 1) == [False]
    assert count_failures(throttle, "10.0.0.1", 1) == [False]
    assert count_failures(throttle, "::ffff:10.0.0.1", 100) == [False] * 99 + [True]


async def test_number_of_networks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_keys, "_MAX_NETWORKS", 2)
    throttle = FailedKeyThrottle(FakeClock())

    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.3"):
        count_failures(throttle, address, 60)

    assert len(throttle._networks) == 2
    assert count_failures(throttle, "10.0.0.1", 1) == [True]


async def test_failures_of_many_networks_have_few_lines_and_are_answered_all_the_same() -> None:
    clock = FakeClock()
    throttle = FailedKeyThrottle(clock)

    def fail_from(networks: int) -> list[bool]:
        answers = [throttle.count_failure(f"2001:db8:{i:x}::1", ERROR) for i in range(networks)]
        assert all(answer is ERROR for answer, _ in answers)
        return [is_logged for _, is_logged in answers]

    assert fail_from(5000) == [True] * 1000 + [False] * 4000

    clock.now += 1.0
    assert fail_from(200).count(True) == 100


async def test_one_line_tells_how_many_were_throttled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failed_keys, "_LOG_INTERVAL", 0.01)
    throttle = FailedKeyThrottle(FakeClock())

    with caplog.at_level(logging.WARNING, "interlingua"):
        count_failures(throttle, "10.0.0.1", 130)
        await asyncio.sleep(0.05)
        count_failures(throttle, "10.0.0.1", 1)
        await asyncio.sleep(0.05)

    assert [record.getMessage() for record in caplog.records] == [
        "30 requests without a valid API key have no line of their own",
        "1 requests without a valid API key have no line of their own",
    ]


async def test_wrong_keys_get_429_and_valid_ones_of_the_same_address_are_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_keys, "_RATE", 0.001)  # however long the requests take
    digest = hashlib.sha256(b"sk-1").hexdigest()
    gateway = await serve(f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{e: {{kind: echo, script: [noon]}}}}
models: {{chat: {{backend: e}}}}
keys: [{{name: k, sha256: "{digest}"}}]
""")

    async def ask(key: str) -> int:
        response = await gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        if response.status_code == 429:
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["message"].startswith(
                "too many requests without a valid"
            )
        return response.status_code

    statuses = [await ask(f"wrong-{number}") for number in range(110)]

    assert statuses[:100] == [401] * 100
    assert 429 in statuses[100:]
    assert await ask("sk-1") == 200

    throttled = [record.is_throttled for record in gateway.records]
    assert throttled.count(True) == statuses.count(429)


async def test_spray_of_ipv6_addresses_is_throttled_by_network_in_a_bounded_table(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sockets, from behind a proxy: 150 addresses of one /64, then one of each of 150."""
    monkeypatch.setattr(failed_keys, "_RATE", 0.001)
    monkeypatch.setattr(failed_keys, "_MAX_NETWORKS", 100)
    tables = list[FailedKeyThrottle]()
    count_failure = FailedKeyThrottle.count_failure

    def note(
        self: FailedKeyThrottle, address: str, error: Unauthorized
    ) -> tuple[ClientError, bool]:
        tables.append(self)
        return count_failure(self, address, error)

    monkeypatch.setattr(FailedKeyThrottle, "count_failure", note)
    digest = hashlib.sha256(b"sk-1").hexdigest()
    gateway = await serve(f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai], trusted_proxies: ["127.0.0.0/8"]}}]
backends: {{e: {{kind: echo, script: [noon]}}}}
models: {{chat: {{backend: e}}}}
keys: [{{name: k, sha256: "{digest}"}}]
""")

    async def ask(address: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}", "x-forwarded-for": address}
        return (await gateway.http.get("/v1/models", headers=headers)).status_code

    of_one = [await ask(f"2001:db8:0:1::{number:x}", "wrong") for number in range(150)]
    of_many = [await ask(f"2001:db8:1:{number:x}::1", "wrong") for number in range(150)]

    assert of_one == [401] * 100 + [429] * 50
    assert of_many == [401] * 150
    assert {len(table._networks) for table in tables[-1:]} == {100}
    assert await ask("2001:db8:0:1::1", "sk-1") == 200
