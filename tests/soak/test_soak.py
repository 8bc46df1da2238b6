"""A short soak test; the long one is ``python -m tests.soak``."""

from pathlib import Path

import pytest

from tests.soak.soak_run import (
    EACH,
    FEW,
    SLACK,
    SoakMeasurement,
    SoakResult,
    abandon_streams,
    run_soak,
)


@pytest.mark.slow
async def test_memory_tasks_and_descriptors_do_not_grow(tmp_path: Path) -> None:
    result = await run_soak(tmp_path, requests=5_000, cancelled=300, intervals=6)
    assert result.growing() == []
    assert result.looks[-1].requests == 4_998


@pytest.mark.slow
async def test_memory_is_freed_after_4000_clients_disconnect_at_once(
    tmp_path: Path,
) -> None:
    memory, longest_collection = await abandon_streams(tmp_path, count=4_000, waves=8)
    assert memory < 150 << 20
    assert longest_collection < 0.2


def make_measurements(memory: int = 0, tasks: int = 0, descriptors: int = 0) -> SoakResult:
    """Make ten measurements, each higher than the one before."""
    return SoakResult(
        [SoakMeasurement(1000 * n, memory * n, tasks * n, descriptors * n) for n in range(10)]
    )


def test_growth_of_memory_tasks_and_descriptors_is_reported() -> None:
    most = SLACK // 9 + EACH * 1000
    assert make_measurements(memory=most - 10).growing() == []
    assert make_measurements(memory=most + 10).growing() == ["memory: 2.3 MiB in 9000 requests"]
    assert make_measurements(tasks=1).growing() == ["tasks: 0 to 9"]
    assert make_measurements(descriptors=1).growing() == ["descriptors: 0 to 9"]
    assert FEW < 9
