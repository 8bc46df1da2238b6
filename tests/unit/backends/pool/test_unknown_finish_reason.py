"""An unknown finish reason ends a unary response without a retry or an ejection."""

import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.circuit_breaker import WorkerHealth
from backends.pool.retry import classify_error
from backends.pool.worker_state import WorkerState
from protocols.core.errors import UnknownFinishReason


def test_unknown_finish_reason_is_not_retried() -> None:
    assert classify_error(UnknownFinishReason("zzz"), accepted=True) is None


def test_unknown_finish_reasons_eject_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerState(0, WorkerConfig("http://w:1"), WorkerHealth(), lambda: 100.0)

    for _ in range(20):
        worker.record_failure(UnknownFinishReason("zzz"))

    assert caplog.messages == []
