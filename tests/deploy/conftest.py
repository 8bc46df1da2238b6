"""What runs as containers and units would have it."""

from collections.abc import Iterator

import pytest

from tests.deploy.processes import ProcessLauncher


@pytest.fixture
def stage() -> Iterator[ProcessLauncher]:
    """Closed at the end."""
    launcher = ProcessLauncher()
    yield launcher
    launcher.close()
