"""The log has the reason of an ejection, whatever text the error has."""

import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.circuit_breaker import WorkerHealth
from backends.pool.worker_state import WorkerState
from protocols.core.errors import WorkerFailed


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(TimeoutError(), "TimeoutError"), (OSError("refused"), "refused"), (None, "the worker broke")],
)
def test_ejection_of_a_worker_names_its_reason(
    caplog: pytest.LogCaptureFixture, cause: Exception | None, reason: str
) -> None:
    worker = WorkerState(0, WorkerConfig("http://w:1"), WorkerHealth(), lambda: 100.0)
    error = WorkerFailed("the worker broke")
    error.__cause__ = cause

    for _ in range(5):
        worker.record_failure(error)

    [line] = caplog.messages
    assert line.startswith("worker http://w:1 ejected for ")
    assert line.endswith(f": {reason}")
