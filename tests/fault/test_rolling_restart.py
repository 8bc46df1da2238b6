"""Three workers are restarted one after another, three times, under load (fault 7)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.rolling_restart import run_rolling_restarts

RATE = 100.0
"""Requests a second: what a machine that does other things too can send. By hand: rolling.py."""


@pytest.mark.fault(7)
@pytest.mark.slow
async def test_rolling_restart_loses_no_request(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Streams run to their end; clients of no protocol notice the restart."""
    got = await run_rolling_restarts(tmp_path, rate=RATE)
    record_property("requests a second", round(got.rate))

    assert got.history.violations() == []
    assert got.lost == 0
    assert got.restarts == 9
    assert len(got.history.observations) > 9 * 20, "hardly anything was asked meanwhile"


@pytest.mark.fault(7, 32)
@pytest.mark.slow
async def test_client_disconnects_during_a_rolling_restart_are_not_losses(
    tmp_path: Path,
) -> None:
    """What they got until then is what was recorded, and their workers' calls have ended."""
    got = await run_rolling_restarts(tmp_path, rate=RATE, rounds=1, disconnect_every=3)

    assert got.history.violations() == []
    assert got.lost == 0
    assert got.history.ends()["left"] > 10
