"""Three workers are restarted one after another, three times, under load (fault 7)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.rolling import roll

RATE = 100.0
"""Requests a second: what a machine that does other things too can send. By hand: rolling.py."""


@pytest.mark.slow
async def test_fault_07_no_request_is_lost_to_a_rolling_restart(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Streams run to their end; in every dialect nobody notices."""
    got = await roll(tmp_path, rate=RATE)
    record_property("requests a second", round(got.rate))

    assert got.history.violations() == []
    assert got.lost == 0
    assert got.restarts == 9
    assert len(got.history.heard) > 9 * 20, "hardly anything was asked meanwhile"


@pytest.mark.slow
async def test_fault_07_32_those_who_leave_meanwhile_are_told_from_those_who_are_lost(
    tmp_path: Path,
) -> None:
    """What they got until then is what was recorded, and their workers' calls have ended."""
    got = await roll(tmp_path, rate=RATE, rounds=1, leaves=3)

    assert got.history.violations() == []
    assert got.lost == 0
    assert got.history.ends()["left"] > 10
