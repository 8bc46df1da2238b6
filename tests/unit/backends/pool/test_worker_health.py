"""A worker's health by its responses, and its report."""

import logging
from typing import Any

import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.circuit_breaker import WorkerHealth
from backends.pool.settings import CircuitBreakerSettings, HealthCheckSettings
from backends.pool.worker_state import WorkerState
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)
from tests.support.fakes import FakeClock


def make_worker(
    clock: FakeClock | None = None,
    checks: HealthCheckSettings = HealthCheckSettings(),  # noqa: B008 - frozen
    **breaker: Any,
) -> WorkerState:
    health = WorkerHealth(checks, CircuitBreakerSettings(**breaker))
    return WorkerState(0, WorkerConfig("http://w:1"), health, clock or FakeClock())


FAILURES: list[tuple[GatewayError, str]] = [
    (WorkerFailed("x", status=500), "500"),
    (WorkerFailed("x", status=502), "502"),
    (WorkerFailed("x", status=307), "307"),
    (WorkerFailed("not HTTP"), "invalid_response"),
    (Overloaded("x"), "503"),
    (StreamBroken("x"), "disconnect"),
    (DeadlineExceeded("x", which="first_token"), "first_token"),
    (DeadlineExceeded("x", which="idle"), "idle"),
    (WorkerUnreachable("x"), "connect"),
]


@pytest.mark.parametrize(("error", "kind"), FAILURES)
def test_worker_faults_eject_the_worker(error: GatewayError, kind: str) -> None:
    one = make_worker(consecutive_failures=1)

    one.record_failure(error)

    assert (one.report().state, one.report().error) == ("out", kind)


KIND_WORDS: list[tuple[GatewayError, str]] = [
    (UnsupportedFeature("x"), ""),
    (ContextTooLong("x"), ""),
    (DeadlineExceeded("x", which="total"), ""),
    (InternalError("x"), ""),
    (WorkerFailed("x", status=401), "401"),
    (WorkerFailed("x", status=404), "404"),
    (RateLimitExceeded("x"), "429"),
]


@pytest.mark.parametrize(("error", "kind"), KIND_WORDS)
def test_other_errors_do_not_eject_the_worker(error: GatewayError, kind: str) -> None:
    one = make_worker(consecutive_failures=1)

    for _ in range(50):
        one.record_failure(error)

    assert (one.report().state, one.report().error) == ("up", kind)


def test_client_error_resets_the_failure_count() -> None:
    one = make_worker(consecutive_failures=2)

    for _ in range(9):
        one.record_failure(StreamBroken("x"))
        one.record_failure(UnsupportedFeature("x"))

    assert one.report().state == "up"


@pytest.mark.parametrize("error", [RateLimitExceeded("x"), Overloaded("x")])
def test_overload_response_lowers_the_limit_without_ejection(error: GatewayError) -> None:
    one = make_worker(consecutive_failures=1)
    one.in_flight_by_model = {"": 10}

    one.record_failure(error, overloaded=True)

    assert (one.report().state, one.limit) == ("up", 7)


def test_successful_connection_readmits_the_worker() -> None:
    clock = FakeClock()
    one = make_worker(clock)
    one.record_failure(WorkerUnreachable("x"))
    clock.now += 1.0

    assert one.report().state == "trial"

    one.record_connected()

    assert one.report().state == "up"


def test_health_checks_eject_and_readmit_the_worker() -> None:
    one = make_worker(checks=HealthCheckSettings(fall=2, rise=2))
    one.model_limits_from.add("m")
    states = []

    for ok in (True, False, False, True, True):
        one.record_health_check(ok=ok)
        states.append(one.report().state)

    assert states == ["up", "up", "out", "out", "up"]
    assert not one.model_limits_from, "the worker may be another release now"


def test_ejected_worker_loses_its_cached_model_limits() -> None:
    one = make_worker(consecutive_failures=1)
    one.model_limits_from.add("m")

    one.record_failure(StreamBroken("x"))

    assert not one.model_limits_from


def test_only_health_state_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "interlingua")
    clock = FakeClock()
    one = make_worker(clock)
    lost = WorkerUnreachable("x")
    lost.__cause__ = OSError("refused")
    for _ in range(50):
        one.record_failure(lost)
    clock.now += 1.0
    for _ in range(50):
        one.record_connected()

    for _ in range(50):
        one.record_health_check(ok=False)

    assert [record.getMessage() for record in caplog.records] == [
        "worker http://w:1 ejected for 0.5 s: refused",
        "worker http://w:1 is back in rotation",
        "worker http://w:1 ejected now: its health checks fail",
    ]


@pytest.mark.parametrize(("adaptive", "limit"), [(True, 7), (False, None)])
def test_429_lowers_the_concurrency_only_if_it_is_adaptive(
    *, adaptive: bool, limit: int | None
) -> None:
    worker = make_worker(adaptive_concurrency=adaptive)
    worker.in_flight_by_model["m"] = 10
    worker.record_failure(RateLimitExceeded("x"), model="m")
    assert worker.health.get_limit("m") == limit
