"""Three workers are restarted one after another, three times, under load (fault 7)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.rolling_restart import run_rolling_restarts

RATE = 100.0
"""Requests per second that a shared machine can send.

``rolling_restart.py`` has an option for it.
"""


@pytest.mark.fault(7)
@pytest.mark.slow
async def test_rolling_restart_loses_no_request(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Streams finish, and no client of any protocol notices a restart."""
    result = await run_rolling_restarts(tmp_path, rate=RATE)
    record_property("requests a second", round(result.rate))

    assert result.history.violations() == []
    assert result.lost == 0
    assert result.restarts == 9
    assert len(result.history.observations) > 9 * 20, "too few requests were sent"


@pytest.mark.fault(7, 32)
@pytest.mark.slow
async def test_client_disconnects_during_a_rolling_restart_are_not_losses(
    tmp_path: Path,
) -> None:
    """What these clients received is recorded, and the workers' calls have ended."""
    result = await run_rolling_restarts(tmp_path, rate=RATE, rounds=1, disconnect_every=3)

    assert result.history.violations() == []
    assert result.lost == 0
    assert result.history.ends()["left"] > 10
