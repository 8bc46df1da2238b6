"""What runs as containers and units would have it."""

from collections.abc import Iterator

import pytest

from tests.deploy.processes import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Closed at the end."""
    made = Stage()
    yield made
    made.close()
