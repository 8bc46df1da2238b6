"""Fixtures for commands of containers and units."""

from collections.abc import Iterator

import pytest

from tests.deploy.processes import ProcessLauncher


@pytest.fixture
def stage() -> Iterator[ProcessLauncher]:
    """Launches processes and stops them at the end."""
    launcher = ProcessLauncher()
    yield launcher
    launcher.close()
