"""With ``--cov``, the tests of protocols alone are measured, and imports; others run at full speed.

These tests must cover every branch of ``protocols``: what only a longer test happens to run is not
tested there.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

_HERE: Final = Path(__file__).parent
COVERED: Final = (_HERE / "unit" / "protocols", _HERE / "golden")


class CoverageSwitch:
    """Pauses and resumes the measurement of pytest-cov, which is on when tests begin."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._is_on = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Switch before the test's fixtures are set up."""
        controller = self._plugin.cov_controller
        is_measured = any(item.path.is_relative_to(folder) for folder in COVERED)
        if controller is not None and is_measured is not self._is_on:
            self._is_on = is_measured
            if is_measured:
                controller.resume()
            else:
                controller.pause()
        return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Switch where pytest-cov is installed."""
    manager = session.config.pluginmanager
    plugin = manager.get_plugin("_cov")
    if plugin is not None:
        manager.register(CoverageSwitch(plugin))
