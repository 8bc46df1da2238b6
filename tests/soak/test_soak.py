"""A short soak; the long one is ``python -m tests.soak``."""

from pathlib import Path

import pytest

from tests.soak.soaking import EACH, FEW, SLACK, Look, Soaked, abandon, soak


@pytest.mark.slow
async def test_memory_tasks_and_descriptors_stay_as_they_are(tmp_path: Path) -> None:
    got = await soak(tmp_path, requests=5_000, cancelled=300, intervals=6)
    assert got.growing() == []
    assert got.looks[-1].requests == 4_998


@pytest.mark.slow
async def test_memory_is_given_back_when_4000_clients_leave_their_streams_at_once(
    tmp_path: Path,
) -> None:
    assert await abandon(tmp_path, count=4_000, waves=3) < 150 << 20


def looks(memory: int = 0, tasks: int = 0, descriptors: int = 0) -> Soaked:
    """Ten looks, of which each has so much more than the one before."""
    return Soaked([Look(1000 * n, memory * n, tasks * n, descriptors * n) for n in range(10)])


def test_what_grows_is_told() -> None:
    most = SLACK // 9 + EACH * 1000
    assert looks(memory=most - 10).growing() == []
    assert looks(memory=most + 10).growing() == ["memory: 2.3 MiB in 9000 requests"]
    assert looks(tasks=1).growing() == ["tasks: 0 to 9"]
    assert looks(descriptors=1).growing() == ["descriptors: 0 to 9"]
    assert FEW < 9
